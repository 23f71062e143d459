"""The table of targets: the work, the baseline, and the ratio that meets the goal."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from baselines.settings import BY_NAME as SETTING_BY_NAME
from baselines.settings import SETTINGS, Setting
from our_engine import Cell, OurEngine, OurSetting, quality_of
from results import ResultsFile

if TYPE_CHECKING:
    from baselines.llama_cpp import LlamaCpp

FP4 = "nvfp4"  # the format of --quant-policy 16 on the CPU
MIN_REPEATS = 5
REST_SECONDS = 0.2
PROBE_TIMEOUT_S = 1800
# KV type, flash attention, and how llama.cpp reads the file. "as-stored" keeps the matrices as they
# are in the file: less memory, slower products.
MEMORY_SETTINGS = ("q4_0,on,mmap", "q4_0,on,as-stored", "f16,on,mmap")


class Kind(Enum):
    """The kind of work of a target."""

    DECODE = "decode"
    PREFILL = "prefill"
    DECODE_OWN = "decode against our own 16 bit"
    ATTENTION = "attention alone"
    MEMORY = "peak memory"
    SERVER = "server"


@dataclass(frozen=True)
class Target:
    """One line of the table. `better` is the direction in which the ratio meets `goal`.

    `settings` names the settings of llama.cpp that are tried (baselines/llama_cpp.py).
    """

    name: str
    work: str
    kind: Kind
    goal: float
    cell: Cell
    mode: str = FP4
    settings: str = "decode"
    better: Literal[">=", "<="] = ">="
    unit: str = "tokens/s"

    def is_met(self, ratio: float | None) -> bool | None:
        """Return whether a ratio meets the goal. None means that nothing was measured."""
        if ratio is None:
            return None
        return ratio >= self.goal if self.better == ">=" else ratio <= self.goal


def _decode(context: int, batch: int, *, goal: float, steps: int) -> Target:
    work = f"decode, batch 1, context {context}, fp4"
    if batch > 1:
        work = f"{batch} sequences decoding together, context {context}, fp4"
    name, settings = f"decode-{context}-batch-{batch}", "decode" if batch == 1 else "batch"
    return Target(name, work, Kind.DECODE, goal, Cell(context, batch, steps), settings=settings)


def _prefill(context: int, goal: float) -> Target:
    work, cell = f"prefill, {context} tokens, fp4", Cell(context, 1, 1)
    return Target(f"prefill-{context}", work, Kind.PREFILL, goal, cell, settings="prefill")


def _attention(context: int) -> Target:
    return Target(
        f"attention-{context}",
        f"attention alone, fp4, context {context}, batch 8",
        Kind.ATTENTION,
        goal=0.7,
        cell=Cell(context, 8, 1),
        unit="bytes/s",
    )


_SERVER_CELL = Cell(512, 16, 128)

TARGETS = (
    Target(
        "decode-128-16bit",
        "decode, batch 1, context 128, 16 bit",
        Kind.DECODE,
        goal=1.2,
        cell=Cell(128, 1, 64),
        mode="none",
        settings="16 bit",
    ),
    _decode(2048, 1, goal=1.8, steps=32),
    _decode(8192, 1, goal=3.5, steps=16),
    _prefill(128, 3.0),
    _prefill(2048, 4.0),
    _prefill(8192, 6.0),
    _decode(128, 32, goal=5.0, steps=32),
    _decode(1024, 32, goal=6.0, steps=16),
    Target(
        "server-requests",
        "server, 16 streaming clients, 512 in, 128 out, fp4",
        Kind.SERVER,
        goal=4.0,
        cell=_SERVER_CELL,
        unit="requests/s",
    ),
    Target(
        "server-p99",
        "server, the same: p99 time per token",
        Kind.SERVER,
        goal=0.3,
        cell=_SERVER_CELL,
        better="<=",
        unit="s",
    ),
    Target(
        "decode-32768-own",
        "decode, batch 1, context 32768, fp4 against our own 16 bit",
        Kind.DECODE_OWN,
        goal=2.0,
        cell=Cell(32768, 1, 16),
    ),
    _attention(8192),
    _attention(32768),
    Target(
        "memory",
        "peak memory of the process, context 2048, fp4",
        Kind.MEMORY,
        goal=1.0,
        cell=Cell(2048, 1, 8),
        better="<=",
        unit="bytes",
    ),
)
BY_NAME = {target.name: target for target in TARGETS}


@dataclass(frozen=True)
class TargetRow:
    """One measured line. `ratio` is the median of the ratios of the paired runs."""

    name: str
    work: str
    model: str
    unit: str
    ours: float | None
    ours_setting: str
    peer: float | None
    peer_setting: str
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    repeats: int
    better: str
    target: float
    met: bool | None
    trial: bool
    note: str
    ours_runs: list[float]
    peer_runs: list[float]
    commit: str = ""
    date: str = ""


@dataclass(frozen=True)
class Runs:
    """Alternating runs of both engines, in the order in which they were paired."""

    ours: Sequence[float]
    peer: Sequence[float]
    ours_setting: str
    peer_setting: str
    note: str = ""


def row_of(target: Target, runs: Runs | None, *, model: str, note: str = "") -> TargetRow:
    """Return the row with medians and verdict, or a row without figures for `runs` None.

    Raises ValueError for runs that do not pair and for figures that are not positive.
    """
    ours, peer = (list(runs.ours), list(runs.peer)) if runs else ([], [])
    if len(ours) != len(peer) or not all(math.isfinite(x) and x > 0 for x in [*ours, *peer]):
        raise ValueError(
            f"{target.name}: the runs {ours} and {peer} are not pairs of positive figures"
        )
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    ratio = statistics.median(ratios) if ratios else None
    if runs:
        few = len(ratios) < MIN_REPEATS and target.kind is not Kind.ATTENTION
        note = "; ".join(filter(None, [f"runs: only {len(ratios)}" * few, note, runs.note]))

    def of(choose: Callable[[list[float]], float], values: list[float]) -> float | None:
        return rounded(choose(values)) if values else None

    return TargetRow(
        name=target.name,
        work=target.work,
        model=model,
        unit=target.unit,
        ours=of(statistics.median, ours),
        ours_setting=runs.ours_setting if runs else "",
        peer=of(statistics.median, peer),
        peer_setting=runs.peer_setting if runs else "",
        ratio=of(statistics.median, ratios),
        ratio_low=of(min, ratios),
        ratio_high=of(max, ratios),
        repeats=len(ratios),
        better=target.better,
        target=target.goal,
        met=target.is_met(ratio),
        trial=False,
        note=note,
        ours_runs=[rounded(value) for value in ours],
        peer_runs=[rounded(value) for value in peer],
    )


def rounded(value: float) -> float:
    """Round to four significant digits: more is noise."""
    return float(f"{value:.4g}") if value < 1e6 else float(round(value))


class NotMeasured(Exception):
    """The reason why a row has no figures."""


@dataclass(frozen=True)
class SuiteOptions:
    """Options of the suite."""

    threads: int
    repeats: int
    attention_bench: Path | None = None


def alternate(
    ours: Callable[[], float], theirs: Callable[[], float], *, repeats: int
) -> tuple[list[float], list[float]]:
    """Run each side `repeats` times. The first side changes every time, so that drift is fair.

    A rest between runs lets the waiting threads of the last run stop spinning.
    """
    sides: list[tuple[Callable[[], float], list[float]]] = [(theirs, []), (ours, [])]
    for turn in range(repeats):
        for run, values in sides if turn % 2 == 0 else reversed(sides):
            time.sleep(REST_SECONDS)
            values.append(run())
    return sides[1][1], sides[0][1]


def peak_memory(path: str, cell: Cell, *, engine: str, setting: str, threads: int) -> int:
    """Return the peak bytes of one engine in a new process (bench_engine.py --peak)."""
    command = [sys.executable, str(Path(__file__).with_name("bench_engine.py")), "--model", path]
    command += ["--peak", f"{engine}:{setting}", "--contexts", str(cell.context)]
    command += ["--steps", str(cell.steps), "--num-threads", str(threads)]
    return int(json_of(command)["peak_rss_bytes"])


def attention_run(bench: Path, config: Any, *, cell: Cell, mode: str, threads: int) -> Any:
    """Run attention_alone_bench once and return its JSON object."""
    heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    command = [str(bench), f"mode={mode}", f"context={cell.context}", f"batch={cell.batch}"]
    command += [f"kv_heads={heads}", f"group={group}", f"head_dim={config.head_dim}"]
    return json_of([*command, f"threads={threads}"])


def json_of(command: Sequence[str]) -> Any:
    """Run a program and return the JSON object on its last line."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


