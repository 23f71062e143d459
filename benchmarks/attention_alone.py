"""Decode attention of one layer beside what the machine allows.

Two limits on the cached bytes that attention can read per second: the read bandwidth of the level
in which the bytes of a call lie, and the arithmetic of its multiplications and additions at the
machine's highest measured rate. Both are measured in the same run; the lower one counts. How fast
the same loop runs over a cache that lies in L2 is noted beside it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from our_engine import Cell
from results_file import cache_bytes
from targets import Runs

from lmdeploy import _turbomind

CEILING_SECONDS = 1.5
CACHED_CONTEXT, CACHED_BATCH = 256, 4  # within the L2 of every thread, and work for all
LEVELS = ("memory", "l3", "l2")
KINDS = ("int8", "bf16", "fp32")
BENCH_TIMEOUT_S = 600


def measure_ceilings(threads: int) -> dict[str, Any]:
    """Bytes per second by level, operations per second by kind; None: not on this machine.

    LookupError where nothing can be measured.
    """
    measure = getattr(_turbomind, "measure_ceilings", None)
    if measure is None:
        raise LookupError("this build has no _turbomind.measure_ceilings")
    found = measure(_turbomind.make_cpu_device(threads), CEILING_SECONDS)
    reads = {level: getattr(found, level).bytes_per_s or None for level in LEVELS}
    rates = {f"{kind}_ops_per_s": getattr(found, f"{kind}_ops_per_s") or None for kind in KINDS}
    return {"read_bytes_per_s": reads, **rates}


def level_of(working_set: float, *, threads: int, caches: Mapping[int, int]) -> str:
    """`l2`, `l3` or `memory`: the first level that holds the bytes of all threads together."""
    if working_set <= caches.get(2, 0) * threads:
        return "l2"
    return "l3" if working_set <= caches.get(3, 0) else "memory"


def lower_limit(
    ceilings: Mapping[str, Any], level: str, *, operations_per_byte: float
) -> tuple[float, str]:
    """Bytes per second and what limits them. LookupError where a ceiling is absent."""
    bandwidth = ceilings.get("read_bytes_per_s", {}).get(level)
    if not bandwidth:
        raise LookupError(f"measure_ceilings gave no read bandwidth of {level}")
    rates = {kind: ceilings.get(f"{kind}_ops_per_s") or 0.0 for kind in KINDS}
    kind = max(rates, key=lambda name: rates[name])
    arithmetic = rates[kind] / operations_per_byte
    if 0 < arithmetic < bandwidth:
        return arithmetic, f"{kind} arithmetic, {rates[kind]:.3g} operations/s"
    return float(bandwidth), f"read bandwidth of {level}"


def run_bench(bench: Path, config: Any, *, cell: Cell, mode: str, threads: int) -> dict[str, Any]:
    """One run of attention_alone_bench. RuntimeError with what it printed when it fails."""
    sizes = {
        "mode": mode,
        "context": cell.context,
        "batch": cell.batch,
        "kv_heads": config.num_kv_heads,
        "group": config.num_heads // config.num_kv_heads,
        "head_dim": config.head_dim,
        "threads": threads,
    }
    command = [str(bench), *(f"{key}={value}" for key, value in sizes.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BENCH_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{bench.name}: exit {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bytes_per_second(found: Mapping[str, Any]) -> float:
    """Median over the rounds of a run."""
    return float(found["bytes"] / statistics.median(found["seconds"]))


def attention_runs(
    config: Any, cell: Cell, *, mode: str, bench: Path, threads: int, repeats: int
) -> Runs:
    """`ours`: bytes of the cache read per second; `peer`: what the machine allows.

    Each repetition measures the ceilings anew. LookupError where they cannot be measured.
    """
    ours: list[float] = []
    limits: list[float] = []
    names: list[str] = []
    for _ in range(repeats):
        ceilings = measure_ceilings(threads)
        found = run_bench(bench, config, cell=cell, mode=mode, threads=threads)
        level = level_of(found["bytes"], threads=threads, caches=cache_bytes())
        per_byte = found["operations"] / found["bytes"]
        limit, name = lower_limit(ceilings, level, operations_per_byte=per_byte)
        ours.append(bytes_per_second(found))
        limits.append(limit)
        names.append(name)
    small = Cell(CACHED_CONTEXT, CACHED_BATCH, 1)
    cached = bytes_per_second(run_bench(bench, config, cell=small, mode=mode, threads=threads))
    note = (
        f"{found['bytes'] / 2**20:.1f} MiB in {level}, {found['isa']}, {per_byte:.1f} operations "
        f"per byte; {cached / 1e9:.3g} GB/s with the cache in L2"
    )
    return Runs(ours, limits, f"{mode}, {threads} threads", statistics.mode(names), note)
