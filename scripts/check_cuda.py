"""Compiles the CUDA kernels without a GPU and checks what the compiler made of them.

    python scripts/check_cuda.py                   # sm_90a: FP4 and 16 bit, head_dim 64 and 128
    python scripts/check_cuda.py --all             # every format, head_dim and architecture

Fails where a decode kernel spills registers, and where the loop of an FP4 kernel on sm_90a takes
more instructions per element than MOST_PER_ELEMENT: not met yet (3.2 at head_dim 128, 3.9 at 64),
so no check calls this. Needs nvcc; for the instructions cuobjdump, from the toolkit or the package
nvidia-cuda-cuobjdump (with nvidia-cuda-nvdisasm). Without nvcc it says so and ends with 0; without
cuobjdump it checks the spills alone and says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICK_ARCHS = ("sm_90a",)
ALL_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100f", "sm_120f")
QUICK_MODES = ("kFp4Mx", "kFp4Nv", "kNone")
ALL_MODES = (*QUICK_MODES, "kInt8", "kInt4", "kFp8E4m3", "kFp8E5m2")
QUICK_DIMS = (64, 128)
ALL_DIMS = (64, 80, 96, 128, 256)
TILE_TOKENS, STAGES = 32, 3
# Per element of K and V and lane, of a tile whose maximum does not move.
MOST_PER_ELEMENT = {64: 3.4, 128: 3.1}
GATED_ARCH = "sm_90a"

COMPILE_LINE = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
SPILL_LINE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill")
REGISTERS_LINE = re.compile(r"Used (\d+) registers")
SASS_FUNCTION = re.compile(r"Function : (\S+)")
SASS_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?)([A-Z0-9_.]+)\s*([^;]*);")


@dataclass(frozen=True)
class Kernel:
    """One instance of DecodeKernel."""

    mode: str
    head_dim: int

    def instantiation(self) -> str:
        """The line that makes the compiler build it."""
        config = (
            f"DecodeConfig<{self.mode}, {self.mode}, DataType::kBFloat16, {self.head_dim}, "
            f"{TILE_TOKENS}, {STAGES}>"
        )
        return f"template __global__ void DecodeKernel<{config}>(DecodeParams);"


@dataclass
class Compiled:
    """What ptxas says of one kernel."""

    registers: int = 0
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


def find_tool(name: str) -> str | None:
    """On the path, or in a wheel of this Python."""
    found = shutil.which(name)
    if found:
        return found
    wheels = Path(sys.prefix).glob(f"lib/python*/site-packages/nvidia/*/bin/{name}")
    return next((str(path) for path in wheels), None)


def compile_kernel(nvcc: str, kernel: Kernel, *, arch: str, folder: Path) -> tuple[Path, Compiled]:
    """The cubin and what ptxas said. Raises RuntimeError with the compiler's words."""
    source = folder / f"{kernel.mode}_{kernel.head_dim}_{arch}.cu"
    source.write_text(
        '#include "turbomind/backend/cuda/decode_attention.h"\n'
        "namespace turbomind::cuda {\nusing enum KvCacheMode;\n"
        f"{kernel.instantiation()}\n}}\n",
        encoding="utf-8",
    )
    cubin = source.with_suffix(".cubin")
    command = [nvcc, "-std=c++20", "-O3", f"-arch={arch}", f"-I{ROOT / 'src'}", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, "-cubin", "-o", str(cubin), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{kernel.mode} {kernel.head_dim} {arch}:\n{done.stderr[-2000:]}")
    compiled = Compiled()
    for line in done.stderr.splitlines():
        if spill := SPILL_LINE.search(line):
            compiled.spilled += sum(int(count) for count in spill.groups())
        if registers := REGISTERS_LINE.search(line):
            compiled.registers = max(compiled.registers, int(registers.group(1)))
    return cubin, compiled


def machine_code(cuobjdump: str, cubin: Path) -> list[Instruction]:
    """Of the file's one kernel."""
    path = os.pathsep.join((str(Path(cuobjdump).parent), os.environ.get("PATH", "")))
    text = subprocess.run(
        [cuobjdump, "-sass", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": path},
    ).stdout
    return [
        Instruction(int(m.group(1), 16), bool(m.group(2)), m.group(3).split(".")[0], m.group(4))
        for m in map(SASS_LINE.match, text.splitlines())
        if m
    ]


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
        raise RuntimeError("no loop with HMMA found in the machine code")
    return max(loops, key=len)


def slow_path(body: Sequence[Instruction]) -> int:
    """Instructions that run when the maximum moves: what a branch over the shuffles skips."""
    shuffles = [x.address for x in body if x.opcode == "SHFL"]
    skipped = [
        sum(branch.address < x.address < target for x in body)
        for branch in body
        if (target := branch.target) is not None
        and branch.predicated
        and shuffles
        and branch.address < min(shuffles)
        and target > max(shuffles)
    ]
    return min(skipped, default=0)


def per_element(code: Sequence[Instruction], head_dim: int) -> float:
    """Instructions per element of K and V and lane of the loop over tiles."""
    body = tile_loop(code)
    return (len(body) - slow_path(body)) / (2 * head_dim * TILE_TOKENS / 32)


def chosen(everything: bool) -> Iterator[tuple[Kernel, str]]:
    """Kernels and architectures to compile."""
    modes, dims, archs = (
        (ALL_MODES, ALL_DIMS, ALL_ARCHS) if everything else (QUICK_MODES, QUICK_DIMS, QUICK_ARCHS)
    )
    for arch in archs:
        for dim in dims:
            for mode in modes:
                yield Kernel(mode, dim), arch


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, check, print a line per kernel."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every format, head_dim, architecture")
    options = parser.parse_args(arguments)
    nvcc, cuobjdump = find_tool("nvcc"), find_tool("cuobjdump")
    if nvcc is None:
        print("check_cuda: no nvcc here: nothing is checked")
        return 0
    if cuobjdump is None:
        print("check_cuda: no cuobjdump here: instructions are not counted")
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        for kernel, arch in chosen(options.all):
            cubin, compiled = compile_kernel(nvcc, kernel, arch=arch, folder=Path(folder))
            line = f"{arch:8} {kernel.mode:9} head_dim {kernel.head_dim:3}"
            line += f"  {compiled.registers:3} registers, {compiled.spilled} bytes spilled"
            wrong = compiled.spilled > 0
            gated = arch == GATED_ARCH and kernel.mode.startswith("kFp4")
            if cuobjdump is not None and gated and kernel.head_dim in MOST_PER_ELEMENT:
                count = per_element(machine_code(cuobjdump, cubin), kernel.head_dim)
                most = MOST_PER_ELEMENT[kernel.head_dim]
                line += f", {count:.2f} instructions per element (at most {most})"
                wrong = wrong or count > most
            print(line + ("  FAILED" if wrong else ""), flush=True)
            faults += wrong
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
