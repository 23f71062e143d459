"""Speed on a GPU, printed as JSON lines and merged into one file.

    python benchmarks/bench_gpu.py device --bench build/cuda/device_bench
    python benchmarks/bench_gpu.py generation --bench build/cuda/generation_bench
    python benchmarks/bench_gpu.py baselines --json benchmarks/results/gpu_nvidia_h200.json

`device` times single ops, the most important cells first. `generation` times the whole engine with
random weights made in memory. `baselines` times FlashInfer on the decode cells of the file. Rows go
to benchmarks/results/gpu_NAME.json (--json) as they are measured; a new row replaces the row of the
same cell. Nothing begins after --budget-s. Exit status: 0, 1 if a cell failed, 2 for wrong
arguments, 3 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from results import write_json

Row = dict[str, Any]

RESULTS = Path(__file__).resolve().parent / "results"
NO_GPU = 3
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 60.0, 120.0
FEW_MODES = ("none", "fp8", "nvfp4", "mxfp4")  # the formats that are measured first
FORMATS = ("bf16", "q8_0", "q4_0", "mxfp4_split")
# Matrices of an 8B model (hidden 4096, 32 heads of 128, 8 KV heads).
LINEARS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
MODELS = ("llama-3-8b", "gpt-oss-20b")
GENERATION = (
    *("mode=nvfp4 quality=balanced", "mode=none quality=raw", "mode=fp8 quality=raw"),
    *("mode=mxfp4 quality=balanced", "mode=nvfp4 quality=raw", "mode=int8 quality=raw"),
    *("mode=int4 quality=balanced", "mode=mxfp4 quality=raw", "mode=fp8_e5m2 quality=raw"),
)
GENERATION_SIZES = "batches=1,32,128 context=512 steps=64 prompt=2048 prompts=8"
SMALL_SIZES = "batches=1,2 context=40 steps=2 prompt=70 prompts=2"


def device_cells(formats: Sequence[str]) -> Iterator[str]:
    """Yield the cells of device_bench, the most important first. A run may end at any of them."""
    modes = [*FEW_MODES, *(name for name in formats if name not in FEW_MODES)]
    yield "op=copy mb=4096"
    heads = "kv_heads=8 group=8"
    for batch, context in ((8, 32768), (32, 32768), (128, 8192), (1, 131072), (256, 1024)):
        for mode in modes:
            yield f"op=decode mode={mode} batch={batch} context={context} {heads} head_dim=128"
    window = "kv_heads=8 group=8 head_dim=64 context=4096 window=128 sinks=1"
    for batch in (8, 32):
        for mode in modes:
            yield f"op=decode mode={mode} batch={batch} {window}"
    for context in (8192, 32768):
        for mode in FEW_MODES:
            sizes = f"batch=1 context={context} new_tokens=2048 {heads} head_dim=128"
            yield f"op=prefill mode={mode} launches=4 {sizes}"
    for batch, tokens in ((1, 2048), (128, 1)):
        sizes = f"batch={batch} context=2048 new_tokens={tokens} kv_heads=8 group=4 head_dim=128"
        for mode in modes:
            yield f"op=write mode={mode} {sizes}"
        for mode in ("nvfp4", "mxfp4"):
            yield f"op=write mode={mode} {sizes} search=1 rotate=1"
    for batch in (1, 32, 128, 2048):
        launches = " launches=4" if batch > 256 else ""
        for rows, cols in LINEARS:
            for name in FORMATS:
                yield f"op=linear format={name} batch={batch} rows={rows} cols={cols}{launches}"
        experts = "rows=5760 cols=2880 experts=32 top_k=4 launches=4"
        yield f"op=experts format=mxfp4_split batch={batch} {experts}"
    for mode in FEW_MODES:
        yield f"op=flatten mode={mode} batch=1 context=32768 {heads} head_dim=128"


def small_cells() -> Iterator[str]:
    """Yield one tiny cell of every op, to test the program on any device."""
    yield "op=copy mb=1"
    sizes = "launches=1 batch=2 context=96 kv_heads=1 group=2 head_dim=64"
    for mode in FEW_MODES:
        for op in ("decode", "write", "flatten", "prefill"):
            more = " new_tokens=16" if op == "prefill" else ""
            yield f"op={op} mode={mode} {sizes}{more}"
    for name in FORMATS:
        yield f"op=linear format={name} launches=1 batch=2 rows=64 cols=64"
    yield "op=experts format=mxfp4_split launches=1 batch=2 rows=64 cols=64 experts=2 top_k=1"


def kv_formats(bench: Path) -> list[str]:
    """Return the KV formats that device_bench was built with."""
    done = subprocess.run(
        [bench, "formats"], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return done.stdout.split()


class Program:
    """A benchmark program that reads cells from stdin and prints JSON lines."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answers: queue.Queue[Row | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def send(self, cell: str) -> None:
        """Send a cell to the program."""
        assert self._process.stdin is not None
        self._process.stdin.write(cell + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float) -> Row:
        """Return the next line. RuntimeError is raised if the program ended or takes too long."""
        try:
            found = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RuntimeError(f"no answer in {timeout_s:.0f} s") from None
        if found is None:
            raise RuntimeError(f"the program ended with status {self._process.wait()}")
        return found

    def close(self) -> None:
        """Kill the program."""
        self._process.kill()
        self._process.wait()


