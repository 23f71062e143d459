"""Rotary position embedding as Hugging Face configs define it, in double precision."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rope:
    """RoPE parameters, named as in Hugging Face configs.

    `dim` is the number of rotated values of a head. `dynamic` scales its base for `session_len`,
    the longest sequence of the engine.
    """

    dim: int
    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the ends of the ramp to integers
    session_len: int = 0


def plain_frequencies(dim: int, theta: float) -> Doubles:
    """Return theta^(-2i/dim) for each pair i."""
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def llama3_frequencies(rope: Rope) -> Doubles:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those in between."""
    frequencies = plain_frequencies(rope.dim, rope.theta)
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((turns - rope.low_freq_factor) / span, 0, 1)
    return frequencies * (keep + (1 - keep) / rope.factor)


def yarn_frequencies(rope: Rope) -> Doubles:
    """Blend by a linear ramp over the index.

    The ramp begins and ends at the indices that turn beta_fast and beta_slow times in the original
    length.
    """

    def index_of(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low if high != low else 0.001
    stretch = np.clip((np.arange(rope.dim // 2) - low) / span, 0, 1)
    frequencies = plain_frequencies(rope.dim, rope.theta)
    return frequencies * (stretch / rope.factor + (1 - stretch))


def frequencies(rope: Rope) -> Doubles:
    """Return the angle per position of each pair. It is the same at every position."""
    if rope.kind == "default":
        return plain_frequencies(rope.dim, rope.theta)
    if rope.kind == "linear":
        return plain_frequencies(rope.dim, rope.theta) / rope.factor
    if rope.kind == "llama3":
        return llama3_frequencies(rope)
    if rope.kind == "yarn":
        return yarn_frequencies(rope)
    if rope.kind != "dynamic":
        raise ValueError(f"RoPE kind {rope.kind!r} is unknown.")
    length = max(rope.session_len, rope.original_max_position)
    growth = rope.factor * length / rope.original_max_position - (rope.factor - 1)
    return plain_frequencies(rope.dim, rope.theta * growth ** (rope.dim / (rope.dim - 2)))


def rotate(rope: Rope, x: Doubles, positions: npt.NDArray[np.int64]) -> Doubles:
    """Rotate x [tokens, heads, head_dim]; value i is paired with value i + dim / 2."""
    angles = positions[:, None] * frequencies(rope)
    yarn = rope.kind == "yarn" and rope.factor > 1
    size = 0.1 * math.log(rope.factor) + 1 if yarn else 1.0
    cos, sin = (size * f(angles)[:, None, :] for f in (np.cos, np.sin))
    half = rope.dim // 2
    first, second, rest = x[..., :half], x[..., half : rope.dim], x[..., rope.dim :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
