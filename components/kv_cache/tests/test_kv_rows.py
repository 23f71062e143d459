"""Tests of the row forms against vectors, a restatement in torch, and published errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdeploy.kv_rows import FORMS, Form, pack_rows, unpack_rows

# Relative L2 error of N(0, 1), 4,096 rows of 128 values, with the tolerance of docs/kv_cache.md.
FIGURES: dict[Form, float] = {"fp4": 0.109, "int4": 0.117}
FIGURE_BAND = 0.02
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def gaussian(shape: tuple[int, ...] = (4096, 128)) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def nibbles(codes: np.ndarray) -> list[int]:
    return [int(word) >> shift & 15 for word in codes.ravel() for shift in range(0, 32, 4)]


def test_fp4_codes_and_ties() -> None:
    row = [6, 0, 0.5, 1, 1.5, 2, 3, 4, -0.5, -6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5]
    row += [5, -5, -0.0, -0.1, 0.26, 0.74, 5.01, -2.5]
    codes, scale = pack_rows(np.array(row, np.float32), "fp4")
    assert scale.tolist() == [1.0]
    assert nibbles(codes[:2]) == [7, 0, 1, 2, 3, 4, 5, 6, 9, 15, 0, 2, 2, 4, 4, 6]
    assert nibbles(codes[2:]) == [6, 14, 8, 8, 1, 1, 7, 12]
    assert int(codes[0]) == 0x65432107


def test_int4_codes_and_ties() -> None:
    row = [7, -7, 0, 0.5, 1.5, -0.5, -2.5, 6.5]
    codes, scale = pack_rows(np.array([row], np.float64), "int4")
    assert scale.tolist() == [[1.0]]
    assert nibbles(codes) == [15, 1, 8, 8, 10, 8, 6, 14]


@pytest.mark.parametrize("form", FORMS)
def test_scales_are_never_zero_or_infinite(form: Form) -> None:
    for size, scale in ((0.0, 2.0**-24), (1e-8, 2.0**-24), (1e6, 65504.0)):
        row = np.full((2, 8), size, np.float32)
        codes, stored = pack_rows(row, form)
        assert stored.dtype == np.float16 and (stored == np.float16(scale)).all()
        largest = 6 if form == "fp4" else 7
        read = unpack_rows(codes, stored, form=form)
        assert np.isfinite(read).all()
        np.testing.assert_allclose(read, min(size, largest * scale), atol=scale / 2)
    assert nibbles(pack_rows(np.full(8, 1e6, np.float32), "fp4")[0]) == [7] * 8


def restated(x: np.ndarray, form: Form) -> torch.Tensor:
    """Return rows after a round trip, with the nearest value by comparison with all values."""
    rows = torch.from_numpy(x).double()
    grid = torch.cat([-E2M1.flip(0), E2M1]) if form == "fp4" else torch.arange(-7.0, 8).double()
    scale = (rows.abs().amax(-1, keepdim=True).float() / grid.max().float()).clamp(2**-24, 65504)
    scale = scale.half().double()
    nearest = (rows[..., None] / scale[..., None] - grid).abs().argmin(-1)
    return grid[nearest] * scale


@pytest.mark.parametrize("form", FORMS)
def test_round_trip_equals_restatement_in_torch(form: Form) -> None:
    x = gaussian((3, 50, 64)) * np.float32(10) ** np.arange(-3, 2, 0.1, np.float32)[:50, None]
    read = unpack_rows(*pack_rows(x, form), form=form)
    np.testing.assert_allclose(read, restated(x, form).float().numpy(), rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_round_trip_error_equals_figure(form: Form) -> None:
    x = gaussian()
    error = np.linalg.norm(unpack_rows(*pack_rows(x, form), form=form) - x) / np.linalg.norm(x)
    assert error == pytest.approx(FIGURES[form], rel=FIGURE_BAND)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8), st.sampled_from(FORMS))
def test_error_is_within_half_a_step(row: list[float], form: Form) -> None:
    x = np.array(row, np.float32)
    codes, scale = pack_rows(x, form)
    largest, step = (6, 1) if form == "fp4" else (7, 0.5)
    kept = np.clip(x, -largest * float(scale[0]), largest * float(scale[0]))
    assert (
        np.abs(unpack_rows(codes, scale, form=form) - kept).max() <= step * float(scale[0]) * 1.0001
    )


BAD: list[tuple[Any, str, str]] = [
    (np.zeros(8, np.float32), "fp8", "form is 'fp8'"),
    (np.zeros(12, np.float32), "fp4", "x has rows of 12 values"),
    (np.zeros((3, 0), np.float32), "fp4", "x has rows of 0 values"),
    (np.zeros(8, np.int32), "fp4", "x must be"),
    (np.float32(1), "fp4", "x must be"),
    ([0.0] * 8, "fp4", "x must be"),
    (np.full(8, np.nan), "int4", "not finite"),
    (np.full(8, 1e300), "int4", "not finite"),
]


@pytest.mark.parametrize(("x", "form", "message"), BAD)
@pytest.mark.filterwarnings("ignore:overflow")
def test_pack_rows_rejects(x: Any, form: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_rows(x, form)


def test_unpack_rows_rejects() -> None:
    codes, scale = pack_rows(gaussian((4, 16)), "fp4")
    for bad_codes, bad_scale, message in (
        (codes.astype(np.int64), scale, "codes must be"),
        (codes, scale.astype(np.float32), "scale must be"),
        (codes, scale[:3], "scale must be"),
        (codes, scale[:, 0], "scale must be"),
    ):
        with pytest.raises(ValueError, match=message):
            unpack_rows(bad_codes, bad_scale, form="fp4")
