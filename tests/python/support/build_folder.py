"""Finds what the build folder of C++ has, for tests that start processes with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def built(name: str) -> Path:
    """Return the path of a file in the build folder. Skip the test if it is not there."""
    folder = Path(os.environ.get("TM_BUILD_FOLDER", ROOT / "build" / "release"))
    found = sorted(folder.rglob(name))
    if not found:
        pytest.skip(f"no {name} in {folder}: build there, or set TM_BUILD_FOLDER")
    return found[0]
