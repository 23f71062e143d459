"""Tests of AWQ checkpoints: values, names, rejected files, and logits as in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import EngineRun
from parity import MAX_RELATIVE_ERROR, prompt, reference_logits, relative_error
from quantized_folders import Stored, check_hybrid, pack_words, quantize_groups, save_quantized
from reference.weights import AWQ_ORDER, read_awq
from safetensors.numpy import load_file, save_file
from tiny_families import HYBRID_MODELS
from tiny_models import TINY_MODELS, TinyModel
from tiny_moe import QWEN3_MOE

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.convert import engine_bytes, matrix_for_engine
from lmdeploy.checkpoint.fingerprint import hash_model
from lmdeploy.checkpoint.open import open_checkpoint
from lmdeploy.engine.plan import check_model_format

GROUP = 32
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
CONFIG |= {"zero_point": True, "modules_to_not_convert": None}
QWEN2 = next(tiny for tiny in TINY_MODELS if tiny.architecture == "Qwen2")


def pack(values: np.ndarray) -> torch.Tensor:
    """Pack codes [n, outputs] of 0..15 into int32 [n, outputs / 8] in AutoAWQ's nibble order."""
    ordered = values.reshape(len(values), -1, 8)[:, :, list(AWQ_ORDER)]
    return torch.from_numpy(pack_words(ordered.reshape(values.shape), 4, 1))


def quantize(
    weight: np.ndarray, *, group: int = GROUP, symmetric: bool = False, with_zeros: bool = True
) -> tuple[Stored, np.ndarray]:
    """Quantize [outputs, inputs]; return the tensors and the values that they represent."""
    groups = np.arange(weight.shape[1]) // group
    codes, scales, zeros = quantize_groups(weight, groups, bits=4, symmetric=symmetric)
    parts = {"qweight": pack(codes.T), "scales": torch.from_numpy(scales.T.copy())}
    if with_zeros:
        parts["qzeros"] = pack(zeros.T)
    return parts, read_awq({name: data.numpy() for name, data in parts.items()})


def save_awq(tiny: TinyModel, folder: Path) -> Any:
    """Write an AWQ checkpoint and return the model with the dequantized values."""
    return save_quantized(tiny, folder, quantize, quantization=CONFIG)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("awq")
    save_awq(QWEN2, folder)
    return folder


@pytest.mark.parametrize("tiny", [QWEN2, QWEN3_MOE], ids=lambda tiny: tiny.name)
def test_awq_logits_equal_transformers(tiny: TinyModel, tmp_path: Path) -> None:
    model = save_awq(tiny, tmp_path)
    ids = prompt(80)
    with EngineRun(str(tmp_path), exact=True) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    print(f"{tiny.name}: relative error {error:.2e}")
    assert error <= MAX_RELATIVE_ERROR


@pytest.mark.parametrize("tiny", HYBRID_MODELS, ids=lambda tiny: tiny.name)
def test_awq_hybrid_logits_equal_transformers(tiny: TinyModel, tmp_path: Path) -> None:
    check_hybrid(tiny, tmp_path, quantize, quantization=CONFIG)


def test_awq_hybrid_with_other_rows_is_rejected(tmp_path: Path) -> None:
    save_quantized(HYBRID_MODELS[1], tmp_path, quantize, quantization=CONFIG)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    base = "model.layers.1.self_attn.q_proj."
    for cuts, text in (
        ({"scales": 8}, r"q_proj\.scales has shape \[2, 504\]\. It must be \[2, 512\]"),
        ({"qzeros": 8}, r"q_proj\.qzeros has shape \[2, 56\]\. It must be \[2, 64\]"),
        (
            {"qweight": 8, "qzeros": 8, "scales": 64},
            r"q_proj\.weight has shape \[448, 64\]\. By the config it must be \[512, 64\]",
        ),
    ):
        cut = {base + part: whole[base + part][:, :-count].copy() for part, count in cuts.items()}
        save_file({**whole, **cut}, path)
        with pytest.raises(ModelFormatError, match=text):
            open_checkpoint(tmp_path)


def test_matrix_for_engine_awq_becomes_q4_1(qwen2: Path) -> None:
    import gguf

    stored = load_file(qwen2 / "model.safetensors")
    planned = {planned.name: planned for planned in open_checkpoint(qwen2).tensors}
    for name in ("layers.1.q", "layers.0.down"):
        tensor = planned[name].tensor
        kind, wanted = matrix_for_engine(tensor, exact=True)
        assert kind == "f32"
        kind, data = matrix_for_engine(tensor, exact=False)
        assert (kind, data.nbytes) == ("q4_1", engine_bytes(planned[name], exact=False))
        got = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q4_1)
        scales = stored[tensor.name.replace("qweight", "scales")].astype(np.float32)
        max_value = 15 * np.repeat(scales.T, GROUP, axis=1) * 2**-11  # error of the minimum in FP16
        error = np.abs(got - wanted)
        assert (error <= max_value).all() and error.any()


