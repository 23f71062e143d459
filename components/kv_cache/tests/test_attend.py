"""Tests of attention over a KVCache against torch in double precision, and of cuts and windows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from cache_cases import FORMATS, Rows, assert_close, random_rows, reference_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdeploy.kv_cache import CacheConfig, KVCache

COUNTS = (1, 2, 63, 64, 65, 300)
KV_HEADS = 2
NUM_STEPS = 10_000


def make_config(
    quantize: Any, *, head_dim: int = 64, group: int = 2, **options: Any
) -> CacheConfig:
    options = {"max_seq_len": 512, "num_threads": 1, **options}
    longest = options.pop("max_seq_len")
    return CacheConfig(
        1, group * KV_HEADS, KV_HEADS, head_dim, longest, quantize=quantize, **options
    )


# Each format has each head_dim and each group once. Over the formats, every pair occurs.
SHAPES = [
    (name, head_dim, (1, 4, 8)[(i + j) % 3])
    for i, name in enumerate(FORMATS)
    for j, head_dim in enumerate((64, 80, 128))
]


@pytest.mark.parametrize(("quantize", "head_dim", "group"), SHAPES)
def test_attend_equals_torch_in_double_precision(quantize: str, head_dim: int, group: int) -> None:
    for batch in (1, 3):
        config = make_config(quantize, head_dim=head_dim, group=group, exact=batch == 3)
        cache = KVCache(config, batch)
        rows = random_rows(config, sum(COUNTS), batch=batch)
        sinks = np.linspace(-1, 5, config.num_heads, dtype=np.float32)
        end = 0
        for count in COUNTS:
            begin, end = end, end + count
            for logits in (sinks, None):
                got = rows.cut(begin, end).attend(cache, sinks=logits)
                want = reference_attention(config, rows.cut(0, end), queries=count, sinks=logits)
                assert_close(config, got, want, v=rows.v)
            cache.advance(count)


@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("quantize", ["none", "int4", "nvfp4"])
def test_attend_with_rotated_keys_equals_torch(quantize: str, head_dim: int) -> None:
    config = make_config(quantize, head_dim=head_dim, rotate_k=True, exact=True)
    rows = random_rows(config, 100)
    got = rows.attend(KVCache(config))
    assert_close(config, got, reference_attention(config, rows, queries=100), v=rows.v)


def test_attend_scale_replaces_the_default() -> None:
    config = make_config("none", head_dim=64, dtype="float32")
    rows = random_rows(config, 9)
    scaled = Rows(rows.q * 2, rows.k, rows.v)
    got = rows.attend(KVCache(config), scale=2 / 8)
    np.testing.assert_allclose(got, scaled.attend(KVCache(config)), atol=1e-6)


@pytest.mark.parametrize("window", [1, 63, 64, 65, 4096])
@pytest.mark.parametrize("quantize", ["none", "nvfp4", "int8"])
def test_window_equals_mask_over_all_rows(quantize: str, window: int) -> None:
    config = make_config(quantize, head_dim=16, window=window, max_seq_len=1 << 20)
    tokens = 3 * window + 20
    rows = random_rows(config, tokens)
    cache = KVCache(config)
    num_bytes = cache.num_bytes
    queries = min(100, tokens)
    want = reference_attention(config, rows, queries=queries)
    got = rows.attend(cache)  # a prompt of three windows in one call
    assert_close(config, got[:, :, -queries:], want, v=rows.v)
    cache.advance(tokens)
    assert cache.keys(0).shape[2] == min(tokens, window)
    assert cache.num_bytes == num_bytes
    blocks = -(-window // 64) + 2
    assert num_bytes == blocks * 64 * cache.bytes_per_token


def test_window_of_many_steps_takes_constant_memory() -> None:
    config = make_config("nvfp4", head_dim=16, window=65, max_seq_len=1 << 20, num_threads=1)
    cache = KVCache(config)
    rows = random_rows(config, NUM_STEPS)
    for i in range(NUM_STEPS):
        last = rows.cut(i, i + 1).attend(cache)
        cache.advance(1)
    want = reference_attention(config, rows.cut(NUM_STEPS - 100, NUM_STEPS), queries=1)
    assert_close(config, last, want, v=rows.v)
    assert cache.seq_len == NUM_STEPS
    assert cache.num_bytes == 4 * 64 * cache.bytes_per_token
    assert cache.bytes_per_step == 65 * cache.bytes_per_token


KINDS = {
    "numpy float32": lambda x: x,
    "numpy float16": lambda x: x.astype(np.float16),
    "torch float32": torch.from_numpy,
    "torch float16": lambda x: torch.from_numpy(x).half(),
    "torch bfloat16": lambda x: torch.from_numpy(x).bfloat16(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_results_have_the_kind_of_the_arguments(kind: str) -> None:
    config = make_config("nvfp4")
    given_rows = Rows(*map(KINDS[kind], random_rows(config, 70)))
    floats = Rows(*(np.asarray(torch.as_tensor(x).float()) for x in given_rows))
    cache, plain = KVCache(config), KVCache(config)
    for got, want in (
        (given_rows.attend(cache), floats.attend(plain)),
        (given_rows.update(cache)[1], floats.update(plain)[1]),
    ):
        assert type(got) is type(given_rows.q) and got.dtype == given_rows.q.dtype
        rounded = torch.from_numpy(want).to(torch.as_tensor(got).dtype)
        assert torch.equal(torch.as_tensor(got), rounded)


SMALL = CacheConfig(2, 4, 2, 16, 150, quantize="nvfp4", rotate_k=True, num_threads=1)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["attend", "update"]), st.integers(1, 100)),
        st.tuples(st.sampled_from(["advance", "truncate"]), st.integers(0, 100)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=12,
)


def expected(config: CacheConfig, rows: Rows) -> np.ndarray:
    """Return attention of all rows at once, in a new cache with other threads."""
    return rows.attend(KVCache(dataclasses.replace(config, num_threads=2), rows.q.shape[0]))


@settings(max_examples=60, deadline=None)
@given(CALLS, st.sampled_from(["nvfp4", "int8", "none"]), st.sampled_from([0, 40]))
def test_cuts_do_not_change_bits(calls: list[tuple[str, int]], name: str, window: int) -> None:
    config = dataclasses.replace(SMALL, quantize=name, window=window)
    cache = KVCache(config, 2)
    rows = random_rows(config, 150, batch=2)
    whole = expected(config, rows)
    keys = cache_of(config, rows).keys(0) if window == 0 else None
    length, fresh, dropped = 0, 0, 0  # accepted, new, and the first token that a ring may lack
    for call, number in calls:
        end = min(length + number, 150)
        if call in ("attend", "update") and end > length and dropped <= max(0, length + 1 - window):
            for layer in range(2):
                if call == "attend":
                    got = rows.cut(length, end).attend(cache, layer)
                    np.testing.assert_array_equal(got, whole[:, :, length:end])
                else:
                    k, _ = rows.cut(length, end).update(cache, layer)
                    assert keys is None or np.array_equal(k, keys[:, :, :end])
            fresh = end - length
            dropped = max(dropped, (end - 1) // 64 * 64 - 128 + 64) if window else 0
        elif call == "advance" and number <= fresh and dropped <= max(0, length + number - window):
            cache.advance(number)
            length, fresh = length + number, 0
        elif call == "truncate" and number <= length and dropped <= max(0, number - window):
            cache.truncate(number)
            length, fresh = number, 0
        elif call == "reset":
            cache.reset()
            length = fresh = dropped = 0
        assert cache.seq_len == length


def cache_of(config: CacheConfig, rows: Rows) -> KVCache:
    cache = KVCache(config, rows.q.shape[0])
    for layer in range(config.num_layers):
        rows.update(cache, layer)
    cache.advance(rows.k.shape[2])
    return cache
