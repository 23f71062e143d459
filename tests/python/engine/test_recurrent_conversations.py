"""Tests of conversations with a model that has recurrent layers: hits change no bit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conversations import ANSWER, BLOCK, SYSTEM, TURN, check_conversations, turns, whole_blocks
from engine_runs import EngineRun
from parity import prompt
from tiny_families import FAMILY_MODELS
from tiny_models import make_model, save_model

from lmdeploy import TurbomindEngineConfig
from lmdeploy.cli.serve import dry_run_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = next(tiny for tiny in FAMILY_MODELS if tiny.name == "qwen3-5")
    path: Path = save_model(make_model(tiny), tmp_path_factory.mktemp("hybrid"))
    return str(path)


@pytest.mark.parametrize("kv_format", ["none", "int8", "fp8", "nvfp4"])
def test_every_turn_has_the_bits_of_a_cold_one(folder: str, kv_format: str) -> None:
    with (
        EngineRun(folder, exact=False, kv_format=kv_format, prefix_caching=True) as warm,
        EngineRun(folder, exact=False, kv_format=kv_format) as cold,
    ):
        check_conversations(warm, cold)


@pytest.mark.parametrize("name", ["granite-4-h-moe", "falcon-h1", "nemotron-h", "lfm2"])
def test_other_recurrent_layers_have_the_same_hits(name: str, tmp_path: Path) -> None:
    tiny = next(tiny for tiny in FAMILY_MODELS if tiny.name == name)
    path = str(save_model(make_model(tiny), tmp_path))
    with (
        EngineRun(path, exact=False, kv_format="nvfp4", prefix_caching=True) as warm,
        EngineRun(path, exact=False, kv_format="nvfp4", num_draft_tokens=4) as cold,
    ):
        check_conversations(warm, cold)


# The largest KL of the token after a hit. Measured: 9e-7 and 2e-5.
_FORMAT_KL = {"bf16": 2e-6, "int8": 2e-4}


@pytest.mark.parametrize("state_format", _FORMAT_KL)
def test_checkpoints_with_fewer_bits_change_little(folder: str, state_format: str) -> None:
    with (
        EngineRun(folder, exact=True, prefix_caching=True, state_format=state_format) as warm,
        EngineRun(folder, exact=True) as cold,
    ):
        largest = 0.0
        for length in (100, 200, 333):
            ids = prompt(length)
            warm.answer(ids, 1)
            got, wanted = warm.answer(ids, 1), cold.answer(ids, 1)
            assert got.cached_tokens == whole_blocks(length - 1)
            p, q = (
                torch.log_softmax(torch.from_numpy(a.logits[0]).double(), -1) for a in (wanted, got)
            )
            largest = max(largest, float((p.exp() * (p - q)).sum()))
        print(f"{state_format}: KL {largest:.1e}")
        assert 0.0 < largest <= _FORMAT_KL[state_format]


def test_an_edit_of_an_early_turn_hits_what_is_before_it(folder: str) -> None:
    with EngineRun(folder, exact=False, kv_format="nvfp4", prefix_caching=True) as run:
        ids: list[int] = []
        begins = []
        for message in turns(0):
            begins.append(len(ids))
            ids += message
            ids += run.answer(ids, ANSWER).tokens
        edited = ids[: begins[4]] + prompt(TURN, seed=99)
        first, again = run.answer(edited, ANSWER), run.answer(edited, ANSWER)
        assert first.cached_tokens == whole_blocks(begins[4] - 1)
        assert again.cached_tokens == whole_blocks(len(edited) - 1)
        assert again.logits.tobytes() == first.logits.tobytes()


def test_the_third_prompt_hits_where_the_first_two_part(folder: str) -> None:
    with EngineRun(folder, exact=False, kv_format="nvfp4", prefix_caching=True) as run:
        cached = [
            run.answer(prompt(SYSTEM) + prompt(TURN, seed=50 + i), ANSWER).cached_tokens
            for i in range(4)
        ]
    # The second prompt begins at one of the checkpoints that divide the first.
    assert cached == [0, 8 * BLOCK, whole_blocks(SYSTEM), whole_blocks(SYSTEM)]


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a model whose next token depends mostly on the last one, so that answers repeat."""
    tiny = next(tiny for tiny in FAMILY_MODELS if tiny.name == "qwen3-5")
    model = make_model(tiny)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight")):
                tensor.mul_(0.02)
    path: Path = save_model(model, tmp_path_factory.mktemp("repeating"))
    return str(path)


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_drafts_change_no_bit(repeating: str, num_draft_tokens: int) -> None:
    ids = prompt(40)
    with (
        EngineRun(repeating, exact=False, kv_format="nvfp4", prefix_caching=True) as without,
        EngineRun(
            repeating,
            exact=False,
            kv_format="nvfp4",
            prefix_caching=True,
            num_draft_tokens=num_draft_tokens,
        ) as with_drafts,
    ):
        for _ in range(2):
            wanted, got = without.answer(ids, 100), with_drafts.answer(ids, 100)
            assert got.tokens == wanted.tokens
            assert got.logits.tobytes() == wanted.logits.tobytes()
        drafts, accepted = with_drafts.drafts()
        assert 0 < accepted <= drafts
    if num_draft_tokens == 4:
        assert accepted < drafts  # some were refused


def test_dry_run_shows_states_and_checkpoints(folder: str) -> None:
    config = TurbomindEngineConfig(session_len=512, cache_max_entry_count=0.01)

    def line(**options: Any) -> str:
        lines = dry_run_lines(folder, dataclasses.replace(config, **options))
        (found,) = (line for line in lines if line.startswith("recurrent layers: "))
        return found

    assert re.search(
        r"[\d.]+ MiB per sequence; [\d,]+ checkpoints in bf16 \([\d,.]+ MiB\), every 8 blocks",
        line(),
    )
    assert "checkpoints in f32" in line(deterministic=True)
    assert "checkpoints in int8" in line(state_checkpoint_format="int8", deterministic=True)
    assert "every 3 blocks" in line(state_checkpoint_interval=3)
    assert "every" not in line(state_checkpoint_interval=-1)
    assert "; 0 checkpoints" in line(state_checkpoint_share=0.0)
