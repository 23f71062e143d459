"""Convert blocks of GGUF formats that no kernel reads to block formats that kernels read.

The layouts are those of ggml-common.h in https://github.com/ggml-org/ggml. A block of Q4_1 has 32
values: an FP16 scale, an FP16 minimum and 16 bytes of codes, low nibbles first. A block of Q4_0 has
no minimum. A block of Q8_0 has an FP16 scale and 32 int8 codes. All functions raise ValueError if a
finite scale or minimum would not be finite in FP16. Infinite or NaN inputs give infinite or NaN
values.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError

Bytes = npt.NDArray[np.uint8]

_K_SUBBLOCKS = 8  # of 32 values in a block of 256
_BEYOND_FP16 = (
    "The scale or minimum of a block is beyond 65504, the limit of FP16. Use --exact or another "
    "file."
)
_Q4_0_BYTES, _Q4_1_BYTES, _Q8_0_BYTES, _NVFP4_BYTES = 18, 20, 34, 36
_LARGEST_E4M3 = 0x7E  # 448
_LARGEST_PRODUCT = 6 * 480  # of a code and a scale, with 480 for the code of NaN
_LEAST_OF_Q8_0 = 127 * 2.0**-22
# The values of E2M1 codes, and those of both nibbles of a byte.
_E2M1_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)
_E2M1_PAIRS = np.stack([np.tile(_E2M1_VALUES, 16), np.repeat(_E2M1_VALUES, 16)], axis=1)
# The values of the codes of IQ4_NL and IQ4_XS.
_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


def q4_k_to_q4_1(rows: Bytes) -> Bytes:
    """Convert [n, blocks · 144] to [n, blocks · 160] with the same codes.

    The scale and the minimum of a subblock (FP16 times 6 bits) are rounded to FP16. A value changes
    by at most 2^-11 of code · scale plus 2^-11 of the minimum.
    """
    blocks = rows.reshape(-1, 144)
    scales, minima = _six_bits(blocks[:, 4:16])
    # 32 bytes hold the low nibbles of one subblock and the high ones of the next.
    pairs = blocks[:, 16:].reshape(len(blocks), _K_SUBBLOCKS // 2, 1, 32)
    codes = np.concatenate([pairs & 0x0F, pairs >> 4], axis=2).reshape(len(blocks), -1, 32)
    scales = _fp16(blocks[:, 0:2]) * scales
    minima = -_fp16(blocks[:, 2:4]) * minima
    return q4_1_blocks(codes, scales=scales, minima=minima).reshape(len(rows), -1)


def q4_1_blocks(
    codes: Bytes, *, scales: npt.NDArray[np.float32], minima: npt.NDArray[np.float32]
) -> Bytes:
    """Pack codes [n, blocks, 32] of 0 to 15, scales and minima [n, blocks] to [n, blocks · 20]."""
    out = np.empty((*scales.shape, _Q4_1_BYTES), np.uint8)
    out[:, :, 0:2] = _fp16_bytes(scales)
    out[:, :, 2:4] = _fp16_bytes(minima)
    out[:, :, 4:] = codes[..., :16] | (codes[..., 16:] << 4)
    return out.reshape(len(scales), -1)


def q4_0_blocks(codes: Bytes, *, scales: npt.NDArray[np.float32]) -> Bytes:
    """Pack codes [n, blocks, 32] of 0 to 15 and scales [n, blocks] to [n, blocks · 18].

    The value of a code is (code - 8) · scale.
    """
    out = np.empty((*scales.shape, _Q4_0_BYTES), np.uint8)
    out[:, :, 0:2] = _fp16_bytes(scales)
    out[:, :, 2:] = codes[..., :16] | (codes[..., 16:] << 4)
    return out.reshape(len(scales), -1)


def q8_0_blocks(codes: npt.NDArray[np.int8], *, scales: npt.NDArray[np.float32]) -> Bytes:
    """Pack codes [n, blocks, 32] and scales [n, blocks] to [n, blocks · 34]."""
    return _q8_0(_fp16_bytes(scales).reshape(-1, 2), codes.reshape(-1, 32)).reshape(len(scales), -1)


def q5_0_to_q8_0(rows: Bytes) -> Bytes:
    """Convert [n, blocks · 22] to [n, blocks · 34] with the same values."""
    blocks = rows.reshape(-1, 22)
    low = blocks[:, 6:]
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    codes = np.concatenate([low & 0x0F, low >> 4], axis=1) | (fifth << 4)
    return _q8_0(blocks[:, 0:2], codes.astype(np.int8) - np.int8(16)).reshape(len(rows), -1)


def iq4_nl_to_q8_0(rows: Bytes) -> Bytes:
    """Convert [n, blocks · 18] to [n, blocks · 34] with the same values."""
    blocks = rows.reshape(-1, 18)
    return _q8_0(blocks[:, 0:2], _iq4_values(blocks[:, 2:])).reshape(len(rows), -1)


def iq4_xs_to_q8_0(rows: Bytes) -> Bytes:
    """Convert [n, blocks · 136] to [n, blocks · 272] with the same codes.

    The product of scale and 6 bits is rounded to FP16.
    """
    blocks = rows.reshape(-1, 136)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    subblocks = np.arange(_K_SUBBLOCKS)
    low = blocks[:, 4 + subblocks // 2] >> (4 * (subblocks % 2)).astype(np.uint8) & 0x0F
    six_bits = low | (high >> (2 * subblocks).astype(np.uint16) & 3) << 4
    scales = _fp16(blocks[:, 0:2]) * (six_bits.astype(np.float32) - 32)
    codes = _iq4_values(blocks[:, 8:].reshape(-1, 16))
    return _q8_0(_fp16_bytes(scales).reshape(-1, 2), codes).reshape(len(rows), -1)


def values_to_q8_0(rows: npt.NDArray[np.float32]) -> Bytes:
    """Quantize [n, cols] to [n, cols / 32 · 34]; cols is a multiple of 32.

    A value changes by at most half a step. A step is 1/127 of the largest magnitude in the block,
    rounded to FP16.
    """
    blocks = rows.reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    stored = _fp16_bytes(largest / np.float32(127))[:, 0]
    scale = _fp16(stored)
    # FP16 has few bits below 6e-5. If the largest value would be clipped, use the next larger step.
    stored = (stored.view("<u2") + (127.5 * scale < largest)).astype("<u2").view(np.uint8)
    scale = _fp16(stored)
    scale[~np.isfinite(scale)] = 0
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.clip(np.rint(np.where(inverse > 0, blocks, 0) * inverse), -127, 127)
    return _q8_0(stored, codes.astype(np.int8)).reshape(len(rows), -1)


def values_to_q4_1(rows: npt.NDArray[np.float32]) -> Bytes:
    """Quantize [n, cols] to [n, cols / 32 · 20] as llama.cpp does; cols is a multiple of 32.

    The 16 steps of a block reach from its smallest to its largest value.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    with np.errstate(over="ignore"):
        blocks: Bytes = quantize(rows, GGMLQuantizationType.Q4_1)
    halves = np.ascontiguousarray(blocks.reshape(-1, _Q4_1_BYTES)[:, :4]).view("<f2")
    if np.isinf(halves).any() and np.isfinite(rows).all():
        raise ValueError(_BEYOND_FP16)
    return blocks


