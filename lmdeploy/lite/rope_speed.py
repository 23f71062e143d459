"""Computes the angle by which RoPE turns each pair of channels, as src/turbomind/ops/rope.cc."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from lmdeploy._turbomind import ModelConfig, RopeConfig

QUARTER_TURN = math.pi / 2


def slow_channels(model: ModelConfig, context: int) -> npt.NDArray[np.bool_]:
    """Return which channels RoPE turns by less than a quarter turn over `context`.

    The result is [num_layers, head_dim]. The mean of these channels is a property of the model.
    That of the others would depend on the positions of the tokens.
    """
    slow = np.ones((model.num_layers, model.head_dim), np.bool_)
    for layer, index in enumerate(model.layer_ropes or [0] * model.num_layers):
        if index >= 0 and (rope := model.ropes[index]).kind != "none":
            pairs = inverse_frequencies(rope) * context < QUARTER_TURN
            slow[layer, : rope.dim] = np.concatenate([pairs, pairs])
    return slow


def inverse_frequencies(rope: RopeConfig) -> npt.NDArray[np.float64]:
    """Return the radians per position of each pair, [dim / 2]. For `dynamic`, without scaling."""
    exponents = np.arange(0, rope.dim, 2) / rope.dim
    speeds = np.asarray(rope.theta**-exponents, np.float64)
    if rope.kind == "linear":
        speeds = speeds / rope.factor
    elif rope.kind == "llama3":
        speeds = _llama3(rope, speeds)
    elif rope.kind == "yarn":
        speeds = _yarn(rope, speeds)
    return speeds / np.array(rope.freq_factors or 1.0, np.float64)


def _llama3(rope: RopeConfig, speeds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    turns = rope.original_max_position * speeds / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
    return np.asarray(speeds * (smooth + (1 - smooth) / rope.factor))


def _yarn(rope: RopeConfig, speeds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    def dimension(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, rope.dim - 1.0)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return np.asarray(speeds * (1 - ramp) + speeds / rope.factor * ramp)
