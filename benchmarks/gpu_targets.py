"""What the CUDA kernels are to reach, and whether rows of a run do.

Every target is about four-bit modes and is judged apart for each. Where several measured shapes
fall under it, the worst one decides. Ours are compared within one run. A target about peers is not
met before a peer was measured on one of its shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gpu_results import FP8, OURS, SIXTEEN_BIT, Row, is_measured, shape_key

FP4_MODES = ("mxfp4", "nvfp4")
LARGE_BYTES = 300e6  # of KV in the mode itself: beyond any cache
LAUNCH_BOUND_BATCHES = (8, 32)


@dataclass(frozen=True)
class Target:
    """A bound on a figure of rows."""

    name: str
    work: str
    unit: str
    better: Literal["<=", ">="]
    goal: float
    applies: Callable[[Row], bool]
    # Of a row, given all rows of the run; None: what it is compared with was not measured.
    value: Callable[[Row, Sequence[Row]], float | None]
    stretch: float | None = None
    beside: str = ""  # the mode of peers that it is about; empty: none

    def is_met(self, value: float) -> bool:
        """Whether a figure reaches the goal."""
        return value <= self.goal if self.better == "<=" else value >= self.goal


@dataclass(frozen=True)
class Verdict:
    """A target in one mode. `value` None: not measured."""

    target: Target
    mode: str
    value: float | None
    shape: str = ""
    num_shapes: int = 0
    with_peers: int = 0  # of the shapes: those that a peer was measured on

    @property
    def met(self) -> bool | None:
        """None: not measured, or reached beside ours alone where it is about peers, too."""
        if self.value is None:
            return None
        if not self.target.is_met(self.value):
            return False
        return None if self.target.beside and self.with_peers == 0 else True

    @property
    def word(self) -> str:
        """For a line of text."""
        if self.value is None:
            return "not measured"
        return {True: "met", False: "MISSED", None: "no peer"}[self.met]

    def __str__(self) -> str:
        goal = f"{self.target.better} {self.target.goal:g} {self.target.unit}".rstrip()
        if self.value is None:
            return f"{self.word:<13} {self.mode:<6} {self.target.work} ({goal})"
        stretch = self.target.stretch
        more = ""
        if stretch is not None:
            reached = self.value <= stretch if self.target.better == "<=" else self.value >= stretch
            more = f", stretch {stretch:g} {'met' if reached else 'missed'}"
        unit = f" {self.target.unit}" if self.target.unit else ""
        if self.target.beside:
            more += f", peers on {self.with_peers} of {self.num_shapes} shapes"
        return (
            f"{self.word:<13} {self.mode:<6} {self.target.work}: {self.value:.4g}{unit} "
            f"({goal}{more}), worst of {self.num_shapes}: {self.shape}"
        )


def shape_text(row: Row) -> str:
    """`batch 8, context 32768, ...`, without zeros."""
    return ", ".join(f"{k} {v}" for k, v in row.get("shape", {}).items() if v not in (0, ""))


def _shape(row: Row, **wanted: int) -> bool:
    return all(row["shape"].get(key, 0) == value for key, value in wanted.items())


def _is_large(row: Row) -> bool:
    return (
        row["op"] == "decode"
        and _shape(row, head_dim=128, window=0)
        and row.get("kv_bytes", 0) >= LARGE_BYTES
    )


def _plain(row: Row) -> bool:
    return not row["shape"].get("search") and not row["shape"].get("rotate")


def _same_work(row: Row, rows: Sequence[Row], *, mode: str) -> list[Row]:
    """Of every engine in another mode, the shape the same; ours of the same run."""
    wanted = shape_key(row["shape"], plain=True)
    return [
        other
        for other in rows
        if other.get("op") == row["op"]
        and other.get("mode") == mode
        and (other.get("by") != OURS or other.get("run") == row.get("run"))
        and is_measured(other)
        and shape_key(other["shape"]) == wanted
    ]


def _of_copy(row: Row, rows: Sequence[Row]) -> float | None:
    value = row.get("of_copy")
    return None if value is None else float(value)


def _microseconds(row: Row, rows: Sequence[Row]) -> float | None:
    return float(row["us"])


def _times_faster(mode: str, *, peers: bool) -> Callable[[Row, Sequence[Row]], float | None]:
    """Than the fastest in `mode`: ours alone, or ours and every peer's."""

    def value(row: Row, rows: Sequence[Row]) -> float | None:
        others = _same_work(row, rows, mode=mode)
        times = [other["us"] for other in others if peers or other.get("by") == OURS]
        return min(times) / row["us"] if times else None

    return value


