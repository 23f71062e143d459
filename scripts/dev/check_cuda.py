"""Compile the CUDA kernels without a GPU and check what ptxas reports.

    python scripts/dev/check_cuda.py --log LOG   # what a build with -Xptxas=-v has printed (CI)
    python scripts/dev/check_cuda.py --all       # every file for every architecture: 20 minutes

The program also compiles some decode kernels for the architectures that the build lacks. A kernel
fails if it spills registers or has a large stack frame: more than 0 bytes for a decode kernel, more
than MOST_FRAME_BYTES for another one. Without nvcc the program prints that nothing is checked and
exits with 0.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKEND = ROOT / "src/turbomind/backend/cuda"
BUILT_ARCHS = ("sm_90a", "sm_80")  # by the step `cuda` of scripts/check.sh
# One architecture for each way to convert E2M1: in software, and by the instructions of sm_100 on.
OTHER_ARCHS = ("sm_86", "sm_89", "sm_100f", "sm_120f")
MORE_ARCHS = ("sm_100a", "sm_103a", "sm_110a", "sm_110f", "sm_120a", "sm_121a")
ALL_ARCHS = (*BUILT_ARCHS, *OTHER_ARCHS, *MORE_ARCHS)
OTHER_FILES = ("head_dim_64.cu",)  # decode kernels that are compiled for OTHER_ARCHS
JOBS = 2
NAMES = ("TM_CUDA_STAMP", "TM_CUDA_ARCHS")  # set by cmake/cuda.cmake; any text works here
MOST_FRAME_BYTES = 32  # what sincosf takes; a copy of the parameters is larger

Unit = tuple[str, Path]  # the architecture and the file of one run of the compiler

KERNEL = re.compile(
    r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.S,
)


@dataclass(frozen=True)
class Kernel:
    """The registers, spills and stack frame of one kernel, as ptxas reports them."""

    name: str
    frame: int
    spilled: int
    registers: int

    @property
    def is_good(self) -> bool:
        """Return whether the kernel spills nothing and has a small stack frame."""
        limit = 0 if "DecodeKernel" in self.name else MOST_FRAME_BYTES
        return self.spilled == 0 and self.frame <= limit


def parse_ptxas(text: str) -> list[Kernel]:
    """Return the kernels in the output of `ptxas -v`."""
    found = [(name, *map(int, numbers)) for name, *numbers in KERNEL.findall(text)]
    return [Kernel(name, frame, out + back, used) for name, frame, out, back, used in found]


def check_unit(nvcc: str, unit: Unit, *, folder: Path) -> tuple[int, int]:
    """Compile a unit, print its lines and return the numbers of faults and kernels."""
    arch, file = unit
    begun, where = time.monotonic(), f"{arch:8} {file.name}:"
    command = [nvcc, "-std=c++20", "-O3", f"-arch={arch}", f"-I{ROOT / 'src'}"]
    command += [f'-D{name}="checked"' for name in NAMES]
    command += ["-fmad=false"] if file.name.startswith("kv_") else []  # as in the build
    command += ["-Xptxas", "-v", "-cubin", "-o", str(folder / f"{file.stem}_{arch}.cubin")]
    command.append(str(file))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{where} does not compile  FAILED\n{done.stderr[-2000:]}", flush=True)
        return 1, 0
    counts = check_output(where, done.stderr)
    print(f"{where} {time.monotonic() - begun:.0f} s")
    return counts


def check_output(where: str, text: str) -> tuple[int, int]:
    """Print a line about the output of ptxas and return the numbers of faults and kernels."""
    kernels = parse_ptxas(text)
    bad = [kernel for kernel in kernels if not kernel.is_good]
    for kernel in bad:
        print(
            f"{where} {kernel.name} spills {kernel.spilled} bytes and has a stack frame of "
            f"{kernel.frame}  FAILED"
        )
    slow = [line.strip() for line in text.splitlines() if "wgmma" in line and "serialized" in line]
    for line in slow:
        print(f"{where} {line}  FAILED")
    registers = max((kernel.registers for kernel in kernels), default=0)
    print(f"{where} {len(kernels)} kernels, at most {registers} registers")
    return len(bad) + len(slow), len(kernels)


def chosen_units(everything: bool) -> list[Unit]:
    """Return the units to compile."""
    return [
        (arch, path)
        for path in sorted(BACKEND.rglob("*.cu"))
        for arch in ALL_ARCHS
        if everything or (path.name in OTHER_FILES and arch in OTHER_ARCHS)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, check and print a line per file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--log", type=Path, help="output of a build with -Xptxas=-v to check, too")
    parser.add_argument("--all", action="store_true", help="every file for every architecture")
    options = parser.parse_args(arguments)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("check_cuda: there is no nvcc, so nothing is checked")
        return 0
    begun = time.monotonic()
    units = chosen_units(options.all)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(JOBS) as pool:
        counts = list(pool.map(lambda unit: check_unit(nvcc, unit, folder=Path(folder)), units))
    if options.log is not None:
        counts.append(check_output(options.log.name, options.log.read_text()))
    faults, kernels = (sum(column) for column in zip(*counts, strict=True))
    print(
        f"check_cuda: {kernels} kernels, {len(units)} compilations, {faults} faults, "
        f"{time.monotonic() - begun:.0f} s"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
