"""Predict the rate of prefill attention by products of warp groups from counts.

    python benchmarks/predict_prefill.py

prefill_wide.cuh is compiled for SM 90a and the loop over tiles counted. A block of two groups has
128 rows and processes whole tiles, also where positions are hidden. The model:

* A tile costs a block the larger of its tensor cycles and of its exponentials' cycles, because one
  group computes a softmax while the other one's products run, divided by OVERLAP.
* wgmma multiplies 64 x 16 x 2 values a cycle; an SM computes 16 exponentials a cycle.
* Every block takes BLOCK_CYCLES before its first and after its last tile.
* SMs end together: blocks are small beside a launch, and long ones begin first.
* The clock is the one at which cuBLAS would reach what was measured on an H100 if its products
  never waited. Power limits it, so that it is lower than the card's own.

No GPU has run this kernel, and no measurement has checked the model.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from h100 import SMS

CUBLAS_TFLOPS = 737.0  # 2,048 rows of 28,672 x 4,096 on an H100 (docs/gpu.md)
PRODUCTS_PER_CYCLE = 2048
EXPONENTIALS_PER_CYCLE = 16
CLOCK_GHZ = CUBLAS_TFLOPS * 1e3 / (2 * PRODUCTS_PER_CYCLE * SMS)
OVERLAP = 0.9  # assumed
# Assumed: the launch, queries and first keys from memory, a softmax that nothing hides, the last
# products with values, and the stores.
BLOCK_CYCLES = 5400
BLOCK_ROWS = 128


@dataclass(frozen=True)
class Kernel:
    """The counts of a compiled kernel."""

    keys: int  # of a tile
    instructions: int  # of a warp and an inner tile, without caps and masks


# ptxas of CUDA 13.0; every kernel has 168 registers at its launch and spills none.
KERNELS = {
    64: Kernel(128, 299),
    96: Kernel(128, 291),
    128: Kernel(128, 302),
    256: Kernel(64, 196),
}


@dataclass(frozen=True)
class Prompt:
    """The last tokens of a causal prompt."""

    head_dim: int
    new_tokens: int
    context: int
    q_heads: int
    group: int


def tile_cycles(head_dim: int) -> tuple[float, float, float]:
    """Return the cycles of a block's tile: tensor cores, exponentials, and issued instructions."""
    kernel = KERNELS[head_dim]
    products = 2 * BLOCK_ROWS * kernel.keys * head_dim
    weights = BLOCK_ROWS * kernel.keys
    issued = 2 * kernel.instructions  # a scheduler has one warp of each group
    return products / PRODUCTS_PER_CYCLE, weights / EXPONENTIALS_PER_CYCLE, issued


def predict_us(prompt: Prompt) -> float:
    """Return the predicted microseconds of a launch."""
    cycles = max(tile_cycles(prompt.head_dim)) / OVERLAP
    keys, rows = KERNELS[prompt.head_dim].keys, prompt.new_tokens * prompt.group
    total = 0.0
    for first in range(0, rows, BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, rows) - 1
        seen = prompt.context - prompt.new_tokens + last // prompt.group + 1
        total += -(-seen // keys) * cycles + BLOCK_CYCLES
    return total * (prompt.q_heads // prompt.group) / SMS / CLOCK_GHZ / 1e3


def tflops(prompt: Prompt, us: float) -> float:
    """Return the rate of the products that a causal prompt needs."""
    positions = prompt.new_tokens * (prompt.context - prompt.new_tokens / 2)
    return 4 * prompt.q_heads * prompt.head_dim * positions / us / 1e6


PROMPTS = (
    Prompt(128, 8192, 8192, 32, 4),
    Prompt(128, 2048, 8192, 32, 4),
    Prompt(128, 2048, 2048, 32, 4),
    Prompt(64, 8192, 8192, 64, 8),
    Prompt(96, 8192, 8192, 8, 1),
    Prompt(256, 8192, 8192, 16, 2),
)


def main() -> int:
    """Print the predictions."""
    print(f"clock {CLOCK_GHZ:.2f} GHz")
    for prompt in PROMPTS:
        tensor, exponentials, issued = tile_cycles(prompt.head_dim)
        us = predict_us(prompt)
        print(
            f"head_dim {prompt.head_dim:3}, {prompt.new_tokens:,} of {prompt.context:,}, "
            f"{prompt.q_heads:2} heads: a tile takes {tensor:.0f} cycles of tensor cores, "
            f"{exponentials:.0f} of exponentials, {issued:.0f} of issue; {us:.0f} us, "
            f"{tflops(prompt, us):.0f} TFLOP/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
