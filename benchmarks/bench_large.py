"""Decode and prefill speed on a model that fills the memory, beside llama.cpp on the same file.

    python benchmarks/bench_large.py model.gguf --json results.json

One engine is alive at a time: every round starts a process for llama.cpp and one for ours, in
turns, with the same number of threads; a figure is the median over the rounds. llama.cpp has a
16-bit cache, with flash attention on and off: the faster counts. Both map the file: a first round
that does not count reads it. All our modes run in one process, so memory is that of the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cells import BLOCK_TOKENS, Cell, Quality
from results_file import commit_here, describe_machine, today

MODES = "none,int8,nvfp4,mxfp4"


def run_ours(
    path: str, cells: Sequence[Cell], *, modes: Sequence[str], quality: Quality | None, threads: int
) -> Any:
    """Timings of our engine by KV mode and cell. `quality` None: the default of each mode."""
    from our_engine import OurEngine, OurSetting

    from lmdeploy import _turbomind
    from lmdeploy.engine.model_files import load_model

    begun = time.perf_counter()
    device = _turbomind.make_cpu_device(threads)
    loaded = load_model(path, device=device, progress=False)
    load_seconds = time.perf_counter() - begun
    speeds: dict[str, Any] = {}
    qualities: dict[str, str] = {}
    for mode in modes:
        engine = OurEngine(
            loaded.config,
            loaded.weights,
            setting=OurSetting(
                mode,
                session_len=max(cell.context + cell.steps for cell in cells) + 128,
                num_blocks=sum(cell.context + 256 for cell in cells) // BLOCK_TOKENS + 8,
                quality=quality,
            ),
            threads=threads,
        )
        try:
            if not speeds:
                engine.run(cells[0])  # maps the weights' pages
            speeds[mode] = [vars(engine.run(cell)) for cell in cells]
            qualities[mode] = engine.quality
        finally:
            engine.close()
    return {"load_seconds": load_seconds, "speeds": speeds, "qualities": qualities}


def run_peer(path: str, cells: Sequence[Cell], *, threads: int) -> Any:
    """Timings of llama.cpp by its setting and cell."""
    from llama_cpp_peer import SETTINGS, LlamaCpp

    begun = time.perf_counter()
    peer = LlamaCpp(path, threads=threads)
    load_seconds = time.perf_counter() - begun
    speeds: dict[str, Any] = {}
    peer.run(cells[0], SETTINGS[1])  # maps the weights' pages
    for setting in SETTINGS[:2]:
        speeds[setting.name] = [vars(peer.run(cell, setting)) for cell in cells]
    peer.close()
    return {"load_seconds": load_seconds, "speeds": speeds}


def worker(options: argparse.Namespace) -> None:
    """One engine in this process; prints JSON."""
    cells = [Cell(context, 1, options.steps) for context in options.contexts]
    if options.worker == "ours":
        result = run_ours(
            options.model,
            cells,
            modes=options.modes.split(","),
            quality=options.quality,
            threads=options.num_threads,
        )
    else:
        result = run_peer(options.model, cells, threads=options.num_threads)
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(result))


def start(options: argparse.Namespace, engine: str) -> Any:
    """Runs one engine in a process of its own."""
    command = [sys.executable, __file__, options.model, "--worker", engine]
    command += ["--contexts", ",".join(map(str, options.contexts)), "--steps", str(options.steps)]
    command += ["--modes", options.modes, "--num-threads", str(options.num_threads)]
    command += ["--quality", options.quality] if options.quality else []
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def medians(runs: Sequence[Any]) -> Any:
    """Medians over the rounds: {setting: [{prefill, decode} of each cell]}."""
    return {
        name: [
            {
                work: round(statistics.median(run["speeds"][name][i][work] for run in runs), 2)
                for work in ("prefill", "decode")
            }
            for i in range(len(runs[0]["speeds"][name]))
        ]
        for name in runs[0]["speeds"]
    }


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; prints a line per figure."""
    runs: dict[str, list[Any]] = {"peer": [], "ours": []}
    for turn in range(options.rounds + 1):
        for engine in runs if turn % 2 else reversed(runs):
            result = start(options, engine)
            if turn:
                runs[engine].append(result)
            print(f"round {turn} {engine}: {json.dumps(result['speeds'])}", flush=True)
    figures = {engine: medians(found) for engine, found in runs.items()}
    qualities = runs["ours"][0]["qualities"]
    rows = []
    for i, context in enumerate(options.contexts):
        for work in ("prefill", "decode"):
            best = max(values[i][work] for values in figures["peer"].values())
            for mode, values in figures["ours"].items():
                ratio = round(values[i][work] / best, 3)
                rows.append({"work": work, "context": context, "mode": mode})
                rows[-1] |= {
                    "quality": qualities[mode],
                    "ours": values[i][work],
                    "peer": best,
                    "ratio": ratio,
                }
                name = f"{mode}, {qualities[mode].split(' (')[0]}"
                print(
                    f"{work:<8} {context:>5} {name:<15} {values[i][work]:>8} {best:>8} {ratio:>6}"
                )
    peaks = {engine: max(run["peak_rss_bytes"] for run in found) for engine, found in runs.items()}
    loads = {
        engine: round(statistics.median(run["load_seconds"] for run in found), 1)
        for engine, found in runs.items()
    }
    speeds = {engine: [run["speeds"] for run in found] for engine, found in runs.items()}
    return {"rows": rows, "peak_rss_bytes": peaks, "load_seconds": loads, "runs": speeds}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--modes", default=MODES, help="KV modes (default: %(default)s)")
    parser.add_argument(
        "--quality", choices=("raw", "balanced"), help="of our cache (default: the mode's own)"
    )
    parser.add_argument("--contexts", default="128,2048", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=16, help="decode steps timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--worker", choices=["ours", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.contexts = [int(context) for context in options.contexts.split(",")]
    if options.worker:
        worker(options)
        return 0
    result = {
        "about": describe_machine(options.num_threads),
        "commit": commit_here(),
        "date": today(),
        "model": Path(options.model).name,
        "rounds": options.rounds,
        **compare(options),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
