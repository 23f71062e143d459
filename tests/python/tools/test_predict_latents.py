"""Tests of benchmarks/predict_latents.py: its table is that of the notes, and what bounds it."""

from __future__ import annotations

from pathlib import Path

import predict_latents
import pytest
from compiled_kernel import ROOT
from h100 import COPY_GBPS
from predict_latents import EXPAND, KERNELS, ROW_BYTES, expand_phase, predict_us, table

NOTES = Path(ROOT) / "benchmarks/NOTES.md"


def test_notes_have_the_table() -> None:
    assert "\n".join(table()) in NOTES.read_text("utf-8")


def test_notes_have_the_cycles_of_the_phases() -> None:
    text = NOTES.read_text("utf-8")
    for kernel in KERNELS:
        for phase in (expand_phase("nvfp4"), kernel.scores, kernel.weights, kernel.sums):
            assert f"{phase.instructions:.0f}" in text
            assert f" {phase.cycles():,.0f} " in text or f" {phase.cycles():,.0f} cycles" in text


@pytest.mark.parametrize("kind", EXPAND)
def test_no_prediction_is_faster_than_memory(kind: str) -> None:
    for heads in (16, 128):
        us = predict_us(kind, heads=heads, batch=32, context=8192)
        assert us > 32 * 8192 * ROW_BYTES[kind] / COPY_GBPS / 1e3


def test_the_kernel_with_few_rows_is_for_few_heads() -> None:
    assert predict_latents.kernel_of(16).rows == 16
    assert predict_latents.kernel_of(20).rows == 64
