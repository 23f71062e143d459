"""scripts/eval_latents.py: models whose K and V share a latent."""

import eval_latents
import numpy as np
from parity import prompt, reference_logits, relative_error
from reference.quality import RAW
from tiny_models import TinyModel, make_model

_HIDDEN = 64
# Latents are rounded to FP16. Measured: 4e-4.
_MAX_ERROR = 2e-3


def test_latents_of_full_rank_compute_the_model() -> None:
    model = make_model(TinyModel("llama", "Llama"))
    ids = prompt(100)
    wanted = reference_logits(model, ids)
    errors = []
    for rank in (_HIDDEN, _HIDDEN // 2):
        layers = eval_latents.make_latents(model, prompt(200, seed=5), rank=rank)
        got = eval_latents.latent_logits(model, layers, ids=ids, mode="none", quality=RAW)
        errors.append(relative_error(got, wanted))
    assert errors[0] <= _MAX_ERROR < 10 * _MAX_ERROR < errors[1]
    np.testing.assert_array_equal(reference_logits(model, ids), wanted)  # the model is unchanged


def test_formats_with_more_bits_diverge_less() -> None:
    model = make_model(TinyModel("llama", "Llama"))
    ids = prompt(300)
    layers = eval_latents.make_latents(model, prompt(200, seed=5), rank=48)

    def logits(name: str) -> np.ndarray:
        mode, quality = eval_latents.CASES[name]
        return eval_latents.latent_logits(model, layers, ids=ids, mode=mode, quality=quality)

    plain = eval_latents.latent_logits(model, layers, ids=ids, mode="none", quality=RAW)
    order = ["int8/raw", "nvfp4/balanced", "nvfp4/raw"]
    divergences = [eval_latents.mean_kl(plain, logits(name)) for name in order]
    assert 0.0 < divergences[0] < divergences[1] < divergences[2]
