"""Tests of caches in the memory of a GPU, with the stand-in for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from build_folder import built

PROGRAM = Path(__file__).with_name("gpu_program.py")


def test_cache_on_a_gpu_attends_to_arrays_that_are_not_copied() -> None:
    shim = str(built("libturbomind_cuda_shim.so"))
    folders = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), shim],
        env={**os.environ, "LMDEPLOY_CUDA_LIBRARY": shim, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout + done.stderr
