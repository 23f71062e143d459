"""Encoders and decoders of every KV format, one row of head_dim values per token and head.

`encode(mode, rows, …)` returns (payload, metadata). The metadata is (scale, zero) for int8 and
int4, the scale bytes for FP4, and empty otherwise.
"""

import numpy as np

from lmdeploy.config.kv_format_options import reported_formats
from reference.floats import (
    E2M1_VALUES,
    E4M3_VALUES,
    E5M2_VALUES,
    LARGEST_FINITE,
    Bytes,
    Floats,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    from_bits,
    round_to,
    to_bits,
)

MODES = reported_formats()  # each has an encoder and a decoder below
BITS = {"int8": 8, "int4": 4, "fp8": 8, "fp8_e5m2": 8, "mxfp4": 4, "nvfp4": 4}
INTEGERS = ("int8", "int4")
GROUPED = ("mxfp4", "nvfp4")
SCALED = ("fp8", "fp8_e5m2", "nvfp4")  # with a global scale
GROUP = 16
MX_LEAST, MX_MOST = 112, 136
WIDEST = np.float32(2.0**127)  # a wider row saturates, so that scale and sums stay finite
NV_SEARCH = (0, -1, -2, 1, 2, 3, 4, 5)


def finite(x: Floats, dtype: str) -> Floats:
    """Return the values that count for amax, min and max: NaN → 0, infinities → largest finite."""
    max_value = LARGEST_FINITE[dtype]
    return np.clip(
        np.nan_to_num(x, nan=0.0, posinf=max_value, neginf=-max_value), -max_value, max_value
    )


