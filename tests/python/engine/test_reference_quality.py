"""Tests of the NumPy reference of `kv_quality`, part by part."""

from dataclasses import replace

import numpy as np
import pytest
from reference import codecs
from reference.attention import attention
from reference.floats import round_to
from reference.quality import (
    BALANCED,
    RAW,
    WINDOW_OF_16_BITS,
    LayerStore,
    Quality,
    hadamard,
    mixed_attention,
    rotate_rows,
    rotation_size,
    window16_mask,
)

QUANTIZED = [mode for mode in codecs.MODES if mode != "none"]
FP4 = ["mxfp4", "nvfp4"]
EXACT = 1e-12  # double precision


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_rotate_rows_keeps_dot_products_and_is_its_own_inverse(head_dim: int) -> None:
    q, k = gaussian(50, head_dim), gaussian(70, head_dim, seed=1)
    assert np.abs(rotate_rows(q) @ rotate_rows(k).T - q @ k.T).max() < EXACT * head_dim
    assert np.abs(rotate_rows(rotate_rows(q)) - q).max() < EXACT


def test_rotate_rows_examples_equal_hand_computed_values() -> None:
    assert [rotation_size(d) for d in (64, 80, 96, 128, 192, 256)] == [64, 16, 32, 128, 64, 256]
    wanted = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert (hadamard(4) * 2).tolist() == wanted
    outlier = np.zeros(80)
    outlier[3] = 4.0
    assert np.abs(rotate_rows(outlier)).tolist() == [1.0] * 16 + [0.0] * 64


@pytest.mark.parametrize("mode", FP4)
@pytest.mark.parametrize("global_scale", [1.0, 0.0371])
def test_scale_search_error_is_never_above_the_plain_rule(mode: str, global_scale: float) -> None:
    factor = global_scale if mode == "nvfp4" else 1.0
    rows = gaussian(512, 128) * np.exp2(gaussian(512, 1, seed=1))
    rows = round_to(rows.astype(np.float32), "float16")

    def errors(search: bool) -> np.ndarray:
        stored = codecs.round_trip(mode, rows, dtype="float16", global_scale=factor, search=search)
        return ((stored - rows).astype(np.float64) ** 2).reshape(512, 8, 16).sum(axis=-1)

    plain, searched = errors(False), errors(True)
    assert (searched <= plain * (1 + 1e-6)).all()  # the search itself compares FP32 sums
    assert searched.sum() < 0.97 * plain.sum()


# Errors of a round trip of N(0, 1), from docs/kv_cache.md.
@pytest.mark.parametrize(("mode", "figure"), [("nvfp4", 0.0815), ("mxfp4", 0.1100)])
def test_scale_search_error_equals_published_error(mode: str, figure: float) -> None:
    rows = gaussian(4096, 128).astype(np.float32)
    error = codecs.round_trip(mode, rows, dtype="float16", search=True) - rows
    assert np.linalg.norm(error) / np.linalg.norm(rows) == pytest.approx(figure, rel=0.02)


