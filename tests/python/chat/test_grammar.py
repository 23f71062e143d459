"""Tests of grammars: each is compiled once, and each answer has its own state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_engine import FakeTokenizer

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.grammar import Grammar, Grammars, grammar_text

VOCAB_SIZE = 262  # size of llguidance's byte tokenizer


def grammars() -> Grammars:
    return Grammars(lambda: FakeTokenizer().grammar_tokenizer(VOCAB_SIZE))


def text_of(response_format: dict[str, Any]) -> str:
    text = grammar_text(response_format)
    assert text is not None
    return text


def allowed(mask_of: Any, new_tokens: bytes = b"") -> str:
    mask = np.zeros((VOCAB_SIZE + 31) // 32, dtype=np.int32)
    assert mask_of(list(new_tokens), mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return "".join(chr(i) for i in range(256) if bits[i])


def test_token_mask_answers_have_independent_states() -> None:
    known = grammars()
    text = text_of({"type": "regex_schema", "regex_schema": "a(b|c)d"})
    first, second = known.token_mask(text), known.token_mask(text)
    assert (allowed(first), allowed(first, b"a")) == ("a", "bc")
    assert allowed(second) == "a"
    assert allowed(first, b"b") == "d"
    assert allowed(known.token_mask(text)) == "a"
    assert allowed(second, b"a") == "bc"


def test_grammar_waiting_answers_create_no_matcher() -> None:
    grammar = Grammar("start: /ab/", FakeTokenizer().grammar_tokenizer(VOCAB_SIZE))
    copies: list[Any] = []

    class Counted:
        def deep_copy(self) -> Any:
            copies.append(matcher.deep_copy())
            return copies[-1]

    matcher, grammar.matcher = grammar.matcher, Counted()
    masks = [grammar.token_mask() for _ in range(128)]
    assert not copies
    assert (allowed(masks[0]), allowed(masks[0], b"a")) == ("a", "b")
    assert len(copies) == 1


def test_grammars_schemas_with_1_and_true_are_distinct() -> None:
    known = grammars()

    def begins(value: object) -> str:
        schema = {"const": value}
        return allowed(known.token_mask(text_of({"type": "json_schema", "json_schema": schema})))

    assert "1" in begins(1) and "t" in begins(True)


def test_grammar_text_of_plain_text_is_none() -> None:
    assert grammar_text({"type": "text"}) is None


def test_token_mask_token_outside_the_grammar_raises_option_error() -> None:
    mask = np.zeros((VOCAB_SIZE + 31) // 32, dtype=np.int32)
    token_mask = grammars().token_mask(text_of({"type": "regex_schema", "regex_schema": "ab"}))
    assert token_mask([], mask)
    with pytest.raises(OptionError, match=r"^response_format rejected a token: "):
        token_mask([ord("x")], mask)


def mask_of_schema(schema: dict[str, Any]) -> Any:
    return grammars().token_mask(text_of({"type": "json_schema", "json_schema": schema}))


@pytest.mark.parametrize(
    ("kind", "begin"),
    [("integer", ""), ("integer", "-"), ("number", ""), ("number", "-2."), ("number", "4e-")],
)
def test_token_mask_json_number_ends_after_80_digits(kind: str, begin: str) -> None:
    mask_of = mask_of_schema({"type": "array", "items": {"type": kind}})
    assert "7" in allowed(mask_of, b"[" + begin.encode() + b"7" * 79)
    after = allowed(mask_of, b"7")
    assert not set(after) & set("0123456789")
    assert {",", "]"} <= set(after)
    assert "7" in allowed(mask_of, b",")


def test_token_mask_long_number_ends_when_its_digits_come_one_by_one() -> None:
    mask_of = mask_of_schema({"type": "number"})
    steps = [allowed(mask_of, b"7") for _ in range(80)]
    assert all("7" in step for step in steps[:79])
    assert "7" not in steps[79]


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "pattern": "^[0-9]+$"}])
def test_token_mask_digits_in_strings_have_no_bound(schema: dict[str, Any]) -> None:
    assert "7" in allowed(mask_of_schema(schema), b'"' + b"7" * 500)


def test_token_mask_constant_longer_than_80_digits_is_allowed() -> None:
    pattern = "^" + "7" * 200 + "$"
    mask_of = mask_of_schema({"type": "string", "pattern": pattern})
    assert allowed(mask_of, b'"' + b"7" * 100) == "7"


def test_token_mask_regex_may_have_any_number_of_digits() -> None:
    mask_of = grammars().token_mask(text_of({"type": "regex_schema", "regex_schema": "x?[0-9]+,"}))
    assert "7" in allowed(mask_of, b"7" * 500)


DATE = {"type": "string", "format": "date"}


def accepts_string(schema: dict[str, Any], text: str) -> bool:
    mask_of = mask_of_schema(schema)
    expected = allowed(mask_of, b'"')
    for char in text:
        if char not in expected:
            return False
        expected = allowed(mask_of, char.encode())
    return '"' in expected


@pytest.mark.parametrize("day", ["2024-02-29", "2000-02-29", "2023-12-31", "0001-01-01"])
def test_token_mask_date_that_exists_is_allowed(day: str) -> None:
    assert accepts_string(DATE, day)
    assert accepts_string({"type": "string", "format": "date-time"}, f"{day}T23:59:59.5+01:00")


@pytest.mark.parametrize(
    "day", ["2022-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "0000-01-01"]
)
def test_token_mask_date_that_does_not_exist_is_not_allowed(day: str) -> None:
    assert not accepts_string(DATE, day)
    assert not accepts_string({"type": "string", "format": "date-time"}, f"{day}T00:00:00Z")


def test_token_mask_dates_are_checked_in_every_part_of_a_schema() -> None:
    schema = {
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/format"}, {"type": "integer"}]},
        "$defs": {"format": DATE},
    }
    assert not allowed(mask_of_schema(schema), b'["2022-02-2').count("9")
    assert "8" in allowed(mask_of_schema(schema), b'["2022-02-2')


def test_token_mask_data_and_names_that_look_like_a_date_format_are_kept() -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"enum": ["date", {"format": "date"}]}},
        "required": ["format"],
        "additionalProperties": False,
    }
    assert allowed(mask_of_schema(schema), b'{"format": {"forma') == "t"