class TargetSuite:
    """Measures the targets for one model and writes every row to the file."""

    def __init__(
        self, loaded: Any, peer: LlamaCpp | None, *, options: SuiteOptions, file: ResultsFile
    ) -> None:
        self._loaded, self._peer, self._options, self._file = loaded, peer, options, file
        self._path = Path(loaded.path)
        self.model = self._path.stem

    def run(self, targets: Sequence[Target], *, report: Callable[[TargetRow], None]) -> None:
        """Measure the rows that the file does not have."""
        for target in targets:
            earlier = self._file.row(self.model, target.name, repeats=self._options.repeats)
            report(earlier or self._measured(target))

    def _measured(self, target: Target) -> TargetRow:
        try:
            row = row_of(target, self._runs(target, target.cell), model=self.model)
        except NotMeasured as why:
            row = row_of(target, None, model=self.model, note=f"not measured: {why}")
        self._file.add(row)
        return row

    def _runs(self, target: Target, cell: Cell) -> Runs:
        if target.kind in (Kind.DECODE, Kind.PREFILL):
            return self._against_llama_cpp(target, cell)
        if target.kind is Kind.DECODE_OWN:
            return self._own(target, cell)
        if target.kind is Kind.MEMORY:
            return self._memory(target, cell)
        if target.kind is Kind.ATTENTION:
            return self._attention(target, cell)
        raise NotMeasured("run benchmarks/bench_server.py --llama-server PATH --json FILE")

    def _engine(self, cell: Cell, mode: str) -> OurEngine:
        setting = OurSetting.for_cell(cell, mode)
        return OurEngine(self._loaded, setting=setting, threads=self._options.threads)

    def _setting(self, target: Target, cell: Cell) -> Setting:
        """Return the fastest setting of llama.cpp for the cell."""
        assert self._peer
        peer = self._peer
        tried = SETTINGS[target.settings]
        works = f"{target.kind.value}, batch {cell.batch}, context {cell.context}"
        key = f"{self.model}: {works}, {target.settings} settings"
        speeds = self._file.search(
            key, lambda: {s.name: speed_of(peer, cell, setting=s, kind=target.kind) for s in tried}
        )
        return SETTING_BY_NAME[max(speeds, key=lambda name: speeds[name])]

    def _against_llama_cpp(self, target: Target, cell: Cell) -> Runs:
        if not self._peer:
            raise NotMeasured("llama-cpp-python is not installed")
        setting = self._setting(target, cell)
        with ExitStack() as stack:
            engine = stack.enter_context(self._engine(cell, target.mode))
            context = stack.enter_context(self._peer.context(cell, setting))
            ours, theirs = lambda: engine.decode(cell), context.decode
            if target.kind is Kind.PREFILL:
                engine.prefill(replace(cell, context=min(cell.context, 512)))  # warm up
                ours, theirs = lambda: engine.prefill(cell), context.prefill
            else:
                context.fill()
                engine.decode(cell)
                context.decode()
            pairs = alternate(ours, theirs, repeats=self._options.repeats)
            return Runs(*pairs, engine.format, setting.name)

    def _own(self, target: Target, cell: Cell) -> Runs:
        """Compare with our 16-bit cache. Both engines keep their prompts; decoding alternates."""
        with self._engine(cell, target.mode) as engine, self._engine(cell, "none") as plain:
            engine.decode(cell)
            plain.decode(cell)
            pairs = alternate(
                lambda: engine.decode(cell),
                lambda: plain.decode(cell),
                repeats=self._options.repeats,
            )
            return Runs(*pairs, engine.format, "ours, 16 bit")

    def _memory(self, target: Target, cell: Cell) -> Runs:
        """Compare with the setting of llama.cpp that needs the least memory."""
        if not self._peer:
            raise NotMeasured("llama-cpp-python is not installed")
        path, threads = str(self._path), self._options.threads

        def peak(engine: str, setting: str) -> int:
            return peak_memory(path, cell, engine=engine, setting=setting, threads=threads)

        peaks = {setting: peak("peer", setting) for setting in MEMORY_SETTINGS}
        least = min(peaks, key=lambda setting: peaks[setting])
        pairs = alternate(
            lambda: peak("ours", target.mode),
            lambda: peak("peer", least),
            repeats=self._options.repeats,
        )
        note = ", ".join(f"{s}: {p / 2**20:.0f} MiB" for s, p in peaks.items())
        ours = f"{target.mode}, {quality_of(target.mode)}"
        return Runs(*pairs, ours, least, f"llama.cpp: {note}")

    def _attention(self, target: Target, cell: Cell) -> Runs:
        """Compare attention with a plain read of the same bytes by the same threads."""
        bench = self._options.attention_bench
        if bench is None or not bench.is_file():
            raise NotMeasured(
                "pass --attention-bench BUILD/attention_alone_bench (ninja attention_alone_bench)"
            )
        threads = self._options.threads
        found = [
            attention_run(bench, self._loaded.config, cell=cell, mode=target.mode, threads=threads)
            for _ in range(self._options.repeats)
        ]
        ours = [run["bytes"] / statistics.median(run["seconds"]) for run in found]
        reads = [run["read_bytes_per_s"] for run in found]
        note = f"{found[0]['bytes'] / 2**20:.1f} MiB, {found[0]['isa']}"
        return Runs(
            ours, reads, f"{target.mode}, raw, {threads} threads", "a sum of the bytes", note
        )


def speed_of(peer: LlamaCpp, cell: Cell, *, setting: Setting, kind: Kind) -> float:
    """Return tokens per second of one run after a warm-up, or 0 if llama.cpp refuses."""
    try:
        with peer.context(cell, setting) as context:
            if kind is Kind.PREFILL:
                return round(max(context.prefill(), context.prefill()), 2)
            context.fill()
            context.decode()
            return round(context.decode(), 2)
    except RuntimeError as error:
        print(f"llama.cpp, {setting.name}: skipped: {error}")
        return 0.0


def format_row(row: TargetRow) -> str:
    """Return one line for the terminal."""
    goal = f"{row.better} {row.target:g}"
    if row.ratio is None:
        return f"{row.name:<22} {'':>31} {goal:>7}  {row.note}"
    verdict = {True: "met", False: "MISSED", None: ""}[row.met]
    spread = f"{row.ratio_low:.2f}-{row.ratio_high:.2f}"
    return (
        f"{row.name:<22} {row.ours:>12.6g} {row.peer:>12.6g} {row.ratio:>6.3g} ({spread}) "
        f"{goal:>7} {verdict:<6} {row.peer_setting}" + (f"; {row.note}" if row.note else "")
    )
