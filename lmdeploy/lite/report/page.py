"""Writes the page of a report as Markdown, and its figures as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmdeploy.base.resources import cpu_name
from lmdeploy.lite.report.cells import REFERENCE
from lmdeploy.lite.report.costs import DECODE_ROUNDS, DECODE_STEPS, SIZES, worst_head
from lmdeploy.lite.retrieval import DEPTHS

if TYPE_CHECKING:
    from lmdeploy.lite.report.data import Report

NOTHING = "–"


def write_page(report: Report, facts: dict[str, Any]) -> None:
    """Write the Markdown and JSON files."""
    options = report.options
    page = "\n".join(page_lines(report)) + "\n"
    (options.output / f"{options.name}.md").write_text(page, encoding="utf-8")
    data = {"facts": facts, "command": command(report), "cells": report.figures}
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    (options.output / f"{options.name}.json").write_text(text, encoding="utf-8")


def page_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the page."""
    options = report.options
    yield f"# KV cache: accuracy and cost of {options.model_path.rstrip('/').split('/')[-1]}"
    yield ""
    yield from _introduction(report)
    first = next(iter(report.ids))
    for context in map(str, options.contexts):
        yield ""
        yield f"## Context {context}"
        yield ""
        yield from _accuracy(report, first, context=context)
    yield ""
    yield "## Retrieval by depth"
    yield ""
    yield from _depths(report)
    yield ""
    yield "## Cost"
    yield ""
    yield from _costs(report)
    others = [name for name in report.ids if name != first]
    if others:
        yield ""
        yield "## Other texts"
        yield ""
        yield from _texts(report, [first, *others])


def command(report: Report) -> str:
    """Return the command that creates the page, with file names without folders."""
    o = report.options
    parts = ["lmdeploy", "lite", "kv-report", o.model_path.split("/")[-1], "--text"]
    parts += [path.name for path in o.texts]
    parts += ["--formats", ",".join(o.formats), "--qualities", ",".join(o.qualities)]
    parts += ["--contexts", ",".join(map(str, o.contexts))]
    if o.max_tokens < 1 << 30:
        parts += ["--max-tokens", str(o.max_tokens)]
    for flag, path in (
        ("--kv-calibration", o.calibration),
        ("--calibration-text", o.calibration_text),
    ):
        parts += [flag, path.name] if path else []
    parts += ["--retrieval-prompts", str(o.retrieval_prompts), "--name", o.name]
    return shlex.join(parts)


def _introduction(report: Report) -> Iterator[str]:
    yield "Made by"
    yield ""
    yield f"    {command(report)}"
    yield ""
    yield f"on {cpu_name()} with {report.model.threads} threads."
    yield ""
    if report.picture:
        yield f"![divergence, retrieval and decode speed]({report.options.name}.png)"
        yield ""
    yield "* KL is KL(none || format) in nats over all positions of a context except the last;"
    yield "  p99 is its 99th percentile. Top-1 is the share of positions with the same argmax."
    yield "* Lines such as `lantern = 4193;` are planted over the whole context, and its end asks"
    yield "  for their numbers. Recall is the share of numbers whose tokens are all the argmax. The"
    yield "  last column is their mean log probability. `none` shows the limit of the model."
    yield "* Bits per value include everything that a sequence needs between steps: codes, scales,"
    yield "  metadata and the window. Copies in the prefix cache do not count."
    yield "* All numbers are computed as a server computes them, without `exact`."


def _accuracy(report: Report, text: str, *, context: str) -> Iterator[str]:
    tokens = report.figures[REFERENCE]["texts"][text][context]["tokens"]
    questions = report.figures[REFERENCE]["retrieval"][context]["questions"]
    yield f"{tokens} positions of {text}; {questions} questions."
    yield ""
    yield from table_head(
        ["format", "perplexity", "KL mean", "KL p99", "top-1", "recall", "log prob of value"]
    )
    for label, figures in report.figures.items():
        row, found = figures["texts"][text][context], figures["retrieval"][context]
        yield table_row(
            [
                f"`{label}`",
                f"{row['ppl']:.3f}",
                f"{row['kl_mean']:.5f}",
                f"{row['kl_p99']:.4f}",
                percent(row["top1"]),
                percent(found["recall"]),
                f"{found['log_prob']:.2f}",
            ]
        )


