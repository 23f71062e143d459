"""Predict the time of linear layers with few rows on a GPU from counts, without a GPU.

    pip install nvidia-cuda-nvdisasm
    python benchmarks/predict_linear.py [--nvdisasm PATH]

It compiles StreamKernel for SM 90, counts registers and the instructions of the loop over units in
SASS, and adds up a small model of an H100:

* A block is resident as long as registers, shared memory and warps allow. Blocks beyond the first
  wave begin when others end, and run almost alone.
* A warp computes a unit every LATENCY / (units in flight) cycles, plus the cycles in which the
  schedulers issue the instructions of all resident warps.
* The SM receives at most its share of the bandwidth of a copy: COPY_SHARE of it, or ROW_SHARE for
  rows of which a unit has 64 bytes.

The first table compares the model with what commit d9c15d8 measured on an H100, whose kernels had
one unit in flight. The second table predicts the kernels of this tree. Nothing here was measured on
a GPU after d9c15d8.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compiled_kernel import Code, compile_kernel, nvdisasm_option
from h100 import CLOCK_GHZ, COPY_GBPS, LAUNCH_CYCLES, SCHEDULERS, SMS, blocks_per_sm

LATENCY, LATENCY_ALONE = 1130, 1060  # fitted to the measurements below, as LAUNCH_CYCLES
COPY_SHARE, ROW_SHARE = 0.93, 0.64
ISSUE_SHARE = 0.85  # of the cycles in which a scheduler can issue, if nothing else limits
MAX_SLICES, WANTED_WARPS, MIN_UNITS = 8, 6144, 5  # as linear_choice.cc
WEIGHT_FORMATS = {
    **{"q4_0": "kQ4_0", "q8_0": "kQ8_0", "mxfp4": "kMxfp4", "bf16": "kBF16"},
    **{"q4_1": "kQ4_1", "nvfp4": "kNvfp4", "q4_k": "kQ4_K", "q5_k": "kQ5_K", "q6_k": "kQ6_K"},
}
# Bytes and columns of a unit of 16 outputs, with its share of the factors of a super-block.
UNITS = {
    **{"q4_0": (576, 64), "q8_0": (576, 32), "mxfp4": (544, 64), "bf16": (1024, 32)},
    **{"q4_1": (640, 64), "nvfp4": (576, 64)},
    **{"q4_k": (592, 64), "q5_k": (720, 64), "q6_k": (840, 64)},
}
TILES = {"q4_k": 2, "q5_k": 2, "q6_k": 2}  # of a block (linear_choice.cc), if not 1
STAGED = {"q4_k": 640, "q5_k": 768, "q6_k": 864}  # bytes in a ring, if not those of a unit


@dataclass(frozen=True)
class Counts:
    """The counts of a compiled kernel. `shared` is that of a warp."""

    registers: int
    instructions: int  # of a unit of each tile
    in_flight: int  # units
    shared: int


@dataclass(frozen=True)
class Layer:
    """A matrix, and its measured microseconds with one row at d9c15d8, or 0."""

    kind: str
    outputs: int
    cols: int
    measured: float = 0

    @property
    def tiles(self) -> int:
        """Return the number of tiles of 16 outputs."""
        return -(-self.outputs // 16)

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""
        return -(-self.tiles // TILES.get(self.kind, 1))

    @property
    def units(self) -> int:
        """Return the units of a tile."""
        return -(-self.cols // UNITS[self.kind][1])

    @property
    def slices(self) -> int:
        """Return the warps of a block, as NumSlices does."""
        most = min(MAX_SLICES, WANTED_WARPS // self.tiles, self.units // MIN_UNITS)
        return 1 << (max(most, 1).bit_length() - 1)

    @property
    def copy_us(self) -> float:
        """Return the time in which a copy would read the weights."""
        return self.tiles * self.units * UNITS[self.kind][0] / COPY_GBPS / 1e3


LAYERS = (
    Layer("q4_0", 28672, 4096, 46.25),
    Layer("mxfp4", 28672, 4096, 32.49),
    Layer("q8_0", 28672, 4096, 54.34),
    Layer("bf16", 28672, 4096, 136.7),
    Layer("q4_0", 4096, 4096, 8.92),
    Layer("bf16", 4096, 4096, 17.45),
    *(Layer(kind, 28672, 4096) for kind in ("q4_1", "nvfp4", "q4_k", "q5_k", "q6_k")),
)
# The kernels of d9c15d8: registers by ptxas, and instructions of a unit counted in their SASS. ncu
# reported 74 and 80 registers for q4_0 and bf16 as well. All loads share a scoreboard.
OLD = {
    "q4_0": Counts(74, 100, 1, 512),
    "mxfp4": Counts(66, 117, 1, 512),
    "q8_0": Counts(64, 64, 1, 512),
    "bf16": Counts(80, 34, 1, 512),
}


def resident_blocks(layer: Layer, counts: Counts) -> int:
    """Return how many blocks of a layer fit into an SM."""
    warps = layer.slices
    shared = counts.shared * warps
    return blocks_per_sm(registers=counts.registers, shared_bytes=shared, warps=warps)


def wave_cycles(layer: Layer, counts: Counts, *, blocks: float, latency: int) -> float:
    """Return the cycles of a wave with `blocks` blocks on each SM."""
    unit_bytes = UNITS[layer.kind][0] * TILES.get(layer.kind, 1)
    warps = blocks * layer.slices
    units = layer.units / layer.slices
    issue = warps / SCHEDULERS * counts.instructions
    if counts.in_flight == 1:
        by_latency = units * (latency + issue)
    else:
        by_latency = max(units * issue / ISSUE_SHARE, units * latency / counts.in_flight) + latency
    share = ROW_SHARE if layer.kind == "bf16" else COPY_SHARE
    by_bytes = warps * units * unit_bytes / (COPY_GBPS / SMS / CLOCK_GHZ * share)
    return max(by_latency, by_bytes + (latency if counts.in_flight > 1 else 0))


def predict(layer: Layer, counts: Counts) -> float:
    """Return the microseconds of a layer with one row."""
    per_sm = layer.blocks / SMS
    resident = resident_blocks(layer, counts)
    full, rest = divmod(per_sm, resident)
    cycles = full * wave_cycles(layer, counts, blocks=resident, latency=LATENCY)
    if rest:
        alone = LATENCY if full == 0 else LATENCY_ALONE
        cycles += wave_cycles(layer, counts, blocks=rest, latency=alone)
    return (cycles + LAUNCH_CYCLES) / CLOCK_GHZ / 1e3


def loop_instructions(sass: str) -> int:
    """Return the instructions of the innermost loop that waits for copies."""
    return min(end + 1 - begin for begin, end in Code.of(sass).copy_loops())


def stages_of(kind: str) -> int:
    """Return the stages of a warp's ring, as StreamConfig."""
    return min(max(4608 // stage_bytes(kind), 3), 8)


def stage_bytes(kind: str) -> int:
    """Return the bytes of a stage."""
    return TILES.get(kind, 1) * STAGED.get(kind, UNITS[kind][0])


def count(kind: str, *, nvdisasm: str, folder: Path) -> Counts:
    """Compile the kernel of a format for SM 90 and count."""
    name, tiles = WEIGHT_FORMATS[kind], TILES.get(kind, 1)
    source = (
        '#include "turbomind/backend/cuda/linear/linear_stream.cuh"\n'
        "using namespace turbomind;\nusing namespace turbomind::cuda;\n"
        f"using C = StreamConfig<MatrixFormat::{name}, {tiles}, 1>;\n"
        f"static_assert(C::kStages == {stages_of(kind)});\n"
        "template __global__ void turbomind::cuda::StreamKernel<C>(StreamParams);\n"
    )
    found = compile_kernel(source, kernel="StreamKernel", nvdisasm=nvdisasm, folder=folder)
    stages = stages_of(kind)
    instructions = loop_instructions(found.sass)
    return Counts(found.registers, instructions, stages - 1, stages * stage_bytes(kind))


def print_table(title: str, counts: dict[str, Counts], *, measured: bool) -> None:
    """Print the predictions of all layers."""
    print(f"\n{title}\n")
    last = "measured | error" if measured else "of a copy | at d9c15d8"
    print(f"| layer | registers | blocks an SM | waves | in flight an SM | predicted | {last} |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for layer in LAYERS:
        if layer.kind not in counts:
            continue
        one = counts[layer.kind]
        resident = resident_blocks(layer, one)
        blocks = min(resident, layer.blocks / SMS)
        flight = blocks * layer.slices * one.in_flight * stage_bytes(layer.kind) / 1024
        us = predict(layer, one)
        end = (
            f"{layer.measured:.1f} | {us / layer.measured - 1:+.0%}"
            if measured
            else f"{layer.copy_us / us:.0%} | {f'{layer.measured:.1f}' if layer.measured else '–'}"
        )
        print(
            f"| {layer.kind}, {layer.outputs:,} x {layer.cols:,} | {one.registers} | {resident} | "
            f"{layer.blocks / SMS / resident:.2f} | {flight:.0f} KiB | {us:.1f} us | {end} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    nvdisasm = nvdisasm_option(__doc__, arguments)
    print_table("Kernels of d9c15d8, microseconds with one row", OLD, measured=True)
    if nvdisasm is None:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        new = {kind: count(kind, nvdisasm=nvdisasm, folder=Path(folder)) for kind in WEIGHT_FORMATS}
    print_table("Kernels of this tree, predicted", new, measured=False)
    for kind, one in new.items():
        instructions = one.instructions / TILES.get(kind, 1)
        print(f"{kind}: {instructions:.0f} instructions a unit, {one.in_flight} units in flight")
    return 0


if __name__ == "__main__":
    sys.exit(main())
