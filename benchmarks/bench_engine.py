"""Prefill and decode speed per KV format, compared with llama.cpp on the same GGUF file.

    python benchmarks/bench_engine.py --suite --json speed.jsonl
    python benchmarks/bench_engine.py --contexts 128,2048 --batches 1,8 --json cells.jsonl
    python benchmarks/bench_engine.py --modes nvfp4 --profile      # a table of time per op
    python benchmarks/bench_engine.py --model FOLDER --device cuda --batches 1,32,128

The suite measures its workloads (suite.py) in alternating pairs of runs. The baseline (llama.cpp,
or that of --baseline) runs with the fastest of its settings for each workload. The file has JSON
Lines and is written after every row. A second run with the same file measures missing rows and
rows of other commits.

Without --suite, the benchmark times our engine on cells of any size, on the CPU or a GPU. A figure
is the median of the repetitions. The engine samples each token by argmax over the vocabulary.
make_random_checkpoint.py writes models of any size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from our_engine import Cell, OurEngine
from results import ResultsFile, describe_machine
from server_process import peak_bytes

from lmdeploy.config.kv_format_options import reported_formats

if TYPE_CHECKING:
    from baselines.baseline import Baseline
    from suite import Workload

    from lmdeploy import _turbomind

MODES = reported_formats()
CELL_KEY = ("model", "work", "mode", "quality", "batch", "context")


def load(options: argparse.Namespace) -> tuple[Any, _turbomind.Device]:
    """Load the model for the device of --device. Raise ValueError if there is none."""
    from lmdeploy import TurbomindEngineConfig
    from lmdeploy.engine.devices import open_device
    from lmdeploy.engine.model_files import load_model

    config = TurbomindEngineConfig(
        device_type=options.device,
        num_threads=options.num_threads,
        gemm_input_dtype=options.gemm_input_dtype,
    )
    device = open_device(config)
    return load_model(options.model, device=device), device


def make_baseline(options: argparse.Namespace, loaded: Any) -> Baseline | None:
    """Load the baseline of --baseline. Return None if it is not installed."""
    path, threads = str(loaded.path), options.num_threads
    try:
        if options.baseline == "openvino":
            from baselines.openvino import OpenVino

            return OpenVino(path, threads=threads, vocab_size=loaded.config.vocab_size)
        if options.baseline == "ik_llama.cpp":
            from baselines.ik_llama_cpp import IkLlamaCpp

            return IkLlamaCpp(path, threads=threads, program=options.ik_llama_bench)
        return make_llama_cpp(path, threads=threads)
    except ImportError as error:
        print(f"no baseline: {error}")
        return None


def make_llama_cpp(path: str, *, threads: int) -> Baseline:
    """Load llama.cpp and print its kernels. Raise ImportError if it is not installed."""
    from baselines.llama_cpp import LlamaCpp, build_of_llama_cpp, kernels_in_library

    build = build_of_llama_cpp()
    kernels = [name for name, found in kernels_in_library().items() if found]
    print(f"llama.cpp {build['llama_cpp_python']}, {build['compiler']}; reports {build['flags']}")
    print(f"llama.cpp kernels found in its library: {', '.join(kernels) or 'none'}")
    return LlamaCpp(path, threads=threads)


def machine_of(options: argparse.Namespace, device: _turbomind.Device) -> str:
    """Return the facts about the machine that its rows get."""
    if options.machine:
        return str(options.machine)
    if options.device == "cuda":
        return f"{device.name}, {device.capability.generation}"
    return describe_machine(options.num_threads, gemm_input_dtype=options.gemm_input_dtype)


def run(options: argparse.Namespace) -> None:
    """Time our engine on every context and batch."""
    loaded, device = load(options)
    file = ResultsFile(options.json, machine=machine_of(options, device), key=CELL_KEY)
    cells = [Cell(c, b, options.steps) for c in options.contexts for b in options.batches]
    for cell, mode in itertools.product(cells, options.modes.split(",")):
        with OurEngine(
            loaded, device, cell=cell, mode=mode, quality=options.quality, profiled=options.profile
        ) as engine:
            works = {"prefill": engine.prefill, "decode": engine.decode}
            timings = [[time(cell) for time in works.values()] for _ in range(options.repeats or 3)]
            for work, speeds in zip(works, zip(*timings, strict=True), strict=True):
                speed = round(statistics.median(speeds), 1)
                row = {"model": Path(loaded.path).stem, "work": work, "mode": mode}
                row |= {"quality": engine.quality, "batch": cell.batch, "context": cell.context}
                file.add({**row, "ours": speed})
                cache = f"{mode}, {engine.quality.split(' (')[0]}"
                shape = f"batch {cell.batch:>3} context {cell.context:>5}"
                print(f"{work:<8} {cache:<18} {shape} {speed:>10.1f}", flush=True)
            if options.profile:
                print(engine.profile_table(), flush=True)


def run_suite(options: argparse.Namespace) -> None:
    """Measure the suite for one model."""
    from suite import ROW_KEY, Cpu, Suite

    workloads = workloads_of(options)
    loaded, device = load(options)
    file = ResultsFile(options.json, machine=machine_of(options, device), key=ROW_KEY)
    baseline = make_baseline(options, loaded)
    suite = Suite(
        loaded,
        baseline,
        file=file,
        cpu=Cpu(options.num_threads, options.gemm_input_dtype),
        repeats=options.repeats or 5,
    )
    suite.run(workloads)
    if baseline:
        baseline.close()


def run_peak(options: argparse.Namespace) -> None:
    """Run one engine alone in this process and print its peak memory as JSON."""
    engine, setting = options.peak.split(":")
    cell = Cell(options.contexts[0], 1, options.steps)
    if engine == "ours":
        loaded, device = load(options)
        with OurEngine(loaded, device, cell=cell, mode=setting) as one:
            one.prefill(cell)
            one.decode(cell)
    else:
        from baselines.llama_cpp import LlamaCpp
        from baselines.settings import Setting

        kind, attention, reading = setting.split(",")
        baseline = LlamaCpp(
            options.model,
            threads=options.num_threads,
            use_mmap=reading != "read",
            repack=reading != "as-stored",
        )
        with baseline.context(cell, Setting(kind, kind, attention == "on")) as context:
            context.prefill()
            context.decode()
    print(json.dumps({"peak_rss_bytes": peak_bytes()}))


def numbers(text: str) -> list[int]:
    """Parse an argument such as 128,2048."""
    values = text.split(",")
    if not all(value.isdecimal() and int(value) > 0 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers with commas")
    return [int(value) for value in values]


def workloads_of(options: argparse.Namespace) -> list[Workload]:
    """Return the workloads of --only, or all."""
    from suite import BY_NAME, WORKLOADS

    chosen = [name for name in (options.only or "").split(",") if name]
    for name in chosen:
        if name not in BY_NAME:
            raise ValueError(f"--only {name!r} is unknown; choose from {', '.join(BY_NAME)}.")
    return [workload for workload in WORKLOADS if not chosen or workload.name in chosen]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    threads = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2", help="GGUF file or smollm2")
    add("--json", type=Path, help="add the rows to this file of JSON Lines")
    add("--modes", default=",".join(MODES), help="KV formats (default: %(default)s)")
    add("--quality", choices=("raw", "balanced"), help="of cells (default: that of the format)")
    add("--contexts", type=numbers, default=[128, 2048], help="default: 128,2048")
    add("--batches", type=numbers, default=[1, 8], help="default: 1,8")
    add("--steps", type=int, default=32, help="decode steps of cells (default: %(default)s)")
    add("--repeats", type=int, help="default: 3; --suite: 5")
    add("--num-threads", type=int, default=threads)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of cells")
    add("--machine", help="how rows name the machine (default: what the engine reports)")
    add("--gemm-input-dtype", choices=("int8",), help="as of the engine")
    add("--profile", action="store_true", help="print time and bytes per op after each cell")
    add("--peak", help=argparse.SUPPRESS)
    group = parser.add_argument_group("suite")
    add = group.add_argument
    add("--suite", action="store_true", help="measure the workloads of suite.py")
    add("--only", help="names of workloads, with commas")
    names = ("llama.cpp", "ik_llama.cpp", "openvino")
    add("--baseline", choices=names, default=names[0], help="default: %(default)s")
    add("--ik-llama-bench", type=Path, help="the llama-bench program of ik_llama.cpp")
    options = parser.parse_args(arguments)
    if options.suite and (options.profile or options.device != "cpu"):
        parser.error("--profile and --device work with cells, not with --suite.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the file."""
    options = parse_arguments(arguments)
    try:
        if options.suite:
            run_suite(options)
        elif options.peak:
            run_peak(options)
        else:
            run(options)
    except ValueError as error:
        print(f"bench_engine.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