@pytest.mark.parametrize(
    ("position", "window16"),
    [
        (0, [(0, 1)]),
        (63, [(0, 64)]),
        (64, [(0, 65)]),
        (127, [(0, 128)]),
        (128, [(0, 129)]),
        (191, [(0, 192)]),
        (192, [(0, 64), (128, 193)]),
        (255, [(0, 64), (128, 256)]),
        (256, [(0, 64), (192, 257)]),
    ],
)
def test_window16_mask_blocks_of_64_equal_examples(
    position: int, window16: list[tuple[int, int]]
) -> None:
    wanted = np.zeros(position + 1, bool)
    for begin, end in window16:
        wanted[begin:end] = True
    assert window16_mask(BALANCED, [position], position + 1)[0].tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("length", "sink_end", "recent"), [(16, 64, 4), (32, 64, 2), (64, 64, 1), (128, 128, 1)]
)
def test_window16_mask_blocks_of_any_length_follow_the_rule(
    length: int, sink_end: int, recent: int
) -> None:
    quality = Quality(sink_tokens=64, recent_tokens=64, block_len=length)
    mask = window16_mask(quality, range(700), 700)
    for position in range(700):
        begin = (position // length - recent) * length
        wanted = [key < sink_end or key >= begin for key in range(position + 1)]
        assert mask[position, : position + 1].tolist() == wanted
    assert not window16_mask(RAW, range(700), 700).any()


def views(seed: int) -> tuple[np.ndarray, np.ndarray]:
    return gaussian(200, 2, 64, seed=seed), gaussian(200, 2, 64, seed=seed + 1)


@pytest.mark.parametrize("window", [0, 50])
def test_mixed_attention_equal_views_equal_plain_attention(window: int) -> None:
    q, sinks = gaussian(30, 4, 64), gaussian(4, seed=9)
    k, v = views(3)[0], views(5)[0]
    window16 = window16_mask(BALANCED, range(170, 200), 200)
    got = mixed_attention(
        q, (k, k), values=(v, v), window16=window16, scale=0.125, window=window, sinks=sinks
    )
    wanted = attention(q, k, v, scale=0.125, window=window, sinks=sinks)
    assert np.abs(got - wanted).max() < EXACT


def test_mixed_attention_reads_each_key_in_its_view() -> None:
    q, keys, values = gaussian(1, 4, 64), views(3), views(5)
    window16 = window16_mask(BALANCED, [199], 200)
    got = mixed_attention(q, keys, values=values, window16=window16, scale=0.125)
    where = window16[0][:, None, None]
    merged = [np.where(where, view[0], view[1]) for view in (keys, values)]
    assert np.abs(got - attention(q, *merged, scale=0.125)).max() < EXACT


def test_layer_store_mean_and_rotation_cancel_in_fp32() -> None:
    # Nothing is rounded in FP32, so K must come back unchanged, whatever the mean is.
    k = gaussian(40, 2, 64)
    mean = (10 * gaussian(2, 64, seed=4)).astype(np.float32)
    store = LayerStore("none", "none", "float32", WINDOW_OF_16_BITS, k_mean=mean)
    for view in store.keys(k):
        assert np.abs(view - k).max() < 1e-5  # stored in FP32, with values up to 30


@pytest.mark.parametrize("mode", QUANTIZED)
def test_layer_store_views_have_the_error_of_their_format(mode: str) -> None:
    # 16-bit rows have 16-bit error. Quantized rows have their format's error, scaled per head.
    k = gaussian(64, 2, 64)
    scales = np.array([1.0, 0.02], np.float32)
    store = LayerStore(mode, mode, "float16", WINDOW_OF_16_BITS, k_scales=scales, v_scales=scales)
    for window16, quantized in (store.keys(k), store.values(k)):
        assert 0 < np.abs(window16 - k).max() < 4e-3
        error = np.linalg.norm(quantized - k, axis=(0, 2)) / np.linalg.norm(k, axis=(0, 2))
        assert (error > 2e-3).all() and (error < 0.15).all()
        if mode in codecs.SCALED:
            assert not np.isclose(error[0], error[1], rtol=1e-6)


@pytest.mark.parametrize("mode", FP4)
def test_layer_store_offset_removes_what_the_keys_of_a_block_share(mode: str) -> None:
    shared = np.repeat(30 * gaussian(2, 2, 64, seed=5), 64, axis=0)
    k = gaussian(128, 2, 64) + shared

    def error(quality: Quality) -> float:
        quantized = LayerStore(mode, mode, "float16", quality).keys(k)[1]
        return float(np.linalg.norm(quantized - k) / np.linalg.norm(k - shared))

    assert error(replace(WINDOW_OF_16_BITS, k_offset=True)) < 0.15 < 1 < error(WINDOW_OF_16_BITS)


def test_layer_store_int8_window_has_the_error_of_int8() -> None:
    k = gaussian(128, 2, 64)
    window, _ = LayerStore("nvfp4", "nvfp4", "float16", BALANCED).keys(k)
    assert 2e-3 < np.linalg.norm(window - k) / np.linalg.norm(k) < 8e-3


def test_layer_store_base_is_subtracted_before_and_added_after_int8() -> None:
    base = (50 * gaussian(2, 2, 64, seed=7)).astype(np.float32)
    k = gaussian(128, 2, 64) + np.repeat(base, 64, axis=0)
    errors = []
    for k_base in (None, base):
        window, _ = LayerStore("nvfp4", "nvfp4", "float16", BALANCED, k_base=k_base).keys(k)
        errors.append(float(np.linalg.norm(window - k)))
    assert errors[1] < errors[0] / 10
