"""Measures the table of targets (targets.py), one row after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention_alone import attention_runs
from bench_server import ServerBench, at_full_size, fastest, target_runs
from bench_server import setting_named as server_setting_named
from cells import Cell
from memory_probe import Peak, probe
from our_engine import OurEngine, OurSetting, quality_of
from peer_search import (
    LONG_BATCH_1,
    LONG_BATCHED,
    LONG_CELL,
    Work,
    best_setting,
    run_search,
    search_lengths,
    seconds_of_requests,
    setting_named,
)
from results_file import ResultsFile
from server_load import Load
from server_processes import EVERY_PEER_SETTING, PeerServerSetting
from targets import Kind, Peers, Runs, Target, TargetRow, as_trial, row_of, unmeasured

if TYPE_CHECKING:
    from llama_cpp_peer import LlamaCpp, PeerSetting

    from lmdeploy.engine.model_files import LoadedModel

MEMORY_SETTINGS = ("q4_0,on,mmap", "q4_0,on,read", "mxfp4,on,mmap", "f16,on,mmap", "f16,off,mmap")
# Its matrices stay as the file has them: less memory, slower products.
AS_STORED_SETTINGS = ("q4_0,on,as-stored", "mxfp4,on,as-stored")
REST_SECONDS = 0.2


class NotMeasured(Exception):
    """Why a row has no figures."""


@dataclass(frozen=True)
class SuiteOptions:
    """What the suite runs with. `steps` None: those of each target."""

    threads: int
    repeats: int
    steps: int | None = None
    max_context: int | None = None
    peer_setting: str | None = None
    attention_bench: Path | None = None
    llama_server: Path | None = None
    server_requests: int = 1
    keep: bool = False

    def cell_of(self, target: Target) -> Cell:
        """The target's cell; shorter where the options say so, which only tries the suite."""
        cell = target.cell
        context = min(cell.context, self.max_context or cell.context)
        return replace(cell, context=context, steps=min(cell.steps, self.steps or cell.steps))


def alternate(
    ours: Callable[[], float], theirs: Callable[[], float], *, repeats: int
) -> tuple[list[float], list[float]]:
    """`repeats` runs of each; who begins changes every time, so that a drift favours nobody.

    Between runs is a rest in which the waiting threads of the last one stop spinning.
    """
    sides: list[tuple[Callable[[], float], list[float]]] = [(theirs, []), (ours, [])]
    for turn in range(repeats):
        for run, values in sides if turn % 2 == 0 else reversed(sides):
            time.sleep(REST_SECONDS)
            values.append(run())
    return sides[1][1], sides[0][1]