class GpuFile:
    """The rows of one GPU by cell. The file is written after every row."""

    def __init__(self, path: Path | None, about: Row) -> None:
        name = re.sub(r"[^a-z0-9]+", "_", str(about["device"]).lower()).strip("_")
        self.path = path or RESULTS / f"gpu_{name}.json"
        self.document: Row = {"about": about, "rows": []}
        if self.path.exists():
            self.document = json.loads(self.path.read_text(encoding="utf-8"))
            known = self.document["about"]["device"]
            if known != about["device"]:
                raise ValueError(f"{self.path} has rows of {known}; give --json another file.")

    def add(self, row: Row) -> None:
        """Print a row and replace the row of the same cell in the file."""
        print(json.dumps(row), flush=True)
        key = (row["by"], row["cell"])
        rows = [old for old in self.document["rows"] if (old["by"], old["cell"]) != key]
        self.document["rows"] = [*rows, row]
        write_json(self.path, self.document)


class Run:
    """Sends cells to a program until the time is over, and starts it again after an error."""

    def __init__(self, command: Sequence[str], *, path: Path | None, budget_s: float) -> None:
        self._command, self._path = command, path
        self._end = time.monotonic() + budget_s
        self._is_generation = any(word.startswith("model=") for word in command)
        self.file: GpuFile | None = None
        self.failed: list[str] = []

    def run(self, cells: Sequence[str]) -> list[str]:
        """Measure the cells in order and return what failed.

        Raises RuntimeError if the program does not start.
        """
        num_rows, program = 0, self._start()
        for number, cell in enumerate(cells):
            if time.monotonic() >= self._end:
                print(f"{len(cells) - number} cells skipped: the time is over")
                break
            try:
                program.send(cell)
                while "done" not in (answer := program.answer(ANSWER_TIMEOUT_S)):
                    num_rows += self._add(cell, answer)
                    if not self._is_generation:
                        break
            except (RuntimeError, OSError) as error:
                self.failed.append(f"{cell}: {error}")
                program.close()
                program = self._start()
        program.close()
        return self.failed or ([] if num_rows else [f"{self._command}: nothing was measured"])

    def _start(self) -> Program:
        program = Program(self._command)
        about = program.answer(START_TIMEOUT_S)
        if self._is_generation:
            program.answer(ANSWER_TIMEOUT_S)  # the weights
        self.file = self.file or GpuFile(self._path, about)
        return program

    def _add(self, cell: str, answer: Row) -> bool:
        assert self.file is not None
        if "error" in answer:
            self.failed.append(f"{cell}: {answer['error']}")
        elif "skipped" in answer:
            print(f"skipped, {answer['skipped']}: {cell}")
        else:
            name = f"{answer['work']} batch={answer['batch']} {cell}" if "work" in answer else cell
            self.file.add({"by": "lmdeploy-fp4", "cell": name, **answer})
            return True
        return False


def measure_ours(options: argparse.Namespace) -> list[str]:
    """Measure with device_bench or generation_bench and return what failed."""
    command = [str(options.bench), f"device={options.device}"]
    if options.what == "device":
        command += ["rotate_mb=0", "round_ms=0"] if options.small else []
        run = Run(command, path=options.json, budget_s=options.budget_s)
        cells = list(small_cells() if options.small else device_cells(kv_formats(options.bench)))
        return run.run(cells)
    failed: list[str] = []
    models = ("tiny-llama", "tiny-gpt-oss") if options.small else MODELS
    for model in models:
        sizes = SMALL_SIZES if options.small else GENERATION_SIZES
        cells = [f"{work} {sizes}" for work in GENERATION[: 2 if options.small else None]]
        budget = options.budget_s / len(models)
        failed += Run([*command, f"model={model}"], path=options.json, budget_s=budget).run(cells)
    return failed


def measure_baselines(options: argparse.Namespace) -> list[str]:
    """Measure FlashInfer on the decode cells of the file and return what failed."""
    from baselines import flashinfer

    document = json.loads(options.json.read_text(encoding="utf-8"))
    file = GpuFile(options.json, document["about"])
    cells = [row["cell"] for row in document["rows"] if row["cell"].startswith("op=decode")]
    return flashinfer.measure_all(cells, save=file.add, budget_s=options.budget_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("device", "generation", "baselines"))
    parser.add_argument("--bench", type=Path, help="the program device_bench or generation_bench")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget-s", type=float, default=160.0, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="default: results/gpu_NAME.json")
    parser.add_argument("--small", action="store_true", help="tiny cells, to test the program")
    options = parser.parse_args(arguments)
    if options.what == "baselines" and not options.json:
        parser.error("baselines needs --json, the file with the rows of `device`.")
    if options.what != "baselines" and not options.bench:
        parser.error(f"{options.what} needs --bench.")
    try:
        measure = measure_baselines if options.what == "baselines" else measure_ours
        failed = measure(options)
    except RuntimeError as error:
        print(f"bench_gpu.py: no GPU, or the program does not start: {error}", file=sys.stderr)
        return NO_GPU
    except (ValueError, OSError) as error:
        print(f"bench_gpu.py: {error}", file=sys.stderr)
        return 2
    for line in failed:
        print(f"FAILED: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