def _share_of_time(mode: str) -> Callable[[Row, Sequence[Row]], float | None]:
    faster = _times_faster(mode, peers=False)

    def value(row: Row, rows: Sequence[Row]) -> float | None:
        times = faster(row, rows)
        return None if times is None else 1 / times

    return value


TARGETS = (
    Target(
        "decode-bandwidth",
        "decode, head_dim 128, at least 300 MB of KV: share of the copy bandwidth",
        "",
        ">=",
        0.85,
        _is_large,
        _of_copy,
    ),
    Target(
        "decode-16bit",
        "decode, the same: times faster than 16 bit, ours and peers'",
        "",
        ">=",
        3.0,
        _is_large,
        _times_faster(SIXTEEN_BIT, peers=True),
        beside=SIXTEEN_BIT,
    ),
    Target(
        "decode-fp8",
        "decode, the same: times faster than fp8, ours and peers'",
        "",
        ">=",
        1.6,
        _is_large,
        _times_faster(FP8, peers=True),
        beside=FP8,
    ),
    Target(
        "decode-8x32k",
        "decode, batch 8, context 32k, 8 KV heads of 128: a layer",
        "µs",
        "<=",
        83.0,
        lambda row: (
            row["op"] == "decode"
            and _shape(row, batch=8, context=32768, kv_heads=8, head_dim=128, window=0)
        ),
        _microseconds,
        stretch=74.0,
    ),
    Target(
        "decode-window",
        "decode, head_dim 64, window 128 with sinks: a layer",
        "µs",
        "<=",
        8.0,
        lambda row: (
            row["op"] == "decode"
            and _shape(row, head_dim=64, window=128, sinks=1)
            and row["shape"].get("batch") in LAUNCH_BOUND_BATCHES
        ),
        _microseconds,
    ),
    Target(
        "prefill",
        "prefill attention: time beside fp8",
        "",
        "<=",
        1.05,
        lambda row: row["op"] == "prefill",
        _share_of_time(FP8),
    ),
    Target(
        "write",
        "KV write: time beside 16 bit",
        "",
        "<=",
        1.2,
        lambda row: row["op"] == "write" and _plain(row),
        _share_of_time(SIXTEEN_BIT),
    ),
    Target(
        "write-served",
        "KV write with search and rotation: time beside plain 16 bit",
        "",
        "<=",
        1.2,
        lambda row: row["op"] == "write" and not _plain(row),
        _share_of_time(SIXTEEN_BIT),
    ),
)


def judge(target: Target, mode: str, *, rows: Sequence[Row]) -> Verdict:
    """The worst of the shapes that were measured."""
    found: list[tuple[float, Row]] = []
    for row in rows:
        if row.get("by") == OURS and row.get("mode") == mode and is_measured(row):
            value = target.value(row, rows) if target.applies(row) else None
            if value is not None:
                found.append((value, row))
    if not found:
        return Verdict(target, mode, None)
    pick = max if target.better == "<=" else min
    value, row = pick(found, key=lambda pair: pair[0])
    with_peers = sum(_has_peer(row, rows, mode=target.beside) for _, row in found)
    return Verdict(target, mode, value, shape_text(row), len(found), with_peers)


def _has_peer(row: Row, rows: Sequence[Row], *, mode: str) -> bool:
    return any(other.get("by") != OURS for other in _same_work(row, rows, mode=mode))


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Of every target and mode, in the order of the list. REQUIRES: rows with_ratios."""
    for target in TARGETS:
        for mode in FP4_MODES:
            yield judge(target, mode, rows=rows)
