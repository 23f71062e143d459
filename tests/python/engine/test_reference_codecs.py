"""Tests of the NumPy reference against published errors, and of the engine's codecs against it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import codecs
from reference.floats import LARGEST_FINITE, encode_e2m1, round_to

from lmdeploy import _turbomind

QUANTIZED = [mode for mode in codecs.MODES if mode != "none"]
DTYPES = ["float16", "bfloat16"]

# Relative L2 error of a round trip of N(0, 1), with the tolerance of docs/kv_cache.md.
FIGURES = {
    ("nvfp4", False): 0.0952,
    ("nvfp4", True): 0.0815,
    ("mxfp4", False): 0.1129,
    ("mxfp4", True): 0.1100,
    ("int4", False): 0.0999,
    ("int8", False): 0.0059,
    ("fp8", False): 0.0265,
}
FIGURE_BAND = 0.02
# Both multiply three numbers in FP32, in another order. A product has an error of 2^-24.
TWO_PRODUCTS_RTOL = 2.0**-22


def gaussian(rows: int = 4096, head_dim: int = 128, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, head_dim)).astype(np.float32)


def hostile_rows(head_dim: int, dtype: str) -> np.ndarray:
    """Return rows with ties, signed zeros, subnormals, inf, NaN, constants and extreme values."""
    rng = np.random.default_rng(1)
    max_value = LARGEST_FINITE[dtype]
    ties = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, -0.0, -0.1, -0.25, -5, -6, 1])
    scaled = [np.resize(ties * 2.0**e, head_dim) for e in range(-20, 14)]
    scaled = [np.clip(row, -max_value, max_value) for row in scaled]
    sizes = [rng.standard_normal(head_dim) * 2.0**e for e in range(-24, 14)]
    mixed = rng.standard_normal((64, head_dim)) * 2.0 ** rng.integers(-12, 9, (64, head_dim))
    special = rng.standard_normal((8, head_dim))
    special[0, ::3] = np.nan
    special[1, 1] = np.inf
    special[2, 1] = -np.inf
    special[3] = np.nan
    special[4, :16] = 0.0
    special[5, :16] = -0.0
    constants = [np.full(head_dim, c) for c in (0.0, -0.0, 1.0, -3.25, 6e-8, float(max_value) / 2)]
    return np.vstack([*scaled, *sizes, mixed, special, *constants]).astype(np.float32)


def assert_same_bytes(
    mode: str, rows: np.ndarray, *, dtype: str, global_scale: float, isa: str, search: bool = False
) -> None:
    payload, metadata = _turbomind.encode_rows(mode, rows, dtype, global_scale, isa, search=search)
    wanted_payload, wanted_metadata = codecs.encode(
        mode, rows, dtype=dtype, global_scale=global_scale, search=search
    )
    np.testing.assert_array_equal(metadata, wanted_metadata)
    np.testing.assert_array_equal(payload, wanted_payload)


@pytest.mark.parametrize(("mode", "search"), FIGURES)
def test_reference_round_trip_error_equals_published_error(mode: str, search: bool) -> None:
    rows = gaussian()
    error = codecs.round_trip(mode, rows, dtype="float16", search=search) - rows
    relative = np.linalg.norm(error) / np.linalg.norm(rows)
    assert relative == pytest.approx(FIGURES[mode, search], rel=FIGURE_BAND)


def test_encode_e2m1_examples_are_rounded_to_even() -> None:
    x = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.2501, 1.2501, 5.01]
    wanted = [0, 2, 2, 4, 4, 6, 6, 1, 3, 7]
    assert encode_e2m1(np.array(x, np.float32)).tolist() == wanted
    special = np.array([np.inf, -np.inf, np.nan, -0.0, -0.1], np.float32)
    assert encode_e2m1(special).tolist() == [7, 15, 7, 8, 8]
    assert codecs.pack_nibbles(np.array([[2, 4]], np.uint8)).tolist() == [[0x42]]


@pytest.mark.parametrize("mode", codecs.MODES)
@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
def test_engine_round_trip_equals_reference(mode: str, dtype: str) -> None:
    rows = gaussian(512)
    payload, metadata = _turbomind.encode_rows(mode, rows, dtype)
    decoded = _turbomind.decode_rows(mode, payload, metadata, rows.shape[1], dtype)
    np.testing.assert_array_equal(decoded, codecs.round_trip(mode, rows, dtype=dtype))


@pytest.mark.parametrize("isa", _turbomind.available_cpu_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", codecs.MODES)
def test_encode_rows_equals_reference(mode: str, dtype: str, isa: str) -> None:
    for global_scale in [1.0, 0.0371] if mode in codecs.SCALED else [1.0]:
        for head_dim in (64, 80, 96, 128, 256):
            assert_same_bytes(
                mode, gaussian(256, head_dim), dtype=dtype, global_scale=global_scale, isa=isa
            )
            hostile = hostile_rows(head_dim, dtype)
            if mode == "none":
                hostile = hostile[np.isfinite(round_to(hostile, dtype)).all(axis=1)]
            assert_same_bytes(mode, hostile, dtype=dtype, global_scale=global_scale, isa=isa)


@pytest.mark.parametrize("isa", _turbomind.available_cpu_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_encode_rows_with_scale_search_equals_reference(mode: str, dtype: str, isa: str) -> None:
    for global_scale in [1.0, 0.0371, 11.5] if mode == "nvfp4" else [1.0]:
        for head_dim in (64, 80, 96, 128, 256):
            rows = gaussian(256, head_dim)
            assert_same_bytes(
                mode, rows, dtype=dtype, global_scale=global_scale, isa=isa, search=True
            )
            hostile = hostile_rows(head_dim, dtype)
            assert_same_bytes(
                mode, hostile, dtype=dtype, global_scale=global_scale, isa=isa, search=True
            )
    plain, _ = _turbomind.encode_rows(mode, rows, dtype)
    searched, _ = _turbomind.encode_rows(mode, rows, dtype, search=True)
    assert (plain != searched).any()


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=True), min_size=16, max_size=16),
    mode=st.sampled_from([mode for mode in QUANTIZED if mode not in codecs.INTEGERS]),
    dtype=st.sampled_from(DTYPES),
    search=st.booleans(),
)
def test_encode_rows_random_row_equals_reference(
    values: list[float], mode: str, dtype: str, search: bool
) -> None:
    rows = np.resize(np.array(values, np.float32), (1, 64))
    assert_same_bytes(mode, rows, dtype=dtype, global_scale=1.0, isa="", search=search)


def all_codes(mode: str, metadata: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of 32 values that combine every metadata row with every code."""
    if codecs.BITS[mode] == 8:
        codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    else:
        codes = codecs.pack_nibbles(np.arange(32, dtype=np.uint8)[None] & 15)
    return np.tile(codes, (len(metadata), 1)), np.repeat(metadata, len(codes), axis=0)


