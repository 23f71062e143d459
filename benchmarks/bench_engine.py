"""Prefill and decode speed per KV format, compared with llama.cpp on the same GGUF file.

    python benchmarks/bench_engine.py --suite targets --json targets.json
    python benchmarks/bench_engine.py --contexts 128,2048 --batches 1,8 --json results.json
    python benchmarks/bench_engine.py --modes nvfp4 --profile      # a table of time per op
    python benchmarks/bench_engine.py --model FOLDER --device cuda --batches 1,32,128
    python benchmarks/bench_engine.py --modes nvfp4 --long-prompt 32768

The suite measures the table of targets (targets.py) in alternating pairs of runs. The baseline
(llama.cpp, or that of --baseline) runs with the fastest of three settings for each workload. The
file is written after every row and belongs to one baseline. A second run with the same file
measures missing rows and rows of other commits.

Without --suite, the benchmark times our engine on cells of any size, on the CPU or a GPU. A figure
is the median of the repetitions. The engine samples each token by argmax over the vocabulary.
make_random_checkpoint.py writes models of any size.
--long-prompt measures what a long prompt costs other requests.
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
from results import ResultsFile, Row, describe_machine, write_json
from server_process import peak_bytes

from lmdeploy.config.kv_format_options import reported_formats

if TYPE_CHECKING:
    from baselines.baseline import Baseline
    from targets import Target

    from lmdeploy import _turbomind

MODES = reported_formats()


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


def run(options: argparse.Namespace) -> None:
    """Time our engine on every context and batch."""
    loaded, device = load(options)
    rows: list[Row] = []
    cells = [Cell(c, b, options.steps) for c in options.contexts for b in options.batches]
    for cell, mode in itertools.product(cells, options.modes.split(",")):
        with OurEngine(
            loaded, device, cell=cell, mode=mode, quality=options.quality, profiled=options.profile
        ) as engine:
            works = {"prefill": engine.prefill, "decode": engine.decode}
            timings = [[time(cell) for time in works.values()] for _ in range(options.repeats or 3)]
            for work, speeds in zip(works, zip(*timings, strict=True), strict=True):
                speed = round(statistics.median(speeds), 1)
                row = {"work": work, "mode": mode, "quality": engine.quality}
                rows.append({**row, "batch": cell.batch, "context": cell.context, "ours": speed})
                cache = f"{mode}, {engine.quality.split(' (')[0]}"
                shape = f"batch {cell.batch:>3} context {cell.context:>5}"
                print(f"{work:<8} {cache:<18} {shape} {speed:>10.1f}", flush=True)
            if options.profile:
                print(engine.profile_table(), flush=True)
        if options.json:
            write_json(options.json, rows)


def run_long_prompt(options: argparse.Namespace) -> None:
    """Time short requests and running answers while a long prompt is read."""
    from long_prompt import ANSWERS, measure_long_prompt

    loaded, device = load(options)
    cell = Cell(options.long_prompt, 2 * ANSWERS, options.steps)
    for mode in options.modes.split(","):
        with OurEngine(loaded, device, cell=cell, mode=mode, quality=options.quality) as engine:
            print(engine.format, *measure_long_prompt(engine, options.long_prompt), sep="\n")


def run_suite(options: argparse.Namespace) -> None:
    """Measure the table of targets for one model."""
    from targets import Cpu, TargetSuite

    targets = targets_of(options)
    file = ResultsFile(options.json)
    loaded, _ = load(options)
    baseline = make_baseline(options, loaded)
    machine = describe_machine(options.num_threads)
    machine["gemm_input_dtype"] = options.gemm_input_dtype
    file.measured_on({**machine, **(baseline.about() if baseline else {})})
    suite = TargetSuite(
        loaded,
        baseline,
        file=file,
        cpu=Cpu(options.num_threads, options.gemm_input_dtype == "int8"),
        repeats=options.repeats or 5,
        attention_bench=options.attention_bench,
    )
    suite.run(targets)
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


def targets_of(options: argparse.Namespace) -> list[Target]:
    """Return the targets of --only, or all."""
    from targets import BY_NAME, TARGETS

    chosen = [name for name in (options.only or "").split(",") if name]
    for name in chosen:
        if name not in BY_NAME:
            raise ValueError(f"--only {name!r} is unknown; choose from {', '.join(BY_NAME)}.")
    return [target for target in TARGETS if not chosen or target.name in chosen]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    threads = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2", help="GGUF file or smollm2")
    add("--json", type=Path, help="write the rows to this file")
    add("--modes", default=",".join(MODES), help="KV formats (default: %(default)s)")
    add("--quality", choices=("raw", "balanced"), help="of cells (default: that of the format)")
    add("--contexts", type=numbers, default=[128, 2048], help="default: 128,2048")
    add("--batches", type=numbers, default=[1, 8], help="default: 1,8")
    add("--steps", type=int, default=32, help="decode steps of cells (default: %(default)s)")
    add("--repeats", type=int, help="default: 3; --suite: 5")
    add("--num-threads", type=int, default=threads)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of cells")
    add("--gemm-input-dtype", choices=("int8",), help="round activations to 8 bits")
    add("--profile", action="store_true", help="print time and bytes per op after each cell")
    add(
        "--long-prompt",
        type=int,
        help="measure what a prompt of so many tokens costs",
    )
    add("--peak", help=argparse.SUPPRESS)
    group = parser.add_argument_group("--suite targets")
    add = group.add_argument
    add("--suite", choices=("targets",), help="measure the table of targets")
    add("--only", help="names of targets, with commas")
    names = ("llama.cpp", "ik_llama.cpp", "openvino")
    add("--baseline", choices=names, default=names[0], help="default: %(default)s")
    add("--ik-llama-bench", type=Path, help="the llama-bench program of ik_llama.cpp")
    add("--attention-bench", type=Path, help="binary attention_alone_bench")
    options = parser.parse_args(arguments)
    if options.suite and (options.profile or options.device != "cpu"):
        parser.error("--profile and --device work with cells, not with --suite.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the JSON file."""
    options = parse_arguments(arguments)
    try:
        if options.suite:
            run_suite(options)
        elif options.long_prompt:
            run_long_prompt(options)
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
