"""Decode attention of one layer beside what the machine allows.

Two limits on the cached bytes that attention can read per second: the read bandwidth of the level
in which the bytes of a call lie, and its multiplications and additions at the rate of the products
that the format needs (ceilings.py). Both are measured in the same run; the lower one counts. How
fast the same loop runs over a cache that lies in L2 is noted beside it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ceilings import cache_products, l3_in_reach, read_level
from cells import Cell
from targets import Runs

from lmdeploy import _turbomind

if TYPE_CHECKING:
    from lmdeploy._turbomind import CpuCeilings

CEILING_SECONDS = 1.5
CACHED_CONTEXT, CACHED_BATCH = 256, 4  # within the L2 of every thread, and work for all
LEVELS = ("memory", "l3", "l2")
KINDS = ("int8", "bf16", "fp32")
BENCH_TIMEOUT_S = 600


@dataclass(frozen=True)
class Limits:
    """Bytes of the cache per second: what `level` delivers, what `products` allow."""

    level: str
    read: float
    products: str
    multiply: float

    @property
    def lower(self) -> tuple[float, str]:
        """The limit that counts, and its name."""
        if self.multiply < self.read:
            return self.multiply, f"{self.products} products"
        return self.read, f"read bandwidth of {self.level}"


def ceilings_here(threads: int) -> CpuCeilings:
    """Measures them. LookupError where nothing can be measured."""
    measure = getattr(_turbomind, "measure_ceilings", None)
    if measure is None:
        raise LookupError("this build has no _turbomind.measure_ceilings")
    found: CpuCeilings = measure(_turbomind.make_cpu_device(threads), CEILING_SECONDS)
    return found


def measure_ceilings(threads: int) -> dict[str, Any]:
    """Bytes per second by level and what fits there, operations per second by kind; None: not on
    this machine.

    LookupError where nothing can be measured.
    """
    found = ceilings_here(threads)
    reads = {level: getattr(found, level).bytes_per_s or None for level in LEVELS}
    sizes = {"l2": found.l2_bytes * found.num_threads, "l3": l3_in_reach(found)}
    rates = {f"{kind}_ops_per_s": getattr(found, f"{kind}_ops_per_s") or None for kind in KINDS}
    return {"read_bytes_per_s": reads, "level_bytes": sizes, **rates}


def limits_of(found: Mapping[str, Any], ceilings: CpuCeilings, *, mode: str) -> Limits:
    """Of one run of the bench. LookupError where a ceiling is absent."""
    level, read = read_level(found["bytes"], ceilings)
    products, rate = cache_products([mode], ceilings)
    if not read or not rate:
        raise LookupError(f"measure_ceilings gave no read bandwidth of {level}, or no {products}")
    return Limits(level, read, products, rate / (found["operations"] / found["bytes"]))


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
    limits: list[Limits] = []
    for _ in range(repeats):
        ceilings = ceilings_here(threads)
        found = run_bench(bench, config, cell=cell, mode=mode, threads=threads)
        ours.append(bytes_per_second(found))
        limits.append(limits_of(found, ceilings, mode=mode))
    small = Cell(CACHED_CONTEXT, CACHED_BATCH, 1)
    cached = bytes_per_second(run_bench(bench, config, cell=small, mode=mode, threads=threads))
    read, multiply = (
        statistics.median(getattr(x, f) for x in limits) for f in ("read", "multiply")
    )
    note = (
        f"{found['bytes'] / 2**20:.1f} MiB in {limits[-1].level}, {found['isa']}, "
        f"{found['operations'] / found['bytes']:.1f} operations per byte; limits: read bandwidth "
        f"of {limits[-1].level} {read / 1e9:.3g} GB/s, {limits[-1].products} products "
        f"{multiply / 1e9:.3g} GB/s; {cached / 1e9:.3g} GB/s with the cache in L2"
    )
    return Runs(
        ours,
        [limit.lower[0] for limit in limits],
        f"{mode}, raw, {threads} threads",
        statistics.mode(limit.lower[1] for limit in limits),
        note,
    )
