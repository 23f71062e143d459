"""Tests of the instruction counts of a decode step per KV format against the record.

`python scripts/dev/count_instructions.py BUILD --update` records an intended change.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from pathlib import Path

import count_instructions as counting
import pytest

ROOT = Path(__file__).parents[3]


def test_count_steps_equals_the_record():
    folder = Path(os.environ.get("TM_BUILD_FOLDER", ROOT / "build" / "release"))
    if platform.machine() != "x86_64":
        pytest.skip("the counts are of x86-64 code")
    if not (folder / "step_guard").is_file():
        pytest.skip(f"no {folder / 'step_guard'}: build there, or set TM_BUILD_FOLDER")
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed: scripts/test.sh installs it")
    record = json.loads(counting.RECORD.read_text())
    (_, got), want = counting.about(folder), record["compiler"]
    if got != want:
        pytest.skip(f"built by {got}, the record is of {want}: the counts do not compare")
    counts = counting.count_steps(folder)
    assert counting.compare_steps(counts, record["decode_step_avx2"]) == []