class TargetSuite:
    """One model in both engines. Rows are written as they come; earlier ones are kept."""

    def __init__(
        self,
        loaded: LoadedModel,
        peer: LlamaCpp | None,
        *,
        options: SuiteOptions,
        file: ResultsFile,
    ) -> None:
        self._loaded, self._peer, self._options, self._file = loaded, peer, options, file
        self._path = Path(loaded.path)
        self._server_runs: dict[str, Runs] | None = None
        self.model = self._path.stem

    def run(self, targets: Sequence[Target], *, report: Callable[[TargetRow], None]) -> None:
        """Measures what the file does not have yet."""
        for target in targets:
            earlier = self._file.measured(
                self.model, target, repeats=self._options.repeats, keep=self._options.keep
            )
            report(earlier or self._measured(target))

    def _measured(self, target: Target) -> TargetRow:
        cell = self._options.cell_of(target)
        try:
            runs = self._runs(target, cell)
            row = row_of(target, runs, model=self.model)
            if cell != target.cell:
                row = as_trial(row, f"context {cell.context}, {cell.steps} steps")
        except NotMeasured as why:
            row = unmeasured(target, str(why), model=self.model)
        self._file.add(row)
        return row

    def _runs(self, target: Target, cell: Cell) -> Runs:
        if target.kind in (Kind.DECODE, Kind.PREFILL):
            return self._beside_peer(target, cell)
        if target.kind is Kind.DECODE_OWN:
            return self._own(target, cell)
        if target.kind is Kind.MEMORY:
            return self._memory(target, cell)
        if target.kind is Kind.ATTENTION:
            return self._attention(target, cell)
        return self._server(target, cell)

    def _engine(self, cell: Cell, mode: str) -> OurEngine:
        return OurEngine(
            self._loaded.config,
            self._loaded.weights,
            setting=OurSetting.for_cell(cell, mode),
            threads=self._options.threads,
        )

    def _setting(self, target: Target, cell: Cell) -> PeerSetting:
        """The peer's fastest setting for the cell."""
        from llama_cpp_peer import EVERY_SETTING, SIXTEEN_BIT

        settings = EVERY_SETTING if target.peers is Peers.EVERY else SIXTEEN_BIT
        if self._options.peer_setting:
            return setting_named(self._options.peer_setting, EVERY_SETTING)
        speeds = self._search(cell, target.peers)
        work: Work = "prefill" if target.kind is Kind.PREFILL else "decode"
        return best_setting(speeds, work, context=cell.context, settings=settings)

    def _search(self, cell: Cell, peers: Peers) -> Any:
        """Speeds of the peer's settings, from the file where they were searched before."""
        from llama_cpp_peer import EVERY_SETTING, SIXTEEN_BIT

        assert self._peer
        peer = self._peer
        settings = EVERY_SETTING if peers is Peers.EVERY else SIXTEEN_BIT
        first, second = search_lengths(cell)
        lengths = f"contexts {first}, then {second}"
        key = f"{self.model}: batch {cell.batch}, {lengths}, {peers.value}"
        return self._file.search(key, lambda: run_search(peer, cell, settings=settings))

    def _beside_peer(self, target: Target, cell: Cell) -> Runs:
        if not self._peer:
            raise NotMeasured("llama.cpp is not there (--no-peer, or not installed)")
        setting = self._setting(target, cell)
        with ExitStack() as stack:
            engine = stack.enter_context(self._engine(cell, target.mode))
            context = stack.enter_context(self._peer.context(cell, setting))
            if target.kind is Kind.PREFILL:
                warm = replace(cell, context=min(cell.context, 512))
                engine.prefill(warm)
                if cell.context <= LONG_BATCH_1 * 2:
                    context.prefill()
                ours, theirs = alternate(
                    lambda: engine.prefill(cell), context.prefill, repeats=self._options.repeats
                )
            else:
                context.fill()
                context.decode()
                engine.decode(cell)
                ours, theirs = alternate(
                    lambda: engine.decode(cell), context.decode, repeats=self._options.repeats
                )
            return Runs(ours, theirs, engine.format, setting.name)

    def _own(self, target: Target, cell: Cell) -> Runs:
        """Both prompts stay in their caches; only decoding takes turns."""
        with self._engine(cell, target.mode) as engine, self._engine(cell, "none") as plain:
            engine.decode(cell)
            plain.decode(cell)
            ours, theirs = alternate(
                lambda: engine.decode(cell),
                lambda: plain.decode(cell),
                repeats=self._options.repeats,
            )
            return Runs(ours, theirs, engine.format, "ours, 16 bit")

    def _memory(self, target: Target, cell: Cell) -> Runs:
        """Beside the setting of llama.cpp that takes the least, fast or not."""
        if not self._peer:
            raise NotMeasured("llama.cpp is not there (--no-peer, or not installed)")

        def peak(engine: str, setting: str) -> Peak:
            threads = self._options.threads
            return probe(str(self._path), cell, engine=engine, setting=setting, threads=threads)

        peaks = {s: peak("peer", s) for s in (*MEMORY_SETTINGS, *AS_STORED_SETTINGS)}
        own = peak("ours", target.mode)
        least = min(peaks, key=lambda setting: peaks[setting].peak_rss_bytes)
        ours, theirs = alternate(
            lambda: peak("ours", target.mode).peak_rss_bytes,
            lambda: peak("peer", least).peak_rss_bytes,
            repeats=self._options.repeats,
        )
        return Runs(ours, theirs, own.setting, peaks[least].setting, memory_note(own, peaks))

    def _server(self, target: Target, cell: Cell) -> Runs:
        """Both rows come from one measurement."""
        if self._server_runs is None:
            self._server_runs = self._measured_servers(target, cell)
        return self._server_runs[target.name]

    def _measured_servers(self, target: Target, cell: Cell) -> dict[str, Runs]:
        if self._options.llama_server is None:
            raise NotMeasured("pass --llama-server BUILD/bin/llama-server (see bench_server.py)")
        bench = ServerBench(
            str(self._path),
            self._loaded.config.vocab_size,
            Load(cell.batch, self._options.server_requests, cell.context, cell.steps),
            self._options.llama_server,
            threads=self._options.threads,
            mode=target.mode,
            quality=quality_of(target.mode),
        )
        return target_runs(bench, self._server_setting(bench), repeats=self._options.repeats)

    def _server_setting(self, bench: ServerBench) -> PeerServerSetting:
        """Of the best by what the engine's searches predict, the fastest under the whole load."""
        if self._options.peer_setting:
            try:
                return server_setting_named(self._options.peer_setting)
            except ValueError as error:  # the engine has settings that its server lacks
                raise NotMeasured(str(error)) from error
        if not self._peer:
            raise NotMeasured("the search needs llama.cpp here, too (--no-peer, or not installed)")
        alone = self._search(Cell(LONG_CELL * LONG_BATCH_1, 1, 1), Peers.EVERY)
        together = self._search(Cell(LONG_CELL * LONG_BATCHED, 32, 1), Peers.EVERY)
        load = bench.load
        seconds = seconds_of_requests(alone, together, load=load)
        names = [s.name for s in EVERY_PEER_SETTING if s.name in seconds]
        order = sorted(names, key=lambda name: seconds[name])
        key = (
            f"{self.model}: llama-server, {load.clients} clients, {load.requests} requests of "
            f"{load.prompt_tokens} tokens in, {load.answer_tokens} out, best of the searches"
        )
        return fastest(self._file.search(key, lambda: at_full_size(bench, order)))

    def _attention(self, target: Target, cell: Cell) -> Runs:
        bench = self._options.attention_bench
        if bench is None or not bench.is_file():
            raise NotMeasured(
                "pass --attention-bench BUILD/attention_alone_bench (ninja attention_alone_bench)"
            )
        try:
            return attention_runs(
                self._loaded.config,
                cell,
                mode=target.mode,
                bench=bench,
                threads=self._options.threads,
                repeats=self._options.repeats,
            )
        except LookupError as error:
            raise NotMeasured(str(error)) from error


