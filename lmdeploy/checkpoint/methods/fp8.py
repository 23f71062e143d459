"""Read FP8 weights (E4M3) with a scale per tensor, per output or per block of a matrix.

Devices with FP8 get the codes and a scale per output, or one for each 128 inputs of an output.
Others get Q8_0.

A weight is code · scale. `weight_scale_inv` is such a scale too, despite its name. Scales of
activations are not used, because activations keep 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.tensor_file import (
    QuantizedMatrix,
    SomeRows,
    StoredTensor,
    TensorFile,
)
from lmdeploy.checkpoint.gguf_blocks import values_to_q8_0
from lmdeploy.checkpoint.methods.groups import (
    BLOCK,
    SCALE_FORMATS,
    Bytes,
    Floats,
    check_scales,
    float_values,
)
from lmdeploy.checkpoint.methods.matrix_file import MatrixFile, Parts
from lmdeploy.models.config_reader import ConfigReader

E4M3 = "F8_E4M3"
_CODES, _SCALE, _BLOCK_SCALE = "weight", "weight_scale", "weight_scale_inv"
_UNUSED = ("input_scale", "input_scale_ub", "activation_scale")
_LARGEST_CODE = np.float32(448)
# The engine's formats of FP8, and the inputs that share a scale of an output. None means all.
FP8_KINDS = {"fp8": None, "fp8_block": 128}
# Below 2^-22, a step of Q8_0 has so few bits in FP16 that the rounding of weights grows.
_LEAST_VALUE = 127 * 2.0**-22

Combine = Callable[[Parts], StoredTensor]


def _e4m3_values() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (8 + mantissa) * np.exp2(exponent - 10.0)
    magnitude = np.where(exponent > 0, normal, mantissa * np.exp2(-9.0))
    magnitude[codes & 0x7F == 0x7F] = np.nan
    return np.asarray(np.where(codes < 128, magnitude, -magnitude), np.float32)


E4M3_VALUES = _e4m3_values()


@dataclass(frozen=True)
class Fp8Matrix:
    """A QuantizedMatrix of E4M3 codes. A scale belongs to a block of rows and columns."""

    cols: int
    block: tuple[int, int]
    codes: Bytes
    scales: StoredTensor  # two dimensions

    kind = "q8_0"

    @property
    def parts(self) -> tuple[Bytes, ...]:
        """Return all bytes of the matrix in the file."""
        return self.codes, self.scales.raw

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return rows [begin, end), rounded to 8 bits in blocks of 32.

        Raise ValueError for a NaN code, for a scale that is not positive and finite, and for
        values outside the range of Q8_0.
        """
        values = self.f32(begin, end)
        largest = float(self._scales(begin, end).max() * _LARGEST_CODE)
        if largest < _LEAST_VALUE:
            largest = float(self._all_scales().max() * _LARGEST_CODE)
        if largest < _LEAST_VALUE:
            raise ValueError(
                f"By its scales, the largest value is {largest:.3g}. It must be at least "
                f"{_LEAST_VALUE:.3g}, because scales become FP16. Use --exact or another file."
            )
        return values_to_q8_0(values)

    def f32(self, begin: int, end: int) -> Floats:
        """Return rows [begin, end) without rounding. Raise ValueError as `blocks` does."""
        scales = self.scales_by_row(begin, end)
        values: Floats = E4M3_VALUES[self.checked_codes(begin, end)]
        values *= np.repeat(scales, self.block[1], axis=1)[:, : self.cols]
        return values

    def checked_codes(self, begin: int, end: int) -> Bytes:
        """Return the codes of rows [begin, end). Raise ValueError for NaN."""
        codes = self.codes.reshape(-1, self.cols)[begin:end]
        if ((codes & 0x7F) == 0x7F).any():
            raise ValueError("A code is NaN. All codes must be numbers.")
        return codes

    def scales_by_row(self, begin: int, end: int) -> Floats:
        """Return the scales of rows [begin, end). Raise ValueError as `blocks` does."""
        first = begin // self.block[0]
        return self._scales(begin, end)[np.arange(begin, end) // self.block[0] - first]

    def _scales(self, begin: int, end: int) -> Floats:
        rows = slice(begin // self.block[0], -(-end // self.block[0]))
        raw = self.scales.raw.reshape(self.scales.shape[0], -1)[rows]
        scales = float_values(raw.reshape(-1), self.scales.format).reshape(len(raw), -1)
        check_scales(scales)
        if scales.max() > np.finfo(np.float32).max / _LARGEST_CODE:
            raise ValueError(f"A scale is {scales.max():g}, which is too large for FP32.")
        return scales

    def _all_scales(self) -> Floats:
        return float_values(self.scales.raw, self.scales.format)


@dataclass(frozen=True)
class KeptFp8Matrix:
    """A QuantizedMatrix with the codes of an Fp8Matrix, for devices that compute them."""

    stored: Fp8Matrix
    kind: str  # one of FP8_KINDS

    @property
    def parts(self) -> tuple[Bytes, ...]:
        """Return all bytes of the matrix in the file."""
        return self.stored.parts

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return the codes of rows [begin, end). Raise ValueError for NaN."""
        return self.stored.checked_codes(begin, end)

    def f32(self, begin: int, end: int) -> Floats:
        """Return rows [begin, end) without rounding. Raise ValueError as Fp8Matrix does."""
        return self.stored.f32(begin, end)

    def scales(self, begin: int, end: int) -> Floats:
        """Return the scales of rows [begin, end): [rows, 1] or [rows, inputs / 128].

        Raise ValueError for a scale that is not positive and finite.
        """
        by_row = self.stored.scales_by_row(begin, end)
        scale_cols = FP8_KINDS[self.kind]
        if scale_cols is None:
            return by_row
        count = num_scales(self.kind, self.stored.cols)
        return np.repeat(by_row, self.stored.block[1] // scale_cols, axis=1)[:, :count]


def num_scales(kind: str, cols: int) -> int:
    """Return the number of scales of an output in one of FP8_KINDS."""
    return -(-cols // (FP8_KINDS[kind] or cols))


def kept_fp8(matrix: QuantizedMatrix | None) -> QuantizedMatrix | None:
    """Return the matrix in a format of FP8_KINDS. None if it is not FP8, or has other blocks."""
    if isinstance(matrix, SomeRows):
        whole = kept_fp8(matrix.whole)
        return None if whole is None else replace(matrix, whole=whole)
    if not isinstance(matrix, Fp8Matrix):
        return None
    if matrix.block[1] >= matrix.cols:
        return KeptFp8Matrix(matrix, "fp8")
    fits = matrix.block[1] % 128 == 0
    return KeptFp8Matrix(matrix, "fp8_block") if fits else None


def fp8_scales(matrix: QuantizedMatrix | None, span: tuple[int, int]) -> Floats:
    """Return the scales of rows [begin, end) of a matrix from `kept_fp8`."""
    if isinstance(matrix, SomeRows):
        runs = matrix.runs.ranges(*span)
        return np.concatenate([fp8_scales(matrix.whole, run) for run in runs])
    assert isinstance(matrix, KeptFp8Matrix)
    return matrix.scales(*span)


def fp8_tensor(parts: Parts, scale: str, *, block: tuple[int, int] | None = None) -> StoredTensor:
    """Return the matrix of the codes and of the scales with the suffix `scale`.

    Without `block`, there is one scale for the whole matrix or one for each output. Raise
    ModelFormatError if the tensors do not fit each other.
    """
    codes = parts.tensor(_CODES, formats=(E4M3,))
    rows, cols = codes.shape
    if cols % BLOCK:
        raise parts.refuse(codes, f"The inputs must be a multiple of {BLOCK}.")
    scales = parts.any_shape(scale, formats=SCALE_FORMATS)
    if block is None:
        count = math.prod(scales.shape)
        is_per_row = count == rows and scales.shape[0] == rows
        if count != 1 and not is_per_row:
            raise parts.refuse(
                scales, f"It must have one scale, or one for each of {rows} outputs."
            )
        block = (1, cols) if is_per_row else (rows, cols)
    wanted = (-(-rows // block[0]), -(-cols // block[1]))
    if math.prod(scales.shape) != wanted[0] * wanted[1] or (
        len(scales.shape) == 2 and scales.shape != wanted
    ):
        raise parts.refuse(
            scales, f"It must be {list(wanted)} for blocks of {block[0]} x {block[1]}."
        )
    scales = StoredTensor(scales.name, scales.format, wanted, scales.raw)
    name = f"FP8 {block[0]}x{block[1]}"  # the hash of a model must cover the block
    block = (min(block[0], rows), min(block[1], cols))  # scales are repeated over a block
    matrix = Fp8Matrix(cols=cols, block=block, codes=codes.raw, scales=scales)
    return StoredTensor(codes.name, name, (rows, cols), codes.raw, matrix=matrix)


def open_fp8(file: TensorFile, quantization: ConfigReader, *, source: str) -> TensorFile:
    """Open FP8 weights with scales per block or per tensor.

    Raise ModelFormatError for a variant that is not supported.
    """
    kind = quantization.text("fmt", default="e4m3")
    if kind != "e4m3":
        raise quantization.refuse(f"fmt is {kind[:40]!r}. It must be e4m3.")
    return _matrix_file(file, _block_of(quantization), source=source)


def open_fbgemm_fp8(file: TensorFile, quantization: ConfigReader, *, source: str) -> TensorFile:
    """Open FP8 weights with a scale for each output."""
    return _matrix_file(file, None, source=source)


def _matrix_file(file: TensorFile, block: tuple[int, int] | None, *, source: str) -> TensorFile:
    def combine(parts: Parts) -> StoredTensor:
        suffixes = [suffix for suffix in (_SCALE, _BLOCK_SCALE) if parts.has(suffix)]
        if len(suffixes) == 2:
            raise ModelFormatError(
                f"{source}: tensors {parts.base}{_SCALE} and {parts.base}{_BLOCK_SCALE} exclude "
                "each other. Remove one."
            )
        return fp8_tensor(parts, suffixes[0], block=block)

    return MatrixFile(
        file,
        marks=(_SCALE, _BLOCK_SCALE),
        others=(_CODES, *_UNUSED),
        combine=combine,
        source=source,
    )


def _block_of(quantization: ConfigReader) -> tuple[int, int] | None:
    sizes = quantization.integers("weight_block_size")
    if not sizes:
        return None
    if len(sizes) != 2 or 0 in sizes:
        raise quantization.refuse(
            f"weight_block_size is {str(sizes)[:40]}. It must be two integers above 0."
        )
    return sizes[0], sizes[1]
