"""The suite of CPU benchmarks: its workloads, and how each is measured against a baseline."""

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
from typing import TYPE_CHECKING, Any, TypeVar

from our_engine import Cell, OurEngine, quality_of
from results import ResultsFile, Row

if TYPE_CHECKING:
    from baselines.baseline import Baseline, Setting

T = TypeVar("T")

FP4 = "nvfp4"  # the format of --quant-policy 16 on the CPU
ROW_KEY = ("baseline_by", "model", "name")
MIN_REPEATS = 5
REST_SECONDS = 0.2
PROBE_TIMEOUT_S = 1800
LONG_PROMPT = 2048  # tokens; a warm-up changes less than the noise
# KV type, flash attention, and how llama.cpp reads the file. "as-stored" keeps the matrices as they
# are in the file: less memory, slower products.
MEMORY_SETTINGS = ("q4_0,on,mmap", "q4_0,on,as-stored", "f16,on,mmap")


class Kind(Enum):
    """The kind of a workload."""

    DECODE = "decode"
    PREFILL = "prefill"
    DECODE_OWN = "decode against our own 16 bit"
    MEMORY = "peak memory"
    SERVER = "server"


@dataclass(frozen=True)
class Workload:
    """One row of the suite. `settings` is the kind of work for which a baseline has settings."""

    name: str
    kind: Kind
    cell: Cell
    settings: str = ""
    mode: str = FP4
    unit: str = "tokens/s"


WORKLOADS = (
    Workload("decode-128-16bit", Kind.DECODE, Cell(128, 1, 64), "16 bit", mode="none"),
    Workload("decode-2048-batch-1", Kind.DECODE, Cell(2048, 1, 32), "decode"),
    Workload("decode-8192-batch-1", Kind.DECODE, Cell(8192, 1, 16), "decode"),
    Workload("prefill-128", Kind.PREFILL, Cell(128, 1, 1), "prefill"),
    Workload("prefill-512", Kind.PREFILL, Cell(512, 1, 1), "prefill"),
    Workload("prefill-2048", Kind.PREFILL, Cell(2048, 1, 1), "prefill"),
    Workload("prefill-8192", Kind.PREFILL, Cell(8192, 1, 1), "prefill"),
    Workload("decode-128-batch-32", Kind.DECODE, Cell(128, 32, 32), "batch"),
    Workload("decode-1024-batch-32", Kind.DECODE, Cell(1024, 32, 16), "batch"),
    Workload("server-requests", Kind.SERVER, Cell(512, 16, 128), unit="requests/s"),
    Workload("server-p99", Kind.SERVER, Cell(512, 16, 128), unit="s"),
    Workload("decode-32768-own", Kind.DECODE_OWN, Cell(32768, 1, 16)),
    Workload("memory", Kind.MEMORY, Cell(2048, 1, 8), unit="bytes"),
)
BY_NAME = {workload.name: workload for workload in WORKLOADS}


@dataclass(frozen=True)
class Runs:
    """Alternating runs of both engines, in the order in which they were paired."""

    ours: Sequence[float]
    baseline: Sequence[float]
    ours_setting: str
    baseline_setting: str
    note: str = ""


