"""Tensors in a memory-mapped file, before any conversion."""

from __future__ import annotations

from collections.abc import Iterator
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
        """Return the format of `blocks`: q4_0, q4_1, q8_0, nvfp4, fp8 or fp8_block."""

    @property
    def parts(self) -> tuple[Bytes, ...]:
        """Return all bytes of the matrix in the file."""

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return rows [begin, end) as GGUF blocks of `kind`, or as codes of FP8.

        Raise ValueError on overflow.
        """

    def f32(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return rows [begin, end) without rounding."""


@dataclass(frozen=True)
class RowRuns:
    """A selection of rows: `count` rows from row `first` on of every `stride` rows."""

    first: int
    count: int
    stride: int

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of rows of the whole that are rows [begin, end) of the selection."""
        while begin < end:
            group, row = divmod(begin, self.count)
            size = min(self.count - row, end - begin)
            start = group * self.stride + self.first + row
            yield start, start + size
            begin += size


@dataclass(frozen=True)
class SomeRows:
    """A QuantizedMatrix of some rows of another one."""

    whole: QuantizedMatrix
    runs: RowRuns

    @property
    def kind(self) -> str:
        return self.whole.kind

    @property
    def parts(self) -> tuple[Bytes, ...]:
        return self.whole.parts

    def blocks(self, begin: int, end: int) -> Bytes:
        return np.concatenate([self.whole.blocks(*run) for run in self.runs.ranges(begin, end)])

    def f32(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        return np.concatenate([self.whole.f32(*run) for run in self.runs.ranges(begin, end)])


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
    runs: RowRuns | None = None  # the rows of `raw` and `scales` that the tensor has; None: all
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
        """Return the size in the file. Selected rows have their share of the whole."""
        size = sum(int(part.size) for part in self.parts)
        runs = self.matrix.runs if isinstance(self.matrix, SomeRows) else self.runs
        return size if runs is None else size * runs.count // runs.stride

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

    def take(self, first: int, count: int, *, groups: int = 1) -> StoredTensor:
        """Return `count` rows (or values of a vector) from `first` on of each of `groups`.

        The groups are equal runs of rows. REQUIRES: the tensor has all rows of `raw`.
        """
        assert self.runs is None and self.shape[0] % groups == 0
        runs = RowRuns(first, count, self.shape[0] // groups)
        part = replace(self, shape=(groups * count, *self.shape[1:]))
        if self.matrix is not None:
            return replace(part, matrix=SomeRows(self.matrix, runs))
        if groups > 1:
            return replace(part, runs=runs)

        def view(data: Bytes) -> Bytes:
            return data.reshape(runs.stride, -1)[first : first + count].reshape(-1)

        scales = self.scales_by_row()
        return replace(
            part, raw=view(self.raw), scales=self.scales if scales is None else view(scales)
        )

    def bytes_by_row(self) -> Bytes:
        """Return the bytes as [rows, bytes of a row]: a view, or a copy if rows are selected."""
        return self._by_row(self.raw)

    def scales_by_row(self) -> Bytes | None:
        """Return the scales of SPLIT_MXFP4 as `bytes_by_row` does, or None for other formats."""
        if self.format != SPLIT_MXFP4 or self.scales is None:
            return None
        return self._by_row(self.scales)

    def _by_row(self, data: Bytes) -> Bytes:
        if self.runs is not None:
            groups = data.reshape(self.shape[0] // self.runs.count, self.runs.stride, -1)
            data = groups[:, self.runs.first : self.runs.first + self.runs.count]
        return data.reshape(self.rows, -1)


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
