"""The section on GPUs of docs/performance.md, from benchmarks/results/gpu_*.json.

    python benchmarks/gpu_tables.py                # writes the page anew
    python benchmarks/gpu_tables.py --check        # says whether it is what this would write

Everything between the markers is made here; nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_results import OURS, Row, copy_bandwidth, is_measured, read_document, shape_key
from gpu_targets import Verdict, verdicts
from markdown_page import put_between, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/performance.md"
BEGIN = "<!-- gpu: begin. Made by benchmarks/gpu_tables.py; do not edit by hand -->"
END = "<!-- gpu: end -->"
NOTHING = "Nothing has been measured on a GPU yet."
MODES = ("none", "int8", "fp8", "fp8_e5m2", "int4", "mxfp4", "nvfp4")
KV_HEADS, HEAD_DIM = 8, 128
ROOF_BATCHES, ROOF_CONTEXTS = (1, 8, 32, 128), (8192, 32768)
ROOF_MODES = ("none", "fp8", "int4", "nvfp4")


def value_bytes(mode: str, head_dim: int) -> float:
    """Of the cache, scales and (scale, zero) included."""
    pair = 4 / head_dim
    return {
        "none": 2.0,
        "int8": 1 + pair,
        "int4": 0.5 + pair,
        "fp8": 1.0,
        "fp8_e5m2": 1.0,
        "mxfp4": 0.5625,
        "nvfp4": 0.5625,
    }[mode]


def least_us(mode: str, batch: int, *, context: int, gb_per_s: float) -> float:
    """Of decode attention of a layer with 8 KV heads of 128, at this bandwidth."""
    values = batch * context * 2 * KV_HEADS * HEAD_DIM
    return values * value_bytes(mode, HEAD_DIM) / gb_per_s / 1e3


def time_text(us: float) -> str:
    """Three digits."""
    return f"{us / 1e3:,.3g} ms" if us >= 1e4 else f"{us:,.3g} µs" if us < 1e3 else f"{us:,.0f} µs"


def context_text(tokens: int) -> str:
    """`32k`."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def roof_lines(gb_per_s: float) -> Iterator[str]:
    """What the copy bandwidth allows, in every batch and context."""
    head = ("context", *(f"batch {batch}" for batch in ROOF_BATCHES))
    rows = []
    for context in ROOF_CONTEXTS:
        cells = [
            " / ".join(
                f"{least_us(mode, batch, context=context, gb_per_s=gb_per_s):,.3g}"
                for mode in ROOF_MODES
            )
            for batch in ROOF_BATCHES
        ]
        rows.append((context_text(context), *cells))
    yield "The least µs of decode attention of a layer (8 KV heads, head_dim 128) at the measured"
    yield "copy bandwidth: batch · context · 2 · 8 · 128 values of 2 (16 bit), 1 (fp8), 0.5 + 4/128"
    yield "(int4) and 0.5625 (fp4) bytes."
    yield ""
    yield from table(head, rows)


