"""Prefill and decode speed per KV format, compared with llama.cpp on the same GGUF file.

    python benchmarks/bench_engine.py --suite targets --json targets.json
    python benchmarks/bench_engine.py --contexts 128,2048 --batches 1,8 --json results.json
    python benchmarks/bench_engine.py --quick --profile            # a table of time per op

The suite measures the table of targets (targets.py) in alternating pairs of runs. llama.cpp runs
with the fastest of three settings for each workload. The file is written after every row. A second
run with the same file measures missing rows and, without --keep, rows of other commits.

Without --suite, the benchmark times our engine on cells of any size. A figure is the median of the
repetitions. Cells of more than --long-context tokens run once. Batches of more than --max-fill
prompt tokens share one prompt, and their prefill is not timed. The engine samples each token by
argmax over the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from our_engine import BLOCK_TOKENS, Cell, OurEngine, OurSetting
from results import ResultsFile, describe_machine, write_json

if TYPE_CHECKING:
    from baselines.llama_cpp import LlamaCpp
    from targets import Target

MODES = ("none", "int8", "fp8", "nvfp4", "int4", "mxfp4")
MAX_BATCH = 32
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


def cells_of(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells in order and print which prefills are skipped."""
    for context in options.contexts:
        for batch in options.batches:
            shared = batch > 1 and context * batch > options.max_fill
            if shared:
                print(f"prefill {context} x {batch}: skipped, over --max-fill {options.max_fill}")
            yield Cell(context, batch, options.steps, shared)


def measure(cell: Cell, engines: Sequence[OurEngine], *, repeats: int) -> Iterator[Row]:
    """Yield the rows of one cell. The engines alternate, `repeats` times."""
    timings = [[engine.run(cell) for engine in engines] for _ in range(repeats)]
    for work in ("decode",) if cell.shared else ("prefill", "decode"):
        for engine, runs in zip(engines, zip(*timings, strict=True), strict=True):
            speed = float(statistics.median(getattr(run, work) for run in runs))
            yield Row(work, engine.mode, engine.quality, cell.batch, cell.context, round(speed, 1))


def load(options: argparse.Namespace) -> Any:
    """Load the model for our engine."""
    from lmdeploy import _turbomind
    from lmdeploy.engine.model_files import load_model

    device = _turbomind.make_cpu_device(options.num_threads)
    return load_model(options.model, device=device)


