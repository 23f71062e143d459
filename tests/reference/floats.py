"""Small floating-point types: every value is listed in a table, and rounding searches the table."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LARGEST_FINITE = {
    "float32": np.finfo(np.float32).max,
    "float16": np.float32(65504.0),
    "bfloat16": np.array(0x7F7F0000, np.uint32).view(np.float32)[()],
}

E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES]).astype(np.float32)


def minifloat_table(*, exponent_bits: int, mantissa_bits: int, bias: int) -> Floats:
    """Return the values of codes 0..127 of an 8-bit float, as if no code were special."""
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits)
        if exponent == 0:
            values.append(fraction * 2.0 ** (1 - bias))
        else:
            values.append((1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(values, np.float32)


def signed_table(magnitudes: Floats, *, first_special: int, infinity: int | None) -> Floats:
    """Return the values of all 256 codes; codes 128..255 are the negatives of 0..127.

    Codes from `first_special` on are NaN, except that code `infinity` is infinite.
    """
    table = magnitudes.copy()
    table[first_special:] = np.nan
    if infinity is not None:
        table[infinity] = np.inf
    return np.concatenate([table, -table]).astype(np.float32)


E4M3_MAGNITUDES = minifloat_table(exponent_bits=4, mantissa_bits=3, bias=7)
E5M2_MAGNITUDES = minifloat_table(exponent_bits=5, mantissa_bits=2, bias=15)
E4M3_VALUES = signed_table(E4M3_MAGNITUDES, first_special=0x7F, infinity=None)
E5M2_VALUES = signed_table(E5M2_MAGNITUDES, first_special=0x7C, infinity=0x7C)


def nearest_code(x: Floats, magnitudes: Floats) -> Bytes:
    """Return the code of the value nearest to |x| in an ascending table.

    Ties go to the even code. Larger values saturate. NaN → 0.
    """
    wide = magnitudes.astype(np.float64)
    midpoints = (wide[1:] + wide[:-1]) / 2
    size = np.where(np.isnan(x), 0.0, np.abs(x.astype(np.float64)))
    code = np.searchsorted(midpoints, size, side="left")  # a tie stays at the lower code
    tie = (code < len(midpoints)) & (midpoints[np.minimum(code, len(midpoints) - 1)] == size)
    return (code + (tie & (code % 2 == 1))).astype(np.uint8)


def encode_e2m1(x: Floats) -> Bytes:
    """Return four-bit codes; NaN → 7, -0 → 8."""
    code = nearest_code(x, E2M1_MAGNITUDES) | (np.signbit(x).astype(np.uint8) << 3)
    return np.where(np.isnan(x), 7, code).astype(np.uint8)


def encode_fp8(x: Floats, magnitudes: Floats, largest_code: int) -> Bytes:
    """Return eight-bit codes, saturated at `largest_code`; NaN → 0x7F."""
    code = nearest_code(x, magnitudes[: largest_code + 1])
    code |= np.signbit(x).astype(np.uint8) << 7
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def encode_e4m3(x: Floats) -> Bytes:
    """Return E4M3 codes, saturated at 448 (0x7E)."""
    return encode_fp8(x, E4M3_MAGNITUDES, 0x7E)


def encode_e5m2(x: Floats) -> Bytes:
    """Return E5M2 codes, saturated at 57344 (0x7B)."""
    return encode_fp8(x, E5M2_MAGNITUDES, 0x7B)


def to_bits(x: Floats, dtype: str) -> npt.NDArray[np.uint8]:
    """Round rows to a dtype, to nearest even, and return its bytes: [n, d] → [n, d * size]."""
    if dtype == "float32":
        stored: npt.NDArray[np.generic] = np.ascontiguousarray(x, np.float32)
    elif dtype == "float16":
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(x.astype(np.float16))
    else:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        stored = np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)
    return stored.view(np.uint8).reshape(x.shape[0], -1)


def from_bits(raw: Bytes, dtype: str) -> Floats:
    """Return the FP32 values of bytes from `to_bits`."""
    raw = np.ascontiguousarray(raw)
    if dtype == "float32":
        return raw.view(np.float32)
    if dtype == "float16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_to(x: Floats, dtype: str) -> Floats:
    """Round to a dtype and return the result in FP32."""
    return from_bits(to_bits(x, dtype), dtype).reshape(x.shape)
