"""Tests of logits and greedy tokens against transformers in FP32: tiny models of each family."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import EngineRun
from parity import (
    MAX_RELATIVE_ERROR,
    NUM_GREEDY,
    NUM_TOKENS,
    prompt,
    reference_greedy,
    reference_hidden,
    reference_logits,
    relative_error,
)
from tiny_gguf import write_gguf
from tiny_models import TINY_MODELS, TinyModel, make_model, save_model

from lmdeploy import Pipeline, TurbomindEngineConfig


@pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)
def test_tiny_logits_and_greedy_tokens_equal_transformers(tiny: TinyModel, tmp_path: Path) -> None:
    model = make_model(tiny)
    folder = save_model(model, tmp_path)
    ids, session_len = prompt(), 1024
    if tiny.rope.get("rope_type") == "dynamic":  # the next test covers longer texts
        session_len = tiny.config_values()["max_position_embeddings"]
        ids = prompt(session_len - NUM_GREEDY)
    with EngineRun(str(folder), exact=True, session_len=session_len) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
        print(f"{tiny.name}: relative error {error:.2e}")
        assert error <= MAX_RELATIVE_ERROR
        assert run.greedy(ids, NUM_GREEDY) == reference_greedy(model, ids, NUM_GREEDY)


def test_pooled_states_equal_transformers(tmp_path: Path) -> None:
    model = make_model(TINY_MODELS[0])
    ids = prompt()
    hidden = reference_hidden(model, ids)
    with EngineRun(str(save_model(model, tmp_path)), exact=True) as run:
        assert relative_error(run.pooled(ids, "last"), hidden[-1]) <= MAX_RELATIVE_ERROR
        assert relative_error(run.pooled(ids, "mean"), hidden.mean(0)) <= MAX_RELATIVE_ERROR


def test_dynamic_rope_uses_the_base_of_session_len(tmp_path: Path) -> None:
    # transformers chooses one base per call from its longest position. The engine uses the base of
    # session_len for every text. A text's first tokens do not depend on later ones, so padding
    # gives the reference.
    tiny = next(tiny for tiny in TINY_MODELS if tiny.rope.get("rope_type") == "dynamic")
    model = make_model(tiny)
    ids, num_greedy = prompt(NUM_TOKENS), 8
    wanted = reference_logits(model, ids)
    greedy = ids[:-num_greedy]
    while len(greedy) < NUM_TOKENS:
        padded = greedy + [3] * (NUM_TOKENS - len(greedy))
        greedy.append(int(reference_logits(model, padded)[len(greedy) - 1].argmax()))
    folder = save_model(model, tmp_path)
    with EngineRun(str(folder), exact=True, session_len=NUM_TOKENS) as run:
        for length in (NUM_TOKENS - 1, 40):
            error = relative_error(run.logits(ids[:length]), wanted[:length])
            print(f"{length} tokens: relative error {error:.2e}")
            assert error <= MAX_RELATIVE_ERROR
        assert run.greedy(ids[:-num_greedy], num_greedy) == greedy[-num_greedy:]


def test_rope_scaling_factor_equals_dynamic_rope_of_the_config(tmp_path: Path) -> None:
    folder = str(save_model(make_model(TINY_MODELS[0]), tmp_path))
    ids, rope = prompt(NUM_TOKENS), {"rope_type": "dynamic", "factor": 3.0}
    losses = []
    for option in ({}, {"rope_scaling_factor": 3.0}, {"hf_overrides": {"rope_parameters": rope}}):
        config = TurbomindEngineConfig(exact=True, session_len=512, **option)
        with Pipeline(folder, config) as pipe:
            losses += pipe.get_ppl(ids)
    assert losses[1] == losses[2] != losses[0]


def test_rope_scaling_factor_of_another_rope_kind_is_rejected(tmp_path: Path) -> None:
    tiny = next(tiny for tiny in TINY_MODELS if tiny.rope.get("rope_type") == "yarn")
    folder = str(save_model(make_model(tiny), tmp_path))
    with pytest.raises(ValueError, match=r"^rope_scaling_factor is 2, but .* of kind yarn"):
        Pipeline(folder, TurbomindEngineConfig(rope_scaling_factor=2.0))


@pytest.mark.parametrize("weight_format", ["F32", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("index", [0, 10, 12], ids=["llama", "qwen2", "qwen3"])
def test_gguf_logits_equal_transformers_with_equal_values(
    weight_format: str, index: int, tmp_path: Path
) -> None:
    # transformers gets the dequantized weights; the exact engine gets the stored ones.
    model = make_model(TINY_MODELS[index])
    stored = write_gguf(model, tmp_path / "m.gguf", weight_format=weight_format)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(stored[name]))
    ids = prompt(80)
    with EngineRun(str(tmp_path / "m.gguf"), exact=True) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    print(f"{weight_format}: relative error {error:.2e}")
    assert error <= MAX_RELATIVE_ERROR


def test_gguf_frequency_factors_give_llama3_scaling(tmp_path: Path) -> None:
    # llama.cpp's converter stores plain frequency / scaled frequency in rope_freqs.weight.
    tiny = next(tiny for tiny in TINY_MODELS if tiny.name == "llama-llama3-dim128")
    model = make_model(tiny)
    scaled = model.model.rotary_emb.inv_freq.numpy()
    plain = 10000.0 ** -(np.arange(0, 128, 2) / 128)
    write_gguf(model, tmp_path / "m.gguf", freq_factors=plain / scaled)
    ids = prompt()
    with EngineRun(str(tmp_path / "m.gguf"), exact=True) as run:
        assert relative_error(run.logits(ids), reference_logits(model, ids)) <= MAX_RELATIVE_ERROR


@pytest.mark.parametrize(
    "change",
    [{"sliding_window": 25}, {"rope_theta": 10500.0}, {"rms_norm_eps": 1e-3}],
    ids=lambda change: next(iter(change)),
)
def test_tiny_tolerance_detects_small_mistakes(change: dict[str, Any], tmp_path: Path) -> None:
    # A window longer by one, or a slightly different base or epsilon, must fail the comparison.
    import json

    tiny = next(tiny for tiny in TINY_MODELS if tiny.name == "mistral-window-mqa")
    model = make_model(tiny)
    folder = save_model(model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    if "rope_theta" in change:
        config["rope_parameters"].update(change)
    else:
        config.update(change)
    (folder / "config.json").write_text(json.dumps(config))
    ids = prompt()
    with EngineRun(str(folder), exact=True) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    assert error > 10 * MAX_RELATIVE_ERROR