def memory_note(own: Peak, peaks: Mapping[str, Peak]) -> str:
    """Ours beside the least of those whose weights are repacked for speed, and every figure."""
    fast = min(MEMORY_SETTINGS, key=lambda setting: peaks[setting].peak_rss_bytes)
    ratio = own.peak_rss_bytes / peaks[fast].peak_rss_bytes
    figures = ", ".join(f"{s}: {p.peak_rss_bytes / 2**20:.0f} MiB" for s, p in peaks.items())
    return (
        f"beside its least with weights repacked for speed ({peaks[fast].setting}): "
        f"{ratio:.3f}; llama.cpp's {figures}"
    )


def format_row(row: TargetRow) -> str:
    """One line for the terminal."""
    goal = f"{row.better} {row.target:g}"
    if row.ratio is None:
        return f"{row.name:<22} {'':>31} {goal:>7}  {row.note}"
    verdict = {True: "met", False: "MISSED", None: ""}[row.met]
    spread = f"{row.ratio_low:.2f}-{row.ratio_high:.2f}"
    return (
        f"{row.name:<22} {row.ours:>12.6g} {row.peer:>12.6g} {row.ratio:>6.3g} ({spread}) "
        f"{goal:>7} {verdict:<6} {row.peer_setting}" + (f"; {row.note}" if row.note else "")
    )
