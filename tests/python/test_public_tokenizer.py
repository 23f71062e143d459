"""Tests of the public tokenizer, which is loaded without the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import byte_tokenizer

from lmdeploy import Pipeline, Tokenizer, TurbomindEngineConfig

TEXT = "Grüße, 世界!"


def test_tokenizer_equals_that_of_the_pipeline() -> None:
    tokenizer = Tokenizer("smollm2")
    with Pipeline("smollm2", TurbomindEngineConfig(session_len=256)) as pipe:
        ids = pipe.tokenizer.encode(TEXT)
        assert tokenizer.encode(TEXT) == ids
        assert tokenizer.eos_token_id in pipe.tokenizer.stop_ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids, 2) == tokenizer.decode(ids[2:])
    assert tokenizer(TEXT).input_ids == ids and tokenizer([TEXT, TEXT]).input_ids == [ids, ids]
    assert max(ids) < tokenizer.vocab_size


def test_tokenizer_of_a_folder_needs_no_weights(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    tokenizer = Tokenizer(str(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT


def test_tokenizer_never_runs_code_of_a_checkpoint() -> None:
    trusting = Tokenizer("smollm2", trust_remote_code=True)
    assert trusting.encode(TEXT) == Tokenizer("smollm2").encode(TEXT)
    with pytest.raises(ValueError, match=r"^trust_remote_code is 'yes'\. It must be True or False"):
        Tokenizer("smollm2", trust_remote_code="yes")  # type: ignore[arg-type]
