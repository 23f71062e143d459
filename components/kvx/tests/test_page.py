"""Tests of README.md: its programs compile, run and print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "README.md"


def code(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
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