def pack_nibbles(codes: Bytes) -> Bytes:
    """Pack pairs of codes into bytes, with code 2i in the low nibble of byte i."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)


def unpack_nibbles(payload: Bytes) -> Bytes:
    """Invert `pack_nibbles`."""
    return np.stack([payload & 15, payload >> 4], axis=-1).reshape(payload.shape[0], -1)


def encode_int(x: Floats, bits: int, dtype: str) -> tuple[Bytes, Bytes]:
    """Encode rows with an asymmetric scale per row. Codes use the scale and zero as stored."""
    x = finite(x, dtype)
    low = x.min(axis=1, keepdims=True) + np.float32(0)  # a minimum of -0 is stored as +0
    levels = np.float32(2**bits - 1)
    span = np.minimum(np.abs(x.max(axis=1, keepdims=True) - low), WIDEST)
    scale = round_to((span / levels).astype(np.float32), dtype)
    zero = round_to(low, dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.rint((x - zero) / scale)
    codes = np.where(scale > 0, np.clip(steps, 0, levels), 0).astype(np.uint8)
    metadata = to_bits(np.concatenate([scale, zero], axis=1), dtype)
    return (codes if bits == 8 else pack_nibbles(codes)), metadata


def decode_int(codes: Bytes, metadata: Bytes, dtype: str) -> Floats:
    """Return code * scale + zero, with rounding after each operation."""
    scale, zero = np.split(from_bits(metadata, dtype).reshape(-1, 2), 2, axis=1)
    return (codes.astype(np.float32) * scale + zero).astype(np.float32)


def mx_exponent(amax: Floats) -> np.ndarray:
    """Return the smallest e with amax <= 6 * 2^e, exactly, for amax > 0."""
    mantissa, exponent = np.frexp(amax.astype(np.float64))  # amax = mantissa * 2^exponent, [.5, 1)
    return exponent - 3 + (mantissa > 0.75)  # 6 = 0.75 * 2^3


def grouped_error(x: Floats, decoded: Floats) -> Floats:
    """Return the squared error per group: FP32 sums in order, without contraction."""
    total = np.zeros(x.shape[:-1], np.float32)
    for i in range(GROUP):
        difference = x[..., i] - decoded[..., i]
        total = (total + (difference * difference).astype(np.float32)).astype(np.float32)
    return total


def encode_mxfp4(x: Floats, dtype: str, search: bool) -> tuple[Bytes, Bytes]:
    """Encode as MXFP4 with one E8M0 scale byte per 16 values."""
    groups = x.reshape(x.shape[0], -1, GROUP)
    amax = np.abs(finite(groups, dtype)).max(axis=-1)
    safe = np.where(amax > 0, amax, np.float32(1))
    plain = np.clip(mx_exponent(safe) + 127, MX_LEAST, MX_MOST)
    best = plain
    if search:
        lower = np.maximum(plain - 1, MX_LEAST)
        known = finite(groups, dtype)
        errors = [grouped_error(known, mx_round(known, byte)) for byte in (plain, lower)]
        best = np.where(errors[1] < errors[0], lower, plain)
    codes = encode_e2m1(groups / mx_step(best)[..., None])
    codes = np.where(amax[..., None] > 0, codes, 0).astype(np.uint8)
    scales = np.where(amax > 0, best, MX_LEAST).astype(np.uint8)
    return pack_nibbles(codes.reshape(x.shape)), scales


def mx_step(byte: np.ndarray) -> Floats:
    """Return 2^(byte - 127)."""
    return np.ldexp(np.float64(1), byte.astype(np.int64) - 127).astype(np.float32)


def mx_round(groups: Floats, byte: np.ndarray) -> Floats:
    step = mx_step(byte)[..., None]
    return E2M1_VALUES[encode_e2m1(groups / step)] * step


def nv_round(groups: Floats, codes: Bytes, global_scale: np.float32) -> Floats:
    return nv_values(encode_e2m1(groups / nv_divisor(codes, global_scale)), codes, global_scale)


def nv_divisor(scales: Bytes, global_scale: np.float32) -> Floats:
    return (E4M3_VALUES[scales] * global_scale)[..., None]


def nv_values(codes: Bytes, scales: Bytes, global_scale: np.float32) -> Floats:
    return (E2M1_VALUES[codes] * E4M3_VALUES[scales][..., None]) * global_scale


def encode_nvfp4(
    x: Floats, dtype: str, global_scale: np.float32, search: bool
) -> tuple[Bytes, Bytes]:
    """Encode as NVFP4 with one E4M3 scale byte per 16 values.

    The payload is divided by the scale as stored.
    """
    groups = x.reshape(x.shape[0], -1, GROUP)
    known = finite(groups, dtype)
    amax = np.abs(known).max(axis=-1)
    plain = encode_e4m3((amax / (np.float32(6) * global_scale)).astype(np.float32))
    plain = np.where((amax > 0) & (plain == 0), 1, plain).astype(np.uint8)
    best = np.maximum(plain, 1)
    if search:
        start = best.astype(np.int64)
        min_value = np.full(amax.shape, np.inf, np.float32)
        for k in NV_SEARCH:
            candidate = np.clip(start + k, 0x01, 0x7E).astype(np.uint8)
            error = grouped_error(known, nv_round(known, candidate, global_scale))
            best = np.where(error < min_value, candidate, best)
            min_value = np.minimum(error, min_value)
    codes = encode_e2m1(groups / nv_divisor(best, global_scale))
    codes = np.where(amax[..., None] > 0, codes, 0).astype(np.uint8)
    scales = np.where(amax > 0, best, 0).astype(np.uint8)
    return pack_nibbles(codes.reshape(x.shape)), scales


def encode(
    mode: str, rows: Floats, *, dtype: str, global_scale: float = 1.0, search: bool = False
) -> tuple[Bytes, Bytes]:
    """Encode rows [n, head_dim], rounded to the cache dtype first, as (payload, metadata)."""
    x = round_to(np.ascontiguousarray(rows, np.float32), dtype)
    factor = np.float32(global_scale)
    nothing = np.empty((len(x), 0), np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        if mode == "none":
            return to_bits(x, dtype), nothing
        if mode in INTEGERS:
            return encode_int(x, BITS[mode], dtype)
        if mode == "fp8":
            return encode_e4m3(x / factor), nothing
        if mode == "fp8_e5m2":
            return encode_e5m2(x / factor), nothing
        if mode == "mxfp4":
            return encode_mxfp4(x, dtype, search)
        if mode == "nvfp4":
            return encode_nvfp4(x, dtype, factor, search)
    raise ValueError(f"KV format {mode!r} is unknown. Use one of {', '.join(MODES)}.")


def decode(
    mode: str, payload: Bytes, metadata: Bytes, *, dtype: str, global_scale: float = 1.0
) -> Floats:
    """Return the FP32 rows of (payload, metadata) from `encode`."""
    factor = np.float32(global_scale)
    if mode == "none":
        return from_bits(payload, dtype)
    if mode in INTEGERS:
        codes = payload if mode == "int8" else unpack_nibbles(payload)
        return decode_int(codes, metadata, dtype)
    if mode in ("fp8", "fp8_e5m2"):
        return (E4M3_VALUES if mode == "fp8" else E5M2_VALUES)[payload] * factor
    if mode not in GROUPED:
        raise ValueError(f"unknown mode {mode!r}: {', '.join(MODES)}")
    codes = unpack_nibbles(payload)
    groups = codes.reshape(len(codes), -1, GROUP)
    if mode == "mxfp4":
        with np.errstate(over="ignore"):
            return (E2M1_VALUES[groups] * mx_step(metadata)[..., None]).reshape(codes.shape)
    return nv_values(groups, metadata, factor).reshape(codes.shape)


def round_trip(
    mode: str, rows: Floats, *, dtype: str, global_scale: float = 1.0, search: bool = False
) -> Floats:
    """Return rows [n, head_dim] as attention reads them after they were stored."""
    payload, metadata = encode(mode, rows, dtype=dtype, global_scale=global_scale, search=search)
    return decode(mode, payload, metadata, dtype=dtype, global_scale=global_scale)
