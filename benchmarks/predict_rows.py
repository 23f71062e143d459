"""Predict the time of linear layers with many rows, and of experts, on a GPU from counts.

    pip install nvidia-cuda-nvdisasm
    python benchmarks/predict_rows.py [--nvdisasm PATH]

The model is that of predict_linear.py, with its constants. TileKernel (linear_tile.cuh) and
StreamKernel with two tiles of outputs are compiled for SM 90 and their loops counted. What the
model has in addition:

* A wave lasts as long as its SM with the most blocks. Waves of blocks follow each other, and every
  block takes BLOCK_CYCLES to find its rows and to add and store its sums.
* A layer takes at least the time in which a copy would read its weights once.
* Weights and rows of x pass from L2 to the SMs at L2_BYTES a cycle. A warp of StreamKernel reads
  the rows in FP32, a block of TileKernel in BF16.
* The tensor cores take MMA_CYCLES for a product of 16 x 8 x 16: mma.sync is assumed to reach 62 %
  of the rate of wgmma. That limits none of the products below.
* Rows of x are rounded by a launch of their own, and slices in blocks of their own are added by
  one.
* linear_wide.cuh, with warp groups, is not in the model.
* The rows of an expert are binomial: every token goes to TOP of EXPERTS.
* The blocks of WideKernel (linear_wide.cuh) fill the GPU and compute whole items while there are
  enough. They share the last ones, whose sums pass through L2. wgmma takes half a cycle for a row
  of 64 x 16 weights, and its products overlap the other instructions.

The first table compares the model with what d9c15d8 measured on an H100, of which its own counts
are given here. The second predicts the kernels of this tree, which no GPU has run. The third is for
those of warp groups, whose model no measurement has checked.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compiled_kernel import Code, compile_kernel, nvdisasm_option
from h100 import CLOCK_GHZ, COPY_GBPS, LAUNCH_CYCLES, SCHEDULERS, SMS, blocks_per_sm
from predict_linear import (
    COPY_SHARE,
    ISSUE_SHARE,
    LATENCY,
    MAX_SLICES,
    MIN_UNITS,
    ROW_SHARE,
    UNITS,
    WANTED_WARPS,
    WEIGHT_FORMATS,
)

BLOCK_CYCLES = 700  # assumed: about 200 instructions of a warp, a barrier and the stores
MMA_CYCLES = 6.5
EXPERTS, TOP = 32, 4
# What the profiler adds to an op: BF16, 28,672 x 4,096 with 32 rows takes 155.7 us with it, and
# 148.3 in a graph.
PROFILE_US = 7.4
L2_BYTES = 23.7  # that an SM reads from L2 in a cycle: assumed, 5.6 TB/s for all SMs
TILE_WARPS, TILE_TILES = 4, 2


@dataclass(frozen=True)
class Kernel:
    """The counts of a compiled kernel. Instructions and products are those of a unit of a warp."""

    is_tile: bool
    rows: int  # of a block
    registers: int
    instructions: int
    products: int
    in_flight: int  # units
    shared: int  # of a warp of StreamKernel, or of a block of TileKernel

    @property
    def tiles(self) -> int:
        """Return the tiles of 16 outputs of a warp."""
        return TILE_TILES

    @property
    def block_outputs(self) -> int:
        """Return the outputs of a block."""
        return 16 * self.tiles * (TILE_WARPS if self.is_tile else 1)


@dataclass(frozen=True)
class Work:
    """A product of some rows, or of the rows that `rows` tokens send to experts."""

    kind: str
    outputs: int
    cols: int
    rows: int
    measured: float = 0.0  # microseconds on an H100 at d9c15d8
    experts: bool = False
    is_profiled: bool = False  # measured with the profiler

    @property
    def measured_us(self) -> float:
        """Return the measured time without the profiler."""
        return self.measured - (PROFILE_US if self.is_profiled else 0)

    @property
    def units(self) -> int:
        """Return the units of a tile of 16 outputs."""
        return -(-self.cols // UNITS[self.kind][1])

    @property
    def slices(self) -> int:
        """Return the slices of the columns, as NumSlices does."""
        most = min(MAX_SLICES, WANTED_WARPS // -(-self.outputs // 16), self.units // MIN_UNITS)
        return 1 << (max(most, 1).bit_length() - 1)

    def row_blocks(self, rows: int) -> float:
        """Return how many blocks of up to `rows` rows there are, for experts on average."""
        if not self.experts:
            return -(-self.rows // rows)
        share = TOP / EXPERTS
        return EXPERTS * sum(
            math.comb(self.rows, n) * share**n * (1 - share) ** (self.rows - n) * -(-n // rows)
            for n in range(1, self.rows + 1)
        )

    @property
    def copy_us(self) -> float:
        """Return the time in which a copy would read the weights once."""
        matrices = self.row_blocks(self.rows) if self.experts else 1
        num_bytes = matrices * -(-self.outputs // 16) * self.units * UNITS[self.kind][0]
        return num_bytes / COPY_GBPS / 1e3


@dataclass(frozen=True)
class Prediction:
    """The counts and the time of one product by the model."""

    blocks: float
    resident: int
    waves: float
    idle: float  # of the places of the last wave
    in_flight_kib: float  # weights that an SM waits for
    us: float


def predict(work: Work, kernel: Kernel) -> Prediction:
    """Predict the time of a product."""
    slices, unit_bytes = work.slices, UNITS[work.kind][0]
    row_blocks = work.row_blocks(kernel.rows)
    blocks: float = row_blocks * -(-work.outputs // kernel.block_outputs)
    in_parts = kernel.is_tile and slices > 1 and blocks < SMS
    blocks *= slices if in_parts else 1
    warps = TILE_WARPS if kernel.is_tile else slices
    units = work.units / (slices if in_parts or not kernel.is_tile else 1)
    has_totals = kernel.is_tile and slices > 1 and not in_parts
    totals = kernel.rows * kernel.block_outputs * 4 if has_totals else 0
    shared = kernel.shared * (1 if kernel.is_tile else warps) + totals
    resident = blocks_per_sm(registers=kernel.registers, shared_bytes=shared, warps=warps)

    filled = work.rows * TOP / row_blocks if work.experts else min(kernel.rows, work.rows)
    x_bytes = filled * UNITS[work.kind][1] * (2 / TILE_WARPS if kernel.is_tile else 4)

    def wave(blocks_of_sm: int) -> float:
        per_scheduler = blocks_of_sm * warps / SCHEDULERS
        issue = per_scheduler * kernel.instructions
        tensor = per_scheduler * kernel.products * MMA_CYCLES
        by_l2 = blocks_of_sm * warps * (kernel.tiles * unit_bytes + x_bytes) / L2_BYTES
        if kernel.in_flight == 1:
            cycles = units * max(LATENCY + issue, tensor, by_l2)
        else:
            by_latency = LATENCY / kernel.in_flight
            cycles = units * max(issue / ISSUE_SHARE, tensor, by_l2, by_latency) + LATENCY
        return cycles + BLOCK_CYCLES

    waves = blocks / (SMS * resident)
    full, rest = divmod(blocks / SMS, resident)
    cycles = full * wave(resident) + (wave(math.ceil(rest)) if rest else 0)
    share = ROW_SHARE if work.kind == "bf16" else COPY_SHARE
    us = max(cycles / CLOCK_GHZ / 1e3, work.copy_us / share) + LAUNCH_CYCLES / CLOCK_GHZ / 1e3
    if kernel.is_tile:
        products = work.rows * (TOP if work.experts else 1)
        us += LAUNCH_CYCLES / CLOCK_GHZ / 1e3 + 6 * products * work.cols / COPY_GBPS / 1e3
    if in_parts:
        us += LAUNCH_CYCLES / CLOCK_GHZ / 1e3
    flight = min(resident, blocks / SMS) * warps * kernel.tiles * kernel.in_flight * unit_bytes
    return Prediction(blocks, resident, waves, math.ceil(waves) - waves, flight / 1024, us)


@dataclass(frozen=True)
class Wide:
    """The counts of a compiled WideKernel. Instructions and products are a warp's, of a step."""

    rows: int  # of a block
    registers: int
    instructions: int
    products: int
    resident: int  # blocks of an SM
    outputs: int  # of a block
    step_bytes: int  # of weights
    ahead: int  # steps of copies


