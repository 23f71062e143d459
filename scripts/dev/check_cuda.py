"""Compile the CUDA kernels without a GPU and check what ptxas reports.

    python scripts/dev/check_cuda.py          # the check of CI: minutes
    python scripts/dev/check_cuda.py --all    # every file for every architecture: 20 minutes
    python scripts/dev/check_cuda.py --all --only decode_variants_64 --only kv_ops

The program compiles every *.cu of the CUDA backend for the measured architectures, and some decode
kernels for the others. A kernel fails if it spills registers or has a large stack frame: more than
0 bytes for a decode kernel, more than MOST_FRAME_BYTES for another one. Without nvcc the program
prints that nothing is checked and exits with 0.
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
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKEND = ROOT / "src/turbomind/backend/cuda"
FILE_ARCHS = ("sm_90a", "sm_80")
# One architecture for each way to convert E2M1: in software, and by the instructions of sm_100 on.
OTHER_ARCHS = ("sm_86", "sm_89", "sm_100f", "sm_120f")
MORE_ARCHS = ("sm_100a", "sm_103a", "sm_110a", "sm_110f", "sm_120a", "sm_121a")
ALL_ARCHS = (*FILE_ARCHS, *OTHER_ARCHS, *MORE_ARCHS)
QUICK_MODES = ("kFp4Mx", "kFp4Nv", "kNone")  # on the other architectures
QUICK_DIMS = (64, 128)
JOBS = 2
NAMES = ("TM_CUDA_STAMP", "TM_CUDA_ARCHS")  # set by cmake/cuda.cmake; any text works here
MOST_FRAME_BYTES = 32  # what sincosf takes; a copy of the parameters is larger

ENTRY_LINE = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
SPILL_LINE = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
REGISTERS_LINE = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Unit:
    """One run of the compiler: a file of the backend, or some decode kernels (`file` None)."""

    arch: str
    file: Path | None = None

    @property
    def label(self) -> str:
        """The name in the report."""
        return self.file.name if self.file else "decode kernels"


@dataclass
class Kernel:
    """What ptxas reports about one kernel."""

    name: str
    registers: int = 0
    frame: int = 0
    spilled: int = 0

    @property
    def is_good(self) -> bool:
        """Whether the kernel spills nothing and has a small stack frame."""
        limit = 0 if "DecodeKernel" in self.name else MOST_FRAME_BYTES
        return self.spilled == 0 and self.frame <= limit


@dataclass
class Result:
    """The outcome of a unit. `error` is the output of a compiler that failed."""

    unit: Unit
    seconds: float = 0.0
    error: str = ""
    kernels: list[Kernel] = field(default_factory=list)


def parse_ptxas(text: str) -> list[Kernel]:
    """Return the kernels in the output of `ptxas -v`."""
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if entry := ENTRY_LINE.search(line):
            kernels.append(Kernel(entry.group(1)))
        elif kernels and (spill := SPILL_LINE.search(line)):
            frame, stores, loads = (int(count) for count in spill.groups())
            kernels[-1].frame = max(kernels[-1].frame, frame)
            kernels[-1].spilled += stores + loads
        elif kernels and (registers := REGISTERS_LINE.search(line)):
            kernels[-1].registers = int(registers.group(1))
    return kernels


def source_of(unit: Unit, folder: Path) -> Path:
    """Return the file to compile. The decode kernels of a unit without a file are written."""
    if unit.file:
        return unit.file
    header = next(BACKEND.rglob("decode_variants_of.*")).relative_to(ROOT / "src")
    variants = [
        f"template DecodeVariant MakeVariant<{mode}, {mode}, DataType::kFloat16, {dim}>"
        "(const DecodeFormat&);\n"
        for dim in QUICK_DIMS
        for mode in QUICK_MODES
    ]
    source = folder / f"decode_{unit.arch}.cu"
    source.write_text(
        f'#include "{header}"\nnamespace turbomind::cuda {{\nusing enum KvCacheMode;\n'
        + "".join(variants)
        + "}\n",
        encoding="utf-8",
    )
    return source


def compile_unit(nvcc: str, unit: Unit, *, folder: Path) -> Result:
    """Compile a unit and read the output of ptxas."""
    begun = time.monotonic()
    command = [nvcc, "-std=c++20", "-O3", f"-arch={unit.arch}", f"-I{ROOT / 'src'}"]
    command += [f'-D{name}="checked"' for name in NAMES]
    if unit.label.startswith("kv_"):
        command.append("-fmad=false")  # as the build does
    cubin = folder / f"{unit.label.replace(' ', '_')}_{unit.arch}.cubin"
    done = subprocess.run(
        [*command, "-Xptxas", "-v", "-cubin", "-o", str(cubin), str(source_of(unit, folder))],
        capture_output=True,
        text=True,
        check=False,
    )
    error = f"status {done.returncode}: {done.stderr[-2000:]}" if done.returncode else ""
    return Result(unit, time.monotonic() - begun, error, parse_ptxas(done.stderr))


def chosen_units(everything: bool) -> list[Unit]:
    """Return the units to compile."""
    archs = ALL_ARCHS if everything else FILE_ARCHS
    others = [Unit(arch) for arch in ALL_ARCHS if everything or arch in OTHER_ARCHS]
    return others + [Unit(arch, path) for path in sorted(BACKEND.rglob("*.cu")) for arch in archs]


def report(result: Result) -> int:
    """Print the lines of a unit and return the number of faults."""
    unit = result.unit
    if result.error:
        print(f"{unit.arch:8} {unit.label}: does not compile  FAILED\n{result.error}", flush=True)
        return 1
    bad = [kernel for kernel in result.kernels if not kernel.is_good]
    for kernel in bad:
        print(
            f"{unit.arch:8} {unit.label}: {kernel.name} spills {kernel.spilled} bytes and has a "
            f"stack frame of {kernel.frame}  FAILED"
        )
    decode = sum("DecodeKernel" in kernel.name for kernel in result.kernels)
    wanted = len(QUICK_MODES) * len(QUICK_DIMS) if unit.file is None else 0
    if decode < wanted:
        print(f"{unit.arch:8} {unit.label}: {decode} kernels, not at least {wanted}  FAILED")
    max_registers = max((kernel.registers for kernel in result.kernels), default=0)
    print(
        f"{unit.arch:8} {unit.label}: {len(result.kernels)} kernels, "
        f"at most {max_registers} registers, "
        f"{result.seconds:.0f} s",
        flush=True,
    )
    return len(bad) + (decode < wanted)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, check and print a line per file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every file for every architecture")
    parser.add_argument("--only", action="append", metavar="PART", help="part of a file name")
    options = parser.parse_args(arguments)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("check_cuda: there is no nvcc, so nothing is checked")
        return 0
    begun = time.monotonic()
    parts = options.only or [""]
    units = [x for x in chosen_units(options.all) if any(part in x.label for part in parts)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(JOBS) as pool:
        results = pool.map(lambda unit: compile_unit(nvcc, unit, folder=Path(folder)), units)
        counts = [(report(result), len(result.kernels)) for result in results]
    faults, kernels = (sum(column) for column in zip(*counts, strict=True))
    print(
        f"check_cuda: {kernels} kernels in {len(units)} compilations, {faults} faults, "
        f"{time.monotonic() - begun:.0f} s"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
