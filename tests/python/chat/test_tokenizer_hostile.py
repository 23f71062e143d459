"""Tests of hostile tokenizer.json files: panics of the library, growing texts, slow expressions."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_models import byte_tokenizer

from lmdeploy.base.checks import OptionError
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.chat.bounded import child
from lmdeploy.chat.bounded.settings import is_bounded
from lmdeploy.chat.gguf_pretokenizers import PRE_TOKENIZERS
from lmdeploy.chat.tokenizer import Tokenizer, library_errors, tokenizer_from_folder

TEMPLATE_WITHOUT_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


def settings(**changes: Any) -> dict[str, Any]:
    """Return the byte-level tokenizer as the object of tokenizer.json, with changes."""
    spec = json.loads(byte_tokenizer().to_str())
    spec["model"] |= changes.pop("model", {})
    return spec | changes


def load(folder: Path, **changes: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(settings(**changes)))
    return tokenizer_from_folder(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"continuing_subword_prefix": "#########"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    ],
    ids=["prefix longer than a merge", "character map that ends early"],
)
def test_panic_while_loading_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json: The file is not a tokenizer: "):
        load(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"post_processor": TEMPLATE_WITHOUT_TOKEN},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAA"}},
        {
            "model": {"type": "Unigram", "unk_id": None, "vocab": [["b", 0.0]], "merges": None},
            "pre_tokenizer": None,
        },
    ],
    ids=["template", "length 0", "character map", "unknown token"],
)
def test_failure_while_tokenizing_refuses_the_request(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    tokenizer = load(tmp_path, **changes)
    for _ in range(2):
        with pytest.raises(OptionError, match="tokenizer of this model cannot process") as refusal:
            tokenizer.encode("aaa")
        assert refusal.value.field == "prompt"


def test_library_errors_pass_on_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), library_errors(ValueError):
        raise KeyboardInterrupt


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def sequence(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def template(*pieces: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DOUBLING = sequence("normalizers", *[replace("a", "aa")] * 26)
# Each of the 100 matches takes just fewer steps than the library's limit of 10**7.
BACKTRACKING = split("(a|a){22}c|a")
HOSTILE = {
    "doubling normalizers": {"normalizer": DOUBLING},
    "backtracking pre-tokenizer": {"pre_tokenizer": sequence("pretokenizers", BACKTRACKING, BYTES)},
    "backtracking normalizer": {
        "normalizer": {"type": "Replace", "pattern": BACKTRACKING["pattern"], "content": "b"}
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_slow_settings_refuse_the_request_within_the_limits(tmp_path: Path, name: str) -> None:
    tokenizer = load(tmp_path, **HOSTILE[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    with pytest.raises(OptionError, match="takes more than 5 s or too much memory"):
        tokenizer.encode("aaa" if "backtracking" not in name else "a" * 1000)
    assert time.monotonic() - start < child.MAX_SECONDS + 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert tokenizer.encode("e", add_special=False) == tokenizer.encode("e", add_special=False)


def test_doubling_normalizers_of_an_added_token_are_one_error_at_load(tmp_path: Path) -> None:
    token = {"id": 3, "content": "aaa", "normalized": True, "special": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    tokens = [*settings()["added_tokens"], token | flags]
    with pytest.raises(ModelFormatError, match="takes too much time or memory"):
        load(tmp_path, normalizer=DOUBLING, added_tokens=tokens)


SPACE = replace(" ", "\u2581")
UNBOUNDED = [
    *HOSTILE.values(),
    {"post_processor": template(TEXT, TEXT)},
    {"normalizer": replace("", "a")},
    {"normalizer": replace("a", "a" * 65)},
    {"normalizer": {"type": "Prepend", "prepend": "a" * 64}},
    {"normalizer": sequence("normalizers", *[replace("a", "a")] * 9)},
    {"normalizer": sequence("normalizers", sequence("normalizers", DOUBLING))},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"pre_tokenizer": split("a+")},
    *(
        {"pre_tokenizer": split(PRE_TOKENIZERS[name].patterns[place])}
        for name, place in (("tiny_aya", 0), ("superbpe", 1))
    ),
    {"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 4)},
    {"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}},
    {"added_tokens": [{"id": 1, "content": "<mask>", "lstrip": True}]},
    {"post_processor": template(*[{"SpecialToken": {"id": "x", "type_id": 0}}] * 17)},
    {"normalizer": "Replace"},
    {"normalizer": {}},
]
BOUNDED = [
    {},
    {"normalizer": None, "pre_tokenizer": None, "post_processor": None},
    {"normalizer": sequence("normalizers", {"type": "Prepend", "prepend": "\u2581"}, SPACE)},
    {"normalizer": {"type": "NFC"}, "post_processor": template(TEXT)},
    *(
        {"pre_tokenizer": sequence("pretokenizers", *map(split, each.patterns), BYTES)}
        for each in PRE_TOKENIZERS.values()
        if each.is_linear
    ),
    # Qwen 2 and 3, and Llama 3, as in their tokenizer.json.
    *(
        {
            "pre_tokenizer": split(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
                + digits
                + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
        }
        for digits in (r"\p{N}", r"\p{N}{1,3}")
    ),
]


@pytest.mark.parametrize("changes", UNBOUNDED, ids=lambda changes: str(changes)[:60])
def test_settings_that_may_be_slow_are_not_bounded(changes: dict[str, Any]) -> None:
    assert not is_bounded(settings(**dict(changes)))


@pytest.mark.parametrize("changes", BOUNDED, ids=lambda changes: str(changes)[:60])
def test_settings_of_released_models_are_bounded(changes: dict[str, Any]) -> None:
    assert is_bounded(settings(**dict(changes)))


def test_process_gives_the_same_ids_and_grammar_as_the_library(tmp_path: Path) -> None:
    plain = load(tmp_path)
    fixed = {"type": "FixedLength", "length": 10**6}  # not known, and without effect
    pre_tokenizer = sequence("pretokenizers", fixed, settings()["pre_tokenizer"])
    other = load(tmp_path, pre_tokenizer=pre_tokenizer)
    assert plain._process is None and other._process is not None
    for text in ("", "the rest", "<s>x</s>é中\r\n", "the rest " * 10_000, "\ud800"):
        for add_special in (True, False):
            assert other.encode(text, add_special) == plain.encode(text, add_special)
    assert other.vocab_size == plain.vocab_size and other.eos_token == plain.eos_token
    assert other.grammar_tokenizer().vocab_size == plain.grammar_tokenizer().vocab_size


def test_process_that_was_killed_is_started_again(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, pre_tokenizer={"type": "FixedLength", "length": 3})
    process = tokenizer._process
    assert process is not None
    ids = tokenizer.encode("the rest")
    process._process.kill()
    process._process.wait()
    assert tokenizer.encode("the rest") == ids
