"""Tests of everything that a KVCache rejects, and of arrays that are hostile but valid."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cache_cases import Rows, random_rows

from lmdeploy.kv_cache import CacheConfig, KVCache

CONFIG = CacheConfig(2, 4, 2, 64, 4096, quantize="nvfp4", num_threads=1)
SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "max_seq_len": 4096}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_layers", 0, "num_layers is 0. It must be an integer from 1 to 4096."),
        ("num_layers", True, "num_layers is True"),
        ("num_heads", 3, "num_heads is 3. It must be a multiple of num_kv_heads, 2."),
        ("num_kv_heads", 0, "num_kv_heads is 0"),
        ("head_dim", 72, "head_dim is 72. It must be a multiple of 16."),
        ("head_dim", 272, "head_dim is 272"),
        ("max_seq_len", 0, "max_seq_len is 0"),
        ("max_seq_len", 2**20 + 1, "max_seq_len is 1048577"),
        ("max_seq_len", 2.0, "max_seq_len is 2.0"),
        ("window", -1, "window is -1"),
        ("rotate_k", 1, "rotate_k is 1"),
        ("num_threads", 0, "num_threads is 0"),
        ("dtype", "float64", "dtype is 'float64'. It must be float16, bfloat16 or float32."),
        ("dtype", np.int8, "dtype is"),
        ("dtype", None, "dtype is None"),
        ("quantize", "best", "quantize is 'best'. It must be the name of a KV format"),
        ("quantize", "balanced", "quantize is 'balanced'"),
        ("quantize", "fp5", "quantize is 'fp5'. It must be"),
        ("quantize", 4, "quantize is 4"),
        ("quantize", "k=nvfp4,v=int8", "quantize is k=nvfp4,v=int8. It must be one format"),
        ("quantize", {"default": "none", "2": "int8"}, "quantize is 'layer 2'"),
        ("quantize", {"sliding": "int8"}, "quantize is 'nothing for layer 0'"),
    ],
)
def test_config_rejects(option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        CacheConfig(**{**SIZES, option: value})
    assert str(error.value).startswith(message)
    assert "kv_cache_format" not in str(error.value)


def test_config_of_both_names_of_quantize() -> None:
    assert CacheConfig(**SIZES, quantize_mode=True) == CacheConfig(**SIZES, quantize="nvfp4")
    with pytest.raises(ValueError, match="quantize_mode is 'int8'"):
        CacheConfig(**SIZES, quantize="int4", quantize_mode="int8")


@pytest.mark.parametrize("option", ["kv_calibration", "kv_sink_tokens", "kv_recent_tokens"])
def test_config_has_no_options_of_the_engine(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        CacheConfig(**SIZES, **{option: 64})


def test_config_accepts_dtypes_and_formats_by_layer() -> None:
    for dtype in (np.float16, np.dtype("float16"), torch.float16, "float16"):
        assert CacheConfig(**SIZES, dtype=dtype).dtype == "float16"
    table = {"default": "none", "1": "k=fp8,v=nvfp4"}
    config = CacheConfig(**SIZES, quantize=table)
    assert [str(pair) for pair in config.formats] == ["none", "k=fp8,v=nvfp4"]
    assert CacheConfig(**SIZES, quantize="fp4").quantize == "nvfp4"
    assert hash(config) != hash(CacheConfig(**SIZES))


@pytest.mark.parametrize("batch", [0, -1, 1.5, True, 65537])
def test_cache_rejects_batch_size(batch: Any) -> None:
    with pytest.raises(ValueError, match="batch_size is"):
        KVCache(CONFIG, batch)


def test_cache_rejects_anything_but_a_config() -> None:
    with pytest.raises(ValueError, match="config is"):
        KVCache({"num_layers": 2})  # type: ignore[arg-type]


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


BAD_ARRAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "batch": (
        lambda: zeros(2, 2, 1, 64),
        r"has shape \(2, 2, 1, 64\). It must have \(1, 2, n, 64\)",
    ),
    "heads": (lambda: zeros(1, 4, 1, 64), "has shape"),
    "head_dim": (lambda: zeros(1, 2, 1, 32), "has shape"),
    "dimensions": (lambda: zeros(1, 2, 1, 64, 1), "has shape"),
    "rows": (lambda: zeros(2, 64), "has shape"),
    "no tokens": (lambda: zeros(1, 2, 0, 64), "has no tokens"),
    "other tokens": (lambda: zeros(1, 2, 4, 64), "has 4 tokens|has 3 tokens"),
    "integers": (lambda: zeros(1, 2, 3, 64, dtype=np.int32), r"int32.*astype\(numpy.float32\)"),
    "bits": (lambda: zeros(1, 2, 3, 64, dtype=np.uint16), "uint16"),
    "float64": (lambda: zeros(1, 2, 3, 64, dtype=np.float64), "float64"),
    "complex": (lambda: zeros(1, 2, 3, 64, dtype=np.complex64), "complex64"),
    "objects": (lambda: zeros(1, 2, 3, 64, dtype=object), "object"),
    "torch float64": (
        lambda: torch.zeros(1, 2, 3, 64, dtype=torch.float64),
        r"float64.*\.float\(\)",
    ),
    "torch integers": (lambda: torch.zeros(1, 2, 3, 64, dtype=torch.int16), "int16"),
    "gradient": (lambda: torch.zeros(1, 2, 3, 64, requires_grad=True), "gradient.*no_grad"),
    "meta": (lambda: torch.zeros(1, 2, 3, 64, device="meta"), "without plain memory"),
    "sparse": (lambda: torch.zeros(1, 2, 3, 64).to_sparse(), "without plain memory"),
    "masked": (lambda: np.ma.zeros((1, 2, 3, 64), np.float32), "masked"),
    "list": (lambda: [[[[0.0] * 64]]], "is of type list"),
    "none": (lambda: None, "is of type NoneType"),
    "GPU": (lambda: GpuArray(), r"not in host memory. Pass .*\.cpu\(\)"),
}


class GpuArray:
    __cuda_array_interface__ = ()


@pytest.mark.parametrize("name", ["k_new", "v_new", "q"])
@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_cache_rejects_array_and_stores_nothing(case: str, name: str) -> None:
    make, message = BAD_ARRAYS[case]
    config = CacheConfig(2, 2, 2, 64, 100, quantize="nvfp4", num_threads=1)
    cache = KVCache(config)
    arrays = dict(zip(("q", "k_new", "v_new"), random_rows(config, 3), strict=True))
    with pytest.raises(ValueError, match=message) as error:
        cache.attend(0, **{**arrays, name: make()})
    assert name in str(error.value) or case == "other tokens"
    with pytest.raises(ValueError, match="Layer 0 has 0 new tokens"):
        cache.advance(1)
    assert not cache._cache.stored(0, False)[0].any()


@pytest.mark.parametrize("layer", [-1, 2, 0.5, "0", None, True])
def test_cache_rejects_layer(layer: Any) -> None:
    cache = KVCache(CONFIG)
    rows = random_rows(CONFIG, 1)
    for call in (
        lambda: cache.attend(layer, q=rows.q, k_new=rows.k, v_new=rows.v),
        lambda: cache.update(layer, k_new=rows.k, v_new=rows.v),
        lambda: cache.keys(layer),
        lambda: cache.codes(layer, "k"),
    ):
        with pytest.raises(ValueError, match="layer_idx is"):
            call()


def test_cache_rejects_more_tokens_than_fit() -> None:
    cache = KVCache(CONFIG)
    rows = random_rows(CONFIG, 4094)
    for layer in range(2):
        rows.update(cache, layer)
    cache.advance(4094)
    message = (
        r"k_new has 5 tokens at position 4094. At most 2 fit until max_seq_len 4096. "
        r"Make a larger cache or call reset\(\)."
    )
    with pytest.raises(ValueError, match=message):
        random_rows(CONFIG, 5).attend(cache)
    with pytest.raises(ValueError, match="k_new has 4097 tokens"):
        random_rows(CONFIG, 4097).update(cache)


def test_cache_rejects_advance_and_truncate_beyond_its_tokens() -> None:
    cache = KVCache(CONFIG)
    rows = random_rows(CONFIG, 5)
    rows.attend(cache, 0)
    rows.cut(0, 3).attend(cache, 1)
    with pytest.raises(ValueError, match=r"num_tokens is 4\. Layer 1 has 3 new tokens"):
        cache.advance(4)
    for bad in (-1, 1.0, True):
        with pytest.raises(ValueError, match="num_tokens is"):
            cache.advance(bad)  # type: ignore[arg-type]
    cache.advance(3)
    with pytest.raises(ValueError, match="Layer 0 has 0 new tokens"):
        cache.advance(1)
    with pytest.raises(ValueError, match=r"seq_len is 4\. It must be from 0 to 3"):
        cache.truncate(4)
    assert cache.seq_len == 3


def test_window_rejects_what_it_has_dropped() -> None:
    config = CacheConfig(1, 2, 2, 16, 10**6, window=64, quantize="int8", num_threads=1)
    cache = KVCache(config)
    random_rows(config, 300).attend(cache)
    cache.advance(300)
    with pytest.raises(ValueError, match=r"truncate cannot be used at position 100\. Layer 0"):
        cache.truncate(100)
    with pytest.raises(ValueError, match="no contiguous codes"):
        cache.codes(0, "k")
    assert cache.seq_len == 300


def test_cache_rejects_scale_and_sinks() -> None:
    cache = KVCache(CONFIG)
    rows = random_rows(CONFIG, 2)
    for scale in (float("nan"), float("inf"), "1", True):
        with pytest.raises(ValueError, match="scale is"):
            rows.attend(cache, scale=scale)
    for sinks, message in (
        (np.zeros(3, np.float32), "shape"),
        (np.zeros(4), "float64"),
        (1, "int"),
    ):
        with pytest.raises(ValueError, match=f"sinks .*{message}"):
            rows.attend(cache, sinks=sinks)


def test_codes_rejects_side() -> None:
    with pytest.raises(ValueError, match="side is 'q'"):
        KVCache(CONFIG).codes(0, "q")


def test_second_thread_is_rejected_and_stores_nothing() -> None:
    config = CacheConfig(1, 8, 8, 128, 4096, quantize="nvfp4", num_threads=1)
    cache = KVCache(config)
    long, short = random_rows(config, 3000), random_rows(config, 1)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(long.attend(cache)))
    thread.start()
    while not cache._exclusive._lock.locked():  # attend releases the GIL while it computes
        pass
    with pytest.raises(RuntimeError, match="Another thread uses this cache"):
        short.update(cache)
    with pytest.raises(RuntimeError, match="Another thread"):
        cache.advance(0)
    thread.join()
    np.testing.assert_array_equal(results[0], long.attend(KVCache(config)))
    cache.advance(3000)


def hostile(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return arrays with the values of `rows` in unusual memory."""
    big = np.zeros((*rows.shape[:3], 3 * rows.shape[3]), np.float32)
    big[..., 1::3] = rows
    packed = np.zeros(rows.shape, np.dtype([("tag", "u1"), ("x", "f4")]))
    packed["x"] = rows
    return {
        "negative strides": rows[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
        "steps": big[..., 1::3],
        "transposed": rows.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
        "big-endian": rows.astype(">f4"),
        "unaligned": packed["x"],
        "subclass": rows.view(type("Sub", (np.ndarray,), {})),
        "read-only": np.frombuffer(rows.tobytes(), np.float32).reshape(rows.shape),
        "memory map": np.asarray(memoryview(rows)),
    }


@pytest.mark.parametrize("case", hostile(np.zeros((1, 1, 1, 1), np.float32)))
def test_hostile_arrays_give_the_same_bits(case: str) -> None:
    config = CacheConfig(1, 4, 2, 64, 100, quantize="nvfp4", num_threads=1)
    rows = random_rows(config, 7)
    got = Rows(*(hostile(x)[case] for x in rows)).attend(KVCache(config))
    assert type(got) is np.ndarray and got.dtype == np.dtype("=f4")
    np.testing.assert_array_equal(got, rows.attend(KVCache(config)))


def test_zero_strides_give_equal_rows() -> None:
    config = CacheConfig(1, 4, 2, 64, 100, quantize="nvfp4", num_threads=1)
    one = random_rows(config, 1)
    spread = Rows(*(np.broadcast_to(x, (*x.shape[:2], 9, 64)) for x in one))
    copied = Rows(*(np.ascontiguousarray(x) for x in spread))
    np.testing.assert_array_equal(spread.attend(KVCache(config)), copied.attend(KVCache(config)))
    scalar = np.broadcast_to(np.float32(2), (1, 2, 9, 64))
    assert (KVCache(config).update(0, k_new=scalar, v_new=scalar)[0] == 2).all()


def test_nan_and_infinities_are_stored_and_counted() -> None:
    config = CacheConfig(1, 2, 2, 64, 100, quantize="fp8", num_threads=1)
    cache = KVCache(config)
    rows = random_rows(config, 3)
    rows.k[0, 0, 0, :3] = [np.nan, np.inf, -np.inf]
    k, _ = rows.update(cache)
    assert cache.num_nonfinite == 3
    assert np.isnan(k[0, 0, 0, 0]) and list(k[0, 0, 0, 1:3]) == [448, -448]
