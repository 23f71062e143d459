"""Tests of benchmarks/predict_prefill.py: its counts, and what the notes say."""

from __future__ import annotations

from pathlib import Path

import predict_prefill
import pytest
from predict_prefill import KERNELS, PROMPTS, Prompt, predict_us, tflops, tile_cycles

NOTES = Path(predict_prefill.__file__).with_name("NOTES.md")


def test_a_tile_of_64_rows_and_128_keys_takes_8_products_of_64_cycles_for_its_scores() -> None:
    tensor, exponentials, _ = tile_cycles(128)
    assert tensor == 2 * 2 * 8 * 64  # groups, scores and values
    assert exponentials == 128 * 128 / 16
    assert tile_cycles(256)[0] == 2 * (16 * 32 + 4 * 2 * 64)  # 64 keys
    assert KERNELS.keys() == {prompt.head_dim for prompt in PROMPTS}


def test_time_grows_with_the_positions_that_are_seen() -> None:
    whole, end = (Prompt(128, new, 8192, 32, 4) for new in (8192, 2048))
    assert predict_us(end) / predict_us(whole) == pytest.approx(7 / 16, abs=0.03)
    assert tflops(whole, 1e6) == pytest.approx(4 * 32 * 128 * 8192 * 4096 / 1e12)


def test_notes_have_the_predictions() -> None:
    text = NOTES.read_text(encoding="utf-8")
    for prompt in PROMPTS:
        us = predict_us(prompt)
        shape = f"{prompt.new_tokens:,} of {prompt.context:,}, {prompt.q_heads} heads"
        cycles = " | ".join(f"{count:,.0f}" for count in tile_cycles(prompt.head_dim))
        rates = f"{us:.0f} | {tflops(prompt, us):.0f}"
        assert f"| {prompt.head_dim} | {shape} | {cycles} | {rates} |" in text
