"""Exchange K and V with kernels that store a row as 4-bit codes and one FP16 scale.

A row has `head_dim` values: one token of one head. Two forms exist:

* `fp4`: E2M1 codes; the scale is max|row| / 6.
* `int4`: whole numbers from −7 to 7, stored as the number plus 8; the scale is max|row| / 7.

Eight codes share a uint32, the first in its lowest bits. A cache that computes attention stores
other forms, which lose less (docs/kv_cache.md).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lmdeploy.base.checks import OptionError, check_choice

Form = Literal["fp4", "int4"]
FORMS: tuple[Form, ...] = ("fp4", "int4")

_CODES_PER_WORD = 8
_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)
_LARGEST = {"fp4": np.float32(6), "int4": np.float32(7)}
_SMALLEST_SCALE = np.float32(2.0**-24)  # FP16's smallest and largest positive numbers
_LARGEST_SCALE = np.float32(65504)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
_SIGN = np.uint8(8)


def pack_rows(
    x: npt.NDArray[Any], form: Form
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float16]]:
    """Quantize rows [..., D] to codes [..., D/8] and scales [..., 1].

    Codes are computed with the scale as rounded to FP16, which is never 0 or infinite. Larger
    values saturate. Raise ValueError for values that are not finite and for D % 8 != 0.
    """
    check_choice("form", form, choices=FORMS)
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f" or x.ndim == 0:
        raise OptionError("x", "must be a NumPy array of floats with at least 1 dimension.")
    if x.shape[-1] == 0 or x.shape[-1] % _CODES_PER_WORD:
        raise OptionError("x", f"has rows of {x.shape[-1]} values. It must be a multiple of 8.")
    rows = np.asarray(x, np.float32)
    if not np.isfinite(rows).all():
        raise OptionError("x", "has a value that is not finite in float32.")
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    scale = np.clip(largest / _LARGEST[form], _SMALLEST_SCALE, _LARGEST_SCALE).astype(np.float16)
    scaled = rows / scale.astype(np.float32)
    codes = _encode_e2m1(scaled) if form == "fp4" else _encode_int4(scaled)
    words = codes.reshape(*rows.shape[:-1], -1, _CODES_PER_WORD).astype(np.uint32) << _SHIFTS
    return np.bitwise_or.reduce(words, axis=-1), scale


def unpack_rows(
    codes: npt.NDArray[np.uint32], scale: npt.NDArray[np.float16], *, form: Form
) -> npt.NDArray[np.float32]:
    """Return the rows [..., D] of codes [..., D/8] and scales [..., 1] from `pack_rows`."""
    check_choice("form", form, choices=FORMS)
    if not isinstance(codes, np.ndarray) or codes.dtype != np.uint32 or codes.ndim == 0:
        raise OptionError("codes", "must be a NumPy array of uint32 with at least 1 dimension.")
    wanted = (*codes.shape[:-1], 1)
    if not isinstance(scale, np.ndarray) or scale.dtype != np.float16 or scale.shape != wanted:
        raise OptionError("scale", f"must be a NumPy array of float16 with shape {wanted}.")
    nibbles = (codes[..., None] >> _SHIFTS) & np.uint32(15)
    nibbles = nibbles.reshape(*codes.shape[:-1], -1)
    if form == "fp4":
        values = np.where(nibbles & _SIGN, -1, 1).astype(np.float32) * _E2M1[nibbles & 7]
    else:
        values = nibbles.astype(np.float32) - np.float32(8)
    rows: npt.NDArray[np.float32] = values * scale.astype(np.float32)
    return rows


def _encode_e2m1(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Round to nearest, ties to the even code; larger magnitudes become 6."""
    magnitude = np.abs(x)
    below = np.searchsorted(_E2M1_TIES, magnitude, side="left")
    above = np.searchsorted(_E2M1_TIES, magnitude, side="right")
    code = np.where(below % 2 == 0, below, above).astype(np.uint8)
    return np.where(np.signbit(x), code | _SIGN, code)


def _encode_int4(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    return (np.clip(np.rint(x), -7, 7) + 8).astype(np.uint8)