def e2m1_pairs(codes: Bytes) -> npt.NDArray[np.float32]:
    """Return the values of codes [n, cols / 2] as [n, cols]. The low nibble comes first."""
    pairs: npt.NDArray[np.float32] = _E2M1_PAIRS[codes]
    return pairs.reshape(len(codes), -1)


def mxfp4_values(codes: Bytes, *, exponents: Bytes) -> npt.NDArray[np.float32]:
    """Return the values of MXFP4 codes [n, cols / 2] and exponents [n, cols / 32] as [n, cols]."""
    values = e2m1_pairs(codes).reshape(*exponents.shape, 32)
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    values *= np.where(exponents == 255, np.float32(np.nan), powers)[:, :, None]
    return values.reshape(len(codes), -1)


def nvfp4_blocks(codes: Bytes, *, scales: Bytes) -> Bytes:
    """Pack NVFP4 codes [n, cols / 2] and E4M3 scales [n, cols / 16] to [n, cols / 64 · 36].

    A byte of `codes` has two columns that follow each other, and one of a block two columns that
    are 8 apart. The first is in the low nibble.
    """
    groups = codes.reshape(-1, 8)
    first, second = groups[:, :4], groups[:, 4:]
    ordered = np.empty_like(groups)
    ordered[:, 0::2] = first & 0x0F | second << 4
    ordered[:, 1::2] = first >> 4 | second & 0xF0
    out = np.empty((scales.size // 4, _NVFP4_BYTES), np.uint8)
    out[:, :4] = scales.reshape(-1, 4)
    out[:, 4:] = ordered.reshape(-1, 32)
    return out.reshape(len(codes), -1)


def nvfp4_scales(rows: Bytes) -> Bytes:
    """Return the scales of NVFP4 rows [n, cols / 64 · 36] as [blocks, 4]."""
    return rows.reshape(-1, _NVFP4_BYTES)[:, :4]


def check_e4m3_scales(scales: Bytes) -> None:
    """Raise ValueError for an E4M3 scale that is NaN or negative. Zero is the scale of zeros."""
    if scales.size and (largest := int(scales.max())) > _LARGEST_E4M3:
        raise ValueError(
            f"A scale has the E4M3 code {largest:#x}, which is NaN or negative. It must be at most "
            f"{_LARGEST_E4M3:#x}."
        )


def check_factors(factors: npt.NDArray[np.float32], where: str) -> None:
    """Raise ModelFormatError if a factor of NVFP4 is not above 0, or its values are not finite."""
    limit = np.finfo(np.float32).max / _LARGEST_PRODUCT
    good = (factors > 0) & (factors <= limit)  # false for NaN
    if not good.all():
        raise ModelFormatError(
            f"{where} is {factors[~good][0]:g}. It must be above 0 and at most {limit:.3g}."
        )


def check_range_of_q8_0(values: npt.NDArray[np.float32]) -> None:
    """Raise ValueError if all values are so small that FP16 has few bits for a step of Q8_0."""
    largest = float(np.abs(values).max(initial=0.0))
    if 0 < largest < _LEAST_OF_Q8_0:
        raise ValueError(
            f"The largest value is {largest:.3g}. It must be at least {_LEAST_OF_Q8_0:.3g}, "
            "because scales become FP16. Use --exact or another file."
        )


# Maps a stored format to the engine's format and the conversion of whole rows.
REPACKED: dict[str, tuple[str, Callable[[Bytes], Bytes]]] = {
    "Q4_K": ("q4_1", q4_k_to_q4_1),
    "Q5_0": ("q8_0", q5_0_to_q8_0),
    "IQ4_NL": ("q8_0", iq4_nl_to_q8_0),
    "IQ4_XS": ("q8_0", iq4_xs_to_q8_0),
}


def _q8_0(scales: Bytes, codes: npt.NDArray[np.int8]) -> Bytes:
    out = np.empty((len(codes), _Q8_0_BYTES), np.uint8)
    out[:, :2] = scales
    out[:, 2:] = codes.view(np.uint8)
    return out


def _iq4_values(packed: Bytes) -> npt.NDArray[np.int8]:
    """Look up the values of codes [n, 16], low nibbles first, as [n, 32]."""
    values: npt.NDArray[np.int8] = _IQ4_VALUES[np.concatenate([packed & 0x0F, packed >> 4], axis=1)]
    return values


def _six_bits(packed: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Unpack 12 bytes of a K block to its 8 scales and 8 minima of 0 to 63."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 0x0F) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _fp16(pairs: Bytes) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(pairs).view("<f2").astype(np.float32)


def _fp16_bytes(values: npt.NDArray[np.float32]) -> Bytes:
    """Convert [n, m] to FP16 bytes [n, m, 2]."""
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if np.any(np.isinf(halves) & np.isfinite(values)):
        raise ValueError(_BEYOND_FP16)
    return halves.view(np.uint8).reshape(*values.shape, 2)
