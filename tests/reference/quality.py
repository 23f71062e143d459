"""The values that attention reads from a cache with rotation, mean, offsets, search and window.

All values are in the basis of K after RoPE: decoded rows are rotated back and get their mean again,
so queries and learned sinks stay unchanged. The engine rotates Q and shifts the sinks instead. In
exact arithmetic both give the same result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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

    Numbers of tokens are multiples of 64. `recent_tokens` -1 disables the window, whose rows are in
    `window_mode`: none for 16 bits, or int8.
    """

    rotate: bool = False
    search: bool = False
    sink_tokens: int = 0
    recent_tokens: int = -1
    block_len: int = 64
    k_offset: bool = False
    window_mode: str = "none"


RAW = Quality()
WINDOW_OF_16_BITS = Quality(rotate=True, search=True, sink_tokens=64, recent_tokens=64)
BALANCED = replace(WINDOW_OF_16_BITS, k_offset=True, window_mode="int8")


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
    """Return [queries, keys]: True where a query reads a position 0 .. keys-1 in the window.

    A query in block j reads the sink blocks and blocks j - r .. j in the window. The sinks and r
    are `sink_tokens` and `recent_tokens` in blocks, rounded up.
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

    The scales are [kv_heads] and the mean is [kv_heads, head_dim]. With a bias of K, `k_base`
    [blocks, kv_heads, head_dim] has the mean of the bias over each block's positions, after RoPE.
    """

    k_mode: str
    v_mode: str
    dtype: str
    quality: Quality = RAW
    k_scales: npt.NDArray[np.float32] | None = None
    v_scales: npt.NDArray[np.float32] | None = None
    k_mean: npt.NDArray[np.float32] | None = field(default=None)
    k_base: npt.NDArray[np.float32] | None = field(default=None)

    def keys(self, k: Doubles) -> tuple[Doubles, Doubles]:
        """Return K [tokens, kv_heads, head_dim] as read in the window and in the KV format."""
        mean = np.float64(0) if self.k_mean is None else self.k_mean.astype(np.float64)
        turned = rotate_rows(k - mean) if self.quality.rotate else k - mean
        base = np.zeros_like(turned, np.float32)
        if self.k_base is not None:
            rows = self.k_base.astype(np.float64) - mean
            rows = rotate_rows(rows) if self.quality.rotate else rows
            base = np.repeat(self._offsets(rows), self.quality.block_len, axis=0)[: len(k)]
        views = self._views(self.k_mode, turned, self.k_scales, base=base)
        window, quantized = (rotate_rows(v) if self.quality.rotate else v for v in views)
        return window + mean, quantized + mean

    def values(self, v: Doubles) -> tuple[Doubles, Doubles]:
        """Return V [tokens, kv_heads, head_dim] as read in the window and in the KV format."""
        return self._views(self.v_mode, v, self.v_scales)

    def _offsets(self, rows: Doubles) -> Floats:
        """Return rows [blocks, kv_heads, head_dim] as a block stores its K offset."""
        flat = rows.reshape(-1, rows.shape[-1]).astype(np.float32)
        return round_trip("int8", flat, dtype=self.dtype).reshape(rows.shape)

    def _views(
        self,
        mode: str,
        x: Doubles,
        scales: npt.NDArray[np.float32] | None,
        *,
        base: Floats | None = None,
    ) -> tuple[Doubles, Doubles]:
        """Return rows as read in both views. `base` has the offset of each key when it is written.

        Only whole blocks have an offset in the KV format.
        """
        is_key = base is not None
        shift = np.zeros_like(x, np.float32) if base is None else base
        has_window = self.quality.recent_tokens >= 0
        written: Floats = x.astype(np.float32) - shift
        window = self._round_trip(self.quality.window_mode, written, None) + shift
        if not has_window:
            quantized = self._round_trip(mode, written, scales) + shift
            return window.astype(np.float64), quantized.astype(np.float64)
        offset = np.zeros_like(window)
        length = self.quality.block_len
        whole = len(window) // length * length
        if is_key and self.quality.k_offset and mode != "none":
            blocks = window[:whole].astype(np.float64).reshape(-1, length, *window.shape[1:])
            offset[:whole] = np.repeat(self._offsets(blocks.mean(axis=1)), length, axis=0)
        quantized = self._round_trip(mode, window - offset, scales) + offset
        return window.astype(np.float64), quantized.astype(np.float64)

    def _round_trip(
        self, mode: str, rows: Floats, scales: npt.NDArray[np.float32] | None
    ) -> Floats:
        if mode == "none":
            return round_to(rows.reshape(-1, rows.shape[-1]), self.dtype).reshape(rows.shape)
        out = np.empty_like(rows)
        for head in range(rows.shape[1]):
            out[:, head] = round_trip(
                mode,
                rows[:, head],
                dtype=self.dtype,
                global_scale=1.0 if scales is None else float(scales[head]),
                search=self.quality.search,
            )
        return out


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
    """Compute attention of the last len(q) tokens over rows of the window and quantized rows.

    `keys` and `values` are pairs (window, quantized) of [tokens, kv_heads, d]. `window16` [queries,
    tokens] is True where a query reads the window.
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
