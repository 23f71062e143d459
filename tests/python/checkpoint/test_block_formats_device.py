"""Tests of NVFP4 and K-quants on the CUDA backend compiled for the CPU, which stores their bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_fp4 import FORMS, save_fp4
from test_fp8_device import BF16_TOLERANCE, answer, error_of
from tiny_gguf import write_gguf
from tiny_models import TinyModel, make_model
from tiny_moe import QWEN3_MOE

from lmdeploy import _turbomind
from lmdeploy.checkpoint.convert import K_QUANTS
from lmdeploy.engine.model_files import open_files

LLAMA = TinyModel("llama-256", "Llama", {"hidden_size": 256, "intermediate_size": 512})


def check(path: Path, kind: str) -> None:
    """Check that a GPU stores the format and gives the logits of FP32."""
    info = open_files(str(path), capability=_turbomind.cuda_capability(90)).info
    assert info.parts["mlp"].formats == (kind.lower(),)
    _, wanted = answer(path, "cpu")
    _, logits = answer(path, "cuda")
    assert error_of(logits, wanted) < BF16_TOLERANCE


@pytest.mark.parametrize("name", ["nvfp4", "modelopt"])
@pytest.mark.parametrize("tiny", [LLAMA, QWEN3_MOE], ids=lambda tiny: tiny.name)
def test_a_gpu_computes_nvfp4_as_stored(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    save_fp4(tiny, tmp_path / "m", FORMS[name])
    check(tmp_path / "m", "nvfp4")


@pytest.mark.parametrize("kind", ["NVFP4", *K_QUANTS])
def test_a_gpu_computes_gguf_as_stored(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"{kind}.gguf"
    write_gguf(make_model(LLAMA), path, weight_format=kind)
    check(path, kind)
