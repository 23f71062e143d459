"""Mixture-of-experts feed-forward layers in double precision, one token at a time."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Weights = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    With `gpt_oss`: biases, interleaved gate and up, and clamped activations. Otherwise: SiLU
    without biases.
    """

    count: int
    top_k: int
    width: int
    gpt_oss: bool = False
    normalize: bool = True
    limit: float = 7.0

    def matrices(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of each matrix, by its name within a layer."""
        shapes = {"router": (self.count, hidden)}
        for e in range(self.count):
            if self.gpt_oss:
                shapes[f"experts.{e}.gate_up"] = (2 * self.width, hidden)
            else:
                shapes[f"experts.{e}.gate"] = shapes[f"experts.{e}.up"] = (self.width, hidden)
            shapes[f"experts.{e}.down"] = (hidden, self.width)
        return shapes

    def biases(self, hidden: int) -> dict[str, int]:
        """Return the length of each bias, by its name within a layer."""
        if not self.gpt_oss:
            return {}
        return {f"{name}.bias": rows for name, (rows, _) in self.matrices(hidden).items()}


def choose(experts: Experts, logits: Doubles) -> list[tuple[int, float]]:
    """Return (expert, weight) pairs of one token: the highest logits, lower ids first on ties."""
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    ids = sorted(range(experts.count), key=lambda e: (-logits[e], e))[: experts.top_k]
    total = sum(weights[e] for e in ids) if experts.normalize else 1.0
    return [(e, float(weights[e] / total)) for e in ids]


def run_expert(experts: Experts, weights: Weights, prefix: str, x: Doubles) -> Doubles:
    """Return the output of one expert for one token."""
    if experts.gpt_oss:
        both = weights[f"{prefix}.gate_up"].astype(np.float64) @ x
        both += weights[f"{prefix}.gate_up.bias"]
        gate = np.minimum(both[0::2], experts.limit)
        up = np.clip(both[1::2], -experts.limit, experts.limit)
        hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        return (
            weights[f"{prefix}.down"].astype(np.float64) @ hidden + weights[f"{prefix}.down.bias"]
        )
    gate = weights[f"{prefix}.gate"].astype(np.float64) @ x
    up = weights[f"{prefix}.up"].astype(np.float64) @ x
    return weights[f"{prefix}.down"].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up)


def feed_forward(experts: Experts, weights: Weights, prefix: str, x: Doubles) -> Doubles:
    """Run each token of x [tokens, hidden] through its experts; returns the same shape."""
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        logits = weights[f"{prefix}.router"].astype(np.float64) @ row
        logits = logits + weights.get(f"{prefix}.router.bias", np.float32(0))
        for expert, weight in choose(experts, logits):
            out[token] += weight * run_expert(experts, weights, f"{prefix}.experts.{expert}", row)
    return out
