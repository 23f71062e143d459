"""Predict the time of decode attention on an H100 from counts, without a GPU.

    pip install nvidia-cuda-nvdisasm
    python benchmarks/predict_decode.py [--nvdisasm PATH]

The plan (decode_plan.cc) is computed as the host computes it, and its blocks are run by a simulated
GPU: they begin in the plan's order, as many at once as fit, and those that run share the bandwidth.
A block is idle for `item_cycles`, in which it begins, fills its ring and merges its warps, and for
`warp_cycles` for each instruction of its last tile. The tile of a warp takes the norm of order
SHARPNESS of

* the bytes of all running blocks at `read_share` of the rate of a copy,
* `warp_cycles` for each instruction of the warp,
* the instructions of all warps of a scheduler at ISSUE_SHARE of its rate.

Latency of memory has no term of its own: its fitted value was zero. A launch takes `fixed_us` more.
The kernel that combines the results reads and writes them at the rate of a copy.

The four constants and SHARPNESS are fitted to the rows that commit d9c15d8 measured on an H100
(results/gpu_nvidia_h100_80gb_hbm3.jsonl). The error of each shape is also printed for constants
that were fitted without any row of that shape. No GPU has run the kernels of this tree.
"""

from __future__ import annotations

import heapq
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

from compiled_kernel import ROOT, Code, compile_kernel, nvdisasm_option
from h100 import CLOCK_GHZ, COPY_GBPS, LAUNCH_CYCLES, SCHEDULERS, SMS, blocks_per_sm
from predict_linear import ISSUE_SHARE

MEASURED = ROOT / "benchmarks/results/gpu_nvidia_h100_80gb_hbm3.jsonl"
GRANULE, MIN_ITEM, ITEM_COST = 128, 256, 64  # decode_plan.h
HEAD_TILE = 8
SHARPNESS = 2  # of 2, 4 and 8 the one with the smallest error


@dataclass(frozen=True)
class Constants:
    """The four numbers that are fitted to measurements."""

    read_share: float
    warp_cycles: float
    item_cycles: float
    fixed_us: float


CONSTANTS = Constants(1.04, 0.314, 3431, 5.1)


@dataclass(frozen=True)
class Kernel:
    """The counts of a compiled DecodeKernel. Instructions are those of a warp for a tile."""

    registers: int
    instructions: int
    tokens: int
    stages: int
    warps: int
    shared_bytes: int
    stage_bytes: int

    @property
    def resident(self) -> int:
        """Return how many blocks an SM runs at once."""
        return blocks_per_sm(
            registers=self.registers, shared_bytes=self.shared_bytes, warps=self.warps
        )


# The kernels of d9c15d8: registers by ptxas, as ncu reported them (126 for NVFP4 at 128, 96 at 64),
# and instructions of a tile in SASS, without those that few tiles execute.
OLD: dict[tuple[str, int], Kernel] = {
    ("none", 128): Kernel(132, 212, 16, 3, 4, 98304, 8192),
    ("fp8", 128): Kernel(120, 243, 16, 3, 4, 49152, 4096),
    ("int8", 128): Kernel(128, 415, 16, 3, 4, 50688, 4224),
    ("int4", 128): Kernel(124, 795, 32, 3, 4, 52224, 4352),
    ("nvfp4", 128): Kernel(126, 714, 32, 3, 4, 55296, 4608),
    ("mxfp4", 128): Kernel(119, 711, 32, 3, 4, 55296, 4608),
    ("none", 64): Kernel(96, 159, 16, 3, 4, 49152, 4096),
    ("nvfp4", 64): Kernel(96, 448, 32, 3, 4, 27648, 2304),
    ("mxfp4", 64): Kernel(96, 441, 32, 3, 4, 27648, 2304),
}


@dataclass(frozen=True)
class Shape:
    """Sequences of equal length."""

    mode: str
    batch: int
    context: int
    kv_heads: int
    group: int
    head_dim: int
    window: int = 0

    @property
    def visible(self) -> int:
        """Return the positions that a query sees."""
        return min(self.context, self.window) if self.window else self.context

    @property
    def first(self) -> int:
        """Return the first of them."""
        return self.context - self.visible


@dataclass(frozen=True)
class Schedule:
    """How the plan uses the GPU (decode_ops.h)."""

    slots_per_sm: int = 4
    waves: int = 1
    last_merges: bool = False