WIDE_WARPS, WIDE_COLS = 8, 64
MIN_BUSY = 5 / 6  # of the blocks for the last items, unless they share them: WideSchedule


def predict_wide(work: Work, kernel: Wide) -> Prediction:
    """Predict the time of a product by warp groups."""
    row_tiles = work.row_blocks(kernel.rows)
    items = row_tiles * -(-work.outputs // kernel.outputs)
    steps = -(-work.cols // WIDE_COLS)
    grid = SMS * kernel.resident
    filled = work.rows * TOP / row_tiles if work.experts else min(kernel.rows, work.rows)
    step_bytes = kernel.step_bytes + filled * WIDE_COLS * 2

    def step(blocks: float) -> float:
        """Return the cycles of a step with so many blocks on each SM."""
        issue = blocks * WIDE_WARPS * kernel.instructions / SCHEDULERS / ISSUE_SHARE
        tensor = blocks * WIDE_WARPS / SCHEDULERS * kernel.products * kernel.rows / 2
        return max(issue, tensor, blocks * step_bytes / L2_BYTES, LATENCY / kernel.ahead)

    full, rest = divmod(items, grid)
    cycles = full * (steps * step(kernel.resident) + LATENCY + BLOCK_CYCLES)
    if rest >= MIN_BUSY * grid:
        cycles += steps * step(math.ceil(rest / SMS)) + LATENCY + BLOCK_CYCLES
    elif rest:
        parts = 2 * kernel.resident * kernel.outputs * kernel.rows * 4 / L2_BYTES
        cycles += rest / grid * steps * step(kernel.resident) + parts + LATENCY + BLOCK_CYCLES
    us = max(cycles / CLOCK_GHZ / 1e3, work.copy_us / COPY_SHARE)
    x_us = 6 * work.rows * (TOP if work.experts else 1) * work.cols / COPY_GBPS / 1e3
    us += 2 * LAUNCH_CYCLES / CLOCK_GHZ / 1e3 + x_us
    idle = 1 - rest / grid if rest >= MIN_BUSY * grid else 0.0
    flight = kernel.resident * kernel.ahead * kernel.step_bytes / 1024
    return Prediction(items, kernel.resident, items / grid, idle, flight, us)


def wide_rows(work: Work) -> int:
    """Return the rows of a tile, as RunWide chooses them."""
    rows = -(-work.rows * TOP // EXPERTS) if work.experts else work.rows
    return 32 if rows <= 32 else 64 if rows <= 64 else 128


def count_wide(kind: str, *, rows: int, nvdisasm: str, folder: Path) -> Wide:
    """Compile a WideKernel of this tree and count."""
    sizes, registers, loop = count_loop(
        "linear_wide",
        config=f"WideConfig<MatrixFormat::{WEIGHT_FORMATS[kind]}, {rows}>",
        kernel="Wide",
        sizes="C::kBlocksPerSm, C::kOutputs, C::kStepBytes - C::kStageBytes, C::kAhead",
        nvdisasm=nvdisasm,
        folder=folder,
    )
    products = sum("HGMMA" in line for line in loop)
    resident, outputs, step_bytes, ahead = sizes
    return Wide(rows, registers, len(loop), products, resident, outputs, step_bytes, ahead)


GATE_UP, DOWN = (5760, 2880), (2880, 2880)  # of GPT-OSS-20B
# Measured at d9c15d8: bench_gpu.py and, with is_profiled, bench_engine.py --profile.
WORKS = (
    Work("q4_0", 28672, 4096, 32, 60.2),
    Work("q4_0", 28672, 4096, 128, 174.8),
    Work("bf16", 28672, 4096, 32, 148.3),
    Work("bf16", 6144, 4096, 32, 45.5, is_profiled=True),
    Work("bf16", 4096, 4096, 32, 37.3, is_profiled=True),
    Work("bf16", 4096, 14336, 32, 85.7, is_profiled=True),
    Work("mxfp4", *GATE_UP, 32, 181.4, experts=True, is_profiled=True),
    Work("mxfp4", *DOWN, 32, 98.7, experts=True, is_profiled=True),
    Work("mxfp4", *GATE_UP, 128, 307.7, experts=True, is_profiled=True),
    Work("mxfp4", *DOWN, 128, 165.3, experts=True, is_profiled=True),
)
PREDICTED = (
    *(Work("q4_0", 28672, 4096, rows) for rows in (32, 64, 128)),
    *(Work("mxfp4", 28672, 4096, rows) for rows in (32, 64, 128)),
    *(Work("bf16", 28672, 4096, rows) for rows in (32, 64, 128)),
    *(Work("mxfp4", *shape, rows, experts=True) for rows in (32, 128) for shape in (GATE_UP, DOWN)),
)
Form = tuple[bool, str, int]  # is_tile, kind, tiles of 8 rows


def form_of(work: Work) -> Form:
    """Return TileKernel as RunTile chooses it, or StreamKernel for experts.

    The rows of experts here are few: StreamKernel computes 16 at a time.
    """
    if work.experts:
        return False, work.kind, 2
    return True, work.kind, 8 if work.rows > 32 else 4


# Compiled from d9c15d8: registers by ptxas, instructions and products of a unit in SASS without the
# sums of slices, which a unit in 16 or more adds. Loads of weights share a scoreboard.
OLD: dict[Form, Kernel] = {
    (True, "q4_0", 4): Kernel(True, 32, 185, 310, 32, 1, 16384),
    (True, "q4_0", 8): Kernel(True, 64, 244, 463, 64, 1, 32768),
    (True, "bf16", 4): Kernel(True, 32, 132, 128, 16, 1, 8192),
    (False, "mxfp4", 2): Kernel(False, 16, 107, 261, 16, 1, 2048),
}


def loop_of_copies(sass: str) -> list[str]:
    """Return the instructions of the loop that waits for copies, without the sums of slices."""
    code = Code.of(sass)
    lines = code.lines
    begin, end = min(code.copy_loops(), key=lambda loop: loop[1] - loop[0])
    dropped: set[int] = set()
    for i in range(begin, end):
        after = code.target(i)
        if after is not None and i < after <= end + 1:
            skipped = lines[i + 1 : after]
            # Sums go to shared memory, and no product is skipped.
            stores = any(re.search(r"\bSTS\b", x) for x in skipped)
            if stores and not any("HMMA" in x for x in skipped):
                dropped.update(range(i + 1, after))
    return [lines[i] for i in range(begin, end + 1) if i not in dropped]


def count_loop(
    header: str, *, config: str, kernel: str, sizes: str, nvdisasm: str, folder: Path
) -> tuple[tuple[int, ...], int, list[str]]:
    """Compile a kernel of this tree for SM 90.

    Args:
        header: the file in backend/cuda/linear.
        config: the type of the kernel's argument, `C`.
        kernel: the name, without "Kernel".
        sizes: integer expressions of `C`.
        nvdisasm: the program.
        folder: an empty folder.

    Returns:
        the sizes, the registers of a thread, and the loop that waits for copies.
    """
    source = (
        f'#include "turbomind/backend/cuda/linear/{header}.cuh"\n'
        "using namespace turbomind;\nusing namespace turbomind::cuda;\n"
        f"using C = {config};\n"
        f"template __global__ void turbomind::cuda::{kernel}Kernel<C>({kernel}Params);\n"
        f"__device__ int sizes[] = {{{sizes}}};\n"
    )
    found = compile_kernel(source, kernel=f"{kernel}Kernel", nvdisasm=nvdisasm, folder=folder)
    return found.sizes, found.registers, loop_of_copies(found.sass)


def count(form: Form, *, nvdisasm: str, folder: Path) -> Kernel:
    """Compile a TileKernel or a StreamKernel of this tree and count."""
    is_tile, kind, row_tiles = form
    sizes_of_block = str(row_tiles) if is_tile else f"{TILE_TILES}, {row_tiles}"
    name = "Tile" if is_tile else "Stream"
    shared = "SharedBytes(false)" if is_tile else "SharedBytes(1)"
    sizes, registers, loop = count_loop(
        "linear_tile" if is_tile else "linear_stream",
        config=f"{name}Config<MatrixFormat::{WEIGHT_FORMATS[kind]}, {sizes_of_block}>",
        kernel=name,
        sizes=f"C::{shared}, C::kStages, C::kRows, C::kTiles",
        nvdisasm=nvdisasm,
        folder=folder,
    )
    if sizes[3] != TILE_TILES:
        raise ValueError(f"the kernel has {sizes[3]} tiles")
    products = sum("HMMA" in line for line in loop)
    return Kernel(is_tile, sizes[2], registers, len(loop), products, sizes[1] - 1, sizes[0])


@dataclass(frozen=True)
class Row:
    """A line of a table. `instructions` are those of a lane for a weight."""

    work: Work
    registers: int
    instructions: float
    found: Prediction


def row_of(work: Work, kernel: Kernel) -> Row:
    """Predict a product by TileKernel or StreamKernel."""
    weights = 16 * kernel.tiles * UNITS[work.kind][1]
    instructions = kernel.instructions * 32 / weights
    return Row(work, kernel.registers, instructions, predict(work, kernel))


def wide_row_of(work: Work, kernel: Wide) -> Row:
    """Predict a product by WideKernel."""
    instructions = kernel.instructions * 32 * WIDE_WARPS / (kernel.outputs * WIDE_COLS)
    return Row(work, kernel.registers, instructions, predict_wide(work, kernel))


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print the counts and predictions of some products."""
    measured = bool(rows[0].work.measured)
    last = "measured | error" if measured else "of a copy"
    print(f"\n{title}\n")
    print(
        "| product | rows | registers | instructions a weight | blocks an SM | waves | idle in the "
        f"last | in flight an SM | predicted | {last} |"
    )
    print("| --- |" + " ---: |" * (10 if measured else 9))
    for row in rows:
        work, found = row.work, row.found
        name = "32 experts of " if work.experts else ""
        end = f"{work.copy_us / found.us * 100:.0f} %"
        if measured:
            end = f"{work.measured_us:.1f} | {(found.us / work.measured_us - 1) * 100:+.0f} %"
        print(
            f"| {name}{work.kind}, {work.outputs:,} x {work.cols:,} | {work.rows} | "
            f"{row.registers} | {row.instructions:.1f} | {found.resident} | "
            f"{found.waves:.2f} | {found.idle * 100:.0f} % | {found.in_flight_kib:.0f} KiB | "
            f"{found.us:.1f} | {end} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    nvdisasm = nvdisasm_option(__doc__, arguments)
    old = [row_of(work, OLD[form_of(work)]) for work in WORKS]
    print_table("Kernels of d9c15d8, microseconds", old)
    if nvdisasm is None:
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        new = {
            form: count(form, nvdisasm=nvdisasm, folder=folder)
            for form in dict.fromkeys(map(form_of, PREDICTED))
        }
        sizes = dict.fromkeys((work.kind, wide_rows(work)) for work in PREDICTED)
        wide = {
            size: count_wide(size[0], rows=size[1], nvdisasm=nvdisasm, folder=folder)
            for size in sizes
        }
    rows = [row_of(work, new[form_of(work)]) for work in PREDICTED]
    print_table("Kernels of this tree, predicted", rows)
    rows = [wide_row_of(work, wide[work.kind, wide_rows(work)]) for work in PREDICTED]
    print_table("Warp groups, predicted", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
