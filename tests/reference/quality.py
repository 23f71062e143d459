"""The values that attention reads from a cache with rotation, mean, scale search and 16-bit window.

All values are in the basis of K after RoPE: decoded rows are rotated back and get their mean again,
so queries and learned sinks stay unchanged. The engine rotates Q and shifts the sinks instead. In
exact arithmetic both give the same result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reference.attention import first_visible
from reference.codecs import round_trip
from reference.floats import Floats, round_to

Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Quality:
    """Options in addition to the KV format.

    Numbers of tokens are multiples of 64. `recent_tokens` -1 disables the 16-bit window.
    """

    rotate: bool = False
    search: bool = False
    sink_tokens: int = 0
    recent_tokens: int = -1
    block_len: int = 64


RAW = Quality()
BALANCED = Quality(rotate=True, search=True, sink_tokens=64, recent_tokens=64)


def hadamard(size: int) -> Doubles:
    """Return the normalized Hadamard matrix in Sylvester's order.

    Entry (i, j) is negative if i & j has an odd number of ones.
    """
    index = np.arange(size)
    weight = np.bitwise_count(index[:, None] & index[None, :])
    return np.where(weight % 2 == 1, -1.0, 1.0) / np.sqrt(size)


def rotation_size(head_dim: int) -> int:
    """Return the largest power of two that divides head_dim."""
    size = 1
    while head_dim % (2 * size) == 0:
        size *= 2
    return size


def rotate_rows(x: Doubles) -> Doubles:
    """Rotate runs of values along the last axis. The rotation is its own inverse."""
    size = rotation_size(x.shape[-1])
    runs = x.reshape(*x.shape[:-1], -1, size)
    return np.asarray(runs @ hadamard(size)).reshape(x.shape)


def window16_mask(
    quality: Quality, queries: Sequence[int] | npt.NDArray[np.int64], keys: int
) -> Mask:
    """Return [queries, keys]: True where a query reads a position 0 .. keys-1 in 16 bits.

    A query in block j reads the sink blocks and blocks j - r .. j in 16 bits. The sinks and r are
    `sink_tokens` and `recent_tokens` in blocks, rounded up.
    """
    position = np.asarray(queries)[:, None]
    key = np.arange(keys)[None, :]
    if quality.recent_tokens < 0:
        return np.zeros((len(position), keys), np.bool_)
    length = quality.block_len
    sinks = -(-quality.sink_tokens // length)
    recent = -(-quality.recent_tokens // length)
    return np.asarray((key // length < sinks) | (key // length >= position // length - recent))


@dataclass(frozen=True)
class LayerStore:
    """The cache of one layer: KV formats, constants and the dtype of its 16-bit rows.

    The scales are [kv_heads] and the mean is [kv_heads, head_dim].
    """

    k_mode: str
    v_mode: str
    dtype: str
    quality: Quality = RAW
    k_scales: npt.NDArray[np.float32] | None = None
    v_scales: npt.NDArray[np.float32] | None = None
    k_mean: npt.NDArray[np.float32] | None = field(default=None)

    def keys(self, k: Doubles) -> tuple[Doubles, Doubles]:
        """Return K [tokens, kv_heads, head_dim] as read in 16 bits and in the KV format."""
        mean = np.float64(0) if self.k_mean is None else self.k_mean.astype(np.float64)
        turned = rotate_rows(k - mean) if self.quality.rotate else k - mean
        views = self._views(self.k_mode, turned, self.k_scales)
        window16, quantized = (rotate_rows(v) if self.quality.rotate else v for v in views)
        return window16 + mean, quantized + mean

    def values(self, v: Doubles) -> tuple[Doubles, Doubles]:
        """Return V [tokens, kv_heads, head_dim] as read in 16 bits and in the KV format."""
        return self._views(self.v_mode, v, self.v_scales)

    def _views(
        self, mode: str, x: Doubles, scales: npt.NDArray[np.float32] | None
    ) -> tuple[Doubles, Doubles]:
        rows: Floats = x.astype(np.float32)
        window16 = round_to(rows.reshape(-1, x.shape[-1]), self.dtype).reshape(x.shape)
        quantized = np.empty_like(rows)
        for head in range(x.shape[1]):
            global_scale = 1.0 if scales is None else float(scales[head])
            quantized[:, head] = round_trip(
                mode,
                rows[:, head],
                dtype=self.dtype,
                global_scale=global_scale,
                search=self.quality.search,
            )
        return window16.astype(np.float64), quantized.astype(np.float64)


def mixed_attention(
    q: Doubles,
    keys: tuple[Doubles, Doubles],
    *,
    values: tuple[Doubles, Doubles],
    window16: Mask,
    scale: float,
    window: int = 0,
    sinks: Doubles | None = None,
) -> Doubles:
    """Compute attention of the last len(q) tokens over 16-bit and quantized rows.

    `keys` and `values` are pairs (16 bits, quantized) of [tokens, kv_heads, d]. `16-bit` [queries,
    tokens] is True where a query reads the 16-bit row.
    """
    queries, heads, _ = q.shape
    tokens, kv_heads, _ = keys[0].shape
    query_position = np.arange(tokens - queries, tokens)[:, None]
    position = np.arange(tokens)[None, :]
    visible = position <= query_position
    visible &= position >= first_visible(query_position, window)
    out = np.empty((queries, heads, values[0].shape[-1]))
    for head in range(heads):
        group = head * kv_heads // heads
        scores = np.where(
            window16, q[:, head] @ keys[0][:, group].T, q[:, head] @ keys[1][:, group].T
        )
        scores = np.where(visible, scores * scale, -np.inf)
        logits = [scores]
        if sinks is not None:
            logits.append(np.full((queries, 1), sinks[head]))
        every = np.concatenate(logits, axis=1)
        weights = np.exp(every - every.max(axis=1, keepdims=True))
        weights = (weights / weights.sum(axis=1, keepdims=True))[:, :tokens]
        out[:, head] = (weights * window16) @ values[0][:, group]
        out[:, head] += (weights * ~window16) @ values[1][:, group]
    return out
