"""A profile of the engine as a table, as JSON and as a trace: time, bytes and operations per op,
beside what the machine allows.

Bytes and operations are the least that an op must move and compute (profile/op_cost.h); the
ceilings are measured in the same process with as many threads. An op is held against two of them:
the read bandwidth of the level that its bytes live in, and the product rate of its numbers. The one
that would take longer binds it; 100 % is an op that takes no longer than that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ceilings import WIDE_PRODUCTS, cache_products, read_level
from cells import Cell, Timing
from our_engine import OurEngine

from lmdeploy import _turbomind

if TYPE_CHECKING:
    from lmdeploy._turbomind import CpuCeilings, ModelConfig, OpEvent, OpRecord, PhaseProfile

CEILING_SECONDS = 1.5
TRACE_EVENTS = 20_000  # per cell and format: some fifty steps
STEPS_TRACK, OPS_TRACK = 1, 2  # thread ids of a trace
WITHOUT_CEILING = ("engine", "between_steps")
# What goes through matrix tiles, where there are any: prefill over these caches, weights in blocks
# from this many rows on; twice, too, weights of 8 bits in half of each product of bytes.
TILE_CACHES = frozenset({"mxfp4", "nvfp4"})
TILE_ROWS = 12


@dataclass(frozen=True)
class OpRow:
    """One op in one phase; rates are of all threads together.

    `ceiling` names what binds the op (memory, L3, L2, int8, int16, bf16, fp32, tiles), `of_ceiling`
    is the least time that it allows divided by the time taken; both empty where it moves nothing.
    """

    op: str
    calls_per_step: float
    ms_per_step: float
    share: float
    gb_per_s: float
    gop_per_s: float
    ceiling: str
    of_ceiling: float | None
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    operations: int


@dataclass(frozen=True)
class PhaseReport:
    """One kind of steps of a run; `ms_per_step` includes the time between steps."""

    phase: str
    num_steps: int
    tokens_per_step: float
    ms_per_step: float
    rows: list[OpRow]


class ProfiledEngine(OurEngine):
    """The engine on a device that is timed; the profile is that of the last timing."""

    max_events = 0
    profiling: _turbomind.ProfilingDevice

    def _make_device(self, threads: int) -> _turbomind.Device:
        device = super()._make_device(threads)
        self.profiling = _turbomind.make_profiling_device(device, self.max_events)
        return self.profiling

    def prefill(self, cell: Cell) -> float:
        """As OurEngine.prefill."""
        self.profiling.clear()
        return super().prefill(cell)

    def _timed(self, cell: Cell) -> Timing:
        self.profiling.clear()
        return super()._timed(cell)


class TracedEngine(ProfiledEngine):
    """One that keeps its ops as events, too."""

    max_events = TRACE_EVENTS


class ProfileSession:
    """Collects the profiles of a benchmark's cells: prints, and writes files after each cell."""

    def __init__(
        self, config: ModelConfig, *, threads: int, json_path: Path | None, trace_path: Path | None
    ) -> None:
        self._roles = roles_of(config)
        self._json_path = json_path
        self._trace = TraceFile(trace_path) if trace_path else None
        device = _turbomind.make_cpu_device(threads)
        self.ceilings = _turbomind.measure_ceilings(device, CEILING_SECONDS)
        self._cells: list[dict[str, Any]] = []

    def add(self, cell: Cell, engine: OurEngine) -> str:
        """The tables of the last run of a ProfiledEngine."""
        if not isinstance(engine, ProfiledEngine):
            raise TypeError(f"engine: got {type(engine).__name__}, want a ProfiledEngine")
        profile = engine.profiling.profile()
        reports = [
            phase_report(phase, self.ceilings, roles=self._roles) for phase in profile.phases
        ]
        title = f"{engine.format}, batch {cell.batch}, context {cell.context}"
        if self._json_path:
            facts: dict[str, Any] = {"mode": engine.mode, "quality": engine.quality}
            facts |= {"batch": cell.batch, "context": cell.context}
            self._cells.append({**facts, "phases": [asdict(report) for report in reports]})
            text = json.dumps({"ceilings": ceiling_facts(self.ceilings), "cells": self._cells})
            self._json_path.write_text(text + "\n", encoding="utf-8")
        if self._trace:
            self._trace.add(f"{title}, first ops", profile.events, roles=self._roles)
            if profile.num_dropped_events:
                title += f" ({profile.num_dropped_events} ops are not in the trace)"
        return "\n".join([f"profile of {title}", *(format_phase(report) for report in reports)])