def _depths(report: Report) -> Iterator[str]:
    yield "Recall by tenths of the context, from its beginning to its end."
    tenths = [f"{i}–{i + 1}" for i in range(DEPTHS)]
    for context in map(str, report.options.contexts):
        yield ""
        yield from table_head([f"context {context}", *tenths])
        for label, figures in report.figures.items():
            shares = figures["retrieval"][context]["by_depth"]
            cells = [NOTHING if share is None else f"{share:.2f}" for share in shares]
            yield table_row([f"`{label}`", *cells])


def _costs(report: Report) -> Iterator[str]:
    yield (
        f"KV write is the time to encode K and V of one token in all layers on one core, without "
        f"the rotation. Decode is the speed of one sequence: the median of {DECODE_ROUNDS} rounds "
        f"of {DECODE_STEPS} steps that alternate between the qualities of a format. The percentage "
        "in brackets is relative to `raw`. Saturated is the number of values of the first context "
        "beyond the range of the format, and the head that has the most of them. The JSON file has "
        "all heads. Latents are not counted, nor are heads that differ by layer."
    )
    yield ""
    contexts = list(map(str, report.options.contexts))
    sizes = [f"bits at {size}" for size in SIZES]
    speeds = [f"decode at {context}, tokens/s" for context in contexts]
    yield from table_head(["format", *sizes, "KV write, µs", *speeds, "saturated"])
    for label, figures in report.figures.items():
        yield table_row(
            [
                f"`{label}`",
                *(f"{bits:.2f}" for bits in figures["bits_per_value"].values()),
                f"{figures['write_ns_per_token'] / 1000:.2f}",
                *(_speed(figures["decode"].get(context)) for context in contexts),
                saturated_cell(figures["saturated_heads"]),
            ]
        )


def saturated_cell(counts: dict[str, list[list[int]]] | None) -> str:
    """Return the total, and the head that has the most of it."""
    if counts is None:
        return NOTHING
    total = sum(sum(heads) for layers in counts.values() for heads in layers)
    if total == 0:
        return "0"
    side, layer, head, count = worst_head(counts)
    return f"{total} ({count} in {side.upper()} of layer {layer}, head {head})"


def _speed(row: dict[str, Any] | None) -> str:
    if row is None:
        return NOTHING
    ratio = f" ({percent(row['to_raw'])})" if row["to_raw"] else ""
    return f"{row['tokens_per_s']:.1f}{ratio}"


def _texts(report: Report, texts: Sequence[str]) -> Iterator[str]:
    context = str(report.options.contexts[0])
    none = report.figures[REFERENCE]["texts"]
    sizes = ", ".join(f"{name} {none[name][context]['tokens']}" for name in texts)
    yield (
        f"KL mean and change of perplexity against `none` at context {context}. Positions: {sizes}."
    )
    yield ""
    yield from table_head(["format", *texts])
    for label, figures in report.figures.items():
        cells = []
        for name in texts:
            row, plain = figures["texts"][name][context], none[name][context]
            cells.append(f"{row['kl_mean']:.5f} ({row['ppl'] / plain['ppl'] - 1:+.1%})")
        yield table_row([f"`{label}`", *cells])
    yield ""
    for name in texts:
        order = ranking(report.figures, name, context=context)
        yield f"* {name}, in order of KL: {', '.join(f'`{label}`' for label in order)}"


def ranking(figures: dict[str, dict[str, Any]], text: str, *, context: str) -> list[str]:
    """Return all labels except `none`, sorted by KL."""
    labels = [label for label in figures if label != REFERENCE]
    return sorted(labels, key=lambda label: figures[label]["texts"][text][context]["kl_mean"])


def table_head(names: Sequence[str]) -> Iterator[str]:
    """Yield the two head lines of a table. The first column is left-aligned, others right."""
    yield table_row(names)
    yield table_row(["---"] + ["---:"] * (len(names) - 1))


def table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def percent(share: float) -> str:
    """Format a share as a percentage with one digit after the decimal point."""
    return f"{100 * share:.1f} %"
