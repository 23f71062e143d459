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
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from our_engine import Cell, OurEngine, quality_of
from results import ResultsFile, Row

if TYPE_CHECKING:
    from baselines.baseline import Baseline, Setting

T = TypeVar("T")

FP4 = "nvfp4"  # the format of --quant-policy 16 on the CPU
MIN_REPEATS = 5
REST_SECONDS = 0.2
PROBE_TIMEOUT_S = 1800
LONG_PROMPT = 2048  # tokens; a warm-up changes less than the noise
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

    `settings` is the kind of work for which a baseline chooses the settings that are tried.
    """

    name: str
    kind: Kind
    goal: float
    cell: Cell
    settings: str = ""
    mode: str = FP4
    better: Literal[">=", "<="] = ">="
    unit: str = "tokens/s"

    @property
    def work(self) -> str:
        """Describe the work in words."""
        cell, cache = self.cell, "16 bit" if self.mode == "none" else "fp4"
        if self.kind is Kind.SERVER:
            sizes = f"{cell.context} in, {cell.steps} out"
            return f"server, {cell.batch} streaming clients, {sizes}, {cache}"
        return f"{self.kind.value}, batch {cell.batch}, context {cell.context}, {cache}"

    def is_met(self, ratio: float | None) -> bool | None:
        """Return whether a ratio meets the goal. None means that nothing was measured."""
        if ratio is None:
            return None
        return ratio >= self.goal if self.better == ">=" else ratio <= self.goal


TARGETS = (
    Target("decode-128-16bit", Kind.DECODE, 1.2, Cell(128, 1, 64), "16 bit", mode="none"),
    Target("decode-2048-batch-1", Kind.DECODE, 1.8, Cell(2048, 1, 32), "decode"),
    Target("decode-8192-batch-1", Kind.DECODE, 3.5, Cell(8192, 1, 16), "decode"),
    Target("prefill-128", Kind.PREFILL, 3.0, Cell(128, 1, 1), "prefill"),
    Target("prefill-512", Kind.PREFILL, 1.5, Cell(512, 1, 1), "prefill"),
    Target("prefill-2048", Kind.PREFILL, 4.0, Cell(2048, 1, 1), "prefill"),
    Target("prefill-8192", Kind.PREFILL, 6.0, Cell(8192, 1, 1), "prefill"),
    Target("decode-128-batch-32", Kind.DECODE, 5.0, Cell(128, 32, 32), "batch"),
    Target("decode-1024-batch-32", Kind.DECODE, 6.0, Cell(1024, 32, 16), "batch"),
    Target("server-requests", Kind.SERVER, 4.0, Cell(512, 16, 128), unit="requests/s"),
    Target("server-p99", Kind.SERVER, 0.3, Cell(512, 16, 128), better="<=", unit="s"),
    Target("decode-32768-own", Kind.DECODE_OWN, 2.0, Cell(32768, 1, 16)),
    Target("attention-8192", Kind.ATTENTION, 0.7, Cell(8192, 8, 1), unit="bytes/s"),
    Target("attention-32768", Kind.ATTENTION, 0.7, Cell(32768, 8, 1), unit="bytes/s"),
    Target("memory", Kind.MEMORY, 1.0, Cell(2048, 1, 8), better="<=", unit="bytes"),
)
BY_NAME = {target.name: target for target in TARGETS}


@dataclass(frozen=True)
class Runs:
    """Alternating runs of both engines, in the order in which they were paired."""

    ours: Sequence[float]
    baseline: Sequence[float]
    ours_setting: str
    baseline_setting: str
    note: str = ""


def row_of(target: Target, runs: Runs | None, *, model: str, note: str = "") -> Row:
    """Return the JSON object of a row, without figures if `runs` is None.

    `ratio` is the median of the ratios of the paired runs. Raise ValueError for runs that do not
    pair and for figures that are not positive.
    """
    ours, baseline = (list(runs.ours), list(runs.baseline)) if runs else ([], [])
    if len(ours) != len(baseline) or not all(
        math.isfinite(x) and x > 0 for x in [*ours, *baseline]
    ):
        raise ValueError(
            f"{target.name}: the runs {ours} and {baseline} are not pairs of positive figures"
        )
    ratios = [a / b for a, b in zip(ours, baseline, strict=True)]
    ratio = statistics.median(ratios) if ratios else None
    if runs:
        few = len(ratios) < MIN_REPEATS and target.kind is not Kind.ATTENTION
        note = "; ".join(filter(None, [f"runs: only {len(ratios)}" * few, note, runs.note]))

    def of(choose: Callable[[list[float]], float], values: list[float]) -> float | None:
        return rounded(choose(values)) if values else None

    return {
        "name": target.name,
        "work": target.work,
        "model": model,
        "unit": target.unit,
        "ours": of(statistics.median, ours),
        "ours_setting": runs.ours_setting if runs else "",
        "baseline": of(statistics.median, baseline),
        "baseline_setting": runs.baseline_setting if runs else "",
        "ratio": of(statistics.median, ratios),
        "ratio_low": of(min, ratios),
        "ratio_high": of(max, ratios),
        "repeats": len(ratios),
        "better": target.better,
        "target": target.goal,
        "met": target.is_met(ratio),
        "note": note,
        "ours_runs": [rounded(value) for value in ours],
        "baseline_runs": [rounded(value) for value in baseline],
    }


def rounded(value: float) -> float:
    """Round to four significant digits: more is noise."""
    return float(f"{value:.4g}") if value < 1e6 else float(round(value))


class NotMeasured(Exception):
    """The reason why a row has no figures."""


def alternate(
    ours: Callable[[], T], theirs: Callable[[], T], *, repeats: int
) -> tuple[list[T], list[T]]:
    """Run each side `repeats` times. The first side changes every time, so that drift is fair.

    A rest between runs lets the waiting threads of the last run stop spinning.
    """
    sides: list[tuple[Callable[[], T], list[T]]] = [(theirs, []), (ours, [])]
    for turn in range(repeats):
        for run, values in sides if turn % 2 == 0 else reversed(sides):
            time.sleep(REST_SECONDS)
            values.append(run())
    return sides[1][1], sides[0][1]


def json_of(command: Sequence[str]) -> Any:
    """Run a program and return the JSON object on its last line."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Cpu:
    """Threads of both engines, and whether our linear layers round activations to 8 bits."""

    threads: int
    int8_activations: bool = False


