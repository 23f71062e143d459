"""Tests of the cache of latents: its bytes, and that hits, drafts and chunks change no bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversations import check_conversations
from engine_runs import EngineRun
from parity import mean_kl, prompt, reference_logits
from tiny_latents import GLM, MINICPM3, TINY_LATENTS, V2, V3
from tiny_models import TinyModel, make_model, save_model

from lmdeploy import Pipeline, TurbomindEngineConfig, _turbomind
from lmdeploy.cli.serve import dry_run_lines
from lmdeploy.engine.devices import open_device
from lmdeploy.engine.plan import plan_engine
from lmdeploy.engine.prefix_store import identity_of_cache

FORMATS = ("none", "int8", "fp8", "int4", "mxfp4", "nvfp4")
# One layer of DeepSeek's sizes: 512 values of the latent, 64 values that rotate.
ROW_BYTES = {"none": 1152, "int8": 644, "fp8": 640, "int4": 388, "mxfp4": 416, "nvfp4": 416}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(make_model(V3), tmp_path_factory.mktemp("latents")))


def is_rotated(kv_format: str) -> bool:
    return kv_format in ("int4", "nvfp4")


@pytest.mark.parametrize("kv_format", FORMATS)
def test_every_turn_has_the_bits_of_a_cold_one(folder: str, kv_format: str) -> None:
    options: dict[str, Any] = {"kv_format": kv_format, "rotated": is_rotated(kv_format)}
    with (
        EngineRun(folder, exact=False, prefix_caching=True, **options) as warm,
        EngineRun(folder, exact=False, num_draft_tokens=3, **options) as cold,
    ):
        check_conversations(warm, cold)


WINDOWED = ({"windowed": True}, {"windowed": True, "k_offset": True})


@pytest.mark.parametrize(
    ("kv_format", "more"),
    [
        *((name, {}) for name in FORMATS),
        *((name, more) for name in ("int4", "nvfp4") for more in WINDOWED),
    ],
    ids=str,
)
def test_chunks_do_not_change_a_bit(folder: str, kv_format: str, more: dict[str, Any]) -> None:
    ids = prompt(300)
    options: dict[str, Any] = {"kv_format": kv_format, "rotated": is_rotated(kv_format), **more}
    logits = []
    for max_prefill in (5, 64, 300):
        with EngineRun(folder, exact=False, max_prefill=max_prefill, **options) as run:
            logits.append(run.logits(ids))
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0], logits[2])


# Of FP32 logits in the L2 norm. Measured: 1.4e-6 to 3.2e-6.
MAX_ERROR_OF_ROTATION = 1e-5


@pytest.mark.parametrize("tiny", TINY_LATENTS, ids=lambda tiny: tiny.name)
def test_a_rotation_without_quantization_changes_only_roundings(
    tiny: TinyModel, tmp_path: Path
) -> None:
    path, ids = str(save_model(make_model(tiny), tmp_path)), prompt(150)
    prompts, answers = [], []
    for rotated in (False, True):
        with EngineRun(path, exact=True, rotated=rotated, num_draft_tokens=3) as run:
            prompts.append(run.logits(ids))
            answers.append(run.answer(ids, 30))
    plain, turned = answers
    for wanted, got in (prompts, (plain.logits, turned.logits)):
        error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
        print(f"{tiny.name}: {error:.1e}")
        assert 0.0 < error <= MAX_ERROR_OF_ROTATION
    assert plain.tokens == turned.tokens


# The error of all logits in the L2 norm, relative to them, in a dense model with peaked attention.
# Measured: 1.5e-6, 0.017, 0.085, 0.29, 0.35, 0.28.
MAX_ERROR = {"none": 1e-5, "int8": 0.03, "fp8": 0.13, "int4": 0.45, "mxfp4": 0.5, "nvfp4": 0.45}


@pytest.mark.parametrize("kv_format", FORMATS)
def test_formats_are_close_to_the_latents_of_transformers(kv_format: str, tmp_path: Path) -> None:
    model, ids = make_model(MINICPM3), prompt(200)
    with EngineRun(str(save_model(model, tmp_path)), exact=True, kv_format=kv_format) as run:
        got, wanted = run.logits(ids), reference_logits(model, ids)
    error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    print(f"{kv_format}: {error:.1e}")
    assert error <= MAX_ERROR[kv_format]
    assert (error > 1e-4) == (kv_format != "none")


# KL(none || format) per token of a random dense model with a rank of 256. Measured: 2e-5, 2.5e-4,
# 0.0073, 0.0053 and 0.0033.
MAX_KL = {"int8": 6e-5, "fp8": 8e-4, "int4": 0.02, "mxfp4": 0.015, "nvfp4": 0.01}
# FP4 latents in 8 bits may cost so much more than in FP32. Measured: 0.97 to 1.09 in three models.
MAX_KL_OF_BYTES = 1.2


def test_formats_diverge_little_and_bytes_cost_nothing(tmp_path: Path) -> None:
    settings = {**MINICPM3.settings, "kv_lora_rank": 256, "num_hidden_layers": 4}
    model, ids = make_model(dataclasses.replace(MINICPM3, settings=settings)), prompt(500, seed=0)
    with torch.no_grad():  # else attention is more peaked than in trained models
        for layer in model.model.layers:
            layer.self_attn.q_b_proj.weight.mul_(0.4)
    path = str(save_model(model, tmp_path))
    divergences: dict[bool, dict[str, float]] = {}
    for exact in (True, False):
        logits = {}
        for name in (*FORMATS, "mxfp4, rotated", "nvfp4, rotated"):
            kv_format, _, rotated = name.partition(", ")
            with EngineRun(path, exact=exact, kv_format=kv_format, rotated=bool(rotated)) as run:
                logits[name] = run.logits(ids)
        plain = logits.pop("none")
        divergences[exact] = {name: mean_kl(got, plain) for name, got in logits.items()}
    print(divergences)
    for kv_format, largest in MAX_KL.items():
        assert 0.0 < divergences[True][kv_format] <= largest
    for kv_format in ("mxfp4", "nvfp4", "mxfp4, rotated", "nvfp4, rotated"):
        ratio = divergences[False][kv_format] / divergences[True][kv_format]
        assert ratio <= MAX_KL_OF_BYTES


def config(**options: Any) -> TurbomindEngineConfig:
    return TurbomindEngineConfig(session_len=1024, cache_max_entry_count=64, **options)


def memory_plan(path: str, options: TurbomindEngineConfig) -> Any:
    device = open_device(options)
    files, engine_config, _ = plan_engine(path, options, device=device)
    return _turbomind.plan_memory(files.info.config, engine_config, 1 << 30, device.capability)


def real_sizes(tiny: TinyModel, **changes: Any) -> TinyModel:
    """Return a model with the latents of the real one, and few narrow layers."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_hidden_layers": 2}
    return dataclasses.replace(tiny, settings={**tiny.settings, **sizes, **changes})