def target_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Every target, the worst shape of each."""
    yield from table(
        ("target", "format", "shapes", "worst", "goal", "where"),
        [verdict_cells(verdict) for verdict in verdicts(rows)],
        numbers=2,
    )


def verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    """A missed one is in bold."""
    target = verdict.target
    sign = {">=": "≥", "<=": "≤"}[target.better]
    goal = f"{sign} {target.goal:g} {target.unit}".rstrip()
    if verdict.value is None:
        return (target.work, f"`{verdict.mode}`", "0", "not measured", goal, "")
    value = f"{verdict.value:.3g} {target.unit}".rstrip()
    words = {True: f"{goal}, met", False: f"**{goal}, missed**", None: f"{goal}, no peer measured"}
    goal = words[verdict.met]
    return (target.work, f"`{verdict.mode}`", str(verdict.num_shapes), value, goal, verdict.shape)


def peers_beside(rows: Sequence[Row], row: Row) -> list[Row]:
    """Rows of others, on the shape of one of ours."""
    wanted = shape_key(row["shape"], plain=True)
    return [
        other
        for other in rows
        if other.get("by") != OURS
        and other.get("op") == row["op"]
        and is_measured(other)
        and shape_key(other["shape"]) == wanted
    ]


def peer_text(rows: Sequence[Row], mode: str) -> str:
    """The fastest in a mode."""
    times = [row["us"] for row in rows if row["mode"] == mode]
    return time_text(min(times)) if times else ""


def of_op(rows: Sequence[Row], op: str) -> list[Row]:
    """Ours, by shape, then in the order of MODES."""
    found = [row for row in rows if row["op"] == op and row["by"] == OURS]
    return sorted(
        found, key=lambda row: (_shape_order(row), MODES.index(row["mode"]) if row["mode"] else 0)
    )


def _shape_order(row: Row) -> tuple[tuple[int, str], ...]:
    keys = ("head_dim", "group", "window", "new_tokens", "batch", "context", "rows", "cols")
    shape = row["shape"]
    numbers = [(int(shape.get(key, 0)), "") for key in keys]
    return (*numbers, (0, str(shape.get("format", ""))))


def ratio_text(row: Mapping[str, Any], key: str) -> str:
    """`3.21`, or nothing."""
    return f"{row[key]:.2f}" if key in row else ""


def decode_lines(rows: Sequence[Row]) -> Iterator[str]:
    """A table per head_dim, group and window."""
    ours = of_op(rows, "decode")
    kinds = dict.fromkeys(_kind(row) for row in ours)
    peers = {row["by"] for row in rows if row["by"] != OURS and row["op"] == "decode"}
    modes_of_peers = list(dict.fromkeys(row["mode"] for row in rows if row["by"] in peers))
    for kind in kinds:
        head = ["batch", "context", "format", "time", "GB/s", "of copy", "16 bit ÷", "fp8 ÷"]
        head += [f"best peer, {'16 bit' if mode == 'none' else mode}" for mode in modes_of_peers]
        cells = []
        for row in ours:
            if _kind(row) == kind:
                beside = peers_beside(rows, row)
                cells.append(
                    (
                        str(row["shape"]["batch"]),
                        context_text(row["shape"]["context"]),
                        *figure_cells(row),
                        *(peer_text(beside, mode) for mode in modes_of_peers),
                    )
                )
        yield f"Decode attention, {kind}:"
        yield ""
        yield from table(head, cells, numbers=0)
        yield ""
    if peers:
        yield f"Peers: {', '.join(sorted(peers))}."
        yield ""


def figure_cells(row: Row) -> tuple[str, ...]:
    """Format, time, and what follows from it."""
    mode = f"`{row['mode']}`" if row["mode"] else ""
    copy = f"{row['of_copy']:.0%}" if "of_copy" in row else ""
    speed = f"{row['gb_per_s']:,.0f}"
    return (mode, time_text(row["us"]), speed, copy, *(ratio_text(row, k) for k in RATIOS))


RATIOS = ("vs_none", "vs_fp8")


def _kind(row: Row) -> str:
    shape = row["shape"]
    text = f"head_dim {shape['head_dim']}, {shape['group']} query heads per KV head"
    if shape.get("window"):
        text += f", window {shape['window']}" + (" with sinks" if shape.get("sinks") else "")
    return text


def other_lines(rows: Sequence[Row], op: str, *, title: str) -> Iterator[str]:
    """Ops that are not decode attention."""
    cells = []
    for row in of_op(rows, op):
        shape = {k: v for k, v in row["shape"].items() if v not in (0, "")}
        text = ", ".join(f"{key} {value}" for key, value in shape.items())
        tflops = f"{row['tflops']:,.3g}" if row.get("tflops") else ""
        cells.append((text, *figure_cells(row)[:4], tflops, *figure_cells(row)[4:]))
    if cells:
        yield f"{title}:"
        yield ""
        head = ("shape", "format", "time", "GB/s", "of copy", "TFLOP/s", "16 bit ÷", "fp8 ÷")
        yield from table(head, cells, numbers=2)
        yield ""


OTHER_OPS = {
    "prefill": "Prefill attention",
    "write": "KV write (search and rotation: as four bits are served)",
    "flatten": "Cache to dense FP32",
    "linear": "Linear layers (rows, cols: outputs and inputs)",
    "experts": "Experts (batch tokens, each to top_k of them)",
}


def generation_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The whole engine, models with random weights."""
    if not rows:
        return
    cells = [
        (
            str(row["model"]),
            "reading prompts" if row["work"] == "prompts" else str(row["work"]),
            f"`{row['mode']}`, {row['shape']['quality']}",
            str(row["shape"]["batch"]),
            context_text(row["shape"]["context"]),
            f"{row['tokens_per_s']:,.0f}",
        )
        for row in rows
    ]
    yield "The whole engine, greedy, random weights (BF16; experts in MXFP4):"
    yield ""
    head = ("model", "work", "KV format", "sequences", "tokens each", "tokens/s")
    yield from table(head, cells, numbers=3)
    yield ""


