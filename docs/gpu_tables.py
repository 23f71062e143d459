"""Make the tables of gpu.md from the results of one GPU.

    python docs/gpu_tables.py benchmarks/results/gpu_nvidia_h100_80gb_hbm3.jsonl

scripts/gpu_check.sh writes such files. make_charts.py puts the tables into the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

US = "lmdeploy-fp4"
# The columns of the tables: label, by which library, and the format.
DECODERS = tuple(
    (f"`{mode}`", US, mode) for mode in ("none", "fp8", "int8", "nvfp4", "mxfp4", "int4")
)
OTHER_DECODERS = (
    ("`nvfp4`", US, "nvfp4"),
    ("XQA, 16 bit", "XQA", "none"),
    ("FP8", "XQA", "fp8"),
    ("FlashInfer, 16 bit", "FlashInfer fa2", "none"),
    ("NVFP4", "FlashInfer fa2", "nvfp4"),
)
LINEARS = (
    ("BF16", US, "bf16"),
    ("BF16, cuBLAS", "cuBLAS", "bf16"),
    ("Q4_0", US, "q4_0"),
    ("Q8_0", US, "q8_0"),
    ("MXFP4", US, "mxfp4_split"),
)
# Random models by the names of their files.
MODELS = {"llama-3-8b": "Llama 3 8B, BF16", "gpt-oss-20b": "GPT-OSS-20B, MXFP4"}

Row = dict[str, Any]
DecodeRows = dict[tuple[int, ...], dict[tuple[str, str], Row]]


def library(by: str) -> str:
    """Return the library of a row without its version."""
    return by.split(",")[0]


def moved_bytes(row: Row) -> int:
    """Return the least bytes that an op reads and writes."""
    return int(row["weight_bytes"] + row["kv_bytes"] + row["activation_bytes"])


def micros(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def markdown(head: list[str], body: list[list[str]], *, left: int = 1) -> str:
    """Return a Markdown table whose first columns are aligned to the left."""
    rule = " --- |" * left + " ---: |" * (len(head) - left)
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
    return "\n".join([lines[0], "|" + rule, *lines[1:]])


def timed(row: Row | None, by: str, *, rate: float) -> str:
    """Return the microseconds of a row, and this engine's percentage of the bandwidth `rate`."""
    if row is None:
        return "–"
    share = f"<br>{moved_bytes(row) / row['us'] / rate * 100:.0f} %" if by == US else ""
    return micros(row["us"]) + share


def shape_text(shape: tuple[int, ...]) -> tuple[str, str]:
    batch, context, heads, group, head_dim = shape
    return f"{batch} × {context:,}", f"{heads} × {group} heads of {head_dim}"


class GpuResults:
    """The rows of one GPU."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def cells(self, op: str) -> Iterator[tuple[str, dict[str, str], Row]]:
        """Yield which library was measured with an op, the words of the cell, and the row."""
        for row in self.rows:
            words = dict(word.split("=") for word in row.get("cell", "op=none").split())
            if words.pop("op") == op:
                words.pop("launches", None)
                yield library(row["by"]), words, row

    def copy_rate(self) -> float:
        """Return the bytes per microsecond, read and written, of a copy."""
        found = next(self.cells("copy"), None)
        if found is None:
            raise ValueError("The results have no copy (op=copy).")
        return float(found[2]["activation_bytes"] / found[2]["us"])

    def decode_rows(self) -> DecodeRows:
        """Return the rows of decode attention by shape, then by library and format."""
        found: DecodeRows = {}
        for by, words, row in self.cells("decode"):
            if "window" not in words and "k_offset" not in words:
                keys = ("batch", "context", "kv_heads", "group", "head_dim")
                shape = tuple(int(words[key]) for key in keys)
                found.setdefault(shape, {})[by, words["mode"]] = row
        return found


def decode_table(columns: Sequence[tuple[str, str, str]], results: GpuResults) -> str:
    """Return a table of decode attention: microseconds, and this engine's part of the bandwidth."""
    rate, body = results.copy_rate(), []
    for shape, rows in results.decode_rows().items():
        if any(by != US for _, by, _ in columns) and all(by == US for by, _ in rows):
            continue
        cells = [timed(rows.get((by, mode)), by, rate=rate) for _, by, mode in columns]
        body.append([*shape_text(shape), *cells])
    return markdown(["sequences × tokens", "heads", *(name for name, *_ in columns)], body, left=2)


def window_table(results: GpuResults) -> str:
    """Return the table of decode attention in a window with sinks: microseconds."""
    columns = (*DECODERS, *OTHER_DECODERS[1:3])
    found: dict[str, dict[tuple[str, str], Row]] = {}
    for by, words, row in results.cells("decode"):
        if "window" in words:
            label = f"{words['batch']} × {words['context']}, window {words['window']}"
            found.setdefault(label, {})[by, words["mode"]] = row
    body = [
        [label, *(micros(rows[key]["us"]) if (key := c[1:]) in rows else "–" for c in columns)]
        for label, rows in found.items()
    ]
    return markdown(["sequences × tokens", *(name for name, *_ in columns)], body)


