"""Tokens that only files beside tokenizer.json name are recognized as transformers does."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_models import VOCAB_SIZE, byte_tokenizer

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.chat.tokenizer import Tokenizer, tokenizer_from_folder

TEXT = "the <|im_start|>rest<|im_end|> <tool> of it<pad>"


def token(content: str, **flags: bool) -> dict[str, Any]:
    """Return an item of added_tokens_decoder."""
    usual = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **usual, **flags}


def write(folder: Path, backend: Any = None, **files: Any) -> Path:
    (backend or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


DECODER = {
    str(VOCAB_SIZE): token("<|im_start|>", special=True),
    str(VOCAB_SIZE + 1): token("<|im_end|>", special=True),
    str(VOCAB_SIZE + 2): token("<tool>"),
}
ADDED = {"<|im_end|>": VOCAB_SIZE + 1, "<tool>": VOCAB_SIZE + 2, "<|im_start|>": VOCAB_SIZE}
FILES: list[dict[str, Any]] = [
    {"tokenizer_config": {"added_tokens_decoder": DECODER, "eos_token": "<|im_end|>"}},
    {
        "added_tokens": ADDED,
        "tokenizer_config": {
            "eos_token": "<|im_end|>",
            "additional_special_tokens": ["<|im_start|>"],
        },
    },
    {
        "added_tokens": ADDED,
        "tokenizer_config": {},
        "special_tokens_map": {
            "eos_token": token("<|im_end|>"),
            "additional_special_tokens": ["<|im_start|>"],
        },
    },
]


@pytest.mark.parametrize("files", FILES, ids=["decoder", "added_tokens", "special_tokens_map"])
def test_tokens_of_other_files_are_recognized_as_by_transformers(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizer_from_folder(write(tmp_path, **files))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.encode(TEXT, add_special=False) == reference.encode(TEXT)
    ids = [VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2]
    assert set(ids) <= set(tokenizer.encode(TEXT))
    assert [tokenizer.is_special(i) for i in ids] == [True, True, False]
    assert tokenizer.eos_ids[0] == VOCAB_SIZE + 1 and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(TEXT)) == "the rest <tool> of it<pad>"
    assert tokenizer.vocab_size == VOCAB_SIZE + 3


def test_end_tokens_of_the_decoder_end_an_answer(tmp_path: Path) -> None:
    files = {"tokenizer_config": {"added_tokens_decoder": DECODER}}
    assert tokenizer_from_folder(write(tmp_path, **files)).stop_ids == [VOCAB_SIZE + 1, 2]


def test_plain_token_of_tokenizer_json_becomes_special_by_the_decoder(tmp_path: Path) -> None:
    from tokenizers import AddedToken

    backend = byte_tokenizer()
    backend.add_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    assert tokenizer_from_folder(write(tmp_path, backend)).stop_ids == [2]
    decoder = {"tokenizer_config": {"added_tokens_decoder": DECODER}}
    tokenizer = tokenizer_from_folder(write(tmp_path, backend, **decoder))
    assert tokenizer.stop_ids == [VOCAB_SIZE + 1, 2] and tokenizer.is_special(VOCAB_SIZE)


def test_eos_token_in_the_vocabulary_is_special_and_padding_is_not(tmp_path: Path) -> None:
    vocab = byte_tokenizer().get_vocab()
    eos, pad = "th", "in"
    config = {"tokenizer_config": {"eos_token": eos, "pad_token": pad}}
    tokenizer = tokenizer_from_folder(write(tmp_path, **config))
    assert tokenizer.eos_ids[0] == vocab[eos] and tokenizer.is_special(vocab[eos])
    assert not tokenizer.is_special(vocab[pad])


def test_ids_after_a_gap_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = {str(VOCAB_SIZE + 7): token("<tool>"), str(VOCAB_SIZE): token("<|im_end|>")}
    files = {"tokenizer_config": {"added_tokens_decoder": decoder}}
    with caplog.at_level(logging.WARNING, "lmdeploy"):
        tokenizer = tokenizer_from_folder(write(tmp_path, **files))
    assert tokenizer.token_id("<|im_end|>") == VOCAB_SIZE
    assert tokenizer.token_id("<tool>") is None
    assert [record.getMessage() for record in caplog.records] == [
        "Tokens of tokenizer_config.json or added_tokens.json are left out (1, such as '<tool>'), "
        "because their ids do not follow those of tokenizer.json."
    ]


def test_slow_settings_have_the_added_tokens_too(tmp_path: Path) -> None:
    # lstrip searches back for spaces, so that this tokenizer has a process of its own.
    decoder = {str(VOCAB_SIZE): token("<mask>", lstrip=True, special=True)}
    files = {"tokenizer_config": {"added_tokens_decoder": decoder}}
    tokenizer = tokenizer_from_folder(write(tmp_path, **files))
    assert tokenizer._pool is not None
    copy = Path(tokenizer._pool._task[1])
    assert copy.is_file() and copy.parent != tmp_path
    assert tokenizer.encode("a   <mask>", add_special=False)[-1] == VOCAB_SIZE
    assert len(tokenizer.encode("a   <mask>", add_special=False)) == 2
    del tokenizer
    assert not copy.exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "decoder must be an object"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": token("a")}}}, "has the id 'x'"),
        ({"tokenizer_config": {"added_tokens_decoder": {"-1": token("a")}}}, "has the id '-1'"),
        ({"tokenizer_config": {"added_tokens_decoder": {"²": token("a")}}}, "has the id '²'"),
        ({"tokenizer_config": {"added_tokens_decoder": {"1": {"special": True}}}}, "have a text"),
        ({"tokenizer_config": {"added_tokens_decoder": {"1": token("a") | {"special": 2}}}}, "fla"),
        ({"added_tokens": {"a": "9" * 5000}}, "an id of 0 to"),
        ({"added_tokens": {"a": True}}, "an id of 0 to"),
        ({"added_tokens": [1]}, "must be a JSON object"),
    ],
    ids=str,
)
def test_malformed_tokens_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        tokenizer_from_folder(write(tmp_path, **files))


def test_usual_files_change_nothing(tmp_path: Path) -> None:
    from tokenizers import AddedToken

    backend = byte_tokenizer()
    special = [
        AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")
    ]
    backend.add_special_tokens(special)
    folder = write(tmp_path, backend)
    saved = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    decoder = {str(item["id"]): {**item} for item in saved}
    for item in decoder.values():
        del item["id"]
    without: Tokenizer = tokenizer_from_folder(folder)
    write(folder, backend, tokenizer_config={"added_tokens_decoder": decoder})
    assert tokenizer_from_folder(folder)._backend.to_str() == without._backend.to_str()
