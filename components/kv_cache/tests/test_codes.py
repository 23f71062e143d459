"""Tests of stored bytes against the NumPy reference, of views, and of memory."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys

import numpy as np
import pytest
import torch
from cache_cases import FORMATS, random_rows
from reference import codecs
from reference.floats import from_bits, to_bits
from reference.layout import row_bytes

from lmdeploy.kv_cache import CacheConfig, KVCache, memory_table

CONFIG = CacheConfig(2, 4, 2, 80, 200, num_threads=1)
TOKENS = 70
BATCH = 2


def filled(config: CacheConfig, tokens: int = TOKENS) -> KVCache:
    cache = KVCache(config, BATCH)
    rows = random_rows(config, tokens, batch=BATCH)
    for layer in range(config.num_layers):
        rows.update(cache, layer)
    cache.advance(tokens)
    return cache


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("quantize", FORMATS)
def test_codes_equal_reference(quantize: str, dtype: str, search: bool) -> None:
    config = dataclasses.replace(CONFIG, quantize=quantize, dtype=dtype, search_scales=search)
    cache = filled(config)
    rows = random_rows(config, TOKENS, batch=BATCH)
    for side, given in (("k", rows.k), ("v", rows.v)):
        mode = getattr(config.formats[1], side)
        payload, metadata = codecs.encode(
            mode, given.reshape(-1, config.head_dim), dtype=dtype, search=search
        )
        stored = cache.codes(1, side)
        codes = np.ascontiguousarray(stored.codes)
        assert codes.shape[:3] == (BATCH, 2, TOKENS)
        bits = codecs.BITS.get(mode, 16)
        assert codes.dtype == {16: from_dtype(dtype), 8: np.uint8, 4: np.uint32}[bits]
        assert codes.shape[3] == config.head_dim // (8 if bits == 4 else 1)
        np.testing.assert_array_equal(codes.view(np.uint8).ravel(), payload.ravel())
        parts = [x for x in (stored.scale, stored.zero) if x is not None]
        assert len(parts) == (2 if mode in codecs.INTEGERS else 1 if mode in codecs.GROUPED else 0)
        if parts:
            joined = np.ascontiguousarray(np.concatenate(parts, axis=-1))
            np.testing.assert_array_equal(joined.view(np.uint8).ravel(), metadata.ravel())


def from_dtype(dtype: str) -> type:
    return np.float16 if dtype == "float16" else np.uint16


def test_codes_are_views_that_show_later_writes_and_outlive_the_cache() -> None:
    config = dataclasses.replace(CONFIG, quantize="int8")
    cache = filled(config)
    stored = cache.codes(0, "v")
    before = stored.codes.copy()
    assert not stored.codes.flags.owndata and not stored.codes.flags.writeable
    assert stored.codes.strides[2:] == (80, 1)
    cache.reset()
    other = random_rows(config, TOKENS, batch=BATCH, seed=1)
    other.update(cache)
    assert not np.array_equal(stored.codes, before)
    after = stored.codes.copy()
    del cache
    gc.collect()
    np.testing.assert_array_equal(stored.codes, after)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_update_in_the_stored_dtype_returns_views(dtype: str) -> None:
    config = dataclasses.replace(CONFIG, dtype=dtype)
    cache = KVCache(config, BATCH)
    rows = random_rows(config, 20, batch=BATCH)
    k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in rows[1:])
    for first in (0, 12):
        end = first + 12 if first == 0 else 20
        got = cache.update(0, k_new=k[:, :, first:end], v_new=v[:, :, first:end])
        cache.update(1, k_new=k[:, :, first:end], v_new=v[:, :, first:end])
        assert torch.equal(got[0], k[:, :, :end]) and torch.equal(got[1], v[:, :, :end])
        cache.advance(end - first)
    assert torch.equal(cache.keys(0), k) and torch.equal(cache.values(1), v)
    address = cache.codes(0, "k").codes.__array_interface__["data"][0]
    assert got[0].data_ptr() == cache.keys(0).data_ptr() == address
    got[0][0, 0, 0, 0] = 7
    assert cache.keys(0)[0, 0, 0, 0] == 7


@pytest.mark.parametrize("quantize", ["none", "k=none,v=int4", "nvfp4"])
def test_dense_rows_equal_decoded_codes(quantize: str) -> None:
    config = dataclasses.replace(CONFIG, quantize=quantize)
    cache = filled(config)
    rows = random_rows(config, TOKENS, batch=BATCH)
    for side, given, got in (("k", rows.k, cache.keys(1)), ("v", rows.v, cache.values(1))):
        mode = getattr(config.formats[1], side)
        want = codecs.round_trip(mode, given.reshape(-1, 80), dtype="float16", search=True)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want.reshape(given.shape))


def test_bfloat16_values_of_codes_are_bits() -> None:
    config = dataclasses.replace(CONFIG, dtype=torch.bfloat16)
    stored = filled(config).codes(0, "k").codes
    rows = random_rows(config, TOKENS, batch=BATCH).k
    want = to_bits(rows.reshape(-1, 80), "bfloat16").view(np.uint16).reshape(rows.shape)
    np.testing.assert_array_equal(stored, want)
    assert from_bits(want.view(np.uint8), "bfloat16").shape == rows.shape


def test_memory_table_equals_count_by_hand() -> None:
    config = CacheConfig(32, 32, 8, 128, 4096)
    assert memory_table(config, (1, 4096, 5000)) == {
        name: {
            context: 32 * 8 * 2 * tokens * row_bytes(name, 128)
            for context, tokens in ((1, 64), (4096, 4096), (5000, 8192))
        }
        for name in codecs.MODES
    }
    assert memory_table(config)["none"][4096] == 2**29  # the seed of this object says 4 GiB
    assert memory_table(config)["nvfp4"][4096] == 144 * 2**20


def test_num_bytes_are_those_of_the_pools() -> None:
    cache = KVCache(CacheConfig(3, 4, 2, 64, 1000, quantize_mode=True), batch_size=5)
    assert cache.num_bytes == 5 * 3 * 2 * 2 * 1024 * row_bytes("nvfp4", 64)
    assert cache.memory_usage_mb() * 2**20 == cache.num_bytes
    assert cache.bytes_per_token == 3 * 2 * 2 * row_bytes("nvfp4", 64)
    assert cache.bytes_per_step == 5 * cache.bytes_per_token


RESIDENT = """
import sys
import numpy as np
from lmdeploy.kv_cache import CacheConfig, KVCache

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def run(config, tokens):
    cache = KVCache(config)
    rows = np.ones((1, 8, 1, 128), np.float16)
    new = np.broadcast_to(rows, (1, 8, tokens - 1, 128))
    for layer in range(config.num_layers):
        cache.update(layer, k_new=new, v_new=new)
    cache.advance(tokens - 1)
    for layer in range(config.num_layers):
        cache.attend(layer, q=rows, k_new=rows, v_new=rows)
    cache.advance(1)
    return cache

def config(num_layers):
    options = {"quantize": sys.argv[1], "search_scales": False, "num_threads": 1}
    return CacheConfig(num_layers, 8, 8, 128, 4096, **options)

warm = run(config(1), 4096)
before = resident()
cache = run(config(12), 4096)
print((resident() - before) / cache.num_bytes)
"""


@pytest.mark.parametrize("quantize", ["none", "nvfp4"])
def test_resident_growth_of_a_full_cache_is_its_num_bytes(quantize: str) -> None:
    command = [sys.executable, "-c", RESIDENT, quantize]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert 0.9 < float(done.stdout) < 1.05, done.stdout
