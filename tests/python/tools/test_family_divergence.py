"""Tests of the KL divergence of KV formats by family: the script and its committed results."""

import json
import math

import numpy as np
import pytest
from eval_families import FORMATS, INT8_ROTARY, RESULTS, divergence, models

from lmdeploy.models import FAMILIES

# transformers has no InternLM; their tiny models are a Llama. `deepseek2` is a kind of GGUF file
# for families that are measured.
_NOT_MEASURED = {"internlm2", "internlm3", "deepseek2"}
# Families of which a 4-bit format has more than twice the divergence of Llama's tiny model. In
# those with experts, a rounded value changes which experts a token gets.
_MORE_THAN_TWICE = {
    "deepseek_v2": "experts",
    "deepseek_v3": "experts",
    "ernie4_5_moe": "experts",
    "gemma3": "norms with weights of about 2, which make scores and logits larger",
    "gpt_oss": "experts and sinks",
    "mixtral": "experts",
    "nemotron": "norms with weights of about 2",
    "qwen3_next": "experts, and norms with weights of about 2",
}


def _rows() -> dict[str, dict[str, float]]:
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {row["family"]: row["kl"] for row in rows}


def test_every_family_has_a_finite_divergence_in_every_format() -> None:
    rows = _rows()
    assert rows.keys() == {family.name for family in FAMILIES} - _NOT_MEASURED
    assert rows.keys() == {family for family, _ in models()}
    latents = {family.name for family in FAMILIES if family.latent is not None}
    for name, figures in rows.items():
        assert tuple(figures) == ((*FORMATS, INT8_ROTARY) if name in latents else FORMATS)
        assert all(math.isfinite(value) and value > 0.0 for value in figures.values())
        assert figures["int8"] < figures["fp8"] < min(figures["int4"], figures["nvfp4"])


def test_a_rotary_part_in_8_bits_costs_latents_in_4_bits_little() -> None:
    found = [figures for figures in _rows().values() if INT8_ROTARY in figures]
    assert len(found) == 4
    for figures in found:
        assert figures[INT8_ROTARY] == pytest.approx(figures["nvfp4"], rel=0.05)


def test_families_with_more_than_twice_the_divergence_of_llama_are_named() -> None:
    rows = _rows()
    found = {
        family
        for family, figures in rows.items()
        if any(figures[name] > 2.0 * rows["llama"][name] for name in ("int4", "mxfp4", "nvfp4"))
    }
    assert found == _MORE_THAN_TWICE.keys()


def test_divergence_is_that_of_the_definition() -> None:
    wanted = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32))
    got = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], np.float32))
    expected = 0.5 * math.log(2.0) + 0.25 * math.log(0.5)
    assert divergence(wanted, got + 3.0) == pytest.approx([expected, 0.0], abs=1e-6)
