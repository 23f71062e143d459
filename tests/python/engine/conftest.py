"""The stand-in for CUDA, for tests that start a process with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from build_folder import built


@pytest.fixture(scope="session")
def shim() -> Path:
    """Return the path of the CUDA backend that runs without a GPU."""
    return built("libturbomind_cuda_shim.so")