def check_lines(rows: Sequence[Row]) -> Iterator[str]:
    """What scripts/gpu_check.sh said."""
    if rows:
        yield "`scripts/gpu_check.sh`:"
        yield ""
        cells = [(r["name"], r["verdict"], f"{r['seconds']} s", r["note"]) for r in rows]
        yield from table(("part", "verdict", "time", "note"), cells, numbers=2)
        yield ""


def run_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Where rows are of several runs, which: nothing of ours is compared across them."""
    runs = Counter(row["run"] for row in rows if row.get("run"))
    if len(runs) > 1:
        texts = (f"{run} ({count} rows)" for run, count in sorted(runs.items()))
        yield f"Measured in several runs: {', '.join(texts)}. Ratios are of one run each."
        yield ""


def device_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The section of one GPU."""
    about, rows = document["about"], [r for r in document["kernels"] if is_measured(r)]
    copy = copy_bandwidth(rows)
    yield f"### {about['device']}"
    yield ""
    facts = [f"lmdeploy-fp4 {about.get('lmdeploy', 'unknown')}"]
    if about.get("sm"):
        facts.append(f"SM {about['sm']}")
    if about.get("memory_bytes"):
        facts.append(f"{about['memory_bytes'] / 2**30:.0f} GiB")
    facts.append(f"a large copy moves {copy:,.0f} GB/s" if copy else "copy bandwidth not measured")
    yield "; ".join(facts) + "."
    yield ""
    yield from run_lines([*rows, *document["generation"]])
    yield from check_lines(document["checks"])
    if rows:
        yield from target_lines(rows)
        yield ""
    if copy:
        yield from roof_lines(copy)
        yield ""
    yield from decode_lines(rows)
    for op, title in OTHER_OPS.items():
        yield from other_lines(rows, op, title=title)
    yield from generation_lines(document["generation"])


def render(documents: Sequence[Mapping[str, Any]]) -> str:
    """The generated part, markers included."""
    lines = [BEGIN]
    for document in documents:
        lines += device_lines(document)
    if not documents:
        lines += [NOTHING, ""]
    return "\n".join([*lines, END])


def put_in(page: str, generated: str) -> str:
    """The page with its generated part replaced. ValueError when it lacks the markers."""
    return put_between(page, generated, begin=BEGIN, end=END)


def read_documents(folder: Path) -> list[dict[str, Any]]:
    """Of every GPU, by file name."""
    return [read_document(path) for path in sorted(folder.glob("gpu_*.json"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page, or compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of gpu_*.json")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--check", action="store_true", help="write nothing; 1: it would change")
    options = parser.parse_args(arguments)
    try:
        old = options.page.read_text(encoding="utf-8")
        new = put_in(old, render(read_documents(options.results)))
    except (ValueError, OSError) as error:
        print(f"gpu_tables.py: {error}", file=sys.stderr)
        return 2
    if options.check:
        print("the page is up to date" if old == new else "the page is not what the files say")
        return 0 if old == new else 1
    options.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