def test_matrix_for_engine_awq_large_groups_over_several_chunks_are_exact(tmp_path: Path) -> None:
    from lmdeploy.checkpoint.convert import _CHUNK_VALUES
    from lmdeploy.checkpoint.files.tensor_file import StoredTensor
    from lmdeploy.checkpoint.methods.awq import awq_matrix

    rows, cols = 1032, 1024
    assert rows * cols > _CHUNK_VALUES
    weight = np.random.default_rng(1).normal(size=(rows, cols)).astype(np.float32)
    parts, wanted = quantize(weight, group=128)
    codes, zeros, scales = (
        np.ascontiguousarray(parts[name].numpy()).view(np.uint8).reshape(-1)
        for name in ("qweight", "qzeros", "scales")
    )
    matrix = awq_matrix(rows, codes=codes, scales=scales, zeros=zeros)
    tensor = StoredTensor("x", "AWQ", (rows, cols), codes, matrix=matrix)
    np.testing.assert_array_equal(matrix_for_engine(tensor, exact=True)[1], wanted)


@pytest.mark.parametrize("with_zeros", [True, False])
def test_matrix_for_engine_awq_without_zero_points_becomes_q4_0(
    with_zeros: bool, tmp_path: Path
) -> None:
    import gguf

    options = {"symmetric": True, "with_zeros": with_zeros}
    config = {**CONFIG, "zero_point": False}
    save_quantized(QWEN2, tmp_path, partial(quantize, **options), quantization=config)
    (planned,) = [p for p in open_checkpoint(tmp_path).tensors if p.name == "layers.1.down"]
    wanted = matrix_for_engine(planned.tensor, exact=True)[1]
    kind, data = matrix_for_engine(planned.tensor, exact=False)
    assert kind == "q4_0"
    got = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(got, wanted)


def test_hash_model_covers_scales_and_zeros(qwen2: Path, tmp_path: Path) -> None:
    stored = load_file(qwen2 / "model.safetensors")
    (tmp_path / "config.json").write_bytes((qwen2 / "config.json").read_bytes())
    seen = {hash_model(str(qwen2))}
    for part in ("scales", "qzeros"):
        changed = dict(stored)
        name = f"model.layers.1.mlp.up_proj.{part}"
        changed[name] = changed[name] + np.ones(1, changed[name].dtype)
        save_file(changed, tmp_path / "model.safetensors")
        seen.add(hash_model(str(tmp_path)))
    assert len(seen) == 3


def test_check_model_format_awq_accepts_awq_and_hf(qwen2: Path) -> None:
    check_model_format(qwen2, "awq", model_path="m")
    check_model_format(qwen2, "hf", model_path="m")
    with pytest.raises(ValueError, match=r"model_format is gguf\. It must be awq"):
        check_model_format(qwen2, "gguf", model_path="m")
    with pytest.raises(
        ValueError, match=r"model_format is 'nova'\. It must be one of hf, gguf, awq"
    ):
        check_model_format(qwen2, "nova", model_path="m")


Change = Callable[[dict[str, np.ndarray]], None]
UP = "model.layers.0.mlp.up_proj."


def without(name: str) -> Change:
    return lambda stored: stored.pop(name)  # type: ignore[func-returns-value]


def cut(name: str) -> Change:
    return lambda stored: stored.update({name: np.ascontiguousarray(stored[name][:-1])})


def halved(base: str) -> Change:
    def change(stored: dict[str, np.ndarray]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            size = len(stored[base + part]) // 2
            stored[base + part] = np.ascontiguousarray(stored[base + part][:size])

    return change


def huge(stored: dict[str, np.ndarray]) -> None:
    stored[UP + "scales"] = np.full_like(stored[UP + "scales"], 60000)
    stored[UP + "qzeros"] = np.full_like(stored[UP + "qzeros"], -1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without(UP + "qzeros"), "up_proj.qzeros is missing"),
        (without(UP + "scales"), "up_proj.scales is missing"),
        (cut(UP + "scales"), r"up_proj.scales has shape \[1, 160\]\. It must be \[2, 160\]"),
        (
            cut(UP + "qweight"),
            r"up_proj.qweight has shape \[63, 20\]\. .* multiple of group_size 32",
        ),
        (
            halved(UP),
            r"up_proj.weight has shape \[160, 32\]\. By the config it must be \[160, 64\]",
        ),
        (
            lambda stored: stored.update({UP + "weight": np.zeros((160, 64), np.float32)}),
            "exclude each other",
        ),
        (
            lambda stored: stored.update({UP + "g_idx": np.zeros(64, np.int32)}),
            "does not use 1 of the tensors",
        ),
        (huge, "up_proj.qweight: .*beyond 65504, the limit of FP16"),
    ],
)
def test_open_checkpoint_inconsistent_awq_tensor_is_rejected(
    qwen2: Path, tmp_path: Path, change: Change, text: str
) -> None:
    stored = load_file(qwen2 / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((qwen2 / "config.json").read_bytes())
    with pytest.raises(ModelFormatError, match=text):
        for planned in open_checkpoint(tmp_path).tensors:
            if len(planned.tensor.shape) == 2:
                matrix_for_engine(planned.tensor, exact=False)


def test_open_checkpoint_awq_without_quantization_config_is_rejected(
    qwen2: Path, tmp_path: Path
) -> None:
    config = json.loads((qwen2 / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((qwen2 / "model.safetensors").read_bytes())
    with pytest.raises(ModelFormatError, match=r"q_proj\.weight is missing"):
        open_checkpoint(tmp_path)
