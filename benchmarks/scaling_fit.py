"""The law of a decode step's time, fitted to measured steps.

    seconds(context, batch) = fixed + per_slot * context * batch + per_sequence * batch

`fixed` is what a step costs whatever is in it (weights are read once), `per_slot` what one cached
token of one sequence adds (attention), `per_sequence` what one more row of every matrix product
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TERMS = 3


@dataclass(frozen=True)
class Point:
    """One measured cell: mean context of the timed steps, sequences, seconds of a step."""

    context: float
    batch: int
    seconds: float


@dataclass(frozen=True)
class Law:
    """Coefficients in seconds; none is negative."""

    fixed: float
    per_slot: float
    per_sequence: float

    def seconds(self, context: float, batch: int) -> float:
        """Of one step."""
        return self.fixed + self.per_slot * context * batch + self.per_sequence * batch

    def residual(self, point: Point) -> float:
        """(measured - law) / measured."""
        return 1 - self.seconds(point.context, point.batch) / point.seconds


def fit(points: Sequence[Point]) -> Law:
    """Least squares of the relative residuals, coefficients not below zero.

    Relative, because steps last from milliseconds to seconds and noise is a share of them.

    Raises:
        ValueError: fewer points than terms, values that are not positive, or points that cannot
            tell the terms apart.
    """
    if len(points) < TERMS:
        raise ValueError(f"fit: got {len(points)} points, wanted at least {TERMS}")
    for point in points:
        if not (point.context > 0 and point.batch > 0 and 0 < point.seconds < float("inf")):
            raise ValueError(f"fit: got {point}, wanted positive values")
    seconds = np.array([point.seconds for point in points])
    terms = np.array([[1.0, p.context * p.batch, p.batch] for p in points]) / seconds[:, None]
    scale = np.linalg.norm(terms, axis=0)
    if np.linalg.matrix_rank(terms / scale, tol=1e-6) < TERMS:
        raise ValueError("fit: the contexts and batches do not tell the three terms apart")
    solved = _not_negative(terms / scale) / scale
    return Law(*(float(value) for value in solved))


def _not_negative(terms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """argmin |terms x - 1| with x >= 0: the best of the solutions with some terms left out."""
    best, least = np.zeros(TERMS), np.inf
    for mask in range(1, 1 << TERMS):
        used = [i for i in range(TERMS) if mask >> i & 1]
        solved, *_ = np.linalg.lstsq(terms[:, used], np.ones(len(terms)), rcond=None)
        error = float(np.linalg.norm(terms[:, used] @ solved - 1))
        if (solved >= 0).all() and error < least:
            best, least = np.zeros(TERMS), error
            best[used] = solved
    return best
