"""Tests of every KV quality on a model whose keys have a large constant, as in Qwen2.5.

The constant is a bias of the K projection. RoPE rotates slow pairs little, so the K offset of a
block contains nearly all of it. On fast pairs, it turns around within a block, so the cache leaves
it out and attention adds it.
"""

import hashlib
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import TinyModel, make_model, save_model
from tiny_moe import GPT_OSS

from lmdeploy import _turbomind
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.engine.kv_calibration import write_calibration
from lmdeploy.engine.kv_quality import MAX_BIAS_LEFT, resolve_kv_options, warn_of_bias
from lmdeploy.lite.calibrate import CalibrationOptions, calibrate
from lmdeploy.lite.divergence import cache_variants, evaluate
from lmdeploy.lite.prompt_engine import OpenModel, open_model

CONTEXT = 512
BIASES = (0.0, 60.0, 300.0)  # keys without the bias have a spread of about 1.5
PAIRS = 3
FORMATS = ("int8", "int4", "nvfp4", "mxfp4")
Divergence = dict[str, float]


QWEN2 = TinyModel("qwen2-biased", "Qwen2", {"max_position_embeddings": 1024})


def biased_model(
    folder: Path, *, bias: float, slow: bool = True, tiny: TinyModel = QWEN2
) -> OpenModel:
    """Return a model with the bias on the slowest or fastest pairs of every head of 64."""
    import torch

    model = make_model(tiny)
    rng = np.random.default_rng(5)
    half = 32
    with torch.no_grad():
        for layer in model.model.layers:
            biases = layer.self_attn.k_proj.bias.view(2, 2, half)  # heads, halves of a pair, pairs
            pairs = slice(half - PAIRS, half) if slow else slice(0, PAIRS)
            signs = torch.from_numpy(rng.choice([-1.0, 1.0], (2, 2, PAIRS)))
            biases[:, :, pairs] += bias * signs
    return open_model(str(save_model(model, folder)), exact=True)


def random_ids(seed: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, 300, count).tolist()
    return ids


def measure(model: OpenModel, folder: Path, **ingredients: object) -> Divergence:
    """Return KL against `none`, with a calibration on other tokens."""
    path = folder / "calibration.safetensors"
    options = CalibrationOptions(tokens=1024, context=CONTEXT)
    digest = hashlib.sha256(b"random").hexdigest()
    write_calibration(
        path, calibrate(model, random_ids(1, 1024), text_hash=digest, options=options)
    )
    variants = cache_variants(
        FORMATS, ["raw", "balanced", "best"], calibration=str(path), ingredients=ingredients
    )
    configured = {label: model.configure(config) for label, config in variants.items()}
    scores = evaluate(model, [random_ids(2, CONTEXT)], variants=configured)
    divergence = {label: float(score.report()["kl_mean"]) for label, score in scores.items()}
    print({label: f"{value:.5f}" for label, value in divergence.items()})
    return divergence


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Divergence]:
    """Return KL by bias of the slowest pairs."""
    folder = tmp_path_factory.mktemp("slow")
    return {bias: measure(biased_model(folder / str(bias), bias=bias), folder) for bias in BIASES}


@pytest.mark.parametrize("bias", BIASES[1:])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("quality", ["", "/balanced", "/best"])
def test_constant_on_slow_pairs_costs_no_accuracy(
    slow: dict[float, Divergence], name: str, quality: str, bias: float
) -> None:
    label = f"{name}{quality}"
    # KL grows with the square of an error. Keys of 300 are rounded to steps of 1/4 in 16 bits, so
    # that the baseline itself is that far from exact keys.
    floor = 3e-3 if bias > 100 else 1e-4
    assert slow[bias][label] < 2 * slow[0.0][label] + floor


def test_constant_on_slow_pairs_ruins_formats_without_k_offset(
    slow: dict[float, Divergence], tmp_path: Path
) -> None:
    without = measure(biased_model(tmp_path / "model", bias=60.0), tmp_path, kv_k_offset="none")
    for name in ("int4", "nvfp4", "mxfp4"):
        assert without[name] > 0.5, name
        assert without[f"{name}/balanced"] > 10 * slow[60.0][f"{name}/balanced"], name


def test_constant_on_fast_pairs_costs_only_what_values_cost(
    slow: dict[float, Divergence], tmp_path: Path
) -> None:
    # Such a model attends to few tokens, so that errors of V do not average out. With K in 16 bits,
    # V in nvfp4 has a KL of 0.02 on it and 0.004 on the model without the constant.
    model = biased_model(tmp_path / "model", bias=60.0, slow=False)
    fast = measure(model, tmp_path)
    for name in ("int4", "nvfp4"):
        assert fast[name] < 4 * slow[0.0][name], name
        assert fast[f"{name}/balanced"] < 5 * slow[0.0][f"{name}/balanced"], name


def test_bias_of_gpt_oss_costs_no_accuracy(tmp_path: Path) -> None:
    # Sinks, sliding windows and YaRN. Its keys of 60 are rounded to steps of 1/4 in 16 bits, which
    # is nearly all of what int8 with a window in 16 bits shows.
    kl = {
        bias: measure(biased_model(tmp_path / str(bias), bias=bias, tiny=GPT_OSS), tmp_path)
        for bias in (0.0, 60.0)
    }
    for name in ("int4", "nvfp4", "mxfp4"):
        for label in (name, f"{name}/balanced"):
            assert kl[60.0][label] < 2 * (kl[0.0][label] + kl[60.0]["int8/balanced"]), label


def warnings_of(
    caplog: pytest.LogCaptureFixture, left: float, *, k_bias: bool = True, **options: object
) -> list[str]:
    """Return the warnings for a model whose keys keep a bias of this size."""
    config = TurbomindEngineConfig(**options)  # type: ignore[arg-type]
    kv = resolve_kv_options(config, [0], k_bias=k_bias)
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "lmdeploy"):
        patch.setattr(_turbomind, "k_bias_left", lambda *_, **__: left)
        nothing = SimpleNamespace()
        warn_of_bias(
            kv,
            model=SimpleNamespace(k_bias=k_bias),  # type: ignore[arg-type]
            weights=nothing,  # type: ignore[arg-type]
            device=nothing,  # type: ignore[arg-type]
            block_seq_len=64,
        )
    return [record.getMessage() for record in caplog.records]


def test_warning_names_the_option_that_helps(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings_of(caplog, MAX_BIAS_LEFT, quant_policy=16)
    assert not warnings_of(caplog, 1e3, quant_policy=0)
    assert not warnings_of(caplog, 1e3, k_bias=False, quant_policy=16)
    assert not warnings_of(caplog, 1e3, kv_cache_format="k=none,v=nvfp4")
    (text,) = warnings_of(caplog, 1e3, quant_policy=16)
    assert "up to 1000" in text and "--kv-cache-format k=none,v=nvfp4" in text
    (text,) = warnings_of(caplog, 1e3, quant_policy=4)
    assert "--kv-cache-format k=none,v=int4" in text
    (text,) = warnings_of(caplog, 0.0, quant_policy=8, kv_k_offset="none")
    assert "--kv-k-offset block" in text


def test_k_bias_left_is_small_for_slow_and_fast_pairs(tmp_path: Path) -> None:
    for slow in (True, False):
        model = biased_model(tmp_path / str(slow), bias=60.0, slow=slow).loaded
        device = _turbomind.make_cpu_device(1)
        assert _turbomind.k_bias_left(model.config, model.weights, device, block_seq_len=64) < 2