@pytest.mark.parametrize(
    ("mode", "scales"), [("nvfp4", range(256)), ("mxfp4", range(253))], ids=["nvfp4", "mxfp4"]
)
@pytest.mark.parametrize("global_scale", [1.0, 0.0371])
def test_decode_rows_every_fp4_code_and_scale_byte(
    mode: str, scales: range, global_scale: float
) -> None:
    factor = global_scale if mode == "nvfp4" else 1.0
    metadata = np.repeat(np.array(scales, np.uint8)[:, None], 2, axis=1)
    payload, metadata = all_codes(mode, metadata)
    decoded = _turbomind.decode_rows(mode, payload, metadata, 32, "float16", factor)
    wanted = codecs.decode(mode, payload, metadata, dtype="float16", global_scale=factor)
    np.testing.assert_array_equal(decoded, wanted)
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(decoded[number]), np.signbit(wanted[number]))


def dequantize_linear(x: np.ndarray, scale: np.ndarray, *, block_size: int) -> np.ndarray:
    """Return x · scale as ONNX's DequantizeLinear defines it for blocks of the last axis.

    A block_size of 0 means one scale for the tensor. There is no zero point.
    """
    spread = np.repeat(scale, block_size, axis=-1) if block_size else scale
    return (x.astype(np.float32) * spread.astype(np.float32)).astype(np.float32)


