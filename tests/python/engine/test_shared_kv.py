"""Tests of layers that read K and V of others (Gemma 4): their bytes, and bits however they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_runs import EngineRun
from parity import prompt
from tiny_families import FAMILY_MODELS
from tiny_models import make_model, save_model

from lmdeploy import Pipeline, TurbomindEngineConfig, _turbomind
from lmdeploy.checkpoint.methods.at_load import part_of
from lmdeploy.checkpoint.open import open_checkpoint
from lmdeploy.cli.serve import dry_run_lines
from lmdeploy.engine.devices import open_device
from lmdeploy.engine.plan import plan_engine

FORMATS = ("none", "int8", "fp8", "int4", "mxfp4", "nvfp4")
# K and V of one token of four layers that have them: two of 2 heads of 32, two of 2 heads of 64.
_VALUES = 2 * 2 * (2 * 32 + 2 * 64)
_BITS = {"none": 16, "int8": 8, "fp8": 8, "int4": 4, "mxfp4": 4, "nvfp4": 4}


def _folder(name: str, path: Path) -> str:
    tiny = next(tiny for tiny in FAMILY_MODELS if tiny.name == name)
    return str(save_model(make_model(tiny), path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _folder("gemma4", tmp_path_factory.mktemp("shared"))


def _config(**options: Any) -> TurbomindEngineConfig:
    return TurbomindEngineConfig(session_len=1024, cache_max_entry_count=64, **options)


def _plan(path: str, options: TurbomindEngineConfig) -> Any:
    device = open_device(options)
    files, engine_config, _ = plan_engine(path, options, device=device)
    return _turbomind.plan_memory(files.info.config, engine_config, 1 << 30, device.capability)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_plan_has_only_layers_with_k_and_v_of_their_own(folder: str, kv_format: str) -> None:
    quality = None if kv_format == "none" else "raw"
    options = _config(quant_policy=kv_format, kv_quality=quality, dtype="bfloat16")
    plan = _plan(folder, options)
    payload = _VALUES * _BITS[kv_format] // 8
    assert payload <= plan.bytes_per_token <= payload * 1.25
    if kv_format == "none":
        assert plan.bytes_per_token == payload
    lines = dry_run_lines(folder, options)
    assert any(f"{plan.bytes_per_token:,.0f} bytes per token" in line for line in lines)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_chunks_and_hits_do_not_change_a_bit(folder: str, kv_format: str) -> None:
    ids = prompt(300)
    logits = []
    for max_prefill in (5, 64, 300):
        with EngineRun(folder, exact=False, kv_format=kv_format, max_prefill=max_prefill) as run:
            logits.append(run.logits(ids))
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0], logits[2])
    with (
        EngineRun(folder, exact=False, kv_format=kv_format, prefix_caching=True) as warm,
        EngineRun(folder, exact=False, kv_format=kv_format, num_draft_tokens=3) as cold,
    ):
        warm.answer(ids, 4)
        got, wanted = warm.answer(ids, 12), cold.answer(ids, 12)
        assert got.cached_tokens > 200
        assert got.tokens == wanted.tokens
        assert got.logits.tobytes() == wanted.logits.tobytes()


@pytest.mark.parametrize("window", ["16bit", "int8"])
def test_recent_tokens_stay_in_the_window(folder: str, window: str) -> None:
    # A prompt that fits into the window has the logits of the window's format.
    other = "none" if window == "16bit" else "int8"
    losses = []
    for chosen in (
        {"quant_policy": "nvfp4", "kv_quality": "balanced", "kv_window": window},
        {"quant_policy": other, "kv_quality": None if other == "none" else "raw"},
        {"quant_policy": "nvfp4", "kv_quality": "raw"},
    ):
        with Pipeline(folder, _config(deterministic=True, kv_rotation=False, **chosen)) as pipe:
            losses.append(pipe.get_ppl([prompt(60)])[0])
    assert losses[0] == losses[1] != losses[2]


def test_the_table_of_per_layer_inputs_has_the_format_of_the_embedding(folder: str) -> None:
    parts = {planned.name: part_of(planned) for planned in open_checkpoint(Path(folder)).tensors}
    assert parts["per_layer_embedding"] == parts["embedding"] == "other"
    assert parts["layers.0.per_layer_gate"] == parts["per_layer_projection"] == "mlp"
    assert "layers.4.k" not in parts and "layers.4.v" not in parts


def test_a_calibration_of_layers_with_other_heads_is_refused(tmp_path: Path) -> None:
    path = _folder("gemma4", tmp_path)
    device = _turbomind.make_cpu_device(1)
    from lmdeploy.engine.model_files import load_model

    model = load_model(path, exact=True, device=device, progress=False)
    config = _turbomind.EngineConfig()
    config.collect_kv_statistics = True
    with pytest.raises(ValueError, match="layers differ in head_dim or KV heads"):
        _turbomind.Engine(model.config, config, model.weights, device, 1 << 30)
