"""Scaling laws: cost of a decode step against context, batch and threads, per KV format.

    python benchmarks/scaling.py --json scaling.json            # measures, then writes the page
    python benchmarks/scaling.py --from scaling.json            # writes the page again
    python benchmarks/scaling.py --from                         # from benchmarks/results

For each format and number of threads: batch 1 at contexts from 128 to 32k, and batches 1 to 64 at
two contexts. Prompts grow on what the prefix cache holds, so that the longest is read once. The
cells go to the JSON file as they come; a second run with the same file measures what is missing
and, unless --keep, cells of other commits.
The page is docs/performance.md between its markers, the plot docs/performance.png; the table of
targets on it comes from --targets, a file of bench_engine.py --suite. What has no file yet is "not
measured" on the page.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cells import BLOCK_TOKENS, Cell
from our_engine import OurEngine, OurSetting
from performance_page import load_targets, origin_of, put_in, write_page
from results_file import check_same_machine, commit_here, describe_machine, today

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
CONTEXTS = (128, 512, 2048, 8192, 32768)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
BATCH_CONTEXTS = (128, 1024)
MODES = "none,nvfp4"
MAX_SLOTS = 1 << 17  # of all sequences of a cell: what fits into a few GB in 16 bit


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    modes: tuple[str, ...]
    threads: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    batch_contexts: tuple[int, ...]
    steps: int
    repeats: int

    def cells(self) -> list[Cell]:
        """Batch 1 with growing contexts, then the batches; none with more than MAX_SLOTS."""
        shapes = [(context, 1) for context in sorted(self.contexts)]
        shapes += [(c, b) for c in self.batch_contexts for b in self.batches]
        unique = dict.fromkeys(shape for shape in shapes if shape[0] * shape[1] <= MAX_SLOTS)
        return [Cell(context, batch, self.steps) for context, batch in unique]


class GrowingPrompts(Cell):
    """A cell whose prompts are beginnings of the same long ones, whatever its context."""

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """[batch] prompts; equal for equal vocabularies."""
        import numpy as np

        rows = []
        for sequence in range(self.batch):
            ids = np.random.default_rng(sequence).integers(100, vocab_size - 100, 1 << 16)
            rows.append([int(i) for i in ids[: self.context]])
        return rows


def key_of(mode: str, threads: int, *, cell: Cell) -> tuple[str, int, int, int]:
    """What a measured cell is found by."""
    return mode, threads, cell.context, cell.batch


def shape_of(cell: dict[str, Any]) -> tuple[str, int, int, int]:
    """As key_of, of a measured cell."""
    return cell["mode"], cell["threads"], cell["context"], cell["batch"]


def put_cell(document: dict[str, Any], cell: dict[str, Any]) -> None:
    """In the place of the cell of the same shape, or at the end."""
    shapes = [shape_of(known) for known in document["cells"]]
    at = shapes.index(shape_of(cell)) if shape_of(cell) in shapes else len(shapes)
    document["cells"][at : at + 1] = [cell]


def measure_cell(engine: OurEngine, cell: Cell, *, repeats: int) -> dict[str, Any]:
    """Seconds of a step, median of the repetitions, after one that does not count."""
    growing = GrowingPrompts(cell.context, cell.batch, cell.steps)
    engine.decode(growing)
    seconds = [cell.batch / engine.decode(growing) for _ in range(repeats)]
    return {
        "mean_context": cell.context + cell.steps / 2,
        "seconds": float(f"{statistics.median(seconds):.5g}"),
        "low": float(f"{min(seconds):.5g}"),
        "high": float(f"{max(seconds):.5g}"),
    }


def missing(
    document: dict[str, Any], plan: Plan, *, commit: str | None = None
) -> Iterator[tuple[str, int, list[Cell]]]:
    """Modes and threads with the cells that the document lacks; of this commit, if one is given."""
    known = {
        shape_of(cell) for cell in document["cells"] if commit in (None, cell.get("commit", ""))
    }
    for threads in plan.threads:
        for mode in plan.modes:
            cells = [c for c in plan.cells() if key_of(mode, threads, cell=c) not in known]
            if cells:
                yield mode, threads, cells


def measure(model: str, document: dict[str, Any], *, plan: Plan, path: Path, keep: bool) -> None:
    """Adds cells to the document and writes it after each; those of other commits are measured
    again, unless `keep`.
    """
    from attention_alone import measure_ceilings

    from lmdeploy import _turbomind
    from lmdeploy.engine.model_files import load_model

    commit = commit_here()
    loaded = load_model(model, device=_turbomind.make_cpu_device(max(plan.threads)))
    document["model"] = Path(loaded.path).stem
    document["weight_bytes"] = loaded.weights.num_bytes
    older = sorted({origin_of(c) for c in document["cells"] if c.get("commit") != commit})
    if older:
        verdict = "kept" if keep else "measured again, unless --keep"
        print(f"cells of other commits ({'; '.join(older)}; here {commit}): {verdict}")
    fresh = {
        int(threads)
        for threads, found in document["ceilings"].items()
        if keep or found.get("commit") == commit
    }
    for mode, threads, cells in list(missing(document, plan, commit=None if keep else commit)):
        if threads not in fresh:  # beside cells of another run they would say little
            fresh.add(threads)
            try:
                found = measure_ceilings(threads)
                document["ceilings"][str(threads)] = {**found, "commit": commit, "date": today()}
            except LookupError as error:
                print(f"no ceilings: {error}")
        largest = max(cell.batch * (cell.session_len // BLOCK_TOKENS + 1) for cell in cells)
        setting = OurSetting(
            mode,
            session_len=max(cell.session_len for cell in cells),
            num_blocks=largest,
            max_batch_size=max(cell.batch for cell in cells),
        )
        with OurEngine(loaded.config, loaded.weights, setting=setting, threads=threads) as engine:
            document["bytes_per_token"][mode] = engine.bytes_per_token
            for cell in cells:
                timed = measure_cell(engine, cell, repeats=plan.repeats)
                shape = {"mode": mode, "threads": threads}
                shape |= {"context": cell.context, "batch": cell.batch}
                shape |= {"quality": engine.quality, "commit": commit, "date": today()}
                put_cell(document, shape | timed)
                write_document(document, path)
                print(json.dumps(shape | timed), flush=True)


def new_document(threads: int) -> dict[str, Any]:
    """Without any cell."""
    return {
        "about": describe_machine(threads),
        "model": "",
        "weight_bytes": 0,
        "bytes_per_token": {},
        "ceilings": {},
        "cells": [],
    }


def read_document(path: Path) -> dict[str, Any]:
    """ValueError for a file that is not one of ours."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    keys = {"about", "model", "weight_bytes", "bytes_per_token", "ceilings", "cells"}
    if not isinstance(document, dict) or set(document) != keys:
        raise ValueError(f"{path}: wanted the keys {sorted(keys)} of scaling.py")
    found: dict[str, Any] = document
    return found


