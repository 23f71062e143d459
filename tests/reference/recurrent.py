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


def selective_scan(
    q: Doubles,
    k: Doubles,
    v: Doubles,
    a: Doubles,
    decay: Doubles,
    dt_bias: Doubles,
    skip: Doubles,
) -> Doubles:
    """Return the outputs of the selective scan, in the shape of v.

    q and k are [tokens, key_heads, key_dim], v is [tokens, value_heads, value_dim], a is
    [tokens, value_heads], decay, dt_bias and skip are [value_heads].
    """
    repeats = v.shape[1] // q.shape[1]
    queries, keys = np.repeat(q, repeats, axis=1), np.repeat(k, repeats, axis=1)
    dt = np.logaddexp(0, a + dt_bias)
    # The sum over s <= t, without a state: token s adds dt k vᵀ, which later tokens scale.
    logs = np.cumsum(-decay * dt, axis=0)
    scales = np.tril(np.exp(logs.T[:, :, None] - logs.T[:, None, :]))
    weights = np.einsum("thk,shk->hts", queries, keys) * scales * dt.T[:, None, :]
    return np.asarray(np.einsum("hts,shv->thv", weights, v) + skip[:, None] * v)


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


def pattern_gated_convolution(tokens: int, channels: int, kernel: int) -> Doubles:
    """Return the outputs of a convolution with gates whose arguments are patterns.

    The pattern fills rows of x and the gates of the input and of the output.
    """
    x, in_gate, out_gate = np.split(
        pattern(tokens * 3 * channels, 5).reshape(tokens, -1), 3, axis=1
    )
    weight = pattern(kernel * channels, 3).reshape(kernel, channels)
    return out_gate * short_convolution(x * in_gate, weight, silu=False)


def pattern_heads(
    tokens: int, heads: tuple[int, int], dims: tuple[int, int], gates: int
) -> list[Doubles]:
    """Return q, k, v and the gates of rows that a pattern fills.

    `heads` and `dims` are those of keys and of values.
    """
    keys, values = heads[0] * dims[0], heads[1] * dims[1]
    sizes = [keys, keys, values] + gates * [heads[1]]
    rows = pattern(tokens * sum(sizes), 5).reshape(tokens, -1)
    q, k, v, *rest = np.split(rows, np.cumsum(sizes)[:-1].tolist(), axis=1)
    shapes = [(tokens, heads[0], dims[0])] * 2 + [(tokens, heads[1], dims[1])]
    return [x.reshape(shape) for x, shape in zip((q, k, v), shapes, strict=True)] + rest


def pattern_decay(heads: int) -> Doubles:
    """Return the factors of the steps that the C++ tests use."""
    return np.asarray(np.square(pattern(heads, 1)) + 1 / 64)


def pattern_gated_delta(tokens: int, heads: tuple[int, int], dims: tuple[int, int]) -> Doubles:
    """Return the outputs of the delta rule whose arguments are patterns."""
    q, k, v, b, a = pattern_heads(tokens, heads, dims, 2)
    return gated_delta(q, k, v, b, a, pattern_decay(heads[1]), pattern(heads[1], 2))


def pattern_selective_scan(tokens: int, heads: tuple[int, int], dims: tuple[int, int]) -> Doubles:
    """Return the outputs of the selective scan whose arguments are patterns."""
    q, k, v, a = pattern_heads(tokens, heads, dims, 1)
    of_head = pattern_decay(heads[1]), pattern(heads[1], 2), pattern(heads[1], 6)
    return selective_scan(q, k, v, a, *of_head)
