"""The ops of recurrent layers in double precision, for one sequence that begins at position 0.

Definitions: src/turbomind/ops/recurrent_params.h.
"""

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


def sigmoid(x: Doubles) -> Doubles:
    """Return 1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-x)))


def unit(x: Doubles) -> Doubles:
    """Return x divided by its length along the last axis."""
    return np.asarray(x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + 1e-6))


def short_convolution(
    x: Doubles, weight: Doubles, bias: Doubles | None = None, *, silu: bool = True
) -> Doubles:
    """Return the convolution of x[tokens, channels] with weight[kernel, channels]."""
    kernel, channels = weight.shape
    padded = np.concatenate([np.zeros((kernel - 1, channels)), x])
    out = np.stack(
        [(padded[t : t + kernel] * weight).sum(axis=0) for t in range(x.shape[0])],
    )
    if bias is not None:
        out = out + bias
    return np.asarray(out * sigmoid(out)) if silu else out


def gated_delta(
    q: Doubles,
    k: Doubles,
    v: Doubles,
    b: Doubles,
    a: Doubles,
    decay: Doubles,
    dt_bias: Doubles,
) -> Doubles:
    """Return the outputs of the gated delta rule, in the shape of v.

    q and k are [tokens, key_heads, key_dim], v is [tokens, value_heads, value_dim], b and a are
    [tokens, value_heads], decay and dt_bias are [value_heads].
    """
    tokens, heads, value_dim = v.shape
    key_dim = q.shape[-1]
    repeats = heads // q.shape[1]
    queries = np.repeat(unit(q) / np.sqrt(key_dim), repeats, axis=1)
    keys = np.repeat(unit(k), repeats, axis=1)
    forget = np.exp(-decay * np.logaddexp(0, a + dt_bias))
    state = np.zeros((heads, key_dim, value_dim))
    out = np.zeros_like(v)
    for t in range(tokens):
        # S = (I - beta k kᵀ) (forget S) + beta k vᵀ
        beta_k = sigmoid(b[t])[:, None] * keys[t]
        erase = np.eye(key_dim) - beta_k[:, :, None] * keys[t][:, None, :]
        write = beta_k[:, :, None] * v[t][:, None, :]
        state = erase @ (forget[t][:, None, None] * state) + write
        out[t] = np.einsum("hk,hkv->hv", queries[t], state)
    return out


def pattern(size: int, seed: int) -> Doubles:
    """Return the values that the C++ tests use (tests/cpp/ops/recurrent_fixture.h)."""
    return ((np.arange(size) * 37 + 11 * seed) % 101 - 50) / 32


def pattern_convolution(tokens: int, channels: int, kernel: int) -> Doubles:
    """Return the outputs of a convolution with a bias whose arguments are patterns."""
    return short_convolution(
        pattern(tokens * channels, 5).reshape(tokens, channels),
        pattern(kernel * channels, 3).reshape(kernel, channels),
        pattern(channels, 4),
    )


def pattern_gated_delta(tokens: int, heads: tuple[int, int], dims: tuple[int, int]) -> Doubles:
    """Return the outputs of the delta rule whose arguments are patterns.

    `heads` and `dims` are those of keys and of values. The pattern fills rows of q, k, v, b and a.
    """
    keys, values = heads[0] * dims[0], heads[1] * dims[1]
    rows = pattern(tokens * (2 * keys + values + 2 * heads[1]), 5).reshape(tokens, -1)
    q, k, v, b, a = np.split(rows, np.cumsum([keys, keys, values, heads[1]]).tolist(), axis=1)
    return gated_delta(
        q.reshape(tokens, heads[0], dims[0]),
        k.reshape(tokens, heads[0], dims[0]),
        v.reshape(tokens, heads[1], dims[1]),
        b,
        a,
        np.square(pattern(heads[1], 1)) + 1 / 64,
        pattern(heads[1], 2),
    )