class TargetSuite:
    """Measures the targets for one model and writes every row to the file."""

    def __init__(
        self,
        loaded: Any,
        baseline: Baseline | None,
        *,
        file: ResultsFile,
        cpu: Cpu,
        repeats: int,
        attention_bench: Path | None,
    ) -> None:
        self._loaded, self._baseline, self._file = loaded, baseline, file
        self._threads, self._int8 = cpu.threads, cpu.int8_activations
        self._repeats, self._bench = repeats, attention_bench
        self.model = Path(loaded.path).stem

    def run(self, targets: Sequence[Target]) -> None:
        """Measure and print the rows. Rows of the file are not measured again."""
        measures = {
            Kind.DECODE: self._against_baseline,
            Kind.PREFILL: self._against_baseline,
            Kind.DECODE_OWN: self._own,
            Kind.MEMORY: self._memory,
            Kind.ATTENTION: self._attention,
            Kind.SERVER: self._server,
        }
        for target in targets:
            row = self._file.row(self.model, target.name, repeats=self._repeats)
            if row is None:
                try:
                    row = row_of(target, measures[target.kind](target), model=self.model)
                except NotMeasured as why:
                    row = row_of(target, None, model=self.model, note=f"not measured: {why}")
                self._file.add(row)
            print(format_row(row), flush=True)

    def _engine(self, cell: Cell, mode: str) -> OurEngine:
        from lmdeploy import _turbomind

        device = _turbomind.make_cpu_device(self._threads, int8_activations=self._int8)
        return OurEngine(self._loaded, device, cell=cell, mode=mode)

    def _require_baseline(self) -> Baseline:
        if not self._baseline:
            raise NotMeasured("there is no baseline")
        return self._baseline

    def _setting(self, target: Target) -> Setting:
        """Return the fastest setting of the baseline for the cell."""
        cell, baseline = target.cell, self._require_baseline()
        choices = {s.name: s for s in baseline.settings(target.settings)}
        works = f"{target.kind.value}, batch {cell.batch}, context {cell.context}"
        speeds = self._file.search(
            f"{self.model}: {works}, {target.settings} settings of {baseline.name}",
            lambda: {name: speed_of(baseline, target, setting=s) for name, s in choices.items()},
        )
        if not any(speeds.values()):
            raise NotMeasured(f"{baseline.name} refuses every setting")
        return choices[max(speeds, key=lambda name: speeds[name])]

    def _against_baseline(self, target: Target) -> Runs:
        setting, cell = self._setting(target), target.cell
        with ExitStack() as stack:
            engine = stack.enter_context(self._engine(cell, target.mode))
            context = stack.enter_context(self._require_baseline().context(cell, setting))
            ours, theirs = lambda: engine.decode(cell), context.decode
            if target.kind is Kind.PREFILL:
                engine.prefill(replace(cell, context=min(cell.context, 512)))  # warm up
                ours, theirs = lambda: engine.prefill(cell), context.prefill
            else:
                context.fill()
                engine.fill(cell)
                engine.decode(cell)
            theirs()
            pairs = alternate(ours, theirs, repeats=self._repeats)
            return Runs(*pairs, engine.format, setting.name)

    def _own(self, target: Target) -> Runs:
        """Compare with our 16-bit cache. Both engines keep their prompts; decoding alternates."""
        cell = target.cell
        with self._engine(cell, target.mode) as engine, self._engine(cell, "none") as plain:
            engine.decode(cell)
            plain.decode(cell)
            pairs = alternate(
                lambda: engine.decode(cell), lambda: plain.decode(cell), repeats=self._repeats
            )
            return Runs(*pairs, engine.format, "ours, 16 bit")

    def _memory(self, target: Target) -> Runs:
        """Compare with the setting of llama.cpp that needs the least memory."""
        if self._require_baseline().name != "llama.cpp":
            raise NotMeasured("memory is compared with llama.cpp only")

        def peak(engine: str, setting: str) -> int:
            """Return the peak bytes of one engine in a new process (bench_engine.py --peak)."""
            command = [sys.executable, str(Path(__file__).with_name("bench_engine.py"))]
            command += ["--model", str(self._loaded.path), "--peak", f"{engine}:{setting}"]
            command += ["--contexts", str(target.cell.context), "--steps", str(target.cell.steps)]
            return int(json_of([*command, "--num-threads", str(self._threads)])["peak_rss_bytes"])

        peaks = {setting: peak("baseline", setting) for setting in MEMORY_SETTINGS}
        least = min(peaks, key=lambda setting: peaks[setting])
        pairs = alternate(
            lambda: peak("ours", target.mode),
            lambda: peak("baseline", least),
            repeats=self._repeats,
        )
        note = ", ".join(f"{s}: {p / 2**20:.0f} MiB" for s, p in peaks.items())
        ours = f"{target.mode}, {quality_of(target.mode)}"
        return Runs(*pairs, ours, least, f"llama.cpp: {note}")

    def _attention(self, target: Target) -> Runs:
        """Compare attention with a plain read of the same bytes by the same threads."""
        if self._bench is None or not self._bench.is_file():
            raise NotMeasured(
                "pass --attention-bench BUILD/attention_alone_bench (ninja attention_alone_bench)"
            )
        cell, config, threads = target.cell, self._loaded.config, self._threads
        heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        command = [str(self._bench), f"mode={target.mode}", f"context={cell.context}"]
        command += [f"batch={cell.batch}", f"kv_heads={heads}", f"group={group}"]
        command += [f"head_dim={config.head_dim}", f"threads={threads}"]
        found = [json_of(command) for _ in range(self._repeats)]
        ours = [run["bytes"] / statistics.median(run["seconds"]) for run in found]
        reads = [run["read_bytes_per_s"] for run in found]
        note = f"{found[0]['bytes'] / 2**20:.1f} MiB, {found[0]['isa']}"
        return Runs(
            ours, reads, f"{target.mode}, raw, {threads} threads", "a sum of the bytes", note
        )

    def _server(self, target: Target) -> Runs:
        raise NotMeasured("run benchmarks/bench_server.py --llama-server PATH --json FILE")


def speed_of(baseline: Baseline, target: Target, *, setting: Setting) -> float:
    """Return tokens per second of one run, or 0 if the baseline refuses.

    Short prompts and decoding are run once more before, to warm up.
    """
    try:
        with baseline.context(target.cell, setting) as context:
            if target.kind is Kind.PREFILL:
                if target.cell.context < LONG_PROMPT:
                    context.prefill()
                return round(context.prefill(), 2)
            context.fill()
            context.decode()
            return round(context.decode(), 2)
    except RuntimeError as error:
        print(f"{baseline.name}, {setting.name}: skipped: {error}")
        return 0.0


def format_row(row: Row) -> str:
    """Return one line for the terminal."""
    goal, note = f"{row['better']} {row['target']:g}", row["note"]
    if row["ratio"] is None:
        return f"{row['name']:<22} {'':>31} {goal:>7}  {note}"
    verdict = "met" if row["met"] else "MISSED"
    figures = f"{row['ours']:>12.6g} {row['baseline']:>12.6g} {row['ratio']:>6.3g}"
    spread = f"({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"
    line = f"{row['name']:<22} {figures} {spread} {goal:>7} {verdict:<6} {row['baseline_setting']}"
    return line + (f"; {note}" if note else "")
