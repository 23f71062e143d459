"""Tests of README.md and docs/kvx.md: their programs compile, run and print what the pages say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "README.md"
GPU_PAGE = PAGE.parents[2] / "docs/kvx.md"
GPU_STREAM = "torch.cuda.current_stream().cuda_stream"


def code(language: str, *, page: Path = PAGE) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    return str(found)


def test_c_program_prints_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "program.c").write_text(code("c"))
    script = code("sh").replace("$(python ", f"$('{sys.executable}' ")
    done = subprocess.run(
        ["bash", "-ec", f"cd '{tmp_path}'\n{script}"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PAGE.parents[2])},
    )
    assert done.stdout == "1.5 -2\n"
    assert "# 1.5 -2" in script


def test_python_program_prints_what_the_page_says() -> None:
    program = code("python")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"# {done.stdout}" in program


def test_program_for_a_gpu_prints_the_same_in_host_memory() -> None:
    program = code("python", page=GPU_PAGE)
    assert program.count('"cuda"') == 4 and GPU_STREAM in program
    program = program.replace(GPU_STREAM, "None").replace('"cuda"', '"cpu"')
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"# {done.stdout}" in program
