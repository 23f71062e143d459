"""Concurrent streaming clients against our server and llama.cpp's, in turns.

    python benchmarks/bench_server.py --model smollm2 --llama-server BUILD/bin/llama-server

16 clients, 512 tokens in, 128 out: requests per second, time to the first token, time per token.
llama.cpp's server has a slot per client, continuous batching and the fastest of its KV types with
flash attention on and off. It builds from the sources that llama-cpp-python comes with:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build-llama -G Ninja \\
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \\
        -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF \\
        -DLLAMA_BUILD_EXAMPLES=OFF
    ninja -C build-llama llama-server

(On a CPU with AMX, with the compiler and the flags of docs/performance.md, "Measure it yourself":
gcc 12 miscompiles that path.) Both servers stay up during the run; the one that is not asked
sleeps. All prompts are different, given as token ids, and answers run to their limit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from server_load import Load, LoadResult, run_load
from server_processes import (
    EVERY_PEER_SETTING,
    MODEL_NAME,
    PeerServerSetting,
    ServerShape,
    llama_server_command,
    our_command,
    running,
)
from targets import BY_NAME, FP4, Runs, Target, as_trial, row_of

SLOT_MARGIN = 64
FULL_SIZE = 3  # settings that run the whole load before one is chosen
WARM_PROMPT, WARM_ANSWER = 8, 8


@dataclass(frozen=True)
class ServerBench:
    """What is measured."""

    model: str
    vocab_size: int
    load: Load
    llama_server: Path
    threads: int
    mode: str = FP4
    quality: str = ""

    @property
    def shape(self) -> ServerShape:
        """Room for one request per client."""
        length = self.load.prompt_tokens + self.load.answer_tokens + SLOT_MARGIN
        return ServerShape(self.load.clients, -(-length // 256) * 256, self.threads)

    def run(self, port: int, seed: int, *, load: Load | None = None) -> LoadResult:
        """One run; other seeds have other prompts."""
        return run_load(
            port, load or self.load, model=MODEL_NAME, vocab_size=self.vocab_size, seed=seed
        )

    @contextmanager
    def peer(self, setting: PeerServerSetting) -> Iterator[int]:
        """llama.cpp's server; yields its port."""
        command = llama_server_command(
            self.llama_server, self.model, setting=setting, shape=self.shape
        )
        with running(command) as port:
            yield port


