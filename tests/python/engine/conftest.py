"""The stand-in for CUDA, for tests that start a process with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def shim() -> Path:
    """Return the path of the CUDA backend that runs without a GPU."""
    folder = Path(os.environ.get("TM_BUILD_FOLDER", ROOT / "build" / "release"))
    library = folder / "libturbomind_cuda_shim.so"
    if not library.is_file():
        pytest.skip(f"no {library}: build there, or set TM_BUILD_FOLDER")
    return library
