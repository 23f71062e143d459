"""The H100 of the models that predict kernels: what the card has, and what it measured."""

from __future__ import annotations

SMS, CLOCK_GHZ = 132, 1.79  # the clock under the load of linear layers
COPY_GBPS = 3027.0  # of a copy, read and written
# Of an SM. A block has at most 227 KiB of shared memory, but an SM has 228.
REGISTERS, SHARED_BYTES, MOST_WARPS, MOST_BLOCKS = 65536, 228 * 1024, 64, 32
SYSTEM_SHARED_BYTES = 1024  # of each block, for the system
SCHEDULERS = 4
LAUNCH_CYCLES = 2000  # fitted to linear layers of one row (predict_linear.py)


def blocks_per_sm(*, registers: int, shared_bytes: int, warps: int) -> int:
    """Return how many blocks fit into an SM.

    Args:
        registers: of a thread.
        shared_bytes: of a block, without those of the system.
        warps: of a block.
    """
    per_warp = -(-registers // 8) * 8 * 32
    return min(
        REGISTERS // (per_warp * warps),
        SHARED_BYTES // (shared_bytes + SYSTEM_SHARED_BYTES),
        MOST_WARPS // warps,
        MOST_BLOCKS,
    )
