"""Matrices of integer codes with a scale and a zero for each group of inputs.

A weight is (code - zero) · scale. The codes are unsigned, and a symmetric matrix has the middle of
their range as every zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmdeploy.checkpoint.gguf_blocks import q4_1_blocks

BLOCK = 32  # values of a block of Q4_0, Q4_1 and Q8_0

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Codes = Callable[[int, int], Bytes]  # of rows [begin, end): [rows, cols]
PerGroup = Callable[[int, int], Floats]  # of rows [begin, end): [rows, groups]


@dataclass(frozen=True)
class GroupMatrix:
    """A QuantizedMatrix whose groups consist of consecutive inputs, a multiple of 32.

    Args:
        parts: all bytes of the matrix in the file.
        row_step: number of rows that share a word in the file.
        codes: reads the codes of rows.
        scales: reads the scales of rows.
        zeros: reads the zeros of rows.
    """

    parts: tuple[Bytes, ...]
    row_step: int
    codes: Codes
    scales: PerGroup
    zeros: PerGroup

    kind = "q4_1"

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return rows [begin, end), which start at a multiple of `row_step`, as blocks.

        Codes and scales stay the same. A block's minimum, -zero · scale, is rounded to FP16.
        Raise ValueError if the result is not finite.
        """
        codes, scales, zeros = self._rows(begin, end)
        blocks = codes.reshape(len(codes), -1, BLOCK)
        repeats = blocks.shape[1] // scales.shape[1]
        scales, minima = (np.repeat(x, repeats, axis=1) for x in (scales, -zeros * scales))
        return q4_1_blocks(blocks, scales=scales, minima=minima)

    def f32(self, begin: int, end: int) -> Floats:
        """Return rows [begin, end), which start at a multiple of `row_step`, without rounding."""
        codes, scales, zeros = self._rows(begin, end)
        groups = codes.reshape(*scales.shape, -1).astype(np.float32)
        values: Floats = (groups - zeros[:, :, None]) * scales[:, :, None]
        return values.reshape(codes.shape)

    def _rows(self, begin: int, end: int) -> tuple[Bytes, Floats, Floats]:
        return self.codes(begin, end), self.scales(begin, end), self.zeros(begin, end)
