"""Tensors in a memory-mapped file, before any conversion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import Bytes

# Bytes per element of the formats without blocks.
PLAIN_FORMATS = {"F32": 4, "F16": 2, "BF16": 2}
# (values, bytes) of one block in GGUF's layout.
BLOCK_FORMATS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}
SUPPORTED_FORMATS = (*PLAIN_FORMATS, *BLOCK_FORMATS)
# MXFP4 in the form of Hugging Face, with codes and E8M0 scales in separate tensors.
SPLIT_MXFP4 = "MXFP4_SPLIT"


def row_bytes(tensor_format: str, cols: int) -> int:
    """Return the bytes of a row of `cols` values. Raise ValueError for incomplete blocks."""
    if tensor_format in PLAIN_FORMATS:
        return cols * PLAIN_FORMATS[tensor_format]
    values, size = BLOCK_FORMATS[tensor_format]
    if cols % values:
        raise ValueError(
            f"The tensor has {cols} columns. It must have a multiple of the block size {values}."
        )
    return cols // values * size


class QuantizedMatrix(Protocol):
    """A matrix that a quantization method stores as several tensors."""

    @property
    def kind(self) -> str:
        """Return the format of `blocks`: q4_0, q4_1, q8_0 or nvfp4."""

    @property
    def row_step(self) -> int:
        """Return the number to which row ranges must be aligned."""

    @property
    def parts(self) -> tuple[Bytes, ...]:
        """Return all bytes of the matrix in the file."""

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return rows [begin, end) as GGUF blocks of `kind`. Raise ValueError on overflow."""

    def f32(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return rows [begin, end) without rounding."""


@dataclass(frozen=True)
class _SomeRows:
    """Rows [first, first + count) of a matrix, as a matrix."""

    whole: QuantizedMatrix
    first: int
    count: int

    def __post_init__(self) -> None:
        if self.first % self.whole.row_step or self.count % self.whole.row_step:
            raise ModelFormatError(
                f"A fused matrix is quantized in steps of {self.whole.row_step} rows, which do not "
                f"divide its part of {self.count} rows from row {self.first} on."
            )

    @property
    def kind(self) -> str:
        return self.whole.kind

    @property
    def row_step(self) -> int:
        return self.whole.row_step

    @property
    def parts(self) -> tuple[Bytes, ...]:
        return self.whole.parts

    def blocks(self, begin: int, end: int) -> Bytes:
        return self.whole.blocks(self.first + begin, self.first + end)

    def f32(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        return self.whole.f32(self.first + begin, self.first + end)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. Its location was checked against the size of the file."""

    name: str
    # One of SUPPORTED_FORMATS, SPLIT_MXFP4, the name of a method, or the element type of a part.
    format: str
    shape: tuple[int, ...]  # rows first
    raw: Bytes  # the bytes of the tensor, a view into the mapped file
    # A view of the scales of SPLIT_MXFP4, or of the factors of NVFP4 in GGUF.
    scales: Bytes | None = None
    matrix: QuantizedMatrix | None = None  # for a quantization method
    # (groups, first, count): `raw` has more rows than the tensor, see take_of_groups.
    rows_of_groups: tuple[int, int, int] | None = None
    as_stored: bool = False  # the device computes the format as it is
    # NVFP4: one FP32 factor of the values, or one for each item. None means 1.
    factors: npt.NDArray[np.float32] | None = None

    @property
    def rows(self) -> int:
        """Return the outputs of a matrix, or 1 for a vector."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        """Return the inputs of a matrix, or the length of a vector."""
        return self.shape[-1]

    @property
    def factor(self) -> np.float32:
        """Return the factor of a matrix in NVFP4."""
        return np.float32(1) if self.factors is None else self.factors[0]

    @property
    def num_bytes(self) -> int:
        """Return the size in the file."""
        return sum(int(part.size) for part in self.parts)

    @property
    def parts(self) -> list[Bytes]:
        """Return all bytes of the tensor in the file."""
        if self.matrix is not None:
            return list(self.matrix.parts)
        return [part for part in (self.raw, self.scales) if part is not None]

    def item(self, index: int) -> StoredTensor:
        """Return item `index` of the first dimension. REQUIRES: at least two dimensions."""
        size = self.raw.size // self.shape[0]
        raw = self.raw[index * size : (index + 1) * size]
        factors = self.factors
        if factors is not None and factors.size > 1:
            factors = factors[index : index + 1]
        name = f"{self.name}[{index}]"
        return replace(self, name=name, shape=self.shape[1:], raw=raw, factors=factors)

    def take(self, first: int, count: int) -> StoredTensor:
        """Return `count` rows (or values of a vector) from `first` on."""
        shape = (count, *self.shape[1:])
        if self.matrix is not None:
            return replace(self, shape=shape, matrix=_SomeRows(self.matrix, first, count))
        size = self.raw.size // self.shape[0]
        part = replace(self, shape=shape, raw=self.raw[first * size : (first + count) * size])
        if self.format != SPLIT_MXFP4 or self.scales is None:
            return part
        size = self.scales.size // self.shape[0]
        return replace(part, scales=self.scales[first * size : (first + count) * size])

    def take_of_groups(self, first: int, count: int, *, groups: int) -> StoredTensor:
        """Return `count` rows from row `first` of each of `groups` equal runs of rows.

        REQUIRES: no quantization method and no SPLIT_MXFP4.
        """
        assert self.matrix is None and self.format != SPLIT_MXFP4
        shape = (groups * count, *self.shape[1:])
        return replace(self, shape=shape, rows_of_groups=(groups, first, count))

    def bytes_by_row(self) -> Bytes:
        """Return the bytes as [rows, bytes of a row]: a view, or a copy of rows of groups."""
        if self.rows_of_groups is None:
            return self.raw.reshape(self.rows, -1)
        groups, first, count = self.rows_of_groups
        is_vector = len(self.shape) == 1
        runs = self.raw.reshape(groups, -1, row_bytes(self.format, 1 if is_vector else self.cols))
        return runs[:, first : first + count].reshape(self.rows, -1)


class TensorFile(Protocol):
    """The named tensors of a checkpoint in any container."""

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors of the checkpoint."""

    def tensor(
        self, name: str, *, max_dims: int = 2, formats: tuple[str, ...] = SUPPORTED_FORMATS
    ) -> StoredTensor:
        """Return a tensor. Raise ModelFormatError for another format or more dimensions."""


def check_shape(where: str, dims: list[Any], *, file_bytes: int) -> tuple[int, ...]:
    """Return `dims` as a shape. Raise ModelFormatError if the file is too small for it."""
    count = 1
    for dim in dims:
        if isinstance(dim, bool) or not isinstance(dim, int) or dim <= 0:
            raise ModelFormatError(f"{where} has shape {str(dims)[:80]}. Sizes must be above 0.")
        count *= dim
        # The densest format, Q2_K, has 256 values in 84 bytes.
        if count > 4 * file_bytes:
            raise ModelFormatError(
                f"{where} has shape {str(dims)[:80]}, which exceeds the file of {file_bytes} bytes."
            )
    return tuple(dims)
