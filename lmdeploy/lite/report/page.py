"""The page of a report: Markdown for people, the same figures as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmdeploy.base.resources import cpu_name
from lmdeploy.lite.report.cells import REFERENCE
from lmdeploy.lite.report.costs import DECODE_ROUNDS, DECODE_STEPS, SIZES
from lmdeploy.lite.retrieval import DEPTHS

if TYPE_CHECKING:
    from lmdeploy.lite.report.data import Report

NOTHING = "–"


def write_page(report: Report, facts: dict[str, Any]) -> None:
    """Writes the Markdown and JSON files."""
    options = report.options
    page = "\n".join(page_lines(report)) + "\n"
    (options.output / f"{options.name}.md").write_text(page, encoding="utf-8")
    data = {"facts": facts, "command": command(report), "cells": report.figures}
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    (options.output / f"{options.name}.json").write_text(text, encoding="utf-8")


def page_lines(report: Report) -> Iterator[str]:
    """The whole page."""
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
    """What to type to get the page again; files without their folders."""
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
    yield "* KL is KL(none || format) in nats, over every position but the last of each context;"
    yield "  p99 its 99th percentile; top-1 the share of positions with the same likeliest token."
    yield "* Recall: lines such as `lantern = 4193;` are planted over the whole context and asked"
    yield "  for at its end; the share of numbers whose every digit is the likeliest token, and the"
    yield "  mean log-probability of a number. What `none` recalls is what the model can do at all."
    yield "* Bits per value count everything that a sequence holds between steps: payload, scales,"
    yield "  metadata, 16-bit blocks; not cached copies, which are evicted when memory is short."
    yield "* Everything is computed as a server does, not with `exact`."


def _accuracy(report: Report, text: str, *, context: str) -> Iterator[str]:
    tokens = report.figures[REFERENCE]["texts"][text][context]["tokens"]
    questions = report.figures[REFERENCE]["retrieval"][context]["questions"]
    yield f"{tokens} positions of {text}; {questions} questions."
    yield ""
    yield from table_head(
        ["format", "perplexity", "KL mean", "KL p99", "top-1", "recall", "log-prob of value"]
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
        f"KV write: encoding K and V of one token in all layers, one core, without the rotation. "
        f"Decode: one sequence, median of {DECODE_ROUNDS} rounds of {DECODE_STEPS} steps that "
        "alternate between the qualities of a format; in brackets against `raw`. Saturated: values "
        "of the first context beyond what the format stores."
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
                NOTHING if figures["saturated"] is None else str(figures["saturated"]),
            ]
        )


def _speed(row: dict[str, Any] | None) -> str:
    if row is None:
        return NOTHING
    ratio = f" ({percent(row['to_raw'])})" if row["to_raw"] else ""
    return f"{row['tokens_per_s']:.1f}{ratio}"


def _texts(report: Report, texts: Sequence[str]) -> Iterator[str]:
    context = str(report.options.contexts[0])
    none = report.figures[REFERENCE]["texts"]
    sizes = ", ".join(f"{name} {none[name][context]['tokens']}" for name in texts)
    yield f"KL mean and perplexity against `none` at context {context}; positions: {sizes}."
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
        yield f"* {name}, from the least divergence: {', '.join(f'`{label}`' for label in order)}"


def ranking(figures: dict[str, dict[str, Any]], text: str, *, context: str) -> list[str]:
    """Labels but `none`, by KL."""
    labels = [label for label in figures if label != REFERENCE]
    return sorted(labels, key=lambda label: figures[label]["texts"][text][context]["kl_mean"])


def table_head(names: Sequence[str]) -> Iterator[str]:
    """Two lines; the first column to the left, numbers to the right."""
    yield table_row(names)
    yield table_row(["---"] + ["---:"] * (len(names) - 1))


def table_row(cells: Sequence[str]) -> str:
    """One line."""
    return "| " + " | ".join(cells) + " |"


def percent(share: float) -> str:
    """With one digit behind the point."""
    return f"{100 * share:.1f} %"
