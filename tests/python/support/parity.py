"""Compute logits and greedy tokens with transformers, and relative errors."""

from typing import Any

import numpy as np
import torch
from tiny_models import VOCAB_SIZE

# Largest difference of a logit, relative to the largest logit. Both sides compute in FP32 but sum
# in different orders. Measured with these widths and depths: 1.3e-6 to 5.5e-6.
MAX_RELATIVE_ERROR = 3e-5
# More than every window and every original_max_position_embeddings of TINY_MODELS.
NUM_TOKENS = 150
NUM_GREEDY = 24


def prompt(num_tokens: int = NUM_TOKENS, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num_tokens).tolist()


def reference_logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def reference_hidden(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return states[-1][0].float().numpy()  # after the final norm


def reference_greedy(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    ids = list(ids)
    for _ in range(num_tokens):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[-num_tokens:]


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    assert got.shape == wanted.shape
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def mean_kl(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return KL(wanted || got) per token."""
    one, other = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (wanted, got))
    return float((one.exp() * (one - other)).sum(-1).mean())
