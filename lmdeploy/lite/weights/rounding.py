"""Codes of 4 bits with a scale and a zero for each group of inputs.

A weight is (code - zero) · scale. Scales are values of FP16, because folders store them as FP16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

BITS = 4
LEVELS = (1 << BITS) - 1
MIDDLE = 1 << (BITS - 1)
_LEAST_SCALE = 2.0**-20  # FP16 keeps some bits of it, and a folder needs scales above 0


@dataclass(frozen=True)
class Grid:
    """The rule for groups: `group` consecutive inputs, and whether every zero is the middle."""

    group: int
    is_symmetric: bool

    def parameters(self, weights: Floats) -> tuple[Floats, Bytes]:
        """Return scales and zeros [rows, groups] that cover the range of each group."""
        groups = weights.reshape(len(weights), -1, self.group)
        low = np.minimum(groups.min(axis=2), 0)
        high = np.maximum(groups.max(axis=2), 0)
        span = 2 * np.maximum(-low, high) if self.is_symmetric else high - low
        scales = np.maximum(span / LEVELS, _LEAST_SCALE).astype(np.float16).astype(np.float32)
        if self.is_symmetric:
            return scales, np.full(scales.shape, MIDDLE, np.uint8)
        return scales, np.clip(np.rint(-low / scales), 0, LEVELS).astype(np.uint8)

    def round(self, weights: Floats) -> GroupCodes:
        """Return the nearest codes of a matrix [rows, cols]."""
        scales, zeros = self.parameters(weights)
        by_input = np.repeat(scales, self.group, axis=1)
        shifted = np.rint(weights / by_input) + np.repeat(zeros, self.group, axis=1)
        return GroupCodes(np.clip(shifted, 0, LEVELS).astype(np.uint8), scales, zeros)


@dataclass(frozen=True)
class GroupCodes:
    """A quantized matrix."""

    codes: Bytes  # [rows, cols]
    scales: Floats  # [rows, groups]
    zeros: Bytes  # [rows, groups]

    def values(self) -> Floats:
        """Return the values [rows, cols]."""
        group = self.codes.shape[1] // self.scales.shape[1]
        zeros = np.repeat(self.zeros.astype(np.float32), group, axis=1)
        return np.asarray((self.codes - zeros) * np.repeat(self.scales, group, axis=1), np.float32)

    def rows(self, begin: int, end: int) -> GroupCodes:
        """Return a range of rows."""
        rows = slice(begin, end)
        return GroupCodes(self.codes[rows], self.scales[rows], self.zeros[rows])


def output_error(difference: Floats, moments: Floats) -> float:
    """Return tr(Δ · XᵀX · Δᵀ), the squared error of the outputs that Δ causes."""
    return float(np.einsum("ij,ij->", difference @ moments, difference, dtype=np.float64))
