"""Tests of benchmarks/predict_decode.py and predict_token.py: plans, held-out rows, the notes."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from compiled_kernel import ROOT
from predict_decode import (
    CONSTANTS,
    OLD,
    Shape,
    fit,
    plan_items,
    predict_us,
    read_rows,
)
from predict_token import OLD_TREE, parts_of, read_cells
from predict_token import fit as fit_token

SHAPE = Shape("nvfp4", 32, 8192, 8, 8, 64)


def test_plan_fills_the_places_and_fits_the_grid_that_ncu_counted() -> None:
    # The grid has room for any lengths: 776 and 584 blocks of 8 KV heads, some of them empty.
    for shape, blocks in ((SHAPE, 776), (Shape("nvfp4", 8, 32768, 8, 8, 128), 584)):
        assert 66 <= len(plan_items(shape, 4 * 132 // 8)) <= blocks // 8


@pytest.mark.parametrize("context", [1, 255, 1024, 8191])
def test_plan_covers_all_positions_once(context: int) -> None:
    items = plan_items(replace(SHAPE, context=context), 66)
    assert sum(items) == 32 * context and list(items) == sorted(items, reverse=True)


def test_more_positions_bytes_and_instructions_never_take_less_time() -> None:
    kernel = OLD["nvfp4", 64]
    times = [predict_us(replace(SHAPE, context=c), kernel) for c in (512, 2048, 8192, 32768)]
    assert times == sorted(times)
    for more in (
        replace(kernel, stage_bytes=2 * kernel.stage_bytes),
        replace(kernel, instructions=2 * kernel.instructions),
    ):
        assert predict_us(SHAPE, more) > predict_us(SHAPE, kernel)


def test_constants_are_fitted_and_few() -> None:
    rows = read_rows()
    assert len(astuple(CONSTANTS)) < len(rows) / 4
    assert astuple(fit(rows)) == pytest.approx(astuple(CONSTANTS), rel=0.05)
    without = fit([row for row in rows if row.shape.context != 1024])
    assert without != fit(rows)  # the rows that are held out do matter


def test_notes_have_the_predictions_of_measured_rows() -> None:
    text = (ROOT / "benchmarks/NOTES.md").read_text("utf-8").replace("−", "-")
    for row in read_rows():
        us = predict_us(row.shape, OLD[row.shape.mode, row.shape.head_dim])
        error = f"{(us / row.us - 1) * 100:+.0f} %"
        assert f"| {us:.1f} | {row.us:.1f} | {error} |" in text
    small_us = fit_token(read_cells())
    for cell in read_cells():
        rate = cell.batch / parts_of(cell, OLD_TREE).us(small_us) * 1e6
        assert f"| {rate:,.0f} | {cell.tokens_per_s:,.0f} |" in text
