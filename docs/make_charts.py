"""Draw the charts of the documentation and fill the tables of its pages.

Everything comes from benchmarks/results. Run it after new results: python docs/make_charts.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from gpu_tables import GPU_TABLES, US, GpuResults, markdown, shape_text

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks/results"
MACHINES = ("avx512", "amx", "avx2")
OURS, BASELINE, SHADES = "#2563a8", "#a9afb7", ("#2563a8", "#6fa8dc", "#16437a")
MODELS = {
    "SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M, Q4_1",
    "llama-3.2-1b-q4_0": "Llama 3.2 1B, Q4_0",
    "llama-3.2-1b-q8_0": "Llama 3.2 1B, Q8_0",
}
# Name in the results → label. Smaller is better for the rows in SMALLER.
WORKLOADS = {
    "prefill-128": "Prefill, 128 tokens",
    "prefill-512": "Prefill, 512 tokens",
    "prefill-2048": "Prefill, 2,048 tokens",
    "prefill-8192": "Prefill, 8,192 tokens",
    "decode-128-16bit": "Decode at 128, 16-bit cache",
    "decode-2048-batch-1": "Decode at 2,048",
    "decode-8192-batch-1": "Decode at 8,192",
    "decode-128-batch-32": "32 sequences at 128",
    "decode-1024-batch-32": "32 sequences at 1,024",
    "server-requests": "Server, 16 clients",
    "server-p99": "Server, p99 time per token",
    "memory": "Peak memory at 2,048",
}
SMALLER = ("server-p99", "memory")
GPU = "gpu_nvidia_h100_80gb_hbm3"
# The columns of the prompts on AVX-512: label, and the name in the results.
PROMPTS = (
    ("12 bits", "12 bits"),
    ("16 bits", "16 bits"),
    ("int8", "int8"),
    ("OpenVINO", "OpenVINO GenAI 2026.4.1"),
    ("llama.cpp", "llama.cpp, llama-cpp-python 0.3.36"),
)

KEYS = ("ours", "baseline")  # of the results: this engine, the baseline
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def gpu_results() -> GpuResults:
    return GpuResults(read(GPU))


def rows_of(machine: str) -> dict[tuple[str, str], Row]:
    """Return the rows of one machine by workload and model."""
    return {(row["name"], row["model"]): row for row in read(f"speed_{machine}")}


def number(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    if unit == "s":
        return f"{value * 1000:,.0f} ms"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    suffix = " req/s" if unit == "requests/s" else ""
    return f"{value:,.{digits}f}{suffix}"


def speed_cell(row: Row | None) -> str:
    if row is None:
        return "–"
    ours, baseline = (number(row[key], row["unit"]) for key in KEYS)
    spread = f"{row['ratio_low']:.2f}–{row['ratio_high']:.2f}"
    return f"{ours.split()[0]} / {baseline}<br>**{row['ratio']:.2f}** ({spread})"  # one unit


def narrow_table(rows: dict[str, Row]) -> str:
    """Return the Markdown table of one model."""
    lines = ["| workload | this engine | llama.cpp | ratio | range |", "| --- |" + " ---: |" * 4]
    for name, row in rows.items():
        ours, baseline = (number(row[key], row["unit"]) for key in KEYS)
        spread = f"{row['ratio_low']:.2f}–{row['ratio_high']:.2f}"
        cells = [WORKLOADS[name], ours, baseline, f"**{row['ratio']:.2f}**", spread]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def speed_table(machine: str) -> str:
    """Return the Markdown table of one machine: a line per workload, a column per model."""
    rows = rows_of(machine)
    # A model of which little was measured gets no column.
    counts = {model: sum((name, model) in rows for name in WORKLOADS) for model in MODELS}
    models = [model for model in MODELS if counts[model] >= len(WORKLOADS) / 3]
    if len(models) == 1:
        names = [name for name in WORKLOADS if (name, models[0]) in rows]
        return narrow_table({name: rows[name, models[0]] for name in names})
    lines = [
        "| workload | " + " | ".join(MODELS[model] for model in models) + " |",
        "| --- |" + " ---: |" * len(models),
    ]
    for name, label in WORKLOADS.items():
        cells = [speed_cell(rows.get((name, model))) for model in models]
        if cells != ["–"] * len(models):
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def prompt_table() -> str:
    """Return the table of prompts on AVX-512: tokens per second, the range of several runs."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for row in read("speed_avx512_12_bits"):
        if row["work"] == "prompt" and row["unit"] == "tokens/s":
            low, high = f"{row['low']:,}", f"{row['high']:,}"
            cell = low if low == high else f"{low}–{high}"
            found.setdefault((row["model"], row["tokens"]), {})[row["by"]] = cell
    body = [
        [
            f"{MODELS[model.split(',')[0]].rsplit(',', 1)[0]}, {tokens:,}",
            *(cells.get(by, "–") for _, by in PROMPTS),
        ]
        for (model, tokens), cells in found.items()
    ]
    return markdown(["model, tokens", *(label for label, _ in PROMPTS)], body)


