"""Speculative decoding keeps the answers and takes fewer steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import collect, make_engine, make_request
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy import GenerationConfig, TurbomindEngineConfig
from lmdeploy.cli.serve import dry_run_lines
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.pipeline import Pipeline

TESTS_GPU = bool(os.environ.get("LMDEPLOY_TEST_CUDA"))
CYCLE = [9, 3, 27, 41, 5]


def _answer(num_draft_tokens: int, **sampling: Any) -> tuple[list[int], list[Any], Any]:
    """Return the tokens of an answer, their log-probabilities and the engine's counters."""
    engine = make_engine(num_draft_tokens=num_draft_tokens)
    request = make_request(1, CYCLE * 4, max_new_tokens=60)
    request.num_logprobs = 2
    for name, value in sampling.items():
        setattr(request, name, value)
    engine.submit(request)
    outputs = collect(engine)
    tokens = [token for output in outputs for token in output.tokens]
    logprobs = [entry for output in outputs for entry in output.logprobs]
    return tokens, logprobs, engine.stats()


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"do_sample": True, "temperature": 0.1, "seed": 7},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"logit_bias": [(9, 50.0)]},
    ],
    ids=["greedy", "sampled", "penalties", "bias"],
)
def test_drafts_keep_tokens_and_logprobs(sampling: dict[str, Any]) -> None:
    tokens, logprobs, alone = _answer(0, **sampling)
    got, got_logprobs, stats = _answer(6, **sampling)
    assert got == tokens
    assert len(got) == 60
    assert got_logprobs == logprobs
    assert alone.draft_tokens == 0
    assert stats.accepted_tokens <= stats.draft_tokens
    assert stats.num_steps == alone.num_steps - stats.accepted_tokens
    if "logit_bias" in sampling:  # the answer is one token again and again
        assert stats.num_steps < alone.num_steps / 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speculative_algorithm": "eagle"}, "speculative_algorithm is 'eagle'"),
        ({"speculative_algorithm": "draft_model"}, "needs speculative_draft_model"),
        (
            {"speculative_algorithm": "none", "speculative_draft_model": "m"},
            "none excludes speculative_draft_model",
        ),
        ({"speculative_draft_model": ""}, "a non-empty string"),
        ({"speculative_num_draft_tokens": 0}, "an integer from 1 to 32"),
        ({"speculative_num_draft_tokens": 33}, "an integer from 1 to 32"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurbomindEngineConfig(**values)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two models with the same tokenizer and other weights."""
    parent = tmp_path_factory.mktemp("models")
    models = (make_model(TINY_MODELS[0], seed=seed) for seed in (0, 1))
    first, second = (save_model(model, parent / str(i)) for i, model in enumerate(models))
    return first, second


def _tokens_and_stats(folder: Path, **options: Any) -> tuple[list[list[int]], Any]:
    """Return the tokens of a greedy and of a sampled answer, and the engine's counters."""
    # A GPU rounds differently for another number of rows, unless it is told to be deterministic.
    config = TurbomindEngineConfig(
        session_len=256, max_batch_size=4, deterministic=TESTS_GPU, **options
    )
    engine = AsyncEngine.load(str(folder), config, progress=False)
    with Pipeline("", engine=engine) as pipe:
        answers = [
            pipe(
                "A prompt that is not short.",
                GenerationConfig(max_new_tokens=40, ignore_eos=True, random_seed=5, **sampling),
                do_preprocess=False,
            )
            for sampling in ({}, {"do_sample": True, "temperature": 0.5})
        ]
        return [answer.token_ids for answer in answers], engine.stats()


@pytest.mark.parametrize("index", [0, 1], ids=["itself", "another"])
def test_a_draft_model_keeps_the_answers(folders: tuple[Path, Path], index: int) -> None:
    want, alone = _tokens_and_stats(folders[0], speculative_algorithm="none")
    draft = str(folders[index])
    got, stats = _tokens_and_stats(folders[0], speculative_draft_model=draft)
    assert got == want
    assert stats.draft_tokens > 0
    if index == 0:
        assert stats.accepted_tokens > stats.draft_tokens / 2
        assert stats.num_steps < alone.num_steps * 2 / 3


def test_dry_run_counts_the_draft_model(folders: tuple[Path, Path]) -> None:
    config = TurbomindEngineConfig(speculative_draft_model=str(folders[1]), session_len=256)
    lines = [line for line in dry_run_lines(str(folders[0]), config) if "draft model" in line]
    assert len(lines) == 1
    assert f"draft model: {folders[1]}, weights " in lines[0]


def test_a_draft_model_with_other_tokens_is_refused(folders: tuple[Path, Path]) -> None:
    config = TurbomindEngineConfig(speculative_draft_model="smollm2", session_len=256)
    with pytest.raises(ValueError, match=r"another vocabulary than .*--speculative-draft-model"):
        dry_run_lines(str(folders[0]), config)
    with pytest.raises(ValueError, match=r"another vocabulary than .*--speculative-draft-model"):
        AsyncEngine.load(str(folders[0]), config, progress=False)
