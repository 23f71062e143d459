"""Prefill and decode speed per KV format, beside llama.cpp on the same GGUF file.

    python benchmarks/bench_engine.py --suite targets --json targets.json
    python benchmarks/bench_engine.py --json results.json          # cells of any size
    python benchmarks/bench_engine.py --quick                      # a few minutes

The suite measures the table of targets (targets.py): pairs of runs in turns, llama.cpp with the
fastest of all its KV types with flash attention on and off, medians of the pairs' ratios. The file
is written after every row, and a second run with the same file measures what is missing and, unless
--keep, rows of other commits; rows of several models share a file.

Without --suite, cells of any size: both engines run in this process with the same number of
threads, in turns; a figure is the median of the repetitions. llama.cpp runs with the fastest of
five settings; for contexts over --search-context the search is made at that length. Cells with more
than --long-context tokens run once. Batches with more prompt tokens than --max-fill share one
prompt between all sequences, in both engines; their prefill is left out. Ours chooses each token by
argmax over the vocabulary; llama.cpp is given its next token. The file is written after every cell.
--profile shows where the time of each cell's last repetition went, --trace writes it for a viewer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cells import BLOCK_TOKENS, Cell, Timing
from our_engine import OurEngine, OurSetting

if TYPE_CHECKING:
    from llama_cpp_peer import LlamaCpp, PeerSetting
    from profile_report import ProfileSession
    from targets import Target

    from lmdeploy._turbomind import ModelConfig

MODES = ("none", "int8", "fp8", "nvfp4", "int4", "mxfp4")


@dataclass(frozen=True)
class Row:
    """One measured figure in tokens per second."""

    work: str
    mode: str
    quality: str
    batch: int
    context: int
    ours: float
    peer: float | None
    peer_setting: str
    ratio: float | None


def cells_of(options: argparse.Namespace) -> Iterator[Cell]:
    """What is timed, in order; prints what is left out."""
    for context in options.contexts:
        for batch in options.batches:
            shared = batch > 1 and context * batch > options.max_fill
            if shared:
                print(f"prefill {context} x {batch}: skipped, over --max-fill {options.max_fill}")
            yield Cell(context, batch, options.steps, shared)


def best_settings(peer: LlamaCpp, cell: Cell) -> dict[str, PeerSetting]:
    """The fastest setting of the peer for prefill and for decode."""
    from llama_cpp_peer import SETTINGS

    timings: dict[PeerSetting, Timing] = {}
    for setting in SETTINGS:
        try:
            timings[setting] = peer.run(cell, setting)
        except RuntimeError as error:
            print(f"llama.cpp {setting.name}: skipped: {error}")
    return {
        "prefill": max(timings, key=lambda setting: timings[setting].prefill or 0.0),
        "decode": max(timings, key=lambda setting: timings[setting].decode),
    }


def measure(
    cell: Cell,
    engines: Sequence[OurEngine],
    *,
    peer: LlamaCpp | None,
    settings: dict[str, PeerSetting],
    repeats: int,
) -> Iterator[Row]:
    """Rows of one cell: the engines take turns, `repeats` times."""
    ours: dict[str, list[Timing]] = {engine.mode: [] for engine in engines}
    qualities = {engine.mode: engine.quality for engine in engines}
    theirs: dict[str, list[Timing]] = {setting.name: [] for setting in settings.values()}
    for _ in range(repeats):
        if peer:
            for setting in dict.fromkeys(settings.values()):
                theirs[setting.name].append(peer.run(cell, setting))
        for engine in engines:
            ours[engine.mode].append(engine.run(cell))
    for work in ("prefill", "decode"):
        if work == "prefill" and cell.shared:
            continue
        setting_name = settings[work].name if peer else ""
        other = median(theirs[setting_name], work) if peer else None
        for mode, timings in ours.items():
            speed = median(timings, work)
            yield Row(
                work=work,
                mode=mode,
                quality=qualities[mode],
                batch=cell.batch,
                context=cell.context,
                ours=round(speed, 1),
                peer=round(other, 1) if other else None,
                peer_setting=setting_name + (", shared prompt" if cell.shared and peer else ""),
                ratio=round(speed / other, 3) if other else None,
            )


def median(timings: Sequence[Timing], work: str) -> float:
    """Median tokens per second."""
    return float(statistics.median(getattr(timing, work) for timing in timings))


def make_peer(options: argparse.Namespace, path: Path) -> LlamaCpp | None:
    """llama.cpp, or None where it is not wanted or not installed (says so)."""
    if options.no_peer:
        return None
    try:
        from llama_cpp_peer import LlamaCpp
    except ImportError as error:
        print(f"no peer: {error}; pip install llama-cpp-python, or pass --no-peer")
        return None
    return LlamaCpp(str(path), threads=options.num_threads)


def start_profiles(
    options: argparse.Namespace, config: ModelConfig
) -> tuple[ProfileSession | None, type[OurEngine]]:
    """What collects profiles, None where they are not wanted, and the engines to run."""
    if options.profile is None and options.trace is None:
        return None, OurEngine
    from profile_report import ProfiledEngine, ProfileSession, TracedEngine, format_ceilings

    session = ProfileSession(
        config,
        threads=options.num_threads,
        json_path=Path(options.profile) if options.profile else None,
        trace_path=options.trace,
    )
    print(format_ceilings(session.ceilings))
    return session, TracedEngine if options.trace else ProfiledEngine


def run(options: argparse.Namespace) -> list[Row]:
    """All rows."""
    from tqdm import tqdm

    from lmdeploy import _turbomind
    from lmdeploy.engine.model_files import load_model

    device = _turbomind.make_cpu_device(options.num_threads)
    loaded = load_model(options.model, device=device)
    longest = max(options.contexts) + options.steps + 128
    tokens = options.max_fill + max(options.contexts) + 32 * (options.steps + 192)
    profiles, engine_class = start_profiles(options, loaded.config)
    engines = [
        engine_class(
            loaded.config,
            loaded.weights,
            setting=OurSetting(mode, longest, -(-tokens // BLOCK_TOKENS), quality=options.quality),
            threads=options.num_threads,
        )
        for mode in options.modes
    ]
    peer = make_peer(options, Path(loaded.path))
    rows: list[Row] = []
    settings: dict[Cell, dict[str, PeerSetting]] = {}
    print(f"ours on {device.name}; {options.num_threads} threads; median of {options.repeats}")
    try:
        for cell in tqdm(list(cells_of(options)), unit="cell", disable=None):
            searched = replace(cell, context=min(cell.context, options.search_context))
            if peer and searched not in settings:
                settings[searched] = best_settings(peer, searched)
            repeats = 1 if cell.context > options.long_context else options.repeats
            for row in measure(
                cell, engines, peer=peer, settings=settings.get(searched, {}), repeats=repeats
            ):
                rows.append(row)
                tqdm.write(format_row(row))
            write_rows(rows, options.json)
            for engine in engines:
                if profiles:
                    tqdm.write(profiles.add(cell, engine))
    finally:
        for engine in engines:
            engine.close()
        if peer:
            peer.close()
    return rows


def run_suite(options: argparse.Namespace) -> None:
    """The table of targets for one model."""
    from results_file import ResultsFile, describe_machine
    from target_suite import SuiteOptions, TargetSuite, format_row

    from lmdeploy import _turbomind
    from lmdeploy.engine.model_files import load_model

    file = ResultsFile(options.json)
    file.measured_on(describe_machine(options.num_threads))
    loaded = load_model(options.model, device=_turbomind.make_cpu_device(options.num_threads))
    if options.again:
        file.forget(options.targets, Path(loaded.path).stem)
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
    try:
        suite = TargetSuite(loaded, peer, options=suite_options, file=file)
        suite.run(options.targets, report=lambda row: print(format_row(row), flush=True))
    finally:
        if peer:
            peer.close()


def write_rows(rows: Sequence[Row], path: Path | None) -> None:
    """All rows so far."""
    if path:
        text = json.dumps([asdict(row) for row in rows], indent=1)
        path.write_text(text + "\n", encoding="utf-8")


def format_row(row: Row) -> str:
    """One line of the table."""
    beside = "" if row.peer is None else f"{row.peer:>10.1f} {row.ratio:>7.2f}  {row.peer_setting}"
    cache = f"{row.mode}, {row.quality.split(' (')[0]}"
    return (
        f"{row.work:<8} {cache:<18} batch {row.batch:>2} context {row.context:>5} "
        f"{row.ours:>10.1f} {beside}"
    )


def numbers(text: str) -> list[int]:
    """An argument such as 128,2048."""
    values = text.split(",")
    if not all(value.isdecimal() and int(value) > 0 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: expected positive integers with commas")
    return [int(value) for value in values]


def targets_of(options: argparse.Namespace) -> list[Target]:
    """What --only and --skip leave. ValueError for a name that is not in the table."""
    from targets import BY_NAME, TARGETS

    chosen, skipped = (
        [n for n in (text or "").split(",") if n] for text in (options.only, options.skip)
    )
    for flag, names in (("--only", chosen), ("--skip", skipped)):
        for name in names:
            if name not in BY_NAME:
                raise ValueError(f"{flag}: got {name!r}, wanted some of {', '.join(BY_NAME)}")
    return [t for t in TARGETS if (not chosen or t.name in chosen) and t.name not in skipped]


def add_suite_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of --suite."""
    group = parser.add_argument_group("--suite targets")
    group.add_argument("--suite", choices=("targets",), help="measure the table of targets")
    group.add_argument("--only", help="names of targets, with commas")
    group.add_argument("--skip", help="names of targets that are left out, with commas")
    group.add_argument("--again", action="store_true", help="measure rows that the file has, too")
    group.add_argument("--keep", action="store_true", help="keep rows of other commits")
    group.add_argument("--max-context", type=int, help="shorten longer targets, to try the suite")
    group.add_argument("--peer-setting", help="name of llama.cpp's setting instead of a search")
    group.add_argument("--attention-bench", type=Path, help="binary attention_alone_bench")
    group.add_argument("--llama-server", type=Path, help="binary llama-server")
    group.add_argument("--server-requests", type=int, default=1, help="of each of its 16 clients")


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of cells, not of --suite."""
    parser.add_argument(
        "--profile",
        nargs="?",
        const="",
        metavar="FILE.json",
        help="after each cell, time and ceilings per op; FILE.json: there as well",
    )
    parser.add_argument("--trace", type=Path, help="ops as Chrome trace events, for Perfetto")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    threads = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2", help="GGUF file or smollm2")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--modes", default=",".join(MODES), help="default: %(default)s")
    parser.add_argument(
        "--quality", choices=("raw", "balanced"), help="of cells (default: the mode's own)"
    )
    parser.add_argument("--contexts", type=numbers, default=None, help="default: 128,2048,8192")
    parser.add_argument("--batches", type=numbers, default=None, help="default: 1,8,32")
    parser.add_argument(
        "--steps", type=int, help="decode steps timed (default: 32; --suite: at most what each has)"
    )
    parser.add_argument(
        "--repeats", type=int, default=None, help="default: 3; quick: 1; --suite: 5"
    )
    parser.add_argument("--max-fill", type=int, default=16384, help="prompt tokens of a cell")
    parser.add_argument(
        "--search-context", type=int, default=2048, help="longest cell that tries all settings"
    )
    parser.add_argument(
        "--long-context", type=int, default=4096, help="longer cells run once (default: 4096)"
    )
    parser.add_argument("--num-threads", type=int, default=threads)
    parser.add_argument("--no-peer", action="store_true", help="do not run llama.cpp")
    parser.add_argument("--quick", action="store_true", help="contexts 128, 2048; batches 1, 8")
    add_profile_arguments(parser)
    add_suite_arguments(parser)
    options = parser.parse_args(arguments)
    if options.suite:
        if options.profile is not None or options.trace:
            parser.error("--profile, --trace: of cells of any size, not of --suite")
        options.repeats = options.repeats or 5
        return options
    options.steps = options.steps or 32
    options.modes = options.modes.split(",")
    options.contexts = options.contexts or ([128, 2048] if options.quick else [128, 2048, 8192])
    options.batches = options.batches or ([1, 8] if options.quick else [1, 8, 32])
    options.repeats = options.repeats or (1 if options.quick else 3)
    if max(options.batches) > 32:
        parser.error(f"--batches {max(options.batches)}: at most 32")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON file."""
    options = parse_arguments(arguments)
    try:
        if options.suite:
            options.targets = targets_of(options)
            run_suite(options)
        else:
            run(options)
    except ValueError as error:
        print(f"bench_engine.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