class TraceFile:
    """Chrome trace events in a file that is whole after each addition."""

    _END = b"\n]}\n"

    def __init__(self, path: Path) -> None:
        self._path, self._processes = path, 0
        path.write_bytes(b'{"displayTimeUnit": "ms", "traceEvents": [' + self._END)

    def add(
        self, title: str, events: Sequence[OpEvent], *, roles: dict[tuple[str, int, int], str]
    ) -> None:
        """A process with its tracks."""
        first, self._processes = self._processes == 0, self._processes + 1
        lines = [
            json.dumps(event)
            for event in trace_events(events, roles, process=self._processes, title=title)
        ]
        with self._path.open("r+b") as file:
            file.seek(-len(self._END), 2)
            file.write(("\n" if first else ",\n").encode() + ",\n".join(lines).encode())
            file.write(self._END)


def roles_of(config: ModelConfig) -> dict[tuple[str, int, int], str]:
    """(kind, rows, cols) → which of the model's layers have a matrix of that shape."""
    hidden, moe = config.hidden_size, config.moe
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    dense = not moe.num_experts or 0 in moe.layers
    inner, shared, expert = (
        config.intermediate_size if dense else 0,
        moe.shared_intermediate_size,
        moe.intermediate_size,
    )
    found: dict[tuple[str, int, int], list[str]] = {}
    for kind, rows, cols, name in (
        ("embed", config.vocab_size, hidden, "embedding"),
        ("linear", heads + 2 * kv_heads, hidden, "q, k, v"),
        ("linear", hidden, heads, "output"),
        ("linear", 2 * inner, hidden, "gate, up"),
        ("linear", hidden, inner, "down"),
        ("linear", config.vocab_size, hidden, "head"),
        ("linear", moe.num_experts, hidden, "router"),
        ("linear", shared, hidden, "shared gate, up"),
        ("linear", hidden, shared, "shared down"),
        ("linear", 1 if shared else 0, hidden, "shared router"),
        ("grouped_linear", expert, hidden, "gate, up"),
        ("grouped_linear", 2 * expert, hidden, "gate and up"),
        ("grouped_linear", hidden, expert, "down"),
    ):
        if rows and cols:
            found.setdefault((kind, rows, cols), []).append(name)
    return {key: ", ".join(names) for key, names in found.items()}


def name_of(op: OpRecord | OpEvent, roles: dict[tuple[str, int, int], str]) -> str:
    """For example: linear 1536 x 576 q4_1 (gate, up); decode_attention nvfp4."""
    if not op.rows:
        return " ".join([op.kind, "/".join(dict.fromkeys(op.kv_formats))]).rstrip()
    role = roles.get((op.kind, op.rows, op.cols))
    return f"{op.kind} {op.rows} x {op.cols} {op.format}" + (f" ({role})" if role else "")


def product_rate(record: OpRecord, ceilings: CpuCeilings) -> tuple[str, float]:
    """What multiplies the op's numbers, and its operations per second for 2 per multiply-add."""
    if ceilings.tile_bf16_ops_per_s > 0 and runs_on_tiles(record):
        products = 1 if record.format == "bf16" else WIDE_PRODUCTS
        return "tiles", ceilings.tile_bf16_ops_per_s / products
    if record.kv_formats:
        return cache_products(record.kv_formats, ceilings)
    if record.format == "bf16" and ceilings.bf16_ops_per_s > 0:
        return "bf16", ceilings.bf16_ops_per_s
    if record.format in ("", "f32", "bf16"):
        return "fp32", ceilings.fp32_ops_per_s
    return "int8", ceilings.int8_ops_per_s / WIDE_PRODUCTS


