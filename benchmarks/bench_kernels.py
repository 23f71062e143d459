"""Speed of the CUDA kernels op by op, and whether the targets are met.

    python benchmarks/bench_kernels.py --bench build/cuda/gpu_device_bench

Cells are measured in order of their weight until all are done or --budget-s has passed; what was
left out is said. Rows go to benchmarks/results/gpu_NAME.json (--json), where a row of an earlier
run gives way to one of the same cell. The copy bandwidth of the device is the first cell of every
run. Exit status: 0, 1 when a cell failed, 2 for wrong arguments, 3 when there is no GPU.
Needs nothing but Python and the program.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_process import BenchProcess
from gpu_plan import KernelCell, kernel_cells, small_cells
from gpu_results import (
    OURS,
    Row,
    file_name,
    is_measured,
    merge_into,
    read_document,
    version,
    with_ratios,
)
from gpu_targets import verdicts

RESULTS = Path(__file__).resolve().parent / "results"
START_TIMEOUT_S = 60.0
CELL_TIMEOUT_S = 60.0
MOST_FAILURES = 10  # then something is wrong with all
NO_GPU = 3


@dataclass
class Run:
    """What came of one run."""

    about: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # for want of memory
    failed: list[str] = field(default_factory=list)
    left_out: int = 0  # for want of time


class NoDevice(Exception):
    """The program cannot use the device."""


def start(command: Sequence[str]) -> tuple[BenchProcess, dict[str, Any]]:
    """The program and what it says of its device."""
    process = BenchProcess(command)
    try:
        return process, process.answer(START_TIMEOUT_S)
    except RuntimeError as error:
        process.close()
        raise NoDevice(str(error)) from error


def measure(command: Sequence[str], cells: Sequence[KernelCell], *, budget_s: float) -> Run:
    """Cells until the time is over. A program that fails a cell is started anew for the next."""
    run = Run()
    end = time.monotonic() + budget_s
    process, about = start(command)
    run.about = {**about, "lmdeploy": version()}
    try:
        for i, cell in enumerate(cells):
            if time.monotonic() >= end or len(run.failed) >= MOST_FAILURES:
                run.left_out = len(cells) - i
                break
            answer = ask(process, cell)
            if "error" in answer:
                run.failed.append(f"{cell.line()}: {answer['error']}")
                process.close()  # after an illegal access nothing else works
                process, _ = start(command)
            elif "skipped" in answer:
                run.skipped.append(cell.line())
            else:
                run.rows.append(cell.row(OURS, answer))
                print(format_row(with_ratios(run.rows)[-1]), flush=True)
    finally:
        process.close()
    return run


def ask(process: BenchProcess, cell: KernelCell) -> dict[str, Any]:
    """The answer, an error where there is none."""
    try:
        return process.ask(cell.line(), timeout_s=CELL_TIMEOUT_S)
    except RuntimeError as error:
        return {"error": str(error)}


def format_row(row: Row) -> str:
    """One line of the report."""
    shape = " ".join(f"{k}={v}" for k, v in row["shape"].items() if v)
    parts = [f"{row['op']:<8} {row['mode']:<9} {row['us']:>10.2f} µs {row['gb_per_s']:>7.0f} GB/s"]
    parts.append(f"{row['of_copy']:>6.1%}" if "of_copy" in row else " " * 6)
    for name, words in (("vs_none", "16 bit"), ("vs_fp8", "fp8")):
        parts.append(f"{row[name]:>5.2f}x {words}" if name in row else " " * (7 + len(words)))
    return "  ".join([*parts, shape])


def report(run: Run, rows: Sequence[Row]) -> None:
    """Targets, and what was not measured."""
    print("\ntargets (docs/performance.md says which):")
    for verdict in verdicts(rows):
        print(f"  {verdict}")
    if run.left_out:
        print(f"{run.left_out} cells left out: the time was over, or too many failed")
    for line in run.skipped:
        print(f"skipped, too little memory: {line}")
    for line in run.failed:
        print(f"FAILED: {line}")
    print(f"{len(run.rows)} cells measured, {len(run.failed)} failed")


def bench_command(options: argparse.Namespace) -> list[str]:
    """The program with its limits; small cells ask for next to nothing."""
    command = [str(options.bench), f"device={options.device}"]
    return [*command, "rotate_mb=0", "round_ms=0"] if options.small else command


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bench", type=Path, required=True, help="gpu_device_bench")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget-s", type=float, default=180.0, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="default: results/gpu_NAME.json")
    parser.add_argument("--small", action="store_true", help="one tiny cell of every op")
    parser.add_argument("--only", default="", help="cells whose line contains this")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the file."""
    options = parse_arguments(arguments)
    cells = small_cells() if options.small else kernel_cells()
    cells = [c for c in cells if c.op == "copy" or options.only in c.line()]
    try:
        run = measure(bench_command(options), cells, budget_s=options.budget_s)
    except NoDevice as error:
        print(f"bench_kernels.py: no GPU: {error}", file=sys.stderr)
        return NO_GPU
    except OSError as error:
        print(f"bench_kernels.py: {error}", file=sys.stderr)
        return 2
    path = options.json or RESULTS / file_name(str(run.about["device"]))
    try:
        merge_into(path, run.about, lists={"kernels": run.rows})
    except (ValueError, OSError) as error:
        print(f"bench_kernels.py: {error}", file=sys.stderr)
        return 2
    report(run, [row for row in read_document(path)["kernels"] if is_measured(row)])
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
