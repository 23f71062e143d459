"""Random arrays for KVCache, and attention over decoded rows in torch, in double precision."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from reference import codecs
from reference.quality import rotate_rows

from lmdeploy.kv_cache import CacheConfig, KVCache

FORMATS = (*codecs.MODES, "k=fp8,v=nvfp4")
# Largest errors relative to the largest |v|, as in tests/cpp/cpu/attention_fixture.h: FP32 sums;
# affine codes, which lose digits by cancellation; queries and weights rounded to 16 bits.
MAX_ERROR = 1e-5
MAX_ERROR_AFFINE = 3e-5
MAX_ERROR_ROUNDED = 2e-4
INTEGER_CODES = {"int8", "int4", "mxfp4", "nvfp4"}


class Rows(NamedTuple):
    """Q, K and V of some tokens, [batch, heads, tokens, head_dim]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    def cut(self, begin: int, end: int) -> Rows:
        return Rows(*(x[:, :, begin:end] for x in self))

    def attend(self, cache: KVCache, layer: int = 0, **options: Any) -> Any:
        return cache.attend(layer, q=self.q, k_new=self.k, v_new=self.v, **options)

    def update(self, cache: KVCache, layer: int = 0) -> tuple[Any, Any]:
        return cache.update(layer, k_new=self.k, v_new=self.v)


def random_rows(config: CacheConfig, tokens: int, *, batch: int = 1, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)

    def draw(heads: int) -> np.ndarray:
        return rng.standard_normal((batch, heads, tokens, config.head_dim)).astype(np.float32)

    return Rows(draw(config.num_heads), draw(config.num_kv_heads), draw(config.num_kv_heads))


def decoded(config: CacheConfig, rows: np.ndarray, side: str) -> np.ndarray:
    """Return rows as attention reads them, by the NumPy reference."""
    mode = getattr(config.formats[0], side)
    rotates = side == "k" and config.rotate_k and mode != "none"
    flat = rows.reshape(-1, config.head_dim)
    flat = rotate_rows(flat.astype(np.float64)).astype(np.float32) if rotates else flat
    read = codecs.round_trip(mode, flat, dtype=config.dtype, search=config.search_scales)
    read = rotate_rows(read.astype(np.float64)) if rotates else read
    return read.reshape(rows.shape).astype(np.float64)


def reference_attention(
    config: CacheConfig, rows: Rows, *, queries: int, sinks: np.ndarray | None = None
) -> np.ndarray:
    """Return attention of the last `queries` tokens over all rows.

    A sink is one more key, with a score of its own and a value of 0.
    """
    tokens = rows.k.shape[2]
    position = torch.arange(tokens)
    seen = position[None, :] <= position[-queries:, None]
    if config.window:
        seen &= position[None, :] > position[-queries:, None] - config.window
    mask = torch.where(seen, 0.0, -torch.inf).double()
    mask = mask.expand(rows.k.shape[0], config.num_heads, queries, tokens)
    keys, values = (
        torch.from_numpy(decoded(config, x, s)) for x, s in ((rows.k, "k"), (rows.v, "v"))
    )
    if sinks is not None:
        column = torch.from_numpy(sinks.astype(np.float64))[None, :, None, None]
        mask = torch.cat([mask, column.expand(*mask.shape[:3], 1)], dim=-1)
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (keys, values))
    q = torch.from_numpy(rows.q[:, :, -queries:].astype(np.float64))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, keys, values, attn_mask=mask, enable_gqa=True).numpy()


def max_error(config: CacheConfig) -> float:
    """Return the largest error of attention relative to the largest |v|."""
    names = {config.formats[0].k, config.formats[0].v}
    if not names & INTEGER_CODES:
        return MAX_ERROR
    if not config.exact:
        return MAX_ERROR_ROUNDED
    return MAX_ERROR_AFFINE if names & {"int8", "int4"} else MAX_ERROR


def assert_close(config: CacheConfig, got: np.ndarray, want: np.ndarray, *, v: np.ndarray) -> None:
    error = np.abs(got - want).max() / np.abs(v).max()
    assert error < max_error(config), (config, error)
