"""Tests of the KV scales in checkpoints: an fp8 cache uses them, and broken ones are rejected."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_folders import (
    Stored,
    change_config,
    change_tensors,
    pack_words,
    quantize_groups,
    save_quantized,
)
from tiny_families import HYBRID_MODELS
from tiny_models import TINY_MODELS

from lmdeploy import TurbomindEngineConfig, _turbomind
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.kv_scales import KvScales
from lmdeploy.checkpoint.open import open_checkpoint
from lmdeploy.engine.devices import open_device
from lmdeploy.engine.plan import plan_engine
from lmdeploy.engine.prefix_store import identity_of_cache
from lmdeploy.lite.divergence import Score
from lmdeploy.lite.prompt_engine import PromptEngine, open_model

FP8 = {"quant_method": "fp8"}
NAMES = {
    "plain": "self_attn.{side}_scale",
    "modelopt": "self_attn.{side}_proj.{side}_scale",
    "vllm": "self_attn.attn.{side}_scale",
}
K, V = (0.25, 0.5), (0.03, 2.0)


def quantize(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
    scale = np.float32(np.abs(weight).max() / 448)
    codes = torch.from_numpy(weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": torch.tensor(scale)}, codes.float().numpy() * scale


def scales(form: str = "plain", shape: tuple[int, ...] = (1,)) -> Stored:
    return {
        f"model.layers.{layer}.{NAMES[form].format(side=side)}": torch.full(shape, values[layer])
        for side, values in (("k", K), ("v", V))
        for layer in range(2)
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    save_quantized(TINY_MODELS[0], folder, quantize, quantization=FP8, extra=scales())
    return folder


def plan(folder: Path, **options: Any) -> Any:
    config = TurbomindEngineConfig(session_len=64, max_batch_size=1, num_threads=1, **options)
    return plan_engine(str(folder), config, device=open_device(config))


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_open_checkpoint_reads_scales_under_each_name(
    good: Path, tmp_path: Path, form: str, shape: tuple[int, ...]
) -> None:
    def change(stored: Stored) -> None:
        for name in scales():
            del stored[name]
        stored.update(scales(form, shape))

    checkpoint = open_checkpoint(change_tensors(good, tmp_path, change))
    expected = KvScales(*(tuple(np.float32(side).tolist()) for side in (K, V)))
    assert checkpoint.kv_scales == expected


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "fp8", "kv_cache_scheme": "static"},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "kv_cache_scheme": {
                "num_bits": 8,
                "type": "float",
                "strategy": "tensor",
                "dynamic": False,
                "symmetric": True,
            },
        },
    ],
)
def test_open_checkpoint_accepts_the_schemes_of_each_writer(
    good: Path, tmp_path: Path, quantization: dict[str, Any]
) -> None:
    folder = change_tensors(good, tmp_path, lambda _: None)
    change_config(folder, quantization_config=quantization)
    assert open_checkpoint(folder).kv_scales is not None


def test_gptq_folder_with_scales_is_accepted(tmp_path: Path) -> None:
    def pack(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        groups = np.zeros(weight.shape[1], np.int64)
        codes, scales, zeros = quantize_groups(weight, groups, bits=4, symmetric=True)
        parts = {
            "qweight": torch.from_numpy(pack_words(codes.T, 4, 0)),
            "qzeros": torch.from_numpy(pack_words(zeros.T - 1, 4, 1)),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return parts, weight

    config = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    save_quantized(TINY_MODELS[0], tmp_path, pack, quantization=config, extra=scales())
    assert open_checkpoint(tmp_path).kv_scales is not None


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({"quant_policy": "fp8"}, (K, V)),
        ({"kv_cache_format": "k=fp8,v=nvfp4", "kv_quality": "raw"}, (K, (1, 1))),
        ({"kv_cache_format": {"default": "fp8", "1": "none"}}, ((K[0], 1), (V[0], 1))),
        ({"quant_policy": 0}, None),
        ({"quant_policy": 8}, None),
        ({"quant_policy": "fp8_e5m2"}, None),
        ({"quant_policy": "fp8", "kv_quality": "balanced"}, None),
        ({"quant_policy": "fp8", "kv_rotation": True}, None),
    ],
)
def test_plan_engine_uses_scales_or_warns_once(
    good: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    used: tuple[tuple[float, ...], tuple[float, ...]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    config_class = _turbomind.EngineConfig
    plain = config_class.set_kv_calibration

    def watch(self: Any, mean: Any, k: np.ndarray, v: np.ndarray) -> None:
        assert mean is None
        seen.append((k, v))
        plain(self, mean, k, v)

    monkeypatch.setattr(config_class, "set_kv_calibration", watch)
    with caplog.at_level(logging.WARNING, "lmdeploy"):
        _, _, kv = plan(good, **options)
    warnings = [r for r in caplog.records if "scales of an FP8 KV cache" in r.getMessage()]
    assert len(warnings) == (used is None)
    assert ("scales of the checkpoint" in kv.quality_text) == (used is not None)
    assert len(seen) == (used is not None)
    for side, expected in zip(seen[0] if seen else (), used or (), strict=True):
        assert side.shape == (2, 2)  # layers, KV heads
        np.testing.assert_array_equal(side, np.repeat(np.float32(expected)[:, None], 2, axis=1))


def test_identity_of_cache_covers_scales(good: Path, tmp_path: Path) -> None:
    def change(stored: Stored) -> None:
        stored[min(scales())] *= 2

    def identity(folder: Path) -> dict[str, Any]:
        config = TurbomindEngineConfig(quant_policy="fp8", num_threads=1)
        files, _, kv = plan_engine(str(folder), config, device=open_device(config))
        return identity_of_cache(str(folder), config, files=files, kv=kv)()

    one, other = identity(good), identity(change_tensors(good, tmp_path, change))
    assert {key for key in one if one[key] != other[key]} == {"scales"}


def test_fp8_cache_stores_values_by_the_scales(good: Path, tmp_path: Path) -> None:
    """Scales that are far too small cut off values, and good ones keep the divergence small."""

    def divergence(folder: Path) -> float:
        model = open_model(str(folder), exact=True, threads=1)
        ids = [1, 5, 40, 7, 300, 12, 9, 9, 77, 130]
        pieces = []
        for quant_policy in (0, "fp8"):
            configure = model.configure(TurbomindEngineConfig(quant_policy=quant_policy))
            with PromptEngine(model, configure, context=len(ids)) as engine:
                pieces.append(np.concatenate([*engine.pieces(ids)])[:-1])
        score = Score()
        score.add(pieces[1], pieces[0], targets=np.array(ids[1:]))
        return float(score.report()["kl_mean"])

    def shrink(stored: Stored) -> None:
        for name in scales():
            stored[name] = torch.full((1,), 1e-4)

    assert divergence(good) < 0.05
    assert divergence(change_tensors(good, tmp_path, shrink)) > 0.5


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose second layer is the only one with attention."""
    extra = {name: data for name, data in scales("modelopt").items() if "layers.1." in name}
    folder = tmp_path_factory.mktemp("hybrid")
    save_quantized(HYBRID_MODELS[0], folder, quantize, quantization=FP8, extra=extra)
    return folder


