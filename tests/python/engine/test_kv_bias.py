"""Tests of every KV quality on a model whose keys have a large constant, as in Qwen2.5.

The constant is a bias of the K projection. RoPE rotates slow pairs little, so there the bias is
nearly constant over the context. It cancels in the softmax and only wastes the range of the codes.
On fast pairs, it rotates with the position, so no constant can be subtracted.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from tiny_models import TinyModel, make_model, save_model

from lmdeploy.engine.kv_calibration import write_calibration
from lmdeploy.lite.calibrate import CalibrationOptions, calibrate
from lmdeploy.lite.divergence import cache_variants, evaluate
from lmdeploy.lite.prompt_engine import OpenModel, open_model

CONTEXT = 512
BIAS = 60.0  # keys without the bias have a spread of about 1.5; Qwen2.5 has biases above 100
PAIRS = 3
Divergence = dict[str, float]
Agreement = dict[str, float]


def biased_model(folder: Path, *, slow: bool) -> OpenModel:
    """Return a model of two layers with the bias on the slowest or fastest pairs of every head."""
    import torch

    tiny = TinyModel("qwen2-biased", "Qwen2", {"max_position_embeddings": 1024})
    model = make_model(tiny)
    rng = np.random.default_rng(5)
    half = 32
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.view(2, 2, half)  # heads, halves of a pair, pairs
            pairs = slice(half - PAIRS, half) if slow else slice(0, PAIRS)
            signs = torch.from_numpy(rng.choice([-1.0, 1.0], (2, 2, PAIRS)))
            bias[:, :, pairs] += BIAS * signs
    return open_model(str(save_model(model, folder)), exact=True)


def random_ids(seed: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, 300, count).tolist()
    return ids


def measure(model: OpenModel, folder: Path) -> tuple[Divergence, Agreement]:
    """Return KL against `none` and top-1 agreement, with a calibration on other tokens."""
    path = folder / "calibration.safetensors"
    options = CalibrationOptions(tokens=1024, context=CONTEXT)
    digest = hashlib.sha256(b"random").hexdigest()
    write_calibration(
        path, calibrate(model, random_ids(1, 1024), text_hash=digest, options=options)
    )
    variants = cache_variants(["int4", "nvfp4"], ["raw", "balanced", "best"], calibration=str(path))
    configured = {label: model.configure(config) for label, config in variants.items()}
    scores = evaluate(model, [random_ids(2, CONTEXT)], variants=configured)
    rows = {label: score.report() for label, score in scores.items()}
    for label, row in rows.items():
        print(f"{label:16} KL {row['kl_mean']:.5f}  top-1 {row['top1']:.3f}")
    return (
        {label: float(row["kl_mean"]) for label, row in rows.items()},
        {label: float(row["top1"]) for label, row in rows.items()},
    )


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Divergence, Agreement]:
    folder = tmp_path_factory.mktemp("slow")
    return measure(biased_model(folder / "model", slow=True), folder)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> tuple[Divergence, Agreement]:
    folder = tmp_path_factory.mktemp("fast")
    return measure(biased_model(folder / "model", slow=False), folder)


def test_kv_quality_constant_on_slow_pairs_ruins_raw_but_not_best(
    slow: tuple[Divergence, Agreement],
) -> None:
    """Measured: int4 KL 1.53 raw, 0.59 balanced, 0.016 best; nvfp4 1.17, 0.41, 0.012."""
    divergence, agreement = slow
    for name in ("int4", "nvfp4"):
        assert divergence[name] > 0.5 and agreement[name] < 0.3, name
        assert divergence[f"{name}/best"] < 0.05 and agreement[f"{name}/best"] > 0.8, name
        assert divergence[f"{name}/best"] < divergence[f"{name}/balanced"] / 10, name
        assert divergence[f"{name}/balanced"] < divergence[name] / 2, name


def test_kv_quality_constant_on_fast_pairs_is_not_removed_by_the_mean(
    slow: tuple[Divergence, Agreement], fast: tuple[Divergence, Agreement]
) -> None:
    """Measured: int4 KL 1.26 raw, 0.39 balanced, 0.37 best; nvfp4 0.92, 0.41, 0.39.

    RoPE rotates the constant with the position, so its mean is near 0. Rotation and 16-bit blocks
    help; the calibrated mean does not.
    """
    for name in ("int4", "nvfp4"):
        assert fast[0][name] > 0.5 and fast[1][name] < 0.3, name
        assert fast[0][f"{name}/balanced"] < fast[0][name] / 1.5, name
        assert fast[0][f"{name}/best"] > fast[0][f"{name}/balanced"] / 2, name
        assert fast[0][f"{name}/best"] > 5 * slow[0][f"{name}/best"], name