def test_decode_rows_equals_two_dequantize_linears() -> None:
    """Model-Optimizer exports NVFP4 as FP8 scales by an FP32 scale, then FP4 by both."""
    amax = 37.5
    global_scale = np.float32(amax / (6 * 448))  # its weights_scaling_factor_2
    rows = np.clip(gaussian(512, 64) * 9, -amax, amax)
    payload, metadata = _turbomind.encode_rows("nvfp4", rows, "float16", float(global_scale))
    scales = from_e4m3(metadata)
    values = from_e2m1(payload)
    sw_f32 = dequantize_linear(scales, global_scale, block_size=0)
    wanted = dequantize_linear(values, sw_f32, block_size=16)
    decoded = _turbomind.decode_rows("nvfp4", payload, metadata, 64, "float16", float(global_scale))
    np.testing.assert_allclose(decoded, wanted, rtol=TWO_PRODUCTS_RTOL)
    assert np.abs(decoded - rows).max() <= amax / 6 + 1e-3  # half of the widest gap, 4 to 6


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    """Return the values of OCP E4M3 bytes, by the fields of the format."""
    exponent, fraction = (codes >> 3 & 15).astype(int), (codes & 7) / 8.0
    normal = (1 + fraction) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, fraction * 2.0**-6, normal)
    return np.where(codes & 128, -values, values).astype(np.float32)


def from_e2m1(payload: np.ndarray) -> np.ndarray:
    """Return the values of OCP E2M1 nibbles, the low one first, as ONNX's FLOAT4E2M1 stores."""
    codes = np.stack([payload & 15, payload >> 4], axis=-1).reshape(len(payload), -1)
    exponent, fraction = (codes >> 1 & 3).astype(int), (codes & 1) / 2.0
    values = np.where(exponent == 0, fraction, (1 + fraction) * 2.0 ** (exponent - 1))
    return np.where(codes & 8, -values, values).astype(np.float32)


@pytest.mark.parametrize("mode", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("global_scale", [1.0, 0.0371])
def test_decode_rows_every_fp8_code_equals_reference(mode: str, global_scale: float) -> None:
    payload, metadata = all_codes(mode, np.empty((1, 0), np.uint8))
    decoded = _turbomind.decode_rows(mode, payload, metadata, 32, "float16", global_scale)
    wanted = codecs.decode(mode, payload, metadata, dtype="float16", global_scale=global_scale)
    np.testing.assert_array_equal(decoded, wanted)


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_every_integer_code_with_many_scales_equals_reference(
    mode: str, dtype: str
) -> None:
    rng = np.random.default_rng(2)
    pairs = (rng.standard_normal((512, 2)) * 2.0 ** rng.integers(-10, 6, (512, 1))).astype("f4")
    metadata = codecs.to_bits(pairs, dtype)
    payload, metadata = all_codes(mode, metadata)
    decoded = _turbomind.decode_rows(mode, payload, metadata, 32, dtype)
    wanted = codecs.decode(mode, payload, metadata, dtype=dtype)
    np.testing.assert_array_equal(decoded, wanted)


def test_comparison_detects_division_by_the_unrounded_scale() -> None:
    rows = gaussian(64)
    payload, metadata = codecs.encode("nvfp4", rows, dtype="float16")
    amax = np.abs(round_to(rows, "float16").reshape(64, -1, 16)).max(axis=-1, keepdims=True)
    careless = encode_e2m1(round_to(rows, "float16").reshape(64, -1, 16) / (amax / np.float32(6)))
    assert (codecs.pack_nibbles(careless.reshape(64, -1)) != payload).any()
    assert metadata.shape == (64, 8)