def runs_on_tiles(record: OpRecord) -> bool:
    """Whether matrix tiles could multiply it; BF16 of any rows, as they take few, too."""
    if record.kv_formats:
        return record.kind == "prefill_attention" and TILE_CACHES.issuperset(record.kv_formats)
    if record.format == "bf16":
        return True
    if record.format in ("", "f32"):
        return False
    return record.operations >= 2 * record.rows * record.cols * record.calls * TILE_ROWS


def binding_ceiling(
    record: OpRecord, ceilings: CpuCeilings, *, streamed: float
) -> tuple[str, float | None]:
    """Its name, and the least time that it allows divided by the time taken.

    Weights and cache come from where all that a step streams fits, `streamed` bytes; what only
    passes on activations, from where those of one call fit.
    """
    num_bytes = bytes_of(record)
    if record.kind in WITHOUT_CEILING or not num_bytes or not record.nanoseconds:
        return "", None
    is_stream = record.weight_bytes + record.kv_bytes > 0
    level, bandwidth = read_level(streamed if is_stream else num_bytes / record.calls, ceilings)
    product, rate = product_rate(record, ceilings)
    least = {level: num_bytes / bandwidth, product: record.operations / rate}
    ceiling = max(least, key=lambda name: least[name])
    return ceiling, least[ceiling] / (record.nanoseconds / 1e9)


def bytes_of(record: OpRecord) -> int:
    """All that the op moves at least."""
    return record.weight_bytes + record.kv_bytes + record.activation_bytes


def phase_report(
    phase: PhaseProfile, ceilings: CpuCeilings, *, roles: dict[tuple[str, int, int], str]
) -> PhaseReport:
    """Its ops, the longest first."""
    records = sorted(phase.records, key=lambda record: -record.nanoseconds)
    total = sum(record.nanoseconds for record in records)
    streamed = sum(record.weight_bytes + record.kv_bytes for record in records) / phase.num_steps
    rows = []
    for record in records:
        ceiling, of_ceiling = binding_ceiling(record, ceilings, streamed=streamed)
        taken = max(record.nanoseconds, 1)
        rows.append(
            OpRow(
                op=name_of(record, roles),
                calls_per_step=record.calls / phase.num_steps,
                ms_per_step=record.nanoseconds / phase.num_steps / 1e6,
                share=record.nanoseconds / max(total, 1),
                gb_per_s=bytes_of(record) / taken,
                gop_per_s=record.operations / taken,
                ceiling=ceiling,
                of_ceiling=of_ceiling,
                weight_bytes=record.weight_bytes,
                kv_bytes=record.kv_bytes,
                activation_bytes=record.activation_bytes,
                operations=record.operations,
            )
        )
    return PhaseReport(
        phase=phase.phase,
        num_steps=phase.num_steps,
        tokens_per_step=phase.num_tokens / phase.num_steps,
        ms_per_step=total / phase.num_steps / 1e6,
        rows=rows,
    )


def format_phase(report: PhaseReport) -> str:
    """A title and a table."""
    lines = [
        f"{report.phase}: {report.num_steps} steps, {report.tokens_per_step:.1f} tokens and "
        f"{report.ms_per_step:.3f} ms each",
        f"  {'op':<48} {'calls':>6} {'ms':>9} {'share':>6} {'GB/s':>7} {'GOP/s':>8}  of ceiling",
    ]
    for row in report.rows:
        ceiling = "" if row.of_ceiling is None else f"{row.of_ceiling:6.1%} {row.ceiling}"
        lines.append(
            f"  {row.op:<48} {row.calls_per_step:>6.1f} {row.ms_per_step:>9.4f} "
            f"{row.share:>6.1%} {row.gb_per_s:>7.1f} {row.gop_per_s:>8.1f}  {ceiling}".rstrip()
        )
    return "\n".join(lines)


