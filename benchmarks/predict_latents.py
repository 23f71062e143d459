"""Predict the time of attention over latents on an H100 from counts.

    python benchmarks/predict_latents.py

No GPU has run LatentKernel (backend/cuda/latent). The model has the constants of predict_linear.py
and predict_rows.py. What it has in addition:

* A block computes tiles of TOKENS tokens in four phases with a barrier after each. A phase takes
  the longest of what its instructions, its accesses to shared memory and its products take, and
  PHASE_CYCLES until the last warp arrives.
* Two blocks of 16 rows share an SM. They take turns at everything that a phase is bound by, and
  hide each other's barriers.
* The SM with the most tiles ends last. A block takes BLOCK_CYCLES to begin and end, and the rows
  are read at COPY_SHARE of the rate of a copy.
* Partial results are merged by a launch of its own.

The instructions are those of a warp for a tile, counted with nvdisasm in code for SM 90a: `expand`
for eight values of a thread by format, the others for LatentKernel of rank 512. Of the copies of
the next tile, those count that NVFP4 executes, on average over the warps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from h100 import CLOCK_GHZ, COPY_GBPS, LAUNCH_CYCLES, SCHEDULERS, SMS
from predict_linear import COPY_SHARE, ISSUE_SHARE
from predict_rows import BLOCK_CYCLES, MMA_CYCLES

TOKENS, WARPS = 32, 8
RANK, ROTARY = 512, 64
PHASE_CYCLES = 80  # assumed: a barrier, and the latency of the first and last access
WAVEFRONT_BYTES = 128  # of shared memory in a cycle
MERGE_CYCLES = 3000  # assumed: a launch whose rows are latency
EXPAND = {"none": 12, "int8": 50, "fp8": 14, "int4": 55, "mxfp4": 30, "nvfp4": 30}
EXPAND_ROTARY = {"none": 12, "other": 45}  # from BF16 to FP16 beside a quantized latent
ROW_BYTES = {"none": 1152, "int8": 644, "fp8": 640, "int4": 388, "mxfp4": 416, "nvfp4": 416}
# Wavefronts of a warp's load of its raw values: rows are a multiple of 128 bytes apart.
LOAD_CONFLICTS = {"none": 1, "int8": 2, "fp8": 2, "int4": 4, "mxfp4": 2, "nvfp4": 2}


@dataclass(frozen=True)
class Phase:
    """Work of a warp for a tile. A load of matrices takes four wavefronts."""

    instructions: float
    matrices: int = 0
    wavefronts: float = 0
    products: int = 0

    def cycles(self) -> float:
        """Return the cycles of a block's warps."""
        issue = self.instructions * WARPS / SCHEDULERS / ISSUE_SHARE
        shared = (4 * self.matrices + self.wavefronts) * WARPS
        tensor = self.products * WARPS / SCHEDULERS * MMA_CYCLES
        return max(issue, shared, tensor)


@dataclass(frozen=True)
class Kernel:
    """LatentKernel with so many rows per block."""

    rows: int
    blocks_per_sm: int
    scores: Phase
    weights: Phase
    sums: Phase


# Copies of the next tile are part of the scores: 90 instructions.
KERNELS = (
    Kernel(16, 2, Phase(200, 15, 8, 20), Phase(71, 0, 18), Phase(82, 10, 0, 16)),
    Kernel(64, 1, Phase(370, 36, 32, 72), Phase(138, 0, 34), Phase(240, 20, 0, 64)),
)


def expand_phase(kind: str) -> Phase:
    """Return the phase in which a tile is expanded to 16 bits."""
    rotary = EXPAND_ROTARY["none" if kind == "none" else "other"]
    runs = TOKENS * RANK // 8 / (32 * WARPS)
    loads = runs * LOAD_CONFLICTS[kind] * (4 if kind == "none" else 1)
    stores = TOKENS * (RANK + ROTARY) * 2 / WAVEFRONT_BYTES / WARPS
    copies = TOKENS * ROW_BYTES[kind] / WAVEFRONT_BYTES / WARPS
    return Phase(40 + runs * EXPAND[kind] + rotary, 0, loads + stores + copies)


def tile_cycles(kernel: Kernel, kind: str) -> float:
    """Return the cycles that an SM takes for a tile of one block."""
    phases = (expand_phase(kind), kernel.scores, kernel.weights, kernel.sums)
    busy = sum(phase.cycles() for phase in phases)
    alone = busy + PHASE_CYCLES * len(phases)
    return max(busy, alone / kernel.blocks_per_sm)


def kernel_of(heads: int) -> Kernel:
    """Return the kernel of a decode step, as ChooseRows chooses it."""
    return KERNELS[0] if heads <= KERNELS[0].rows else KERNELS[1]


def predict_us(kind: str, *, heads: int, batch: int, context: int) -> float:
    """Predict the microseconds of a layer of a decode step."""
    kernel = kernel_of(heads)
    tiles = -(-heads // kernel.rows) * batch * -(-context // TOKENS)
    slots = SMS * kernel.blocks_per_sm
    per_block = math.ceil(tiles / slots)
    per_sm = per_block * kernel.blocks_per_sm
    cycles = per_sm * tile_cycles(kernel, kind) + BLOCK_CYCLES * kernel.blocks_per_sm
    read_us = batch * context * ROW_BYTES[kind] / COPY_GBPS / COPY_SHARE / 1e3
    us = max(cycles / CLOCK_GHZ / 1e3, read_us)
    return us + (2 * LAUNCH_CYCLES + MERGE_CYCLES) / CLOCK_GHZ / 1e3


def table() -> list[str]:
    """Return the lines of the table in NOTES.md."""
    kinds = tuple(EXPAND)
    lines = ["| heads | sequences | " + " | ".join(f"`{kind}`" for kind in kinds) + " |"]
    lines.append("| ---: " * (2 + len(kinds)) + "|")
    for heads in (16, 128):
        for batch in (1, 32):
            cells = [
                f"{predict_us(kind, heads=heads, batch=batch, context=8192):,.0f}" for kind in kinds
            ]
            lines.append(f"| {heads} | {batch} × 8,192 | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Print the cycles of a tile and the table."""
    for kernel in KERNELS:
        phases = {"scores": kernel.scores, "weights": kernel.weights, "sums": kernel.sums}
        parts = ", ".join(f"{name} {phase.cycles():.0f}" for name, phase in phases.items())
        expands = ", ".join(f"{kind} {expand_phase(kind).cycles():.0f}" for kind in EXPAND)
        print(f"{kernel.rows} rows, cycles of a tile: {parts}; expand: {expands}")
    print("\n".join(table()))


if __name__ == "__main__":
    main()
