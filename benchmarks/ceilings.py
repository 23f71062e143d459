"""Which ceiling an op is held against: the level its bytes live in, the rate of its products."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lmdeploy._turbomind import CpuCeilings

Level = Literal["L2", "L3", "memory"]
# Weights in blocks meet activations of 16 bits, two int8 products for each value. Codes of these
# caches meet queries and softmax weights of 16 bits, in products at half the rate of int8.
INTEGER_CACHES = frozenset({"int8", "int4", "mxfp4", "nvfp4"})
WIDE_PRODUCTS = 2


def cache_bytes() -> dict[int, int]:
    """Level → bytes of the cache that the first core sees; levels that are not known are absent."""
    sizes: dict[int, int] = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level = int((folder / "level").read_text())
            kind, size = ((folder / name).read_text().strip() for name in ("type", "size"))
        except (OSError, ValueError):
            continue
        if kind != "Instruction" and size.endswith("K") and size[:-1].isdigit():
            sizes[level] = int(size[:-1]) * 1024
    return dict(sorted(sizes.items()))


def l3_in_reach(ceilings: CpuCeilings) -> int:
    """Bytes of the last-level caches behind the threads: one for each of them at most."""
    every = ceilings.l3_bytes
    one = min(cache_bytes().get(3, every), every)
    return min(every, one * ceilings.num_threads)


def nearest_level(num_bytes: float, *, l2: float, l3: float) -> Level:
    """The nearest level that holds a working set; sizes are those behind all threads."""
    if num_bytes <= l2:
        return "L2"
    return "L3" if num_bytes <= l3 else "memory"


def level_of(num_bytes: float, ceilings: CpuCeilings) -> Level:
    """The nearest level that holds a working set of all threads."""
    l2 = ceilings.l2_bytes * ceilings.num_threads
    return nearest_level(num_bytes, l2=l2, l3=l3_in_reach(ceilings))


def read_level(num_bytes: float, ceilings: CpuCeilings) -> tuple[Level, float]:
    """The level of a working set and its bandwidth in bytes per second; an L3 that was too small
    to be measured counts as memory.
    """
    level = level_of(num_bytes, ceilings)
    if level == "L3" and not ceilings.l3.bytes_per_s:
        level = "memory"
    found: float = getattr(ceilings, level.lower()).bytes_per_s
    return level, found


def cache_products(formats: Sequence[str], ceilings: CpuCeilings) -> tuple[str, float]:
    """What multiplies the values of a KV cache outside of tiles, operations per second."""
    if INTEGER_CACHES.issuperset(formats):
        return "int16", ceilings.int8_ops_per_s / WIDE_PRODUCTS
    return "fp32", ceilings.fp32_ops_per_s
