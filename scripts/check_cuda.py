"""Compiles the CUDA kernels without a GPU and checks what the compiler made of them.

    python scripts/check_cuda.py          # what CI checks: minutes
    python scripts/check_cuda.py --all    # every file for every architecture: 20 minutes
    python scripts/check_cuda.py --all --only head_dim_64 --only kv_ops    # parts of it

Compiles every *.cu of the CUDA backend for the architectures that kernels are measured on, and some
decode kernels, as they are shipped, for others. Fails where a kernel spills registers, where a
decode kernel has a stack frame, or another kernel one of more than MOST_FRAME_BYTES, and where the
loop over tiles of an FP4 decode kernel of sm_90a is not found or takes more instructions per
element than MOST_PER_ELEMENT.

What is counted: the instructions of the loop, less what a branch leaves out in nearly every turn.
There are two such paths: the maximum moves (it has shuffles), and the first or the last tile of an
item, whose positions outside are hidden (it stores to shared memory). Code that a branch skips
counts as such a path only if it has one of these instructions and no matrix product.

Needs nvcc; for the instructions cuobjdump, from the toolkit or the package nvidia-cuda-cuobjdump
(with nvidia-cuda-nvdisasm). Without nvcc it says so and ends with 0; without cuobjdump it checks
the spills alone and says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BACKEND = ROOT / "src/turbomind/backend/cuda"
GATED_ARCH = "sm_90a"
FILE_ARCHS = (GATED_ARCH, "sm_80")
# Each way of E2M1: in software, and by the instructions that every letter from sm_100 on has.
OTHER_ARCHS = ("sm_86", "sm_89", "sm_100f", "sm_120f")
MORE_ARCHS = ("sm_100a", "sm_103a", "sm_110a", "sm_110f", "sm_120a", "sm_121a")
ALL_ARCHS = (*FILE_ARCHS, *OTHER_ARCHS, *MORE_ARCHS)
# In the order of the enum: their numbers are in the names of kernels.
MODES = ("kNone", "kInt8", "kInt4", "kFp8E4m3", "kFp8E5m2", "kFp4Mx", "kFp4Nv")
QUICK_MODES = ("kFp4Mx", "kFp4Nv", "kNone")  # on the other architectures
QUICK_DIMS = (64, 128)
JOBS = 2
# What a build names itself with (cmake/cuda.cmake); any text does here.
NAMES = ("TM_CUDA_STAMP", "TM_CUDA_ARCHS")
# Per element of K and V and lane, by head_dim and head tiles.
MOST_PER_ELEMENT = {(64, 1): 3.4, (64, 2): 3.8, (128, 1): 3.1, (128, 2): 3.1}
GATED_MODES = ("kFp4Mx", "kFp4Nv")
GATED_TOKENS = 32  # positions of a tile
MOST_FRAME_BYTES = 32  # of other kernels: what sincosf takes, and no copy of parameters
RARE_OPCODES = {"SHFL", "STS"}  # of paths that are not counted

ENTRY_LINE = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
SPILL_LINE = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
REGISTERS_LINE = re.compile(r"Used (\d+) registers")
SASS_FUNCTION = re.compile(r"\s+Function : (\S+)")
SASS_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?)([A-Z0-9_.]+)\s*([^;]*);")
KERNEL_NAME = re.compile(
    r"DecodeKernel.*?KvCacheModeE(\d+)ELS\w*?_(\d+)E.*?Li(\d+)ELi(\d+)ELi\d+ELi\d+ELi(\d+)E"
)


@dataclass(frozen=True)
class Kernel:
    """What an instance of DecodeKernel is named after."""

    k: str
    v: str
    head_dim: int
    tile_tokens: int  # 16 for blocks of 16 positions
    head_tiles: int = 1  # of 8 query heads

    @staticmethod
    def of(name: str) -> Kernel | None:
        """The kernel with this mangled name."""
        found = KERNEL_NAME.search(name)
        if found is None:
            return None
        k, v, *shape = (int(number) for number in found.groups())
        return Kernel(MODES[k], MODES[v], *shape)

    @property
    def is_counted(self) -> bool:
        """Whether a line of the table has its instructions."""
        return self.k == self.v and self.k in GATED_MODES

    @property
    def most_per_element(self) -> float | None:
        """Of sm_90a; None where it does not matter: rare formats, and blocks of 16."""
        gated = self.is_counted and self.tile_tokens == GATED_TOKENS
        return MOST_PER_ELEMENT.get((self.head_dim, self.head_tiles)) if gated else None


GATED = {
    Kernel(mode, mode, head_dim, GATED_TOKENS, head_tiles)
    for mode in GATED_MODES
    for head_dim, head_tiles in MOST_PER_ELEMENT
}


@dataclass(frozen=True)
class Unit:
    """One run of the compiler: a file of the backend, or some decode kernels (file None)."""

    arch: str
    file: Path | None = None

    @property
    def label(self) -> str:
        """How the table calls it."""
        return self.file.name if self.file else "decode kernels"

    @property
    def is_counted(self) -> bool:
        """Whether its machine code is read."""
        gated = self.arch == GATED_ARCH and self.label.startswith("head_dim_")
        return gated or self.file is None


@dataclass
class Compiled:
    """What ptxas says of one kernel."""

    name: str
    registers: int = 0
    frame: int = 0
    spilled: int = 0


@dataclass(frozen=True)
class Instruction:
    """One line of machine code."""

    address: int
    predicated: bool
    opcode: str
    operands: str

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"0x([0-9a-f]+)", self.operands) if self.opcode == "BRA" else None
        return int(found.group(1), 16) if found else None


@dataclass
class Result:
    """What became of a unit."""

    unit: Unit
    seconds: float = 0.0
    error: str = ""
    kernels: list[Compiled] = field(default_factory=list)
    code: dict[str, list[Instruction]] | None = None  # None: not read


@dataclass(frozen=True)
class Count:
    """Instructions of a loop, and those of its rare paths."""

    loop: int
    rare: int

    def per_element(self, kernel: Kernel) -> float:
        """Of K and V and lane."""
        return (self.loop - self.rare) / (2 * kernel.head_dim * kernel.tile_tokens / 32)


def find_tool(name: str) -> str | None:
    """On the path, or in a wheel of this Python."""
    found = shutil.which(name)
    if found:
        return found
    wheels = Path(sys.prefix).glob(f"lib/python*/site-packages/nvidia/*/bin/{name}")
    return next((str(path) for path in wheels), None)


def parse_ptxas(text: str) -> list[Compiled]:
    """The kernels that `ptxas -v` speaks of."""
    kernels: list[Compiled] = []
    for line in text.splitlines():
        if entry := ENTRY_LINE.search(line):
            kernels.append(Compiled(entry.group(1)))
        elif kernels and (spill := SPILL_LINE.search(line)):
            frame, stores, loads = (int(count) for count in spill.groups())
            kernels[-1].frame = max(kernels[-1].frame, frame)
            kernels[-1].spilled += stores + loads
        elif kernels and (registers := REGISTERS_LINE.search(line)):
            kernels[-1].registers = int(registers.group(1))
    return kernels


def parse_sass(text: str) -> dict[str, list[Instruction]]:
    """What `cuobjdump -sass` prints: instructions by kernel."""
    code: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in text.splitlines():
        if function := SASS_FUNCTION.match(line):
            body = code.setdefault(function.group(1), [])
        elif m := SASS_LINE.match(line):
            opcode = m.group(3).split(".")[0]
            body.append(Instruction(int(m.group(1), 16), bool(m.group(2)), opcode, m.group(4)))
    return code


def tile_loop(code: Sequence[Instruction]) -> list[Instruction]:
    """The longest loop with matrix products."""
    loops = []
    for instruction in code:
        target = instruction.target
        if target is not None and target < instruction.address:
            body = [x for x in code if target <= x.address <= instruction.address]
            if any(x.opcode == "HMMA" for x in body):
                loops.append(body)
    if not loops:
        raise ValueError("no loop with HMMA found in the machine code")
    return max(loops, key=len)


def rare_addresses(body: Sequence[Instruction]) -> set[int]:
    """Of what is not counted: see above."""
    rare: set[int] = set()
    for branch in body:
        target = branch.target
        if target is None or not branch.predicated:
            continue
        skipped = [x for x in body if branch.address < x.address < target]
        opcodes = {x.opcode for x in skipped}
        if "HMMA" not in opcodes and opcodes & RARE_OPCODES:
            rare.update(x.address for x in skipped)
    return rare


def count_loop(code: Sequence[Instruction]) -> Count:
    """Of a kernel's loop over tiles."""
    body = tile_loop(code)
    return Count(len(body), len(rare_addresses(body)))