def write_document(document: dict[str, Any], path: Path) -> None:
    """Whole, or as it was."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def integers(text: str) -> tuple[int, ...]:
    """An argument such as 1,2."""
    values = text.split(",")
    if not all(value.isdecimal() and int(value) > 0 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: expected positive integers with commas")
    return tuple(int(value) for value in values)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2", help="GGUF file or smollm2")
    parser.add_argument("--json", type=Path, help="measure, with cells kept in this file")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        nargs="?",
        const=RESULTS / "scaling.json",
        help="measure nothing: write the page from this file (default: %(const)s)",
    )
    parser.add_argument("--modes", default=MODES, help="default: %(default)s")
    parser.add_argument("--threads", type=integers, default=tuple(range(1, min(cores, 2) + 1)))
    parser.add_argument("--contexts", type=integers, default=CONTEXTS)
    parser.add_argument("--batches", type=integers, default=BATCHES)
    parser.add_argument("--batch-contexts", type=integers, default=BATCH_CONTEXTS)
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a repetition")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="keep cells of other commits")
    parser.add_argument("--targets", type=Path, default=RESULTS, help="folder of targets*.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/performance.md")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/performance.png")
    options = parser.parse_args(arguments)
    if bool(options.json) == bool(options.source):
        parser.error("wanted one of --json and --from")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read, then write the page and the plot."""
    options = parse_arguments(arguments)
    try:
        put_in(options.page.read_text(encoding="utf-8"), "")  # before hours of measuring
        path = options.json or options.source
        document = read_document(path) if path.exists() else None
        if options.json:
            here = new_document(max(options.threads))
            document = document or here
            free = {"llama_cpp": None, "threads": None}  # none runs here; of each cell
            known, machine = document["about"] | free, here["about"] | free
            check_same_machine(known, machine, path=path)
            plan = Plan(
                modes=tuple(options.modes.split(",")),
                threads=options.threads,
                contexts=options.contexts,
                batches=options.batches,
                batch_contexts=options.batch_contexts,
                steps=options.steps,
                repeats=options.repeats,
            )
            measure(options.model, document, plan=plan, path=path, keep=options.keep)
        targets = load_targets(options.targets)
        write_page(options.page, document, targets=targets, plot=options.plot)
    except (ValueError, OSError) as error:
        print(f"scaling.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