def test_recurrent_layers_have_no_scales(hybrid: Path, tmp_path: Path) -> None:
    expected = KvScales((1.0, K[1]), (1.0, V[1]))
    assert open_checkpoint(hybrid).kv_scales == expected
    _, _, kv = plan(hybrid, quant_policy="fp8")
    assert "scales of the checkpoint" in kv.quality_text

    def add(stored: Stored) -> None:
        stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)

    with pytest.raises(ModelFormatError, match="1 of the tensors are KV scales"):
        open_checkpoint(change_tensors(hybrid, tmp_path, add))


FIRST = "model.layers.0.self_attn.k_scale"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({FIRST: torch.ones(2)}, r"k_scale has shape \[2\]\. A KV scale must be one number"),
        ({FIRST: torch.ones(1, 2, 1)}, r"k_scale has shape \[1, 2, 1\]"),
        ({FIRST: torch.zeros(1)}, r"k_scale is 0\. It must be a finite number above 0"),
        ({FIRST: torch.full((1,), -1.0)}, r"k_scale is -1\."),
        ({FIRST: torch.full((1,), float("nan"))}, r"k_scale is nan\."),
        ({FIRST: torch.full((1,), float("inf"))}, r"k_scale is inf\."),
        ({FIRST: torch.ones(1, dtype=torch.int8)}, r"k_scale has dtype I8"),
        ({FIRST: None}, r"layers\.0\.self_attn\.k_scale is missing, but .* exists"),
        ({"model.layers.1.self_attn.v_scale": None}, r"layers\.1\.self_attn\.v_scale is missing"),
        ({"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)}, "exclude each other"),
        ({"model.layers.0.self_attn.kv_scale": torch.ones(1)}, "1 of the tensors are KV scales"),
        ({"model.layers.2.self_attn.k_scale": torch.ones(1)}, "1 of the tensors are KV scales"),
        ({"model.layers.0.self_attn.k_zero_point": torch.ones(1)}, "tensors are KV scales"),
    ],
)
def test_open_checkpoint_broken_scales_are_rejected(
    good: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    def change(stored: Stored) -> None:
        for name, value in changes.items():
            if value is None:
                del stored[name]
            else:
                stored[name] = value

    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(change_tensors(good, tmp_path, change))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "num_bits 4"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "type 'int'"),
        ({"kv_cache_scheme": {"strategy": "attn_head"}}, "strategy 'attn_head'"),
        ({"kv_cache_scheme": {"symmetric": False}}, "symmetric is false"),
        ({"kv_cache_scheme": "dynamic"}, "must be an object"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'. It must be FP8"),
        ({"kv_cache_quant_config": {"a": 1}}, "kv_cache_quant_config is not supported"),
    ],
)
def test_open_checkpoint_other_kv_schemes_are_rejected(
    good: Path, tmp_path: Path, quantization: dict[str, Any], message: str
) -> None:
    folder = change_tensors(good, tmp_path, lambda _: None)
    change_config(folder, quantization_config={**FP8, **quantization})
    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(folder)
