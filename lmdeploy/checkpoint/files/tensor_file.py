"""Tensors as they lie in a memory-mapped file, before any conversion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import Bytes

# Bytes of one element, for the formats that are not made of blocks.
PLAIN_FORMATS = {"F32": 4, "F16": 2, "BF16": 2}
# (values, bytes) of one block, as GGUF lays it out.
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
}
SUPPORTED_FORMATS = (*PLAIN_FORMATS, *BLOCK_FORMATS)
# MXFP4 as Hugging Face stores it: codes, and E8M0 scales in a tensor of their own.
SPLIT_MXFP4 = "MXFP4_SPLIT"


def row_bytes(tensor_format: str, cols: int) -> int:
    """Bytes of one row of `cols` values; ValueError when they do not fill whole blocks."""
    if tensor_format in PLAIN_FORMATS:
        return cols * PLAIN_FORMATS[tensor_format]
    values, size = BLOCK_FORMATS[tensor_format]
    if cols % values:
        raise ValueError(f"{cols} columns are not a multiple of the {values} values of a block")
    return cols // values * size


class QuantizedMatrix(Protocol):
    """A matrix that a quantization method stores as several tensors."""

    @property
    def kind(self) -> str:
        """The engine format that the matrix becomes: q4_0, q4_1 or q8_0."""

    @property
    def row_step(self) -> int:
        """Rows that are read together; row ranges begin and end at multiples of it."""

    @property
    def parts(self) -> tuple[Bytes, ...]:
        """All of the matrix's bytes in the file."""

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return rows [begin, end) as GGUF blocks of `kind`. ValueError for values beyond it."""

    def f32(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return rows [begin, end) without rounding."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file: its place was checked against the file's size."""

    name: str
    # One of SUPPORTED_FORMATS, SPLIT_MXFP4, the name of a method, or that of a part's elements.
    format: str
    shape: tuple[int, ...]  # rows first
    raw: Bytes  # the bytes of the tensor, a view into the mapped file
    scales: Bytes | None = None  # of SPLIT_MXFP4, a view too
    matrix: QuantizedMatrix | None = None  # of a quantization method

    @property
    def rows(self) -> int:
        """Outputs of a matrix; 1 for a vector."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        """Inputs of a matrix, or the length of a vector."""
        return self.shape[-1]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return sum(int(part.size) for part in self.parts)

    @property
    def parts(self) -> list[Bytes]:
        """All of its bytes in the file."""
        if self.matrix is not None:
            return list(self.matrix.parts)
        return [part for part in (self.raw, self.scales) if part is not None]

    def item(self, index: int) -> StoredTensor:
        """Entry `index` of the first dimension, of a tensor with at least two."""
        size = self.raw.size // self.shape[0]
        raw = self.raw[index * size : (index + 1) * size]
        return replace(self, name=f"{self.name}[{index}]", shape=self.shape[1:], raw=raw)

    def half(self, index: int) -> StoredTensor:
        """The first (0) or second (1) half of the rows."""
        size = self.raw.size // 2
        raw = self.raw[index * size : (index + 1) * size]
        return replace(self, shape=(self.shape[0] // 2, *self.shape[1:]), raw=raw)


class TensorFile(Protocol):
    """Named tensors of a checkpoint, whatever its container."""

    @property
    def names(self) -> list[str]:
        """Every tensor of the checkpoint."""

    def tensor(
        self, name: str, *, max_dims: int = 2, formats: tuple[str, ...] = SUPPORTED_FORMATS
    ) -> StoredTensor:
        """The tensor of that name; ModelFormatError when its format or rank is another."""


def check_shape(where: str, dims: list[Any], *, file_bytes: int) -> tuple[int, ...]:
    """`dims` as a shape whose element count the file could hold at all."""
    count = 1
    for dim in dims:
        if isinstance(dim, bool) or not isinstance(dim, int) or dim <= 0:
            raise ModelFormatError(f"{where}: shape: got {str(dims)[:80]}, wanted sizes above 0")
        count *= dim
        # The densest format, Q2_K, has 256 values in 84 bytes.
        if count > 4 * file_bytes:
            raise ModelFormatError(
                f"{where}: shape {str(dims)[:80]} is beyond the file of {file_bytes} bytes"
            )
    return tuple(dims)