@pytest.mark.parametrize("tiny", [V2, GLM], ids=lambda tiny: tiny.name)
def test_plan_has_one_row_per_token_and_layer(tiny: TinyModel, tmp_path: Path) -> None:
    path = str(save_model(make_model(real_sizes(tiny)), tmp_path))
    for kv_format, row_bytes in ROW_BYTES.items():
        options = config(quant_policy=kv_format, kv_quality=None if kv_format == "none" else "raw")
        plan = memory_plan(path, options)
        assert plan.bytes_per_token == 2 * row_bytes
        assert plan.bytes_per_token_none == 2 * ROW_BYTES["none"]
        lines = dry_run_lines(path, options)
        assert any(f"{2 * row_bytes:,} bytes per token" in line for line in lines)


@pytest.mark.parametrize("window", ["16bit", "int8"])
def test_recent_latents_stay_in_the_window(folder: str, window: str) -> None:
    # Prompts that fit into the window have the logits of a window's format.
    ids = prompt(60)
    options = {"quant_policy": "nvfp4", "kv_quality": "balanced", "kv_rotation": False}
    options["kv_window"] = window
    other = "none" if window == "16bit" else "int8"
    losses = []
    for chosen in (
        options,
        {"quant_policy": other, "kv_quality": None if other == "none" else "raw"},
        {"quant_policy": "nvfp4", "kv_quality": "raw"},
    ):
        with Pipeline(folder, config(deterministic=True, **chosen)) as pipe:
            losses += pipe.get_ppl(ids)
    assert losses[0] == losses[1] != losses[2]


def test_rotary_part_has_8_bits_if_k_has_a_format_of_its_own(tmp_path: Path) -> None:
    path = str(save_model(make_model(real_sizes(V2)), tmp_path))
    options = config(kv_cache_format="k=int8,v=nvfp4", kv_quality="raw")
    plan = memory_plan(path, options)
    assert plan.bytes_per_token == 2 * (512 // 2 + 32 + 64 + 4)


def test_latents_of_a_block_have_an_offset_on_demand(tmp_path: Path) -> None:
    path = str(save_model(make_model(real_sizes(V2)), tmp_path))
    for options, offset_bytes in (
        ({"kv_quality": "balanced"}, 0),
        # 512 + 4 bytes for 64 tokens, in whole cache lines.
        ({"kv_quality": "balanced", "kv_k_offset": "block"}, 576),
        ({"kv_quality": "raw", "kv_k_offset": "block", "kv_recent_tokens": 64}, 576),
        ({"kv_quality": "raw", "kv_k_offset": "block"}, 0),  # without a window
    ):
        chosen = config(quant_policy="nvfp4", **options)
        plan = memory_plan(path, chosen)
        assert plan.bytes_per_token == 2 * (ROW_BYTES["nvfp4"] + offset_bytes / 64)
        _, _, kv = plan_engine(path, chosen, device=open_device(chosen))
        assert ("offset per block" in kv.quality_text) == (offset_bytes > 0)


def test_a_calibration_without_effect_on_latents_is_refused(folder: str) -> None:
    chosen = config(quant_policy="nvfp4", kv_quality="best", kv_calibration="a.yaml")
    with pytest.raises(ValueError, match=r"^kv_calibration .* caches latents"):
        Pipeline(folder, chosen)


def identity(folder: str, **options: Any) -> dict[str, Any]:
    chosen = config(quant_policy="nvfp4", **options)
    files, _, kv = plan_engine(folder, chosen, device=open_device(chosen))
    return identity_of_cache(folder, chosen, files=files, kv=kv)()


def test_rotated_latents_and_latents_with_offsets_have_other_identities(folder: str) -> None:
    balanced = identity(folder)
    assert identity(folder, kv_rotation=False) == {**balanced, "rotation": False}
    assert identity(folder, kv_k_offset="block") == {**balanced, "k_offset": "mean"}


def test_a_nan_in_the_weights_is_an_error_of_the_request(tmp_path: Path) -> None:
    model = make_model(V3)
    with torch.no_grad():
        model.model.layers[0].self_attn.kv_a_layernorm.weight[3] = float("nan")
    folder = str(save_model(model, tmp_path))
    with (
        EngineRun(folder, exact=True) as run,
        pytest.raises(AssertionError, match="computed NaN or infinite logits"),
    ):
        run.logits(prompt(20))
