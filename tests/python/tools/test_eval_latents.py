"""scripts/eval_latents.py: a Llama as a model whose K and V share a latent."""

from pathlib import Path
from typing import Any

import eval_latents
import numpy as np
import torch
from parity import prompt, reference_logits, relative_error
from tiny_models import TinyModel, make_model

from lmdeploy.lite.prompt_engine import OpenModel, open_model

_HIDDEN = 64
_PAIRS = 8
LLAMA = TinyModel("llama", "Llama", {"head_dim": 2 * _PAIRS})
# Measured: 1.7e-3 with the last pair, and 4e-4 of rows in FP16 alone.
_MAX_ERROR = 3e-3


def llama() -> Any:
    """Return a model whose keys have almost nothing in the last pair, which turns the least."""
    model = make_model(LLAMA)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[_PAIRS - 1 :: _PAIRS] *= 1e-3
    return model


def converted(folder: Path, *, rank: int, pairs: int) -> OpenModel:
    ids = prompt(200, seed=5)
    eval_latents.convert(llama(), ids, folder=folder, rank=rank, pairs=pairs)
    return open_model(str(folder), exact=True)


def test_latents_of_full_rank_compute_the_model(tmp_path: Path) -> None:
    ids = prompt(100)
    wanted = reference_logits(llama(), ids)
    errors = []
    for rank in (_HIDDEN, _HIDDEN // 2):
        found = converted(tmp_path, rank=rank, pairs=_PAIRS - 1)
        errors.append(relative_error(eval_latents.logits_of(found, ids), wanted))
    print(errors)
    assert errors[0] <= _MAX_ERROR < 10 * _MAX_ERROR < errors[1]
    # Without the other pairs, only the first token is right.
    got = eval_latents.logits_of(converted(tmp_path, rank=_HIDDEN, pairs=2), ids)
    print(relative_error(got[:1], wanted[:1]), relative_error(got, wanted))
    assert relative_error(got[:1], wanted[:1]) <= _MAX_ERROR < relative_error(got, wanted)


def test_a_rotation_and_more_bits_diverge_less(tmp_path: Path) -> None:
    ids = prompt(250)
    found = converted(tmp_path, rank=48, pairs=4)
    plain = eval_latents.logits_of(found, ids)

    def divergence(kv_format: str, *, rotation: bool) -> float:
        chosen = {"quant_policy": kv_format, "kv_quality": "raw", "kv_rotation": rotation}
        logits = eval_latents.logits_of(found, ids, **chosen)
        return eval_latents.scores_of(logits, plain, ids=ids)["kl_mean"]

    kl = {name: divergence(name, rotation=True) for name in ("int8", "nvfp4", "mxfp4")}
    print(kl, divergence("mxfp4", rotation=False))
    assert 0.0 < kl["int8"] < kl["nvfp4"] < kl["mxfp4"]
    assert np.isclose(eval_latents.scores_of(plain, plain, ids=ids)["kl_mean"], 0.0)