def make_peer(options: argparse.Namespace, path: Path) -> LlamaCpp | None:
    """Load llama.cpp and print its kernels. Return None if it is off or not installed."""
    if options.no_peer:
        return None
    try:
        from baselines.llama_cpp import LlamaCpp, build_of_llama_cpp, kernels_in_library
    except ImportError as error:
        print(f"no peer: {error}; pip install llama-cpp-python, or pass --no-peer")
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
    """Measure all cells."""
    loaded = load(options)
    longest = max(options.contexts) + options.steps + 128
    tokens = options.max_fill + max(options.contexts) + MAX_BATCH * (options.steps + 192)
    blocks = -(-tokens // BLOCK_TOKENS)
    engines = [
        OurEngine(
            loaded,
            setting=OurSetting(mode, longest, blocks, quality=options.quality),
            threads=options.num_threads,
            profiled=options.profile,
        )
        for mode in options.modes
    ]
    rows: list[Row] = []
    print(f"ours: {options.num_threads} threads; median of {options.repeats}")
    for cell in cells_of(options):
        repeats = 1 if cell.context > options.long_context else options.repeats
        for row in measure(cell, engines, repeats=repeats):
            rows.append(row)
            print(format_row(row), flush=True)
        if options.json:
            write_json(options.json, [asdict(row) for row in rows])
        for engine in engines if options.profile else ():
            print(f"profile of {engine.format}, batch {cell.batch}, context {cell.context}")
            print(engine.profile_table(), flush=True)
    for engine in engines:
        engine.close()


def run_suite(options: argparse.Namespace) -> None:
    """Measure the table of targets for one model."""
    from targets import SuiteOptions, TargetRow, TargetSuite
    from targets import format_row as format_target

    targets = targets_of(options)
    file = ResultsFile(options.json, make_row=lambda fields: TargetRow(**fields))
    file.measured_on(describe_machine(options.num_threads))
    loaded = load(options)
    if options.again:
        file.forget([target.name for target in targets], Path(loaded.path).stem)
    peer = make_peer(options, Path(loaded.path))
    suite_options = SuiteOptions(
        threads=options.num_threads,
        repeats=options.repeats,
        steps=options.steps,
        max_context=options.max_context,
        peer_setting=options.peer_setting,
        attention_bench=options.attention_bench,
        llama_server=options.llama_server,
        server_requests=options.server_requests,
        keep=options.keep,
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
        from baselines.llama_cpp import LlamaCpp, Setting

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
    """Return the targets of --only without those of --skip."""
    from targets import BY_NAME, TARGETS

    chosen, skipped = (
        [n for n in (text or "").split(",") if n] for text in (options.only, options.skip)
    )
    for flag, names in (("--only", chosen), ("--skip", skipped)):
        for name in names:
            if name not in BY_NAME:
                raise ValueError(f"{flag} {name!r} is unknown; choose from {', '.join(BY_NAME)}.")
    return [t for t in TARGETS if (not chosen or t.name in chosen) and t.name not in skipped]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    threads = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2", help="GGUF file or smollm2")
    add("--json", type=Path, help="write the rows to this file")
    add("--modes", default=",".join(MODES), help="KV formats (default: %(default)s)")
    add("--quality", choices=("raw", "balanced"), help="of cells (default: that of the format)")
    add("--contexts", type=numbers, help="default: 128,2048,8192")
    add("--batches", type=numbers, help="default: 1,8,32")
    add("--steps", type=int, help="decode steps (default: 32; --suite: those of each target)")
    add("--repeats", type=int, help="default: 3; quick: 1; --suite: 5")
    add("--max-fill", type=int, default=16384, help="prompt tokens of a cell")
    add("--long-context", type=int, default=4096, help="longer cells run once")
    add("--num-threads", type=int, default=threads)
    add("--no-peer", action="store_true", help="do not run llama.cpp")
    add("--quick", action="store_true", help="contexts 128, 2048; batches 1, 8")
    add("--profile", action="store_true", help="print time and bytes per op after each cell")
    add("--peak", help=argparse.SUPPRESS)
    group = parser.add_argument_group("--suite targets")
    add = group.add_argument
    add("--suite", choices=("targets",), help="measure the table of targets")
    add("--only", help="names of targets, with commas")
    add("--skip", help="names of targets to skip, with commas")
    add("--again", action="store_true", help="measure rows that the file has, too")
    add("--keep", action="store_true", help="keep rows of other commits")
    add("--max-context", type=int, help="shorten longer targets, to try the suite")
    add("--peer-setting", help="name of a setting of llama.cpp instead of the fastest")
    add("--attention-bench", type=Path, help="binary attention_alone_bench")
    add("--llama-server", type=Path, help="binary llama-server")
    add("--server-requests", type=int, default=1, help="requests of each of its 16 clients")
    options = parser.parse_args(arguments)
    if options.suite:
        if options.profile:
            parser.error("--profile works with cells, not with --suite.")
        options.repeats = options.repeats or 5
        return options
    options.steps = options.steps or 32
    options.modes = options.modes.split(",")
    options.contexts = options.contexts or ([128, 2048] if options.quick else [128, 2048, 8192])
    options.batches = options.batches or ([1, 8] if options.quick else [1, 8, MAX_BATCH])
    options.repeats = options.repeats or (1 if options.quick else 3)
    if max(options.batches) > MAX_BATCH:
        parser.error(f"--batches {max(options.batches)} is over the limit of {MAX_BATCH}.")
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
