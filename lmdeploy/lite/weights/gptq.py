"""GPTQ: round column by column, and correct the columns that follow for the error.

The method is that of Frantar et al., 2022 (https://arxiv.org/abs/2210.17323). Columns with large
inputs come first, while groups and their scales follow the order of the inputs, so that a folder
needs no `g_idx`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmdeploy.lite.weights.rounding import LEVELS, Floats, Grid, GroupCodes

_DAMPING = 0.01  # part of the mean diagonal that is added to it
_BLOCK = 128  # columns whose corrections of later columns are combined into one product


def solve_gptq(weights: Floats, moments: Floats, *, grid: Grid) -> GroupCodes:
    """Return codes of `weights` [rows, cols] with a small error of the outputs.

    Args:
        weights: the matrices that read one input, below each other.
        moments: XᵀX of their inputs, [cols, cols].
        grid: the rule for groups.
    """
    order = np.argsort(-np.diagonal(moments), kind="stable")
    factor = _inverse_factor(moments, order)
    left = weights[:, order].copy()
    scales, zeros = grid.parameters(weights)
    groups = order // grid.group
    codes = np.empty(weights.shape, np.uint8)
    cols = weights.shape[1]
    for begin in range(0, cols, _BLOCK):
        end = min(begin + _BLOCK, cols)
        errors = np.empty((len(left), end - begin), np.float32)
        for column in range(begin, end):
            group = groups[column]
            scale, zero = scales[:, group], zeros[:, group].astype(np.float32)
            code = np.clip(np.rint(left[:, column] / scale) + zero, 0, LEVELS)
            codes[:, order[column]] = code
            error = (left[:, column] - (code - zero) * scale) / factor[column, column]
            left[:, column + 1 : end] -= np.outer(error, factor[column, column + 1 : end])
            errors[:, column - begin] = error
        left[:, end:] -= errors @ factor[begin:end, end:]
    return GroupCodes(codes, scales, zeros)


def _inverse_factor(moments: Floats, order: npt.NDArray[np.intp]) -> Floats:
    """Return the upper Cholesky factor of the inverse of the damped moments, in `order`."""
    damped = moments[np.ix_(order, order)].astype(np.float64)
    diagonal = np.diagonal(damped)
    # An input that is always 0 has no error, whatever its weights become.
    extra = np.where(diagonal > 0, _DAMPING * diagonal.mean(), 1.0)
    damped[np.diag_indices_from(damped)] += extra
    inverse = np.linalg.inv(damped)
    return np.asarray(np.linalg.cholesky((inverse + inverse.T) / 2).T, np.float32)
