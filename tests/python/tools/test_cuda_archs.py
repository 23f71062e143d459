"""Tests of cmake/cuda_archs.cmake, with scripts in place of nvidia-smi and nvcc."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = """
cmake_minimum_required(VERSION 3.22)
include("{root}/cmake/cuda_archs.cmake")
set(tm_nvidia_smi "{smi}")
set(CMAKE_CUDA_COMPILER "{nvcc}")
set(CMAKE_CUDA_COMPILER_VERSION {version})
tm_gpus_here(sms)
tm_resolve_archs("${{sms}}" archs)
foreach(arch ${{archs}})
  tm_gencode(${{arch}} option)
  message(STATUS "${{arch}} ${{option}}")
endforeach()
"""
# The output of `nvcc --list-gpu-arch`.
KNOWN = {
    "12.4": "50 75 80 86 87 89 90",
    "12.8": "75 80 86 87 89 90 100 101 120",
    "12.9": "75 80 86 87 89 90 100 101 103 120 121",
    "13.0": "75 80 86 87 88 89 90 100 110 103 120 121",
}


@pytest.fixture
def options(tmp_path):
    """Return a function that gives nvcc's options by architecture, as CMake computes them."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")

    def tool(name: str, text: str, status: int = 0) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\nprintf '%s\\n' {text}\nexit {status}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def run(gpus: str, version: str = "13.0", wanted: str = "AUTO") -> dict[str, str]:
        nvcc = tool("nvcc", " ".join(f"compute_{number}" for number in KNOWN[version].split()))
        smi = tool("nvidia-smi", gpus, status=int(not gpus))
        script = tmp_path / "archs.cmake"
        script.write_text(
            SCRIPT.format(root=ROOT, smi=smi, nvcc=nvcc, version=version), encoding="utf-8"
        )
        done = subprocess.run(
            ["cmake", f"-DTM_CUDA_ARCHS={wanted}", "-P", script],
            capture_output=True,
            text=True,
            check=True,
        )
        lines = [line.removeprefix("-- ") for line in done.stdout.splitlines()]
        return dict(line.split(" ", 1) for line in lines)

    return run


def test_cuda_archs_auto_selects_the_present_gpus(options):
    assert options("9.0 9.0") == {"90a": "SHELL:-gencode arch=compute_90a,code=sm_90a"}
    assert list(options("8.6 12.0")) == ["86", "120a"]
    assert list(options("10.0", "12.8")) == ["100a"]


def test_cuda_archs_gpu_newer_than_nvcc_gets_ptx(options):
    ptx = {"90-virtual": "SHELL:-gencode arch=compute_90,code=compute_90"}
    assert options("12.0", "12.4") == options("13.5") == ptx


@pytest.mark.parametrize(
    ("version", "archs"),
    [
        ("12.4", "80 86 89 90a 90-virtual"),
        ("12.8", "80 86 89 90a 100a 120a 90-virtual"),
        ("12.9", "80 86 89 90a 100f 120f 90-virtual"),
        ("13.0", "80 86 89 90a 100f 110f 120f 90-virtual"),
    ],
)
def test_cuda_archs_all_selects_what_nvcc_supports(options, version, archs):
    assert list(options("9.0", version, "ALL")) == archs.split()
    assert list(options("", version)) == archs.split()  # no GPU is present


def test_cuda_archs_list_is_used_unchanged(options):
    assert list(options("9.0", wanted="89;100f")) == ["89", "100f"]
