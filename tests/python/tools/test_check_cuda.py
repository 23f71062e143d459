"""check_cuda.py reads the output of ptxas and fails for spills and large stack frames."""

from __future__ import annotations

from pathlib import Path

import check_cuda
import pytest

DECODE = "_ZN9turbomind4cuda12DecodeKernelILi1EEEv"

SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to function calls\n"
)


def ptxas(name: str, *, frame: int = 0, spilled: int = 0) -> str:
    return (
        f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'\n"
        f"    {frame} bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 95 registers, used 1 barriers\n"
    )


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (ptxas("_Z5firstv", frame=32) + ptxas(DECODE), 0, "2 kernels, 1 compilations, 0 faults"),
        (ptxas("_Z5firstv", frame=40), 1, "a stack frame of 40  FAILED"),
        (ptxas(DECODE, frame=8), 1, "a stack frame of 8  FAILED"),
        (ptxas("_Z5firstv", spilled=4), 1, "spills 4 bytes"),
        (ptxas(DECODE) + SERIALIZED, 1, "due to function calls  FAILED"),
        ("", 1, "does not compile"),
    ],
)
def test_check_cuda_fails_for_bad_kernels(
    text: str, status: int, words: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "out").write_text(text)
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\ncat {tmp_path}/out >&2; exit {int(not text)}\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(check_cuda.shutil, "which", lambda name: str(nvcc))
    unit = ("sm_90a", tmp_path / "x_ops.cu")
    monkeypatch.setattr(check_cuda, "chosen_units", lambda everything: [unit])
    assert check_cuda.main([]) == status
    assert words in capsys.readouterr().out


def test_check_cuda_reads_the_log_of_a_build(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(check_cuda.shutil, "which", lambda name: "nvcc")
    monkeypatch.setattr(check_cuda, "chosen_units", lambda everything: [])
    log = tmp_path / "ninja.log"
    log.write_text("[1/2] Building CUDA object x.cu.o\n" + ptxas("_Z5firstv") + "[2/2] Linking\n")
    assert check_cuda.main(["--log", str(log)]) == 0
    assert "1 kernels, 0 compilations, 0 faults" in capsys.readouterr().out
    log.write_text(ptxas(DECODE, spilled=8))
    assert check_cuda.main(["--log", str(log)]) == 1