def thousandths(value: float) -> str:
    """Return a divergence in thousandths of a nat."""
    value *= 1000
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.0995 else 3
    return f"{value:.{digits}f}"


def offset_table(texts: Mapping[str, tuple[int, ...]], *, with_bits: bool) -> str:
    """Return a table of divergences with and without K offsets, for contexts of some texts."""
    found: dict[tuple[str, ...], dict[tuple[str, int], Row]] = {}
    for row in read("k_offsets_and_windows_smollm2"):
        setup = (row["format"], row["quality"], row.get("k_offset", "none"), row.get("window", "–"))
        found.setdefault(setup, {})[row["text"], row["context"]] = row
    order = ("int8", "fp8", "nvfp4", "int4", "mxfp4")
    setups = [setup for setup in found if setup[0] in order]
    setups.sort(key=lambda s: (s[1] != "raw", order.index(s[0]), s[2] != "none", s[3] != "16bit"))
    columns = [(text, context) for text, contexts in texts.items() for context in contexts]
    body = []
    for setup in setups:
        rows = found[setup]
        bits = [f"{rows['austen_eval.txt', n]['bits_per_value']:.2f}" for n in (2048, 8192)]
        cells = [thousandths(rows[at]["kl_mean"]) if at in rows else "" for at in columns]
        place = [f"`{setup[0]}/{setup[1]}`", *setup[2:]]
        body.append([*place, *(bits if with_bits else []), *cells])
    heads = [f"{text.split('_')[0].split('.')[0]}, {context:,}" for text, context in columns]
    bits_heads = ["bits, 2,048", "8,192"] if with_bits else []
    return markdown(["format", "offset", "window", *bits_heads, *heads], body, left=3)


# The tables of a page by their names in it.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "performance.md": {
        **{machine: partial(speed_table, machine) for machine in MACHINES},
        "prompts": prompt_table,
    },
    "accuracy.md": {
        "offsets": partial(offset_table, {"austen_eval.txt": (512, 2048, 8192)}, with_bits=True),
        "license": partial(offset_table, {"GPL-3": (512, 2048, 7639)}, with_bits=False),
        "texts": partial(
            offset_table, {"zh.txt": (512, 2048), "argparse.py": (512, 2048)}, with_bits=False
        ),
    },
    "gpu.md": {
        name: partial(lambda make: make(gpu_results()), make) for name, make in GPU_TABLES.items()
    },
}


