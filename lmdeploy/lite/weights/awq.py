"""AWQ: scale inputs up before rounding, by a power of their size, and what comes before down.

The method is that of Lin et al., 2023 (https://arxiv.org/abs/2306.00978).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lmdeploy.lite.weights.rounding import Floats, Grid, output_error

_EXPONENTS = np.arange(20) / 20
_LEAST_SCALE = 1e-4


def search_scales(
    weights: Floats, moments: Floats, *, grid: Grid, allowed: Callable[[Floats], Floats]
) -> Floats:
    """Return the scale of each input [cols] with the least error of the outputs.

    Args:
        weights: the matrices that read one input, below each other.
        moments: XᵀX of their inputs, [cols, cols].
        grid: the rule for groups.
        allowed: returns scales that what comes before can undo, near the given ones.
    """
    size = np.sqrt(np.maximum(np.diagonal(moments), 0).astype(np.float64))
    size = size / max(float(size.mean()), 1e-30)
    best, least = np.ones(len(size), np.float32), np.inf
    for exponent in _EXPONENTS:
        wanted = np.maximum(size**exponent, _LEAST_SCALE)
        wanted /= np.sqrt(wanted.max() * wanted.min())
        scales = allowed(np.asarray(wanted, np.float32))
        difference = grid.round(weights * scales).values() / scales - weights
        error = output_error(difference, moments)
        if error < least:
            best, least = scales, error
    return best
