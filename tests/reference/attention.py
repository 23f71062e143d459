"""Softmax attention in double precision: causal, with a window and sinks."""

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Positions = npt.NDArray[np.integer]


def first_visible(position: Positions, window: int) -> Positions:
    """Return the first position that a query at each position sees.

    `window` is the number of positions, 0 for all, or the negative length of a chunk.
    """
    if window < 0:
        return position // -window * -window
    return position - window + 1 if window else np.zeros_like(position)


def attention(
    q: Doubles,
    k: Doubles,
    v: Doubles,
    *,
    scale: float,
    window: int = 0,
    sinks: Doubles | None = None,
) -> Doubles:
    """Compute attention of the last len(q) tokens over all of k and v.

    q is [queries, heads, d]; k and v are [tokens, kv_heads, d] as decoded from the cache. A query
    at position p sees positions first_visible(p, window) .. p. `sinks` [heads] are logits
    that enter the sum of the softmax but carry no value.
    """
    queries, heads, _ = q.shape
    tokens, kv_heads, _ = k.shape
    out = np.empty((queries, heads, v.shape[-1]))
    query_position = np.arange(tokens - queries, tokens)[:, None]
    position = np.arange(tokens)[None, :]
    visible = position <= query_position
    visible &= position >= first_visible(query_position, window)
    for head in range(heads):
        kv_head = head * kv_heads // heads
        scores = np.where(visible, q[:, head] @ k[:, kv_head].T * scale, -np.inf)
        top = scores.max(axis=1, keepdims=True)
        if sinks is not None:
            top = np.maximum(top, sinks[head])
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks[head] - top)
        out[:, head] = (weights / total) @ v[:, kv_head]
    return out