def with_tables(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return the text of a page with the tables of today's results."""
    for name, make in tables.items():
        mark = rf"<!-- table {name}: written by docs/make_charts.py -->\n"
        parts = re.split(rf"(?<={mark}).*?(?=<!-- end -->)", text, flags=re.S)
        if len(parts) != 2:
            raise SystemExit(f"The page must have one table {name}, found {len(parts) - 1}.")
        text = parts[0] + make() + "\n" + parts[1]
    return text


def save(figure: Any, name: str) -> None:
    figure.savefig(DOCS / f"{name}.svg", metadata={"Date": None}, facecolor="white")
    plt.close(figure)


def draw_readme_chart() -> None:
    """Draw the decoding speed of this engine and of llama.cpp at three context lengths."""
    rows, model = rows_of("avx512"), next(iter(MODELS))
    names = ("decode-128-16bit", "decode-2048-batch-1", "decode-8192-batch-1")
    labels = (
        "128 tokens\n(16-bit cache)",
        "2,048 tokens\n(FP4 cache)",
        "8,192 tokens\n(FP4 cache)",
    )
    figure, axes = plt.subplots(figsize=(9.15, 2.5), layout="constrained")
    for i, name in enumerate(names):
        row = rows[name, model]
        axes.bar(
            i - 0.2, row["baseline"], 0.38, color=BASELINE, label="llama.cpp" if not i else None
        )
        axes.bar(i + 0.2, row["ours"], 0.38, color=OURS, label="lmdeploy-fp4" if not i else None)
        axes.text(i - 0.2, row["baseline"] + 6, f"{row['baseline']:.0f}", ha="center")
        ours = f"{row['ours']:.0f}  ({row['ratio']:.1f}×)"
        axes.text(i + 0.2, row["ours"] + 6, ours, ha="center", weight="bold", color=OURS)
    axes.set_xticks(range(len(names)), labels)
    axes.set_ylabel("tokens per second")
    axes.set_ylim(0, 250)
    axes.legend(frameon=False)
    axes.set_title("Decoding one sequence: SmolLM2-135M on two cores of an AMD EPYC", fontsize=10)
    save(figure, "speed")


def draw_ratios(machine: str) -> None:
    """Draw the speedup over llama.cpp of every workload that was measured on a machine."""
    rows = rows_of(machine)
    names = [name for name in WORKLOADS if name not in SMALLER]
    models = [m for m in MODELS if any((name, m) in rows for name in names)]
    names = [name for name in names if any((name, m) in rows for m in models)]
    height = 0.8 / len(models)
    figure, axes = plt.subplots(
        figsize=(9.15, 0.8 + len(names) * (0.2 + 0.12 * len(models))), layout="constrained"
    )
    for j, model in enumerate(models):
        offset = (j - (len(models) - 1) / 2) * height
        found = [
            (i, rows[name, model]["ratio"]) for i, name in enumerate(names) if (name, model) in rows
        ]
        places, ratios = [i + offset for i, _ in found], [ratio for _, ratio in found]
        axes.barh(places, ratios, height * 0.92, color=SHADES[j], label=MODELS[model])
        for place, ratio in zip(places, ratios, strict=True):
            axes.text(ratio + 0.04, place, f"{ratio:.1f}×", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), [WORKLOADS[name] for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("speed relative to llama.cpp (1 = equal)")
    if len(models) > 1:
        figure.legend(frameon=False, fontsize=8, ncols=len(models), loc="outside upper center")
    axes.margins(x=0.12)
    save(figure, f"speed_{machine}")


def draw_scaling() -> None:
    """Draw decoding speed against context and against the number of sequences."""
    cells = [cell for cell in read("scaling") if cell["threads"] == 2]
    figure, panels = plt.subplots(1, 2, figsize=(9.15, 2.9), layout="constrained")
    styles = {"none": ("16 bit", BASELINE), "nvfp4": ("FP4", OURS)}
    for name, (label, color) in styles.items():
        single = sorted(
            (c["context"], 1 / c["seconds"]) for c in cells if (c["mode"], c["batch"]) == (name, 1)
        )
        panels[0].plot(*zip(*single, strict=True), "o-", color=color, label=label)
        many = sorted(
            (c["batch"], c["batch"] / c["seconds"])
            for c in cells
            if (c["mode"], c["context"]) == (name, 1024)
        )
        panels[1].plot(*zip(*many, strict=True), "o-", color=color, label=label)
    for panel, ticks, axis in (
        (panels[0], (128, 512, 2048, 8192, 32768), "context, tokens (one sequence)"),
        (panels[1], (1, 4, 16, 64), "sequences (context 1,024)"),
    ):
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.set_xlabel(axis)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    panels[0].set_ylabel("tokens per second")
    save(figure, "scaling")


def accuracy_of(preset: str, context: int) -> dict[str, Row]:
    """Return the rows of the first text by format. `raw` has neither offsets nor a window."""
    found = {}
    for row in read("k_offsets_and_windows_smollm2"):
        window = "16bit" if row["format"] in ("int8", "fp8") else "int8"
        setup = (None, None) if preset == "raw" else ("block", window)
        here = (row["text"], row["context"], row["quality"], row.get("k_offset"), row.get("window"))
        if here == ("austen_eval.txt", context, preset, *setup):
            found[row["format"]] = row
    return found


def draw_accuracy() -> None:
    """Draw the KL divergence of every format: a row for each, and a mark for each preset."""
    formats = ("int8", "fp8", "nvfp4", "int4", "mxfp4")
    older = {row["format"]: row["texts"]["austen_eval"] for row in read("kv_report_smollm2")}
    marks = {
        "raw": ("o", BASELINE, BASELINE, accuracy_of("raw", 2048)),
        "balanced": ("s", OURS, OURS, accuracy_of("balanced", 2048)),
        "best, before K offsets": (
            "D",
            "white",
            OURS,
            {n: older[f"{n}/best"]["2048"] for n in formats},
        ),
    }
    figure, axes = plt.subplots(figsize=(9.15, 3), layout="constrained")
    for shift, (label, (marker, face, edge, rows)) in zip(
        (0, -0.17, 0.17), marks.items(), strict=True
    ):
        axes.scatter(
            [rows[name]["kl_mean"] for name in formats],
            [i + shift for i in range(len(formats))],
            s=46,
            marker=marker,
            c=face,
            edgecolors=edge,
            label=label,
            zorder=2,
        )
    raw, balanced = accuracy_of("raw", 8192), accuracy_of("balanced", 8192)
    bits = [(raw[name]["bits_per_value"], balanced[name]["bits_per_value"]) for name in formats]
    labels = [
        f"{name}, {a:.2f} to {b:.2f} bits" for name, (a, b) in zip(formats, bits, strict=True)
    ]
    axes.set_yticks(range(len(formats)), labels)
    axes.set_ylim(len(formats) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlabel("KL divergence from a 16-bit cache, nats per token (context 2,048)")
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, fontsize=8, ncols=3, loc="outside upper center")
    save(figure, "accuracy")


def draw_gpu() -> None:
    """Draw the speed of decode attention on the GPU, relative to this engine's 16-bit cache."""
    series = (
        ("FlashInfer, NVFP4", "FlashInfer fa2", "nvfp4", "#d5d8dc"),
        ("XQA, FP8", "XQA", "fp8", BASELINE),
        ("lmdeploy-fp4, NVFP4", US, "nvfp4", OURS),
    )
    shapes = {
        shape: rows
        for shape, rows in gpu_results().decode_rows().items()
        if any(by == "XQA" for by, _ in rows)
    }
    figure, axes = plt.subplots(figsize=(9.15, 3.4), layout="constrained")
    for i, rows in enumerate(shapes.values()):
        present = [entry for entry in series if entry[1:3] in rows]
        for j, (_, by, mode, color) in enumerate(present):
            place = i + (j - (len(present) - 1) / 2) * 0.26
            ratio = rows[US, "none"]["us"] / rows[by, mode]["us"]
            axes.barh(place, ratio, 0.24, color=color)
            weight = "bold" if by == US else "normal"
            axes.text(ratio + 0.03, place, f"{ratio:.1f}×", va="center", fontsize=8, weight=weight)
    for name, _, _, color in series:
        axes.barh(0, 0, color=color, label=name)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(shapes)), [", ".join(shape_text(shape)) for shape in shapes])
    axes.invert_yaxis()
    axes.set_xlim(0, 4)
    axes.set_xlabel("speed relative to lmdeploy-fp4 with a 16-bit cache (1 = equal)")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_title("Decode attention on an NVIDIA H100: sequences × tokens", fontsize=10)
    save(figure, "gpu")


def main() -> None:
    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "lmdeploy-fp4",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    draw_readme_chart()
    for machine in MACHINES:
        draw_ratios(machine)
    draw_scaling()
    draw_accuracy()
    draw_gpu()
    for name, tables in TABLES.items():
        page = DOCS / name
        page.write_text(with_tables(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
