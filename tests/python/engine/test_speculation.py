"""Speculative decoding keeps the answers and takes fewer steps."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_engine import collect, make_engine, make_request

from lmdeploy import TurbomindEngineConfig

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
    assert [(entry.chosen, entry.top) for entry in got_logprobs] == [
        (entry.chosen, entry.top) for entry in logprobs
    ]
    assert alone.draft_tokens == 0
    assert stats.accepted_tokens <= stats.draft_tokens
    assert stats.num_steps == alone.num_steps - stats.accepted_tokens
    if "logit_bias" in sampling:  # the answer is one token again and again
        assert stats.num_steps < alone.num_steps / 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speculative_algorithm": "eagle"}, "speculative_algorithm is 'eagle'"),
        ({"speculative_num_draft_tokens": 0}, "an integer from 1 to 32"),
        ({"speculative_num_draft_tokens": 33}, "an integer from 1 to 32"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurbomindEngineConfig(**values)
