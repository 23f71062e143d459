"""Tests of FP8 weights on the CUDA backend compiled for the CPU, in subprocesses that load it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_folder import built
from test_fp8 import LLAMA, VARIANTS, save_fp8
from tiny_models import TinyModel
from tiny_moe import QWEN3_MOE

ROOT = Path(__file__).parents[3]
# Arguments: checkpoint, device_type, gemm_input_dtype or "". Prints the lines at the start and the
# logits.
ANSWER = """
import json, sys
from lmdeploy import GenerationConfig, TurbomindEngineConfig, pipeline
path, device_type, dtype = sys.argv[1:]
config = TurbomindEngineConfig(
    device_type=device_type, session_len=256, max_batch_size=2, cache_max_entry_count=0.01,
    num_threads=1, exact=device_type == "cpu", gemm_input_dtype=dtype or None,
)
with pipeline(path, backend_config=config) as pipe:
    gen = GenerationConfig(max_new_tokens=3, ignore_eos=True, output_logits="generation")
    answer = pipe("What is the capital of France? " * 4, gen_config=gen, do_preprocess=False)
    print(json.dumps([pipe.engine.start_lines(), answer.logits.tolist()]))
"""
# Limits of the root mean square of the logits' error, relative to that of the logits. Activations
# have 8 significant bits in BF16, and 4 in E4M3.
BF16_TOLERANCE = 0.03
FP8_TOLERANCE = 0.2


def answer(
    folder: Path, device: str, *, cublas_lt: str = "", dtype: str = ""
) -> tuple[list[str], Any]:
    """Return the lines at the start and the logits of the first generated token."""
    cuda = os.devnull if device == "cpu" else built("libturbomind_cuda_shim.so")
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LMDEPLOY_CUDA_LIBRARY": str(cuda),
        "LMDEPLOY_CUBLASLT_LIBRARY": cublas_lt,
    }
    command = [sys.executable, "-c", ANSWER, folder, device, dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    lines, logits = json.loads(done.stdout)
    return lines, np.asarray(logits[0])


def error_of(logits: Any, wanted: Any) -> float:
    return float(np.linalg.norm(logits - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", ["blocks-128", "tensor", "fbgemm"])
@pytest.mark.parametrize("tiny", [LLAMA, QWEN3_MOE], ids=lambda tiny: tiny.name)
def test_a_gpu_gives_logits_of_fp32(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    save_fp8(tiny, tmp_path, VARIANTS[name])
    _, wanted = answer(tmp_path, "cpu")
    _, logits = answer(tmp_path, "cuda")
    assert error_of(logits, wanted) < BF16_TOLERANCE


@pytest.mark.parametrize("name", ["blocks-128", "fbgemm"])
def test_prompts_are_multiplied_in_8_bits_if_asked_for(name: str, tmp_path: Path) -> None:
    save_fp8(LLAMA, tmp_path, VARIANTS[name])
    _, wanted = answer(tmp_path, "cuda")
    stand_in = str(built("libcuda_shim_cublas_lt.so"))
    _, logits = answer(tmp_path, "cuda", cublas_lt=stand_in)
    assert error_of(logits, wanted) < BF16_TOLERANCE
    _, logits = answer(tmp_path, "cuda", cublas_lt=stand_in, dtype="fp8")
    assert BF16_TOLERANCE < error_of(logits, wanted) < FP8_TOLERANCE


def test_8_bit_activations_need_the_library() -> None:
    open_it = (
        "from lmdeploy import TurbomindEngineConfig as C; from lmdeploy.engine import devices\n"
    )
    open_it += "devices.open_device(C(device_type='cuda', gemm_input_dtype='fp8'))"
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LMDEPLOY_CUDA_LIBRARY": str(built("libturbomind_cuda_shim.so")),
        "LMDEPLOY_CUBLASLT_LIBRARY": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", open_it], capture_output=True, text=True, env=env, check=False
    )
    assert "needs a GPU of SM 90 and cuBLASLt" in done.stderr
