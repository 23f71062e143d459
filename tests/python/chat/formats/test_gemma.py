"""Tests of the grammar of Gemma's tool calls, which is made from the JSON schema."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from fake_engine import FakeTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.formats.gemma_grammar import ArgumentRules
from lmdeploy.chat.grammar import AnswerGrammar


def rules(parameters: dict[str, Any], *, strict: bool = True) -> str:
    """Return the grammar of a tool's arguments."""
    function = {"name": "f", "parameters": parameters, "strict": strict}
    grammar = AnswerGrammar(FakeTokenizer())
    tool = {"type": "function", "function": function}
    return grammar.text(ArgumentRules(tool, grammar, quote='<|"|>').arguments())


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "string", "format": "email"}, "combines format with"),
        ({"type": "array", "prefixItems": [{}]}, "combines prefixItems with"),
        ({"type": "array", "maxItems": 257}, "has the bound 257"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems exceeds"),
        ({"$ref": "#/nothing"}, "has the reference '#/nothing'"),
        ({"$ref": "#/$defs/x", "minimum": 1}, "combines minimum with"),
        ({"anyOf": []}, "without a list"),
        ({"enum": []}, "without a value of its type"),
        ({"type": "string", "const": 1}, "without a value of its type"),
        ({"type": "date"}, "has the type 'date'"),
        ({"type": [[]]}, r"has the type \[\]"),
        ({"const": 'a<|"|>b'}, "contains the text"),
        ({"type": "object", "properties": []}, "wrong type"),
        ({"type": "array", "items": False}, "contains False"),
        (nested(3000), "is nested too deep"),
    ],
)
def test_schema_that_cannot_be_enforced_is_refused(schema: dict[str, Any], problem: str) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"x": {"type": "integer"}}}
    with pytest.raises(OptionError, match=rf"^tools\.f\.parameters .*{problem}"):
        rules(parameters)


WORDS = "type enum const anyOf $ref items minItems maxItems properties required pattern minLength"
KINDS = ["string", "integer", "number", "boolean", "null", "array", "object"]
VALUES = st.recursive(
    st.sampled_from([None, True, -1, 2, "#", "#/$defs/x", *KINDS]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*WORDS.split(), "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=1000, deadline=None)
@given(st.dictionaries(st.sampled_from(WORDS.split()), VALUES, max_size=4), st.booleans())
def test_any_schema_has_a_grammar_or_is_refused(schema: dict[str, Any], strict: bool) -> None:
    with suppress(OptionError):
        rules({"properties": {"a": schema}, "$defs": {"x": schema}}, strict=strict)
    with suppress(OptionError):
        rules(schema, strict=strict)


def test_unknown_keywords_of_lenient_tools_are_ignored() -> None:
    dated = {"properties": {"a": {"type": "string", "format": "email"}}}
    assert rules(dated, strict=False) == rules({"properties": {"a": {"type": "string"}}})


def test_choices_of_another_type_are_left_out() -> None:
    mixed = {"type": ["number", "null"], "enum": [1, "x", None]}
    assert rules({"properties": {"a": mixed}}) == rules({"properties": {"a": {"enum": [1, None]}}})


def test_grammar_has_one_rule_for_each_reference() -> None:
    point = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}}
    parameters = {
        "properties": {f"p{i}": {"$ref": "#/$defs/point"} for i in range(50)},
        "$defs": {"point": point, "x": {"enum": ["only once"]}},
    }
    assert rules(parameters).count("only once") == 1