@cache
def plan_items(shape: Shape, slots: int) -> tuple[int, ...]:
    """Return the positions of the items in the order of the launch, as PlanDecode cuts them."""
    total = shape.batch * (shape.visible + ITEM_COST)
    positions = max(-(-total // slots) - ITEM_COST, MIN_ITEM)
    share = -(-positions // GRANULE) * GRANULE + ITEM_COST
    taken, slot, items = 0, 0, []
    for _ in range(shape.batch):
        begin = shape.first
        while begin < shape.context:
            left, room = shape.context - begin, (slot + 1) * share - taken - ITEM_COST
            cut = (begin + max(room, 0)) // GRANULE * GRANULE
            if slot + 1 == slots or left <= room or shape.context - cut < MIN_ITEM:
                taken += left + ITEM_COST
                items.append(left)
                break
            if cut - begin >= MIN_ITEM:
                taken += cut - begin + ITEM_COST
                items.append(cut - begin)
                begin = cut
            slot += 1
    return tuple(sorted(items, reverse=True))


def tile_cycles(kernel: Kernel, running: float, *, constants: Constants) -> float:
    """Return the cycles of a warp's tile while `running` blocks run on the GPU."""
    per_sm = max(running / SMS, 1)  # the blocks of an SM that has any
    bandwidth = COPY_GBPS / CLOCK_GHZ * constants.read_share
    limits = (
        running * kernel.warps * kernel.stage_bytes / bandwidth,
        kernel.instructions * constants.warp_cycles,
        per_sm * kernel.warps / SCHEDULERS * kernel.instructions / ISSUE_SHARE,
    )
    longest = max(limits)
    total: float = sum((x / longest) ** SHARPNESS for x in limits) ** (1 / SHARPNESS)
    return longest * total


def run_blocks(
    items: Sequence[int], kernel: Kernel, *, copies: int, constants: Constants, places: int
) -> float:
    """Return the cycles until `copies` blocks of each item have run, `places` at once.

    Events are an item's end of idling, and its last tile. The clock of tiles advances for all
    running items alike.
    """
    turn = kernel.tokens * kernel.warps
    waiting = list(reversed(items))
    idling: list[tuple[float, int]] = []  # until when, and its tiles
    reading: list[float] = []  # the clock of tiles at which an item ends
    idle = constants.item_cycles + kernel.instructions * constants.warp_cycles
    now, clock, free = 0.0, 0.0, max(places // copies, 1)
    while waiting or idling or reading:
        while waiting and free:
            idling.append((now + idle, -(-waiting.pop() // turn)))
            free -= 1
        cycles = tile_cycles(kernel, max(len(reading), 1) * copies, constants=constants)
        read_end = now + (reading[0] - clock) * cycles if reading else math.inf
        idle_end = idling[0][0] if idling else math.inf
        then = min(read_end, idle_end)
        clock += (then - now) / cycles if reading else 0
        now = then
        if idle_end <= read_end:
            while idling and idling[0][0] <= now:
                heapq.heappush(reading, clock + idling.pop(0)[1])
        else:
            clock = reading[0]
            while reading and reading[0] <= clock:
                heapq.heappop(reading)
                free += 1
    return now


def predict_us(
    shape: Shape,
    kernel: Kernel,
    *,
    schedule: Schedule | None = None,
    constants: Constants | None = None,
) -> float:
    """Return the microseconds of a layer of a decode step."""
    schedule, constants = schedule or Schedule(), constants or CONSTANTS
    copies = shape.kv_heads * -(-shape.group // HEAD_TILE)
    slots = max(schedule.slots_per_sm * schedule.waves * SMS // copies, 1)
    items = plan_items(shape, slots)
    cycles = run_blocks(
        items, kernel, copies=copies, constants=constants, places=kernel.resident * SMS
    )
    partial_bytes = len(items) * shape.kv_heads * shape.group * (shape.head_dim + 2) * 4
    combine_us = 2 * partial_bytes / COPY_GBPS / 1e3
    saved_us = LAUNCH_CYCLES / CLOCK_GHZ / 1e3 if schedule.last_merges else 0
    return cycles / CLOCK_GHZ / 1e3 + combine_us + constants.fixed_us - saved_us


def kv_bytes(shape: Shape, kernel: Kernel) -> float:
    """Return the bytes of the positions that the queries see."""
    position = kernel.stage_bytes / kernel.tokens
    return shape.batch * shape.kv_heads * shape.visible * position


@dataclass(frozen=True)
class Row:
    """A measured launch."""

    shape: Shape
    us: float

    @property
    def place(self) -> tuple[float, ...]:
        """Return the shape without the format: such rows are held out together."""
        return astuple(self.shape)[1:]


def read_rows(path: Path = MEASURED) -> list[Row]:
    """Return the measured rows of decode attention."""
    rows = []
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        cell = dict(part.split("=") for part in row.get("cell", "").split())
        if cell.get("op") != "decode" or row["by"] != "lmdeploy-fp4":
            continue
        shape = Shape(
            cell["mode"],
            batch=int(cell["batch"]),
            context=int(cell["context"]),
            kv_heads=int(cell["kv_heads"]),
            group=int(cell["group"]),
            head_dim=int(cell["head_dim"]),
            window=int(cell.get("window", 0)),
        )
        rows.append(Row(shape, row["us"]))
    return rows


def squared_error(rows: Sequence[Row], constants: Constants) -> float:
    """Return the sum of squared logarithms of predicted to measured time."""

    def of(row: Row) -> float:
        kernel = OLD[row.shape.mode, row.shape.head_dim]
        return math.log(predict_us(row.shape, kernel, constants=constants) / row.us)

    return sum(of(row) ** 2 for row in rows)


def fit(rows: Sequence[Row], start: Constants = CONSTANTS) -> Constants:
    """Fit the constants by changing one after the other in ever smaller steps."""
    best, error = start, squared_error(rows, start)
    step = 0.16
    while step > 0.004:
        improved = False
        for index in range(len(astuple(best))):
            for factor in (1 + step, 1 / (1 + step)):
                values = list(astuple(best))
                values[index] *= factor
                trial = Constants(*values)
                if (found := squared_error(rows, trial)) < error:
                    best, error, improved = trial, found, True
        step = step if improved else step / 2
    return best


def held_out(rows: Sequence[Row]) -> dict[tuple[float, ...], Constants]:
    """Return for each shape the constants that were fitted without its rows."""
    places = dict.fromkeys(row.place for row in rows)
    return {place: fit([row for row in rows if row.place != place]) for place in places}


FORMATS = {
    **{"none": "kNone", "fp8": "kFp8E4m3", "int8": "kInt8", "int4": "kInt4"},
    **{"nvfp4": "kFp4Nv", "mxfp4": "kFp4Mx"},
}


def executed_instructions(sass: str) -> int:
    """Return the instructions of the loop over tiles, without those that few tiles execute.

    A branch skips these: positions outside the item, a rise of the maximum, caps of scores.
    """
    code = Code.of(sass)
    begin, end = min(code.copy_loops(), key=lambda loop: loop[1] - loop[0])
    dropped: set[int] = set()
    for i in range(begin, end):
        after = code.target(i)
        if after is not None and i < after <= end + 1:
            skipped = range(i + 1, after)
            if not any("LDGSTS" in code.lines[j] for j in skipped):
                dropped.update(skipped)
    return end + 1 - begin - len(dropped)


def count(mode: str, head_dim: int, *, nvdisasm: str, folder: Path) -> Kernel:
    """Compile a DecodeKernel of this tree and count."""
    dtype = "kFloat16" if mode in ("fp8", "nvfp4", "mxfp4") else "kBFloat16"
    formats = ", ".join([f"KvCacheMode::{FORMATS[mode]}"] * 2 + [f"DataType::{dtype}"])
    found = compile_kernel(
        '#include "turbomind/backend/cuda/decode/decode_variants_of.cuh"\n'
        "using namespace turbomind;\nusing namespace turbomind::cuda;\n"
        f"using One = DecodeConfig<{formats}, {head_dim}, 16, 1>;\n"
        "constexpr TileShape kTile =\n"
        f"    ChooseTile(One::kStageBytes / 16, One::kShiftBytes, {head_dim});\n"
        f"using C = DecodeConfig<{formats}, {head_dim}, kTile.tokens, kTile.stages, kTile.warps>;\n"
        "template __global__ void turbomind::cuda::DecodeKernel<C>(DecodeParams);\n"
        "__device__ int sizes[] = {C::kTileTokens, C::kStages, C::kWarps, C::kSharedBytes,\n"
        "                          C::kStageBytes};\n",
        kernel="DecodeKernel",
        nvdisasm=nvdisasm,
        folder=folder,
    )
    return Kernel(found.registers, executed_instructions(found.sass), *found.sizes)


@dataclass(frozen=True)
class Target:
    """A goal: a share of the rate of a copy, or at most so many microseconds."""

    shape: Shape
    share: float = 0.0
    us: float = 0.0


TARGETS = (
    Target(Shape("nvfp4", 8, 8192, 8, 4, 128), 0.92),
    Target(Shape("nvfp4", 8, 32768, 8, 8, 128), 0.92),
    Target(Shape("nvfp4", 128, 8192, 8, 4, 128), 0.92),
    Target(Shape("nvfp4", 32, 8192, 8, 8, 64), 0.85),
    Target(Shape("fp8", 32, 8192, 8, 8, 64), 0.85),
    Target(Shape("int8", 32, 8192, 8, 8, 64), 0.85),
    Target(Shape("nvfp4", 1, 131072, 8, 8, 128), 0.85),
    Target(Shape("nvfp4", 256, 1024, 8, 8, 128), 0.85),
    Target(Shape("nvfp4", 1, 1024, 8, 4, 128), us=7),
)


def best_schedule(shape: Shape, kernel: Kernel) -> tuple[float, Schedule]:
    """Return the shortest time of the schedules that the tuner tries, and its schedule."""
    schedules = [
        Schedule(slots, waves, last_merges)
        for slots in sorted({4, kernel.resident})
        for waves in (1, 3)
        for last_merges in (False, True)
    ]
    times = [(predict_us(shape, kernel, schedule=schedule), schedule) for schedule in schedules]
    return min(times, key=lambda time: time[0])


def name_of(shape: Shape) -> str:
    """Return a shape as the tables write it."""
    heads = f"{shape.kv_heads} × {shape.group} heads of {shape.head_dim}"
    window = f", window {shape.window}" if shape.window else ""
    return f"{shape.mode}, {shape.batch} × {shape.context:,}, {heads}{window}"


def print_measured(rows: Sequence[Row]) -> None:
    """Print the model beside the measurements."""
    others = held_out(rows)
    errors: list[tuple[float, float]] = []
    print("| layer | predicted | measured | error | held out |\n| --- |" + " ---: |" * 4)
    for row in rows:
        kernel = OLD[row.shape.mode, row.shape.head_dim]
        us = predict_us(row.shape, kernel)
        unseen = predict_us(row.shape, kernel, constants=others[row.place])
        errors.append((us / row.us - 1, unseen / row.us - 1))
        print(
            f"| {name_of(row.shape)} | {us:.1f} | {row.us:.1f} | {errors[-1][0] * 100:+.0f} % | "
            f"{errors[-1][1] * 100:+.0f} % |"
        )
    for title, column in (("fitted", 0), ("held out", 1)):
        sizes = [abs(pair[column]) for pair in errors]
        print(f"{title}: median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")


def print_targets(kernels: dict[tuple[str, int], Kernel]) -> None:
    """Print what the tree of today is predicted to reach."""
    print("\n| layer | registers | instructions a tile | blocks an SM | schedule | predicted | "
          "of a copy | goal |\n| --- | ---: | ---: | ---: | --- | ---: | ---: | --- |")  # fmt: skip
    for target in TARGETS:
        shape = target.shape
        kernel = kernels[shape.mode, shape.head_dim]
        us, schedule = best_schedule(shape, kernel)
        share = kv_bytes(shape, kernel) / COPY_GBPS / 1e3 / us
        met = share >= target.share if target.share else us <= target.us
        goal = f"{target.share * 100:.0f} %" if target.share else f"{target.us:.0f} µs"
        plan = f"{schedule.slots_per_sm} × {schedule.waves}"
        plan += ", last merges" if schedule.last_merges else ""
        print(
            f"| {name_of(shape)} | {kernel.registers} | {kernel.instructions} | {kernel.resident} "
            f"| {plan} | {us:.1f} | {share * 100:.0f} % | {goal}: {'met' if met else 'missed'} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    nvdisasm = nvdisasm_option(__doc__, arguments)
    print_measured(read_rows())
    if nvdisasm is None:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        kernels = {
            key: count(*key, nvdisasm=nvdisasm, folder=Path(folder))
            for key in dict.fromkeys((t.shape.mode, t.shape.head_dim) for t in TARGETS)
        }
    print_targets(kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
