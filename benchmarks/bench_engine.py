"""Prefill and decode speed per KV format, compared with llama.cpp on the same GGUF file.

    python benchmarks/bench_engine.py --suite targets --json targets.json
    python benchmarks/bench_engine.py --contexts 128,2048 --batches 1,8 --json results.json
    python benchmarks/bench_engine.py --modes nvfp4 --profile      # a table of time per op

The suite measures the table of targets (targets.py) in alternating pairs of runs. llama.cpp runs
with the fastest of three settings for each workload. The file is written after every row. A second
run with the same file measures missing rows and rows of other commits.

Without --suite, the benchmark times our engine on cells of any size. A figure is the median of the
repetitions. The engine samples each token by argmax over the vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from our_engine import Cell, OurEngine, OurSetting
from results import ResultsFile, describe_machine, write_json

from lmdeploy.config.kv_formats import reported_formats

if TYPE_CHECKING:
    from baselines.llama_cpp import LlamaCpp
    from targets import Target

MODES = reported_formats()
OTHER_LIBRARY = {"ours": "llama_cpp", "peer": "lmdeploy"}


@dataclass(frozen=True)
class Row:
    """One measured figure in tokens per second."""

    work: str
    mode: str
    quality: str
    batch: int
    context: int
    ours: float


def load(options: argparse.Namespace) -> Any:
    """Load the model for our engine."""
    from lmdeploy import _turbomind
    from lmdeploy.engine.model_files import load_model

    device = _turbomind.make_cpu_device(options.num_threads)
    return load_model(options.model, device=device)


def make_peer(options: argparse.Namespace, path: Path) -> LlamaCpp | None:
    """Load llama.cpp and print its kernels. Return None if it is not installed."""
    try:
        from baselines.llama_cpp import LlamaCpp, build_of_llama_cpp, kernels_in_library
    except ImportError as error:
        print(f"no peer: {error}; pip install llama-cpp-python")
        return None
    peer = LlamaCpp(str(path), threads=options.num_threads)
    build = build_of_llama_cpp()
    kernels = [name for name, found in kernels_in_library().items() if found]
    print(f"llama.cpp {build['llama_cpp_python']}, {build['compiler']}; reports {build['flags']}")
    print(
        f"llama.cpp kernels found in its library: {', '.join(kernels) or 'none'}; "
        f"weight buffers: {', '.join(peer.buffers) or 'not logged'}"
    )
    return peer


def run(options: argparse.Namespace) -> None:
    """Time our engine on every context and batch."""
    loaded = load(options)
    rows: list[Row] = []
    cells = [Cell(c, b, options.steps) for c in options.contexts for b in options.batches]
    for cell, mode in itertools.product(cells, options.modes.split(",")):
        setting = replace(OurSetting.for_cell(cell, mode), quality=options.quality)
        with OurEngine(
            loaded, setting=setting, threads=options.num_threads, profiled=options.profile
        ) as engine:
            timings = [engine.run(cell) for _ in range(options.repeats or 3)]
            for work in ("prefill", "decode"):
                speed = round(statistics.median(getattr(t, work) for t in timings), 1)
                rows.append(Row(work, mode, engine.quality, cell.batch, cell.context, speed))
                print(format_row(rows[-1]), flush=True)
            if options.profile:
                print(engine.profile_table(), flush=True)
        if options.json:
            write_json(options.json, [asdict(row) for row in rows])


def run_suite(options: argparse.Namespace) -> None:
    """Measure the table of targets for one model."""
    from targets import SuiteOptions, TargetRow, TargetSuite
    from targets import format_row as format_target

    targets = targets_of(options)
    file = ResultsFile(options.json, make_row=lambda fields: TargetRow(**fields))
    file.measured_on(describe_machine(options.num_threads))
    loaded = load(options)
    peer = make_peer(options, Path(loaded.path))
    suite_options = SuiteOptions(
        threads=options.num_threads,
        repeats=options.repeats or 5,
        attention_bench=options.attention_bench,
    )
    suite = TargetSuite(loaded, peer, options=suite_options, file=file)
    suite.run(targets, report=lambda row: print(format_target(row), flush=True))
    if peer:
        peer.close()


def run_peak(options: argparse.Namespace) -> None:
    """Run one engine alone in this process and print its peak memory as JSON."""
    engine, setting = options.peak.split(":")
    cell = Cell(options.contexts[0], 1, options.steps)
    if engine == "ours":
        loaded = load(options)
        ours = OurSetting.for_cell(cell, setting)
        with OurEngine(loaded, setting=ours, threads=options.num_threads) as one:
            one.run(cell)
    else:
        from baselines.llama_cpp import LlamaCpp
        from baselines.settings import Setting

        kind, attention, reading = setting.split(",")
        peer = LlamaCpp(
            options.model,
            threads=options.num_threads,
            use_mmap=reading != "read",
            repack=reading != "as-stored",
        )
        peer.run(cell, Setting(kind, kind, attention == "on"))
    if OTHER_LIBRARY[engine] in sys.modules:
        raise RuntimeError(f"{OTHER_LIBRARY[engine]} is loaded in the process of {engine}")
    # VmHWM, unlike ru_maxrss, does not begin with the peak of the parent process.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    kilobytes = status.split("VmHWM:")[1].split()[0]
    print(json.dumps({"peak_rss_bytes": int(kilobytes) * 1024}))


def format_row(row: Row) -> str:
    """Return one line of the table."""
    cache = f"{row.mode}, {row.quality.split(' (')[0]}"
    return (
        f"{row.work:<8} {cache:<18} batch {row.batch:>2} context {row.context:>5} {row.ours:>10.1f}"
    )


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
    add("--profile", action="store_true", help="print time and bytes per op after each cell")
    add("--peak", help=argparse.SUPPRESS)
    group = parser.add_argument_group("--suite targets")
    add = group.add_argument
    add("--suite", choices=("targets",), help="measure the table of targets")
    add("--only", help="names of targets, with commas")
    add("--attention-bench", type=Path, help="binary attention_alone_bench")
    options = parser.parse_args(arguments)
    if options.suite and options.profile:
        parser.error("--profile works with cells, not with --suite.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the JSON file."""
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
