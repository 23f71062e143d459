"""Matrices of integer codes with a scale and a zero for each group of inputs.

A weight is (code - zero) · scale. The codes are unsigned. In a symmetric matrix, every zero is the
middle of their range.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.tensor_file import StoredTensor
from lmdeploy.checkpoint.gguf_blocks import (
    q4_0_blocks,
    q4_1_blocks,
    q8_0_blocks,
    values_to_q8_0,
)

logger = logging.getLogger("lmdeploy")

BLOCK = 32  # values of a block of Q4_0, Q4_1 and Q8_0
SCALE_FORMATS = ("F16", "BF16", "F32")

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Codes = Callable[[int, int], Bytes]  # of rows [begin, end): [rows, cols]
PerGroup = Callable[[int, int], Floats]  # of rows [begin, end): [rows, groups]
_Rows = TypeVar("_Rows", Bytes, Floats)

# The error that FP16 adds to a scale, as a part of the largest scale.
_SCALE_ERROR = 2.0**-10


@dataclass(frozen=True)
class GroupMatrix:
    """A QuantizedMatrix of 4 or 8 bits. Groups consist of a multiple of 32 consecutive inputs.

    Args:
        rows: number of outputs.
        parts: all bytes of the matrix in the file.
        codes: reads the codes of rows.
        scales: reads the scales of rows.
        zeros: reads the zeros of rows. None means that the matrix is symmetric.
        bits: 4, or 8 for a symmetric matrix.
        row_step: number of rows of a word in the file; the readers read whole words.
        group_of: the group of each input, if it is not given by the order of the inputs.
        has_sign: scales may be negative.
    """

    rows: int
    parts: tuple[Bytes, ...]
    codes: Codes
    scales: PerGroup
    zeros: PerGroup | None
    bits: int = 4
    row_step: int = 1
    group_of: npt.NDArray[np.int32] | None = None
    has_sign: bool = False

    @property
    def kind(self) -> str:
        """Return the engine format that has the same codes, or q8_0 for shuffled groups."""
        if self.group_of is not None or self.bits == 8:
            return "q8_0"
        return "q4_0" if self.zeros is None else "q4_1"

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return rows [begin, end) as blocks of `kind`.

        Codes stay the same, and so do scales in FP16. A minimum of Q4_1, -zero · scale, is rounded
        to FP16. Shuffled groups are rounded to 8 bits in blocks of 32.

        Raises:
            ValueError: a scale or minimum is not finite in FP16, or a scale has a wrong sign.
        """
        if self.group_of is not None:
            return values_to_q8_0(self.f32(begin, end))
        codes, scales = self._rows(self.codes, (begin, end)), self._checked_scales(begin, end)
        self._check_fp16(scales)
        blocks = codes.reshape(len(codes), -1, BLOCK)
        repeats = blocks.shape[1] // scales.shape[1]
        by_block = np.repeat(scales, repeats, axis=1)
        if self.bits == 8:
            return q8_0_blocks((blocks ^ 0x80).view(np.int8), scales=by_block)
        if self.zeros is None:
            return q4_0_blocks(blocks, scales=by_block)
        minima = np.repeat(-self._rows(self.zeros, (begin, end)) * scales, repeats, axis=1)
        return q4_1_blocks(blocks, scales=by_block, minima=minima)

    def f32(self, begin: int, end: int) -> Floats:
        """Return rows [begin, end) without rounding.

        Raise ValueError for a scale that is not finite or has a wrong sign.
        """
        codes, scales = self._rows(self.codes, (begin, end)), self._checked_scales(begin, end)
        middle = np.full((len(codes), 1), 1 << (self.bits - 1), np.float32)
        zeros = middle if self.zeros is None else self._rows(self.zeros, (begin, end))
        if self.group_of is not None:
            if self.zeros is not None:
                zeros = zeros[:, self.group_of]
            return np.asarray((codes - zeros) * scales[:, self.group_of], np.float32)
        groups = codes.reshape(*scales.shape, -1).astype(np.float32)
        values: Floats = (groups - zeros[:, :, None]) * scales[:, :, None]
        return values.reshape(codes.shape)

    def _checked_scales(self, begin: int, end: int) -> Floats:
        scales = self._rows(self.scales, (begin, end))
        check_scales(np.abs(scales) if self.has_sign else scales)
        return scales

    def _rows(self, read: Callable[[int, int], _Rows], span: tuple[int, int]) -> _Rows:
        """Return the rows of `span`, for which `read` reads whole words."""
        begin, end = span
        first = begin - begin % self.row_step
        last = min(end + -end % self.row_step, self.rows)
        return read(first, last)[begin - first : end - first]

    def _check_fp16(self, scales: Floats) -> None:
        """Raise ValueError if FP16 changes scales by more than rounding would.

        Small scales may lose precision if the matrix has much larger ones.
        """
        with np.errstate(over="ignore"):
            error = float(np.abs(scales.astype(np.float16).astype(np.float32) - scales).max())
        if error <= _SCALE_ERROR * float(np.abs(scales).max()):
            return
        every = np.abs(self.scales(0, self.rows))
        if not error <= _SCALE_ERROR * float(every.max()):
            raise ValueError(
                f"The scales reach from {every.min():.3g} to {every.max():.3g}. They must be from "
                "6e-05 to 65504, the range of FP16. Use --exact or another file."
            )


