"""The table of targets: what is measured, against what, and from which ratio on it is met."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

from cells import Cell

FP4 = "nvfp4"  # what --quant-policy 16 is on CPU
MIN_REPEATS = 5
NO_ORIGIN = "not noted"


class Kind(Enum):
    """What a target times."""

    DECODE = "decode"
    PREFILL = "prefill"
    DECODE_OWN = "decode against our own 16 bit"
    ATTENTION = "attention alone"
    MEMORY = "peak memory"
    SERVER = "server"


class Peers(Enum):
    """Which settings of llama.cpp are tried."""

    EVERY = "every KV type, flash attention on and off"
    SIXTEEN_BIT = "16-bit KV types, flash attention on and off"
    OURS = "our own 16 bit"
    CEILING = "what the machine was measured to allow"


@dataclass(frozen=True)
class Target:
    """One line of the table. `better`: whether the ratio must be at least or at most `goal`."""

    name: str
    work: str
    kind: Kind
    goal: float
    cell: Cell
    mode: str = FP4
    peers: Peers = Peers.EVERY
    better: Literal[">=", "<="] = ">="
    unit: str = "tokens/s"

    def is_met(self, ratio: float | None) -> bool | None:
        """None where nothing was measured."""
        if ratio is None:
            return None
        return ratio >= self.goal if self.better == ">=" else ratio <= self.goal


def _decode(context: int, batch: int, *, goal: float, steps: int) -> Target:
    work = f"decode, batch 1, context {context}, fp4"
    if batch > 1:
        work = f"{batch} sequences decoding together, context {context}, fp4"
    cell = Cell(context, batch, steps)
    return Target(f"decode-{context}-batch-{batch}", work, Kind.DECODE, goal, cell)


def _prefill(context: int, goal: float) -> Target:
    work = f"prefill, {context} tokens, fp4"
    return Target(f"prefill-{context}", work, Kind.PREFILL, goal, Cell(context, 1, 1))


def _attention(context: int) -> Target:
    return Target(
        f"attention-{context}",
        f"attention alone, fp4, context {context}, batch 8",
        Kind.ATTENTION,
        goal=0.7,
        cell=Cell(context, 8, 1),
        peers=Peers.CEILING,
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
        peers=Peers.SIXTEEN_BIT,
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
        peers=Peers.OURS,
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
    """One measured line. `ratio` is the median of the runs' ratios, low and high their ends.

    `trial`: shorter than the target's work, to try the suite; it is neither met nor missed.
    `commit`, `date`: of the sources and of the measurement, empty in files from before they were
    noted.
    """

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

    @classmethod
    def from_json(cls, fields: Any) -> TargetRow:
        """ValueError for a row that is not one of ours; early ones lack commit and date."""
        names = set(cls.__dataclass_fields__)
        if not isinstance(fields, dict) or set(fields) | {"commit", "date"} != names:
            got = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
            raise ValueError(f"row: got {got}, wanted {sorted(names)}")
        return cls(**fields)

    @property
    def origin(self) -> str:
        """Commit and day."""
        return f"{self.commit}, {self.date}" if self.commit else NO_ORIGIN


@dataclass(frozen=True)
class Runs:
    """Alternating runs of both sides, in the order in which they were paired."""

    ours: Sequence[float]
    peer: Sequence[float]
    ours_setting: str
    peer_setting: str
    note: str = ""


def row_of(target: Target, runs: Runs, *, model: str) -> TargetRow:
    """Medians and the verdict. ValueError for runs that do not pair."""
    if len(runs.ours) != len(runs.peer) or not runs.ours:
        raise ValueError(f"{target.name}: {len(runs.ours)} runs of ours, {len(runs.peer)} of peer")
    values = [*runs.ours, *runs.peer]
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"{target.name}: got {values}, wanted positive figures")
    ratios = [ours / peer for ours, peer in zip(runs.ours, runs.peer, strict=True)]
    ratio = statistics.median(ratios)
    few = len(ratios) < MIN_REPEATS and target.kind is not Kind.ATTENTION
    note = f"runs: only {len(ratios)}; " * few + runs.note
    return TargetRow(
        name=target.name,
        work=target.work,
        model=model,
        unit=target.unit,
        ours=rounded(statistics.median(runs.ours)),
        ours_setting=runs.ours_setting,
        peer=rounded(statistics.median(runs.peer)),
        peer_setting=runs.peer_setting,
        ratio=rounded(ratio),
        ratio_low=rounded(min(ratios)),
        ratio_high=rounded(max(ratios)),
        repeats=len(ratios),
        better=target.better,
        target=target.goal,
        met=target.is_met(ratio),
        trial=False,
        note=note.removesuffix("; "),
        ours_runs=[rounded(value) for value in runs.ours],
        peer_runs=[rounded(value) for value in runs.peer],
    )


def as_trial(row: TargetRow, what: str) -> TargetRow:
    """A row of other work than the target's."""
    return replace(row, met=None, trial=True, note=f"trial: {what}; {row.note}".removesuffix("; "))


def unmeasured(target: Target, why: str, *, model: str) -> TargetRow:
    """A line that says why it has no figures."""
    return TargetRow(
        name=target.name,
        work=target.work,
        model=model,
        unit=target.unit,
        ours=None,
        ours_setting="",
        peer=None,
        peer_setting="",
        ratio=None,
        ratio_low=None,
        ratio_high=None,
        repeats=0,
        better=target.better,
        target=target.goal,
        met=None,
        trial=False,
        note=f"not measured: {why}",
        ours_runs=[],
        peer_runs=[],
    )


def rounded(value: float) -> float:
    """To four significant digits: more is noise."""
    return float(f"{value:.4g}") if value < 1e6 else float(round(value))
