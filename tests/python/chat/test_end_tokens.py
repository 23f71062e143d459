"""The tokens that end an answer, from ids and from texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import byte_tokenizer
from vocabularies import sentence_piece_metadata

from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.chat.tokenizer import Tokenizer, tokenizer_from_folder
from lmdeploy.chat.vocabulary.end_tokens import _TURN_ENDS

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def spm_with(tokens: list[str], *, kind: int = _CONTROL, **changes: Any) -> Tokenizer:
    """Return the tokenizer of a SentencePiece GGUF file with these tokens at the end."""
    metadata = sentence_piece_metadata(**changes)
    metadata["tokenizer.ggml.tokens"] += tokens
    metadata["tokenizer.ggml.scores"] += [0.0] * len(tokens)
    metadata["tokenizer.ggml.token_type"] += [kind] * len(tokens)
    return tokenizer_from_gguf(metadata, "spm")


def texts_of(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.stop_ids]


def folder_with(folder: Path, tokens: list[str], *, special: bool = True) -> Path:
    """Write a folder whose generation_config.json has no eos_token_id."""
    from tokenizers import AddedToken

    backend = byte_tokenizer()
    backend.add_tokens([AddedToken(token, special=special) for token in tokens])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text("{}")
    return folder


def test_gguf_control_token_of_known_text_ends_an_answer_without_eot_key() -> None:
    tokenizer = spm_with(["<start_of_turn>", "<end_of_turn>"])
    assert texts_of(tokenizer) == ["</s>", "<end_of_turn>"]
    ids = tokenizer.encode("ab<end_of_turn>b", add_special=False)
    end = next(i for i, token_id in enumerate(ids) if token_id in tokenizer.stop_ids)
    assert tokenizer.decode(ids[:end]) == "ab"


@pytest.mark.parametrize("text", _TURN_ENDS)
def test_known_ends_hold_for_gguf_and_folders(text: str, tmp_path: Path) -> None:
    tokens = [] if text == "</s>" else [text]
    assert text in texts_of(spm_with(tokens))
    assert text in texts_of(tokenizer_from_folder(folder_with(tmp_path, tokens)))


def test_plain_text_of_an_end_is_not_an_end(tmp_path: Path) -> None:
    for kind in (_NORMAL, _USER_DEFINED):
        assert texts_of(spm_with(["<end_of_turn>"], kind=kind)) == ["</s>"]
    folder = folder_with(tmp_path, ["<end_of_turn>"], special=False)
    assert texts_of(tokenizer_from_folder(folder)) == ["</s>"]


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|channel|>", "<|return|>", "<|call|>", "<|end|>"], ["<|return|>", "<|call|>"]),
        (["<|flush|>", "<|calls|>", "<|end|>"], ["<|flush|>", "<|calls|>"]),
    ],
)
def test_end_of_a_message_is_no_end_of_an_answer(tokens: list[str], ends: list[str]) -> None:
    message_end = 270 + tokens.index("<|end|>")
    for stated in ({}, {"eot_token_id": message_end}):  # converters write the wrong id, too
        tokenizer = spm_with(tokens, **stated)
        assert tokenizer.token_id("<|end|>") == message_end
        assert texts_of(tokenizer) == ["</s>", *ends]


def test_call_alone_is_no_end() -> None:
    assert texts_of(spm_with(["<|call|>", "<|end|>"])) == ["</s>", "<|end|>"]


def test_glm_ends_an_answer_with_the_next_role() -> None:
    glm = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|observation|>"]
    assert texts_of(spm_with(glm))[1:] == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    phi = ["<|user|>", "<|assistant|>", "<|end|>"]
    assert texts_of(spm_with(phi)) == ["</s>", "<|end|>"]


def test_stated_ends_come_first(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, ["<|im_end|>", "<stop>"])
    stop = tokenizer_from_folder(folder).token_id("<stop>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    assert texts_of(tokenizer_from_folder(folder)) == ["<stop>", "<|im_end|>", "</s>"]
