"""Independent readers of quantized checkpoints, from the public descriptions of their formats.

Each reader takes the tensors of one matrix by suffix and returns its values [outputs, inputs] in
FP32. The plainest formula has priority over speed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reference.floats import E2M1_VALUES, E4M3_VALUES, Floats

Tensors = Mapping[str, np.ndarray]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the bit fields of int32 words [..., n] as [..., n, 32 / bits], lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)


def read_gptq(parts: Tensors, *, bits: int, is_v2: bool = False) -> Floats:
    """Read AutoGPTQ's tensors: words along the inputs, and along the outputs for zeros."""
    words, outputs = parts["qweight"].shape
    inputs = words * 32 // bits
    codes = fields(parts["qweight"].T, bits).reshape(outputs, inputs)
    zeros = fields(parts["qzeros"], bits).reshape(-1, outputs)
    if not is_v2:
        zeros = (zeros + 1) % (1 << bits)
    scales = parts["scales"].astype(np.float32)
    groups = len(scales)
    order = parts.get("g_idx", np.arange(inputs) * groups // inputs)
    values = np.empty((outputs, inputs), np.float32)
    for column, group in enumerate(order):
        codes_of_column = codes[:, column].astype(np.float32)
        values[:, column] = (codes_of_column - zeros[group].astype(np.float32)) * scales[group]
    return values


def read_awq(parts: Tensors) -> Floats:
    """Read AutoAWQ's tensors: words along the outputs, in AWQ's order of nibbles."""

    def unpack(words: np.ndarray) -> Floats:
        nibbles = fields(words, 4)
        out = np.empty(nibbles.shape, np.float32)
        out[..., list(AWQ_ORDER)] = nibbles
        return out.reshape(len(words), -1)

    codes, scales = unpack(parts["qweight"]), parts["scales"].astype(np.float32)
    zeros = unpack(parts["qzeros"]) if "qzeros" in parts else np.full(scales.shape, 8, np.float32)
    group = len(codes) // len(scales)
    values = (codes - zeros.repeat(group, axis=0)) * scales.repeat(group, axis=0)
    return np.ascontiguousarray(values.T)


def read_packed(parts: Tensors, bits: int) -> Floats:
    """Read compressed-tensors' `pack-quantized`: words along the inputs; of zeros, the outputs."""
    outputs, inputs = (int(size) for size in parts["weight_shape"])
    codes = fields(parts["weight_packed"], bits).reshape(outputs, -1)[:, :inputs]
    scales = parts["weight_scale"].astype(np.float32).reshape(-1, parts["weight_scale"].shape[-1])
    scales = np.broadcast_to(scales, (outputs, scales.shape[1]))
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if "weight_zero_point" in parts:
        zeros = fields(parts["weight_zero_point"].T, bits).reshape(scales.shape[1], -1).T[:outputs]
    order = parts.get("weight_g_idx", np.arange(inputs) * scales.shape[1] // inputs)
    differences = codes.astype(np.float32) - zeros.astype(np.float32)[:, order]
    return np.asarray(differences * scales[:, order], np.float32)


def read_int8(parts: Tensors) -> Floats:
    """Read compressed-tensors' `int-quantized` and `naive-quantized` integers."""
    codes = parts["weight"].astype(np.float32)
    scales = parts["weight_scale"].astype(np.float32).reshape(-1, parts["weight_scale"].shape[-1])
    return np.asarray(codes * scales.repeat(codes.shape[1] // scales.shape[1], axis=1), np.float32)


def read_fp8(codes: np.ndarray, scales: Floats, block: tuple[int, int] | None = None) -> Floats:
    """Read E4M3 codes [outputs, inputs]. Scales are per tensor, per output or per block."""
    values = E4M3_VALUES[codes.view(np.uint8)].astype(np.float32)
    if block is None:
        return values * scales.reshape(-1, 1)
    out = np.empty_like(values)
    for row, column in np.ndindex(scales.shape):
        place = tuple(slice(i * n, (i + 1) * n) for i, n in zip((row, column), block, strict=True))
        out[place] = values[place] * scales[row, column]
    return out


def read_nvfp4(codes: np.ndarray, scales: np.ndarray, number: Floats, *, divides: bool) -> Floats:
    """Read E2M1 codes, two to a byte, with an E4M3 scale per 16 inputs and one number.

    compressed-tensors divides the scales by the number, and ModelOpt multiplies them with it.
    """
    wide = E4M3_VALUES[scales]
    wide = wide / number if divides else wide * number
    return read_e2m1(codes) * wide.repeat(16, axis=1)


def read_mxfp4(codes: np.ndarray, exponents: np.ndarray) -> Floats:
    """Read E2M1 codes, two to a byte, with a power of two per 32 inputs."""
    scales = np.exp2(exponents.astype(np.float64) - 127).astype(np.float32)
    return read_e2m1(codes) * scales.repeat(32, axis=1)


def read_e2m1(codes: np.ndarray) -> Floats:
    """Return the values of codes [n, inputs / 2]. The low nibble is the first input."""
    values = np.empty((len(codes), 2 * codes.shape[1]), np.float32)
    values[:, 0::2], values[:, 1::2] = E2M1_VALUES[codes % 16], E2M1_VALUES[codes // 16]
    return values
