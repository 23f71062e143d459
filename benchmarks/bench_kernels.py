"""Speed of the CUDA kernels op by op, and whether the targets are met.

    python benchmarks/bench_kernels.py --bench build/cuda/device_bench

Cells are measured in order of their weight until all are done or --budget-s has passed, and no wait
is longer than WAIT_BEYOND_S beyond that; what was left out is said. Rows go to
benchmarks/results/gpu_NAME.json (--json) as they are measured, where a row of an earlier run gives
way to one of the same cell. The copy bandwidth of the device is the first cell of every run, and
noted in its rows. Exit status: 0, 1 when a cell failed, 2 for wrong arguments, 3 when there is no
GPU. Needs nothing but Python and the program.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_process import BenchProcess, NoAnswer
from gpu_plan import KernelCell, kernel_cells, small_cells
from gpu_results import (
    OURS,
    Row,
    begin_of_run,
    copy_bandwidth,
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
WAIT_BEYOND_S = 5.0  # for the answer to a cell that was begun in time
MOST_FAILURES = 10  # then something is wrong with all
NO_GPU = 3


class NoDevice(Exception):
    """The program cannot use the device."""


class Clock:
    """The time of a run."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def is_over(self) -> bool:
        """Nothing more may begin."""
        return time.monotonic() >= self._end

    def wait_s(self, most: float) -> float:
        """How long an answer is waited for."""
        return max(0.0, min(most, self._end + WAIT_BEYOND_S - time.monotonic()))


@dataclass
class Run:
    """What came of one run."""

    path: Path
    about: dict[str, Any]
    begun: str = field(default_factory=begin_of_run)
    rows: list[Row] = field(default_factory=list)
    saved: int = 0  # of the rows, those that are in the file
    skipped: list[str] = field(default_factory=list)  # for want of memory
    failed: list[str] = field(default_factory=list)
    left_out: int = 0  # for want of time

    def add(self, row: Row) -> None:
        """With what it is compared with."""
        self.rows.append(row)
        row["run"] = self.begun
        if copy := copy_bandwidth(self.rows):
            row["copy_gb_per_s"] = copy

    def save(self) -> None:
        """Prints what is new, and puts it into the file."""
        new = len(self.rows) - self.saved
        if new:
            merge_into(self.path, self.about, lists={"kernels": self.rows[-new:]})
            self.saved = len(self.rows)
            for row in with_ratios(self.rows)[-new:]:
                print(format_row(row), flush=True)


class Program:
    """device_bench. It is started anew after an error: an illegal access ends all."""

    def __init__(self, command: Sequence[str], clock: Clock) -> None:
        """Raises NoDevice, and OSError where there is no such program."""
        self._command, self._clock = command, clock
        self.about: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        """Raises NoDevice."""
        self._process = BenchProcess(self._command)
        try:
            self.about = self._process.answer(self._clock.wait_s(START_TIMEOUT_S))
        except RuntimeError as error:
            self.close()
            raise NoDevice(str(error)) from error

    def ask(self, cell: KernelCell, *, meanwhile: Callable[[], None]) -> dict[str, Any]:
        """The answer: an error where the program ends, nothing where the time does first."""
        try:
            self._process.send(cell.line())
            meanwhile()
            return self._process.answer(self._clock.wait_s(CELL_TIMEOUT_S))
        except NoAnswer as error:
            return {} if self._clock.is_over() else {"error": str(error)}
        except RuntimeError as error:
            return {"error": str(error)}

    def close(self) -> None:
        """Ends it."""
        self._process.close()


def measure(program: Program, run: Run, *, cells: Sequence[KernelCell], clock: Clock) -> None:
    """Cells until the time is over, or the program does not start again."""
    for i, cell in enumerate(cells):
        run.left_out = len(cells) - i
        if clock.is_over() or len(run.failed) >= MOST_FAILURES:
            return
        answer = program.ask(cell, meanwhile=run.save)
        if not answer:
            print(f"the time is over, without an answer to: {cell.line()}")
            return
        if "error" in answer:
            run.failed.append(f"{cell.line()}: {answer['error']}")
            program.close()
            try:
                program.start()
            except NoDevice as error:
                run.left_out -= 1
                run.failed.append(f"not started again after that: {error}")
                return
        elif "skipped" in answer:
            run.skipped.append(cell.line())
        else:
            run.add(cell.row(OURS, answer))
    run.left_out = 0


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
        print(f"{run.left_out} cells left out: the time was over, or too much failed")
    for line in run.skipped:
        print(f"skipped, too little memory: {line}")
    for line in run.failed:
        print(f"FAILED: {line}")
    if not run.rows:
        print("FAILED: nothing was measured")
    print(f"{len(run.rows)} cells measured, {len(run.failed)} failed")


def bench_command(options: argparse.Namespace) -> list[str]:
    """The program with its limits; small cells ask for next to nothing."""
    command = [str(options.bench), f"device={options.device}"]
    return [*command, "rotate_mb=0", "round_ms=0"] if options.small else command


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bench", type=Path, required=True, help="the program device_bench")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget-s", type=float, default=180.0, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="default: results/gpu_NAME.json")
    parser.add_argument("--small", action="store_true", help="one tiny cell of every op")
    parser.add_argument("--only", default="", help="cells whose line contains this")
    options = parser.parse_args(arguments)
    if options.small and not options.json:
        parser.error("--small needs --json: its figures are none for the results")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the file."""
    options = parse_arguments(arguments)
    cells = small_cells() if options.small else kernel_cells()
    cells = [c for c in cells if c.op == "copy" or options.only in c.line()]
    clock = Clock(options.budget_s)
    try:
        program = Program(bench_command(options), clock)
        about = {**program.about, "lmdeploy": version()}
        run = Run(options.json or RESULTS / file_name(str(about["device"])), about)
        try:
            merge_into(run.path, about, lists={})
            measure(program, run, cells=cells, clock=clock)
        finally:
            program.close()
            run.save()
        rows = read_document(run.path)["kernels"]
    except NoDevice as error:
        print(f"bench_kernels.py: no GPU: {error}", file=sys.stderr)
        return NO_GPU
    except (ValueError, OSError) as error:
        print(f"bench_kernels.py: {error}", file=sys.stderr)
        return 2
    report(run, [row for row in rows if is_measured(row)])
    return 1 if run.failed or not run.rows else 0


if __name__ == "__main__":
    sys.exit(main())
