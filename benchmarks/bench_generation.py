"""Tokens per second of the engine on a GPU, with models of random weights made in memory.

    python benchmarks/bench_generation.py --bench build/cuda/generation_bench

Per model and KV format: prompts (8 of 2048 tokens, nothing cached), then decoding with 1, 32 and
128 sequences of 512 tokens. `balanced` is a four-bit format as a user gets it, `raw` the format
alone. Models take turns with --budget-s, split evenly; what the time does not allow is left out,
and said. Rows go to benchmarks/results/gpu_NAME.json as they are measured. Exit status as
bench_kernels.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_kernels import NO_GPU, RESULTS, Clock, NoDevice
from bench_process import BenchProcess, NoAnswer
from gpu_results import OURS, Row, begin_of_run, file_name, merge_into, version

MODELS = ("llama-3-8b", "gpt-oss-20b")
WORK = (
    ("nvfp4", "balanced"),
    ("none", "raw"),
    ("fp8", "raw"),
    ("mxfp4", "balanced"),
    ("nvfp4", "raw"),
    ("int8", "raw"),
    ("int4", "balanced"),
    ("mxfp4", "raw"),
    ("fp8_e5m2", "raw"),
)
SMALL_WORK = 2
SIZES = {"batches": "1,32,128", "context": 512, "steps": 64, "prompt": 2048, "prompts": 8}
SMALL_SIZES = {"batches": "1,2", "context": 40, "steps": 2, "prompt": 70, "prompts": 2, "rough": 1}
ANSWER_TIMEOUT_S = 120.0


def line_of(mode: str, quality: str, *, sizes: dict[str, Any]) -> str:
    """A cell as generation_bench reads it."""
    words = {"mode": mode, "quality": quality, **sizes}
    return " ".join(f"{key}={value}" for key, value in words.items())


def row_of(model: str, answer: dict[str, Any]) -> Row:
    """What goes to the file."""
    shape = {key: answer[key] for key in ("batch", "context", "quality")}
    figures = {key: answer[key] for key in ("tokens_per_s", "bytes_per_token")}
    return {
        "by": OURS,
        "work": answer["work"],
        "model": model,
        "mode": answer["mode"],
        "shape": shape,
        **figures,
    }


class ModelRun:
    """One model: its rows, which the file has at any time, and what went wrong."""

    def __init__(self, model: str, *, path: Path | None, clock: Clock) -> None:
        self._model, self._path, self._clock = model, path, clock
        self._begun = begin_of_run()
        self._about: dict[str, Any] = {}
        self.measured = 0
        self.failed: list[str] = []
        self.left_out: list[str] = []

    def _answer(self, process: BenchProcess) -> dict[str, Any]:
        return process.answer(self._clock.wait_s(ANSWER_TIMEOUT_S))

    def run(self, command: Sequence[str], lines: Sequence[str]) -> None:
        """Every line that the time allows. NoDevice where the program does not start."""
        with BenchProcess([*command, f"model={self._model}"]) as process:
            try:
                self._about = {**self._answer(process), "lmdeploy": version()}
            except RuntimeError as error:
                raise NoDevice(str(error)) from error
            self._merge([])
            rest = list(lines)
            try:
                loaded = self._answer(process)
                print(f"{self._model}: weights in {loaded['seconds']:.1f} s", flush=True)
                while rest and not self._clock.is_over():
                    self._cell(process, rest[0])
                    del rest[0]
            except RuntimeError as error:
                if isinstance(error, NoAnswer) and self._clock.is_over():
                    print(f"{self._model}: the time is over, without an answer")
                else:
                    self.failed.append(f"{self._model}: {error}")
            self.left_out += rest

    def _cell(self, process: BenchProcess, line: str) -> None:
        process.send(line)
        while "done" not in (answer := self._answer(process)):
            if "error" in answer:
                self.failed.append(f"{self._model} {line}: {answer['error']}")
            elif "skipped" in answer:
                self.left_out.append(f"{line}: {answer['skipped']}")
            else:
                row = row_of(self._model, answer) | {"run": self._begun}
                self._merge([row])
                self.measured += 1
                print(format_row(row), flush=True)

    def _merge(self, rows: list[Row]) -> None:
        path = self._path or RESULTS / file_name(str(self._about["device"]))
        merge_into(path, self._about, lists={"generation": rows})


def format_row(row: Row) -> str:
    """One line of the report."""
    shape = row["shape"]
    return (
        f"{row['model']:<12} {row['work']:<8} {row['mode']:<9} {shape['quality']:<9} "
        f"batch {shape['batch']:>3}, {shape['context']:>5} tokens  "
        f"{row['tokens_per_s']:>10,.0f} tokens/s"
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bench", type=Path, required=True, help="the program generation_bench")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--budget-s", type=float, default=160.0, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="default: results/gpu_NAME.json")
    parser.add_argument("--small", action="store_true", help="next to no tokens")
    options = parser.parse_args(arguments)
    if options.small and not options.json:
        parser.error("--small needs --json: its figures are none for the results")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the file."""
    options = parse_arguments(arguments)
    sizes = SMALL_SIZES if options.small else SIZES
    work = WORK[:SMALL_WORK] if options.small else WORK
    lines = [line_of(mode, quality, sizes=sizes) for mode, quality in work]
    models = options.models.split(",")
    command = [str(options.bench), f"device={options.device}"]
    failed, left_out = [], []
    for i, model in enumerate(models):
        begun = time.monotonic()
        run = ModelRun(model, path=options.json, clock=Clock(options.budget_s / (len(models) - i)))
        try:
            run.run(command, lines)
        except NoDevice as error:
            if i == 0:
                print(f"bench_generation.py: no GPU: {error}", file=sys.stderr)
                return NO_GPU
            run.failed.append(f"{model}: {error}")
        except (ValueError, OSError) as error:
            print(f"bench_generation.py: {error}", file=sys.stderr)
            return 2
        options.budget_s -= time.monotonic() - begun
        failed += run.failed
        left_out += [f"{model}: {line}" for line in run.left_out]
        if not run.measured and not run.failed:
            failed.append(f"{model}: nothing was measured")
    for line in left_out:
        print(f"left out: {line}")
    for line in failed:
        print(f"FAILED: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