def source_of(unit: Unit, folder: Path) -> Path:
    """The file to compile; written where the unit is some kernels: those that layers take."""
    if unit.file:
        return unit.file
    source = folder / f"decode_{unit.arch}.cu"
    variants = [
        f"template DecodeVariant MakeVariant<{mode}, {mode}, DataType::kFloat16, {dim}>"
        "(const DecodeFormat&);\n"
        for dim in QUICK_DIMS
        for mode in QUICK_MODES
    ]
    source.write_text(
        '#include "turbomind/backend/cuda/decode/decode_variants_of.cuh"\n'
        "namespace turbomind::cuda {\nusing enum KvCacheMode;\n" + "".join(variants) + "}\n",
        encoding="utf-8",
    )
    return source


def machine_code(cuobjdump: str, cubin: Path) -> dict[str, list[Instruction]]:
    """Of the file's kernels."""
    path = os.pathsep.join((str(Path(cuobjdump).parent), os.environ.get("PATH", "")))
    text = subprocess.run(
        [cuobjdump, "-sass", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": path},
    ).stdout
    return parse_sass(text)


def compile_unit(nvcc: str, unit: Unit, *, cuobjdump: str | None, folder: Path) -> Result:
    """Compiles, and reads what ptxas said and what it made of decode kernels."""
    begun = time.monotonic()
    cubin = folder / f"{unit.label.replace(' ', '_')}_{unit.arch}.cubin"
    command = [nvcc, "-std=c++20", "-O3", f"-arch={unit.arch}", f"-I{ROOT / 'src'}"]
    command += [f'-D{name}="checked"' for name in NAMES]
    if unit.label.startswith("kv_"):
        command.append("-fmad=false")  # as the build does
    done = subprocess.run(
        [*command, "-Xptxas", "-v", "-cubin", "-o", str(cubin), str(source_of(unit, folder))],
        capture_output=True,
        text=True,
        check=False,
    )
    result = Result(unit, kernels=parse_ptxas(done.stderr))
    if done.returncode != 0:
        result.error = done.stderr[-2000:]
    elif unit.is_counted and cuobjdump is not None:
        result.code = machine_code(cuobjdump, cubin)
    result.seconds = time.monotonic() - begun
    return result


def chosen_units(everything: bool) -> list[Unit]:
    """What to compile."""
    archs = ALL_ARCHS if everything else FILE_ARCHS
    others = [Unit(arch) for arch in ALL_ARCHS if everything or arch in OTHER_ARCHS]
    files = sorted(BACKEND.rglob("*.cu"))
    return others + [Unit(arch, file=path) for path in files for arch in archs]


def kernel_row(compiled: Compiled, result: Result) -> tuple[str, bool]:
    """A decode kernel's line of the table, and whether it is as it has to be."""
    kernel = Kernel.of(compiled.name)
    if kernel is None:
        raise ValueError(f"not a decode kernel: {compiled.name}")
    arch = result.unit.arch
    row = f"{arch:8} {kernel.k:9} {kernel.v:9} {kernel.head_dim:4} {kernel.tile_tokens:4}"
    row += (
        f" {8 * kernel.head_tiles:5} {compiled.registers:5} {compiled.frame:5} {compiled.spilled:6}"
    )
    good = compiled.spilled == 0 and compiled.frame == 0
    if result.code is not None and kernel.is_counted:
        code = result.code.get(compiled.name, [])
        if not code:
            return row + "  no machine code found  FAILED", False
        count = count_loop(code)
        per_element = count.per_element(kernel)
        row += f" {count.loop - count.rare:6} {count.rare:5} {per_element:12.2f}"
        most = kernel.most_per_element if arch == GATED_ARCH else None
        if most is not None:
            row += f"  at most {most}"
            good = good and per_element <= most
    return row + ("" if good else "  FAILED"), good


def missing_kernels(result: Result) -> list[str]:
    """Decode kernels that a unit has to have and has not."""
    found = {kernel for x in result.kernels if (kernel := Kernel.of(x.name)) is not None}
    if result.unit.file is None:
        shapes = {(kernel.k, kernel.head_dim) for kernel in found}
        wanted = ((mode, dim) for mode in QUICK_MODES for dim in QUICK_DIMS)
        return [f"{mode} {dim}" for mode, dim in wanted if (mode, dim) not in shapes]
    gated = [x for x in GATED if result.unit.label == f"head_dim_{x.head_dim}.cu"]
    return [f"{x.k} {x.head_dim}, {8 * x.head_tiles} heads" for x in gated if x not in found]


def report(result: Result) -> int:
    """Prints a unit's lines; how many of them are faults."""
    unit = result.unit
    if result.error:
        print(f"{unit.arch:8} {unit.label}: does not compile  FAILED\n{result.error}", flush=True)
        return 1
    missing = missing_kernels(result)
    for name in sorted(missing):
        print(f"{unit.arch:8} {unit.label}: no decode kernel {name}  FAILED")
    faults = len(missing)
    for x in result.kernels:
        kernel = Kernel.of(x.name)
        if kernel is not None:
            row, good = kernel_row(x, result)
            if kernel.is_counted or not good:
                print(row)
            faults += not good
        elif x.spilled or x.frame > MOST_FRAME_BYTES:
            print(
                f"{unit.arch:8} {unit.label}: {x.name} spills {x.spilled} bytes, has a stack frame "
                f"of {x.frame}  FAILED"
            )
            faults += 1
    most = max((x.registers for x in result.kernels), default=0)
    print(
        f"{unit.arch:8} {unit.label}: {len(result.kernels)} kernels, at most {most} registers, "
        f"{result.seconds:.0f} s",
        flush=True,
    )
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, check, print a line per kernel and file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every file for every architecture")
    parser.add_argument("--only", action="append", metavar="PART", help="of a file's name")
    options = parser.parse_args(arguments)
    nvcc, cuobjdump = find_tool("nvcc"), find_tool("cuobjdump")
    if nvcc is None:
        print("check_cuda: no nvcc here: nothing is checked")
        return 0
    if cuobjdump is None:
        print("check_cuda: no cuobjdump here: instructions are not counted")
    begun = time.monotonic()
    parts = options.only or [""]
    units = [x for x in chosen_units(options.all) if any(part in x.label for part in parts)]
    print(
        "arch     K         V         head tile heads  regs frame spills   loop  rare per element"
    )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(JOBS) as pool:
        results = pool.map(
            lambda unit: compile_unit(nvcc, unit, cuobjdump=cuobjdump, folder=Path(folder)), units
        )
        counts = [(report(result), len(result.kernels)) for result in results]
    faults, kernels = (sum(column) for column in zip(*counts, strict=True))
    print(
        f"check_cuda: {kernels} kernels in {len(units)} compilations, {faults} faults, "
        f"{time.monotonic() - begun:.0f} s"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