def row_of(workload: Workload, runs: Runs, *, model: str, baseline_by: str) -> Row:
    """Return the JSON object of a row.

    `ratio` is the median of the ratios of the paired runs. Raise ValueError for runs that do not
    pair and for figures that are not positive.
    """
    ours, baseline = list(runs.ours), list(runs.baseline)
    if (
        not ours
        or len(ours) != len(baseline)
        or not all(math.isfinite(x) and x > 0 for x in [*ours, *baseline])
    ):
        raise ValueError(
            f"{workload.name}: the runs {ours} and {baseline} are not pairs of positive figures"
        )
    ratios = [a / b for a, b in zip(ours, baseline, strict=True)]
    few = f"runs: only {len(ratios)}" if len(ratios) < MIN_REPEATS else ""
    return {
        "name": workload.name,
        "model": model,
        "unit": workload.unit,
        "ours": rounded(statistics.median(ours)),
        "ours_setting": runs.ours_setting,
        "baseline": rounded(statistics.median(baseline)),
        "baseline_by": baseline_by,
        "baseline_setting": runs.baseline_setting,
        "ratio": rounded(statistics.median(ratios)),
        "ratio_low": rounded(min(ratios)),
        "ratio_high": rounded(max(ratios)),
        "repeats": len(ratios),
        "note": "; ".join(filter(None, [few, runs.note])),
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
    """The threads of both engines, and the type of activations in our linear layers."""

    threads: int
    gemm_input_dtype: str | None = None


class Suite:
    """Measures the workloads for one model and writes every row to the file."""

    def __init__(
        self,
        loaded: Any,
        baseline: Baseline | None,
        *,
        file: ResultsFile,
        cpu: Cpu,
        repeats: int,
    ) -> None:
        self._loaded, self._baseline, self._file = loaded, baseline, file
        self._cpu, self._repeats = cpu, repeats
        self.model = Path(loaded.path).stem

    def run(self, workloads: Sequence[Workload]) -> None:
        """Measure and print the rows. Rows that the file has of this commit are only printed."""
        measures = {
            Kind.DECODE: self._against_baseline,
            Kind.PREFILL: self._against_baseline,
            Kind.DECODE_OWN: self._own,
            Kind.MEMORY: self._memory,
            Kind.SERVER: self._server,
        }
        for workload in workloads:
            by = self._baseline_of(workload)
            row = self._file.find({"baseline_by": by, "model": self.model, "name": workload.name})
            if row is None or row["repeats"] < self._repeats:
                try:
                    runs = measures[workload.kind](workload)
                except NotMeasured as why:
                    print(f"{workload.name}: not measured: {why}", flush=True)
                    continue
                row = row_of(workload, runs, model=self.model, baseline_by=by)
                self._file.add(row)
            print(format_row(row), flush=True)

    def _baseline_of(self, workload: Workload) -> str:
        """Return name and version of what a workload is compared with."""
        if workload.kind is Kind.DECODE_OWN or not self._baseline:
            return "lmdeploy-fp4"
        return self._baseline.about()

    def _engine(self, cell: Cell, mode: str) -> OurEngine:
        from lmdeploy import _turbomind

        device = _turbomind.make_device(
            "cpu",
            self._cpu.threads,
            int8_activations=self._cpu.gemm_input_dtype == "int8",
            deterministic=False,
        )
        return OurEngine(self._loaded, device, cell=cell, mode=mode)

    def _require_baseline(self) -> Baseline:
        if not self._baseline:
            raise NotMeasured("there is no baseline")
        return self._baseline

    def _setting(self, workload: Workload) -> Setting:
        """Return the fastest setting of the baseline for the cell."""
        baseline = self._require_baseline()
        choices = {s.name: s for s in baseline.settings(workload.settings)}
        speeds = {n: speed_of(baseline, workload, setting=s) for n, s in choices.items()}
        if not any(speeds.values()):
            raise NotMeasured(f"{baseline.name} refuses every setting")
        return choices[max(speeds, key=lambda name: speeds[name])]

    def _against_baseline(self, workload: Workload) -> Runs:
        setting, cell = self._setting(workload), workload.cell
        with ExitStack() as stack:
            engine = stack.enter_context(self._engine(cell, workload.mode))
            context = stack.enter_context(self._require_baseline().context(cell, setting))
            ours, theirs = lambda: engine.decode(cell), context.decode
            if workload.kind is Kind.PREFILL:
                engine.prefill(replace(cell, context=min(cell.context, 512)))  # warm up
                ours, theirs = lambda: engine.prefill(cell), context.prefill
            else:
                context.fill()
                engine.fill(cell)
                engine.decode(cell)
            theirs()
            pairs = alternate(ours, theirs, repeats=self._repeats)
            return Runs(*pairs, engine.format, setting.name)

    def _own(self, workload: Workload) -> Runs:
        """Compare with our 16-bit cache. Both engines keep their prompts; decoding alternates."""
        cell = workload.cell
        with self._engine(cell, workload.mode) as engine, self._engine(cell, "none") as plain:
            engine.decode(cell)
            plain.decode(cell)
            pairs = alternate(
                lambda: engine.decode(cell), lambda: plain.decode(cell), repeats=self._repeats
            )
            return Runs(*pairs, engine.format, "ours, 16 bit")

    def _memory(self, workload: Workload) -> Runs:
        """Compare with the setting of llama.cpp that needs the least memory."""
        if self._require_baseline().name != "llama.cpp":
            raise NotMeasured("memory is compared with llama.cpp only")

        def peak(engine: str, setting: str) -> int:
            """Return the peak bytes of one engine in a new process (bench_engine.py --peak)."""
            command = [sys.executable, str(Path(__file__).with_name("bench_engine.py"))]
            command += ["--model", str(self._loaded.path), "--peak", f"{engine}:{setting}"]
            command += [
                "--contexts",
                str(workload.cell.context),
                "--steps",
                str(workload.cell.steps),
            ]
            return int(
                json_of([*command, "--num-threads", str(self._cpu.threads)])["peak_rss_bytes"]
            )

        peaks = {setting: peak("baseline", setting) for setting in MEMORY_SETTINGS}
        least = min(peaks, key=lambda setting: peaks[setting])
        pairs = alternate(
            lambda: peak("ours", workload.mode),
            lambda: peak("baseline", least),
            repeats=self._repeats,
        )
        note = ", ".join(f"{s}: {p / 2**20:.0f} MiB" for s, p in peaks.items())
        ours = f"{workload.mode}, {quality_of(workload.mode)}"
        return Runs(*pairs, ours, least, f"llama.cpp: {note}")

    def _server(self, workload: Workload) -> Runs:
        raise NotMeasured("run benchmarks/bench_server.py --llama-server PATH --json FILE")


def speed_of(baseline: Baseline, workload: Workload, *, setting: Setting) -> float:
    """Return tokens per second of one run, or 0 if the baseline refuses.

    Short prompts and decoding are run once more before, to warm up.
    """
    try:
        with baseline.context(workload.cell, setting) as context:
            if workload.kind is Kind.PREFILL:
                if workload.cell.context < LONG_PROMPT:
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
    figures = f"{row['ours']:>12.6g} {row['baseline']:>12.6g} {row['ratio']:>6.3g}"
    spread = f"({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"
    line = f"{row['name']:<22} {figures} {spread} {row['baseline_setting']}"
    return line + (f"; {row['note']}" if row["note"] else "")