class OrderWarning:
    """Logs a warning for the first matrix of a folder whose groups are shuffled."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._is_done = False

    def __call__(self, name: str) -> None:
        if not self._is_done:
            logger.warning(
                "%s: %s assigns inputs to groups in another order (desc_act). Such matrices are "
                "rounded to 8 bits, which takes twice the memory of 4 bits.",
                self._source,
                name,
            )
        self._is_done = True


def is_shuffled(stored: StoredTensor, source: str, *, groups: int) -> bool:
    """Return whether int32 group numbers differ from consecutive groups of equal size.

    Raise ModelFormatError for a number outside the groups.
    """
    group_of: npt.NDArray[np.int32] = stored.raw.view("<i4")
    if not ((group_of >= 0) & (group_of < groups)).all():
        raise ModelFormatError(
            f"{source}: tensor {stored.name} has groups from {group_of.min()} to "
            f"{group_of.max()}. They must be from 0 to {groups - 1}."
        )
    return not np.array_equal(group_of, np.arange(group_of.size) // (group_of.size // groups))


def check_scales(scales: Floats) -> None:
    """Raise ValueError for a scale that is not positive and finite."""
    good = (scales > 0) & (scales < np.inf)  # false for NaN
    if not good.all():
        raise ValueError(f"A scale is {scales[~good][0]:g}. It must be a finite number above 0.")


def float_values(raw: Bytes, stored_format: str) -> Floats:
    """Return the values of a tensor in one of SCALE_FORMATS."""
    if stored_format == "BF16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view("<f2" if stored_format == "F16" else "<f4").astype(np.float32)


def float_columns(raw: Bytes, stored_format: str, *, rows: int, span: tuple[int, int]) -> Floats:
    """Return columns `span` of a tensor [n, rows] in one of SCALE_FORMATS, as [rows of span, n]."""
    wide = raw.reshape(-1, rows, 4 if stored_format == "F32" else 2)
    columns = np.ascontiguousarray(wide[:, slice(*span)])
    return float_values(columns.reshape(-1), stored_format).reshape(columns.shape[:2]).T


def unpack_words(words: npt.NDArray[np.uint32], bits: int) -> Bytes:
    """Unpack [n, words] to codes [n, words · 32 / bits]. The lowest bits come first."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    out = np.empty((data.shape[0], 2 * data.shape[1]), np.uint8)
    out[:, 0::2] = data & 0x0F
    out[:, 1::2] = data >> 4
    return out
