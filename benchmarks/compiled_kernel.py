"""Compile a kernel for SM 90 without a GPU, and count its registers and instructions."""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def nvdisasm_option(text: str | None, arguments: Sequence[str] | None) -> str | None:
    """Parse the command line of a program with the docstring `text`.

    Returns:
        the path of nvdisasm, or None, with a message, if it or nvcc is missing.
    """
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm"), help="of the CUDA toolkit")
    path: str | None = parser.parse_args(arguments).nvdisasm
    if not path or not shutil.which("nvcc"):
        print(
            f"{parser.prog}: only the old kernels are predicted. Those of this tree need nvcc, and "
            "nvdisasm (pip install nvidia-cuda-nvdisasm, then --nvdisasm PATH).",
            file=sys.stderr,
        )
        return None
    return path


@dataclass(frozen=True)
class Compiled:
    """A kernel in machine code. `sizes` are the integers of the source's variable `sizes`."""

    registers: int
    sass: str
    sizes: tuple[int, ...]


def compile_kernel(
    source_text: str, *, kernel: str, nvdisasm: str, folder: Path, root: Path = ROOT
) -> Compiled:
    """Compile a kernel for SM 90a.

    Args:
        source_text: the source, with an instance of the kernel and, maybe, a variable `sizes`.
        kernel: a part of the kernel's name.
        nvdisasm: the program.
        folder: an empty folder.
        root: the repository whose headers are compiled.

    Raises:
        ValueError: ptxas names no registers.
        subprocess.CalledProcessError: the source does not compile.
    """
    source, cubin = folder / "one.cu", folder / "one.cubin"
    source.write_text(source_text)
    command = ["nvcc", "-std=c++20", "-O3", "-arch=sm_90a", f"-I{root / 'src'}"]
    command += ["--expt-relaxed-constexpr", "-Xptxas=-v", "-cubin", "-o", str(cubin), str(source)]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(rf"{kernel}.*?Used (\d+) registers", log, re.S)
    if used is None:
        raise ValueError("ptxas names no registers")

    def disassemble(*options: str) -> str:
        command = [nvdisasm, *options, str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    has_sizes = " sizes[]" in source_text
    sizes = sizes_of(disassemble()) if has_sizes else []
    return Compiled(int(used[1]), disassemble("-c"), tuple(sizes))


def sizes_of(data: str) -> list[int]:
    """Return the integers of the variable `sizes` in a disassembly."""
    found = re.search(r"^sizes:\n((?:.*\.byte.*\n)+)", data, re.M)
    if found is None:
        raise ValueError("the disassembly has no variable `sizes`")
    raw = bytes(int(x, 16) for x in re.findall(r"0x([0-9a-f]{2})\b", found[1]))
    return [word for (word,) in struct.iter_unpack("<i", raw)]


@dataclass(frozen=True)
class Code:
    """The instructions of a kernel, and the index of each label."""

    lines: list[str]
    places: dict[str, int]

    @classmethod
    def of(cls, sass: str) -> Code:
        """Read a disassembly."""
        places: dict[str, int] = {}
        lines: list[str] = []
        for line in sass.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                places[label[1]] = len(lines)
            elif code := re.match(r"\s*/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
                lines.append(code[1])
        return cls(lines, places)

    def target(self, i: int) -> int | None:
        """Return where the branch at index i goes, or None if there is none."""
        found = re.search(r"BRA `\((\.L_x_\d+)\)", self.lines[i])
        return None if found is None else self.places.get(found[1])

    def copy_loops(self) -> list[tuple[int, int]]:
        """Return the first and last index of the loops that wait for copies.

        Raises:
            ValueError: there is none.
        """
        loops = []
        for end in range(len(self.lines)):
            begin = self.target(end)
            if begin is None or begin > end:
                continue
            if any("DEPBAR.LE" in line for line in self.lines[begin:end]):
                loops.append((begin, end))
        if not loops:
            raise ValueError("no loop waits for copies")
        return loops