def linear_table(results: GpuResults) -> str:
    """Return the table of linear layers: microseconds, and the share of the limit."""
    rate = results.copy_rate()
    rows: DecodeRows = {}
    for by, words, row in results.cells("linear"):
        shape = tuple(int(words[key]) for key in ("rows", "cols", "batch"))
        rows.setdefault(shape, {})[by, words["format"]] = row
    body = []
    for shape in sorted(rows, key=lambda shape: (-shape[0], shape[1:])):
        if all(by != US for by, _ in rows[shape]):
            continue
        outputs, inputs, batch = shape
        cells = [f"{outputs:,} × {inputs:,}", f"{batch:,}"]
        for _, by, name in LINEARS:
            cell = rows[shape].get((by, name))
            if cell is not None and batch >= 512:
                rounds = 2 * outputs * inputs * batch / cell["us"] / 1e6
                cells.append(f"{micros(cell['us'])}<br>{rounds:.0f} TFLOP/s")
            else:
                cells.append(timed(cell, by, rate=rate))
        body.append(cells)
    return markdown(["outputs × inputs", "rows", *(name for name, *_ in LINEARS)], body)


def prefill_table(results: GpuResults) -> str:
    """Return the table of causal attention of prompts: microseconds and TFLOP/s."""
    body = []
    for by, words, row in results.cells("prefill"):
        if "k_offset" in words or "window" in words:
            continue
        new, context = int(words["new_tokens"]), int(words["context"])
        heads = int(words["kv_heads"]) * int(words["group"])
        products = 4 * heads * int(words["head_dim"]) * new * (context - new / 2)
        rate = products / row["us"] / 1e6
        name = f"this engine, `{words['mode']}`" if by == US else row["by"]
        name += f", {words['products']}" if "products" in words else ""
        shape = f"{new:,} of {context:,}" + ("" if heads == 32 else f", {heads} heads")
        shape += "" if words["head_dim"] == "128" else f" of {words['head_dim']}"
        shape += f", {words['batch']} times" if words["batch"] != "1" else ""
        body.append([shape, name, micros(row["us"]), f"{rate:.0f}"])
    body.sort(key=lambda cells: (cells[0], float(cells[2].replace(",", ""))))
    return markdown(["new tokens of all", "by", "µs", "TFLOP/s"], body, left=2)


def model_table(results: GpuResults) -> str:
    """Return the table of whole models: tokens per second of prompts and of decoding."""
    found: dict[tuple[str, int, str], dict[tuple[str, int], float]] = {}
    for row in results.rows:
        if "ours" not in row:
            continue
        preset = row["quality"].split()[0]
        cache = "16 bit" if row["mode"] == "none" else f"`{row['mode']}`<br>{preset}"
        model = MODELS.get(row["model"], row["model"])
        place = found.setdefault((model, row["context"], cache), {})
        place[row["work"], row["batch"]] = row["ours"]
    columns = [(work, batch) for work in ("prefill", "decode") for batch in (1, 32, 128)]
    body = [
        [model.replace(", ", ",<br>"), f"{context:,}", cache]
        + [f"{speeds[column]:,.0f}" if column in speeds else "–" for column in columns]
        for (model, context, cache), speeds in found.items()
    ]
    names = {"prefill": "prompt", "decode": "decode"}
    head = ["model", "context", "cache", *(f"{names[work]}, {batch}" for work, batch in columns)]
    return markdown(head, body, left=3)


def server_table(results: GpuResults) -> str:
    """Return the table of servers: tokens per second of all streams, and times in milliseconds."""
    body = []
    for row in results.rows:
        if row.get("work") == "server":
            times = (row[key] * 1e3 for key in ("p50_first", "p99_first", "p50_token", "p99_token"))
            body.append(
                [
                    MODELS.get(row["model"], row["model"]),
                    f"{row['clients']} × ({row['context']:,} + {row['answer']:,})",
                    f"`{row['mode']}`",
                    f"{row['requests_per_s'] * row['answer']:,.0f}",
                    *(f"{value:,.1f}" for value in times),
                ]
            )
    waits = ["first token, p50", "p99", "next token, p50", "p99"]
    head = ["model", "streams × (prompt + answer)", "cache", "tokens/s", *waits]
    return markdown(head, body, left=3)


GPU_TABLES: dict[str, Callable[[GpuResults], str]] = {
    "decode": partial(decode_table, DECODERS),
    "others": partial(decode_table, OTHER_DECODERS),
    "linear": linear_table,
    "prefill": prefill_table,
    "models": model_table,
}
# Tables that the page gets when they have rows.
MORE_TABLES = {"window": window_table, "server": server_table}


def main(arguments: Sequence[str]) -> int:
    """Print the tables of a file of results."""
    if len(arguments) != 1:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    text = Path(arguments[0]).read_text(encoding="utf-8")
    results = GpuResults([json.loads(line) for line in text.splitlines()])
    for name, make in (GPU_TABLES | MORE_TABLES).items():
        print(f"## {name}\n\n{make(results)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