def ceiling_facts(ceilings: CpuCeilings) -> dict[str, Any]:
    """For JSON: rates per second, working sets in bytes; None: not available."""
    reads = {
        name: {"gb_per_s": read.bytes_per_s / 1e9 or None, "working_set": read.working_set}
        for name, read in (("memory", ceilings.memory), ("l3", ceilings.l3), ("l2", ceilings.l2))
    }
    return {
        "isa": ceilings.isa,
        "num_threads": ceilings.num_threads,
        "read": reads,
        "int8_gop_per_s": ceilings.int8_ops_per_s / 1e9 or None,
        "bf16_gop_per_s": ceilings.bf16_ops_per_s / 1e9 or None,
        "fp32_gop_per_s": ceilings.fp32_ops_per_s / 1e9 or None,
        "amx": {
            "int8_gop_per_s": ceilings.tile_int8_ops_per_s / 1e9,
            "bf16_gop_per_s": ceilings.tile_bf16_ops_per_s / 1e9,
        }
        if ceilings.tile_bf16_ops_per_s > 0
        else None,
    }


def format_ceilings(ceilings: CpuCeilings) -> str:
    """One line."""
    facts = ceiling_facts(ceilings)
    reads = [
        f"{name} {read['gb_per_s']:.1f} GB/s ({read['working_set'] / 2**20:.0f} MiB)"
        if read["gb_per_s"]
        else f"{name} not measured"
        for name, read in facts["read"].items()
    ]
    rates = [
        f"{name} {facts[f'{name}_gop_per_s']:.0f} GOP/s"
        if facts[f"{name}_gop_per_s"]
        else f"{name} not available"
        for name in ("int8", "bf16", "fp32")
    ]
    amx = facts["amx"]
    tiles = (
        f"AMX int8 {amx['int8_gop_per_s']:.0f} GOP/s, bf16 {amx['bf16_gop_per_s']:.0f} GOP/s"
        if amx
        else "AMX not available"
    )
    where = f"{ceilings.isa}, {ceilings.num_threads} threads"
    return f"ceilings ({where}): {', '.join(reads)}; {', '.join(rates)}; {tiles}"


def trace_events(
    events: Sequence[OpEvent],
    roles: dict[tuple[str, int, int], str],
    *,
    process: int,
    title: str,
) -> Iterator[dict[str, Any]]:
    """Chrome trace events: a process with a track of steps and one of ops; times in us."""
    named = {"ph": "M", "pid": process}
    yield {**named, "name": "process_name", "args": {"name": title}}
    for track, name in ((STEPS_TRACK, "steps"), (OPS_TRACK, "ops")):
        yield {**named, "name": "thread_name", "tid": track, "args": {"name": name}}
    if not events:
        return
    base = events[0].begin_ns
    spans: dict[int, tuple[int, int]] = {}
    for event in events:
        first, _ = spans.get(event.step, (event.begin_ns, 0))
        spans[event.step] = (first, event.end_ns)
        yield {
            "ph": "X",
            "pid": process,
            "tid": OPS_TRACK,
            "name": name_of(event, roles),
            "cat": event.kind,
            "ts": (event.begin_ns - base) / 1000,
            "dur": (event.end_ns - event.begin_ns) / 1000,
            "args": {"step": event.step},
        }
    for step, (begin, end) in spans.items():
        yield {
            "ph": "X",
            "pid": process,
            "tid": STEPS_TRACK,
            "name": f"step {step}",
            "cat": "step",
            "ts": (begin - base) / 1000,
            "dur": (end - begin) / 1000,
            "args": {"step": step},
        }