def search(bench: ServerBench) -> dict[str, float]:
    """Requests per second of every setting, for one request per client of a quarter of the size."""
    load = bench.load
    tried = replace(
        load,
        requests=1,
        prompt_tokens=max(2, load.prompt_tokens // 4),
        answer_tokens=max(2, load.answer_tokens // 4),
    )
    return speeds_of(bench, EVERY_PEER_SETTING, load=tried)


def at_full_size(bench: ServerBench, order: Sequence[str]) -> dict[str, float]:
    """Requests per second of the whole load, of the first FULL_SIZE names of a ranking."""
    return speeds_of(bench, [setting_named(name) for name in order[:FULL_SIZE]], load=bench.load)


def speeds_of(
    bench: ServerBench, settings: Sequence[PeerServerSetting], *, load: Load
) -> dict[str, float]:
    """Requests per second of one run each, after a small one that does not count."""
    warm = replace(load, requests=1, prompt_tokens=WARM_PROMPT, answer_tokens=WARM_ANSWER)
    speeds: dict[str, float] = {}
    for setting in settings:
        try:
            with bench.peer(setting) as port:
                bench.run(port, 2, load=warm)
                speeds[setting.name] = bench.run(port, 1, load=load).requests_per_s
        except RuntimeError as error:
            print(f"llama-server, {setting.name}: left out: {error}", file=sys.stderr)
            continue
        print(f"llama-server, {setting.name}: {speeds[setting.name]:.3g} requests/s", flush=True)
    return speeds


def setting_named(name: str) -> PeerServerSetting:
    """ValueError for a name that is not in the list."""
    for setting in EVERY_PEER_SETTING:
        if setting.name == name:
            return setting
    raise ValueError(
        f"peer setting: got {name!r}, wanted one of {[s.name for s in EVERY_PEER_SETTING]}"
    )


def measure(
    bench: ServerBench, setting: PeerServerSetting, *, repeats: int
) -> dict[str, list[LoadResult]]:
    """`ours` and `peer`: runs in turns, after one short run of each that does not count."""
    warm = replace(bench.load, requests=1, answer_tokens=8)
    results: dict[str, list[LoadResult]] = {"peer": [], "ours": []}
    command = our_command(bench.model, bench.mode, shape=bench.shape)
    with running(command) as our_port, bench.peer(setting) as peer_port:
        ports = {"peer": peer_port, "ours": our_port}
        for port in ports.values():
            bench.run(port, 2, load=warm)
        for turn in range(repeats):
            for name in ports if turn % 2 == 0 else reversed(ports):
                result = bench.run(ports[name], 3 + turn)
                results[name].append(result)
                print(f"run {turn + 1}, {name}: {asdict(result)}", flush=True)
    return results


def runs_of(
    bench: ServerBench, results: dict[str, list[LoadResult]], *, field: str, peer_setting: str
) -> Runs:
    """One figure of all runs, with the others in the note."""
    values = {name: [getattr(r, field) for r in runs] for name, runs in results.items()}
    notes = []
    for name, runs in results.items():
        middle = sorted(runs, key=lambda r: r.requests_per_s)[len(runs) // 2]
        notes.append(
            f"{name}: first token {middle.p50_first:.3g} s (p99 {middle.p99_first:.3g}), token "
            f"{middle.p50_token * 1e3:.3g} ms (p99 {middle.p99_token * 1e3:.3g}, mean of the "
            f"slowest requests {middle.p99_request_mean * 1e3:.3g}), "
            f"{middle.pieces_per_token:.2f} pieces per token"
        )
    load = bench.load
    ours = (
        f"{bench.mode}, {bench.quality}, {load.clients} clients with {load.requests} requests each"
    )
    return Runs(values["ours"], values["peer"], ours, peer_setting, "; ".join(notes))


def target_runs(bench: ServerBench, setting: PeerServerSetting, *, repeats: int) -> dict[str, Runs]:
    """Of the targets `server-requests` and `server-p99`."""
    results = measure(bench, setting, repeats=repeats)
    name = f"llama-server, {setting.name}"
    fields = {"server-requests": "requests_per_s", "server-p99": "p99_token"}
    return {
        target: runs_of(bench, results, field=field, peer_setting=name)
        for target, field in fields.items()
    }


def fastest(speeds: dict[str, Any]) -> PeerServerSetting:
    """The setting with the most requests per second. RuntimeError when none ran."""
    if not speeds:
        raise RuntimeError("llama-server ran with none of its settings")
    return setting_named(max(speeds, key=lambda name: speeds[name]))


def not_the_target(target: Target, load: Load) -> str | None:
    """What the load is where it is other work than the target's."""
    cell = target.cell
    if (load.clients, load.prompt_tokens, load.answer_tokens) == (
        cell.batch,
        cell.context,
        cell.steps,
    ):
        return None
    return f"{load.clients} clients, {load.prompt_tokens} in, {load.answer_tokens} out"


def run(options: argparse.Namespace) -> None:
    """Searches, measures, writes both rows."""
    from our_engine import quality_of
    from results_file import ResultsFile, describe_machine
    from target_suite import format_row

    from lmdeploy.engine.model_files import open_files

    info = open_files(options.model).info
    file = ResultsFile(options.json)
    file.measured_on(describe_machine(options.num_threads))
    load = Load(options.clients, options.requests, options.prompt_tokens, options.answer_tokens)
    bench = ServerBench(
        str(info.path),
        info.config.vocab_size,
        load,
        options.llama_server,
        threads=options.num_threads,
        quality=quality_of(FP4),
    )
    name = Path(info.path).stem
    if options.peer_setting:
        setting = setting_named(options.peer_setting)
    else:
        key = f"{name}: llama-server, {load.clients} clients, {load.prompt_tokens} tokens in"
        tried = file.search(f"{key}, a quarter of the load", lambda: search(bench))
        order = sorted(tried, key=lambda name: -float(tried[name]))
        setting = fastest(file.search(f"{key}, whole", lambda: at_full_size(bench, order)))
    for target, runs in target_runs(bench, setting, repeats=options.repeats).items():
        row = row_of(BY_NAME[target], runs, model=name)
        if (why := not_the_target(BY_NAME[target], load)) is not None:
            row = as_trial(row, why)
        file.add(row)
        print(format_row(row))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="GGUF file or smollm2")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--llama-server", type=Path, required=True, help="its binary")
    parser.add_argument("--peer-setting", help="its KV types by name, instead of a search")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=1, help="of each client (default: 1)")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    try:
        run(options)
    except (ValueError, RuntimeError) as error:
        print(f"bench_server.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
