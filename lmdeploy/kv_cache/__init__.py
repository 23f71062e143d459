"""A quantized KV cache for any model loop in NumPy, torch or MLX."""

from __future__ import annotations

from lmdeploy.kv_cache.cache import KVCache, StoredRows
from lmdeploy.kv_cache.config import CacheConfig, memory_table

__all__ = ["CacheConfig", "KVCache", "StoredRows", "memory_table"]
