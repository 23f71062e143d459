"""Tests of the grammars of tool calls, with a model that samples any byte the grammar allows.

Whatever such a model writes must parse, and the arguments must fit the schema.
"""

from __future__ import annotations

import json
import random
import re
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.formats import registry
from lmdeploy.chat.formats.base import AnswerStart, ChatFormat, ModelInfo, ToolCallParser
from lmdeploy.chat.formats.registry import TOOL_CALL_PARSERS, choose_format
from lmdeploy.chat.formats.tagged_calls import TaggedCalls
from lmdeploy.chat.grammar import MAX_ANSWER_GRAMMAR_CHARS, Grammars, response_grammar
from lmdeploy.chat.tokenizer import Tokenizer
from lmdeploy.chat.tool_calls import ToolUse, check_tool_use, join_tool_calls

RECIPES = Path(__file__).parents[4] / "docs" / "extending.md"
PARSERS = [p.names[0] for p in TOOL_CALL_PARSERS]
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {}},
    {"properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]},
    {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "code": {"type": "string", "pattern": "^[a-f]{2}/[0-9]$"},
            "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["unit", "code", "maybe"],
    },
    {
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/point"},
            "all": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
        },
        "required": ["at", "all"],
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"enum": [1, 2]}, "y": {"const": "k"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
    {
        "type": "object",
        "properties": {
            "tree": {"$ref": "#/$defs/tree"},
            "b": {"oneOf": [{"type": "string", "enum": ["", "x"]}, {"type": ["null", "boolean"]}]},
            "A": {"type": "array", "items": {"enum": [1, "y"]}, "minItems": 2, "maxItems": 3},
            "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "odd, key": {"const": {"k": [1.5, None, "z"]}},
        },
        "required": ["tree", "A", "odd, key"],
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                    "size": {"type": "integer"},
                },
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    },
    {
        "$ref": "#/$defs/P",
        "$defs": {
            "P": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "c": {"$ref": "#/$defs/C"}},
                "required": ["n", "c"],
                "additionalProperties": False,
            },
            "C": {"type": "string", "enum": ["a", "b"]},
        },
    },
    {
        "allOf": [
            {"properties": {"a": {"const": 1}}, "required": ["a"]},
            {
                "properties": {
                    "b": {"anyOf": [{"const": "x"}, {"enum": ["y", "z"]}]},
                    "c": {"allOf": [{"type": "string"}, {"pattern": "^[0-9]{2}$"}]},
                    "d": {"type": "string", "format": "date"},
                },
                "required": ["b", "c", "d"],
            },
        ]
    },
]
TOOLS = [
    {"type": "function", "function": {"name": f"tool_{i}", "parameters": schema, "strict": True}}
    for i, schema in enumerate(SCHEMAS)
]
# Marks that models have as tokens. The tests run with and without them.
TOKENS = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    *("<|return|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"),
    *("<|action_start|>", "<|plugin|>", "<|action_end|>", "<|python_tag|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<escape>"),
)
HARMONY_TOKENS = TOKENS[:7]


def byte_tokenizer(tokens: tuple[str, ...]) -> Tokenizer:
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    controls = [AddedToken(token, special=re.search("[|[]", token) is not None) for token in tokens]
    backend.add_tokens(controls)
    return Tokenizer(backend, eos_ids=[256])


WITH_TOKENS, BYTES_ONLY = byte_tokenizer(TOKENS), byte_tokenizer(HARMONY_TOKENS)


def chat_format(name: str, tokenizer: Tokenizer, *, reasoning: str = "none") -> ChatFormat:
    own = {"reasoning_parser": name, "tool_call_parser": name} if name == "gpt-oss" else {}
    flags = own or {"reasoning_parser": reasoning, "tool_call_parser": name}
    return choose_format(ModelInfo("llama", tokenizer, "x"), **flags)


def write(tokenizer: Tokenizer, grammar: str, seed: int) -> list[int]:
    """Return what a model samples that chooses among the allowed tokens, without the end."""
    chance = random.Random(seed)
    size = tokenizer.vocab_size
    next_mask = Grammars(lambda: tokenizer.grammar_tokenizer()).token_mask(grammar)
    mask = np.zeros((size + 31) // 32, dtype=np.int32)
    ids: list[int] = []
    while len(ids) < 4000:
        if not next_mask(ids[-1:], mask):
            return ids
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]
        allowed = [int(i) for i in np.flatnonzero(bits)]
        closing = [i for i in allowed if i >= 256 or tokenizer.token_bytes(i) in (b'"', b"<", b"]")]
        token = chance.choice(closing if closing and chance.random() < 0.4 else allowed)
        if token == 256:
            return ids
        ids.append(token)
    raise AssertionError("the answer does not end")


def read(chat: ChatFormat, start: AnswerStart, ids: list[int]) -> tuple[str, str, list[Any], int]:
    """Return content, reasoning, calls and the number of broken calls."""
    decoder = chat.decoder(start, skip_special=True, constrained=False)
    content = "".join(map(decoder.push, ids)) + decoder.finish()
    aside = decoder.take_aside()
    calls = join_tool_calls(aside.tool_calls)
    return content, aside.reasoning, calls, decoder.num_broken_calls


def use(**options: Any) -> ToolUse:
    found = check_tool_use(TOOLS, **options)
    assert found is not None
    return found


def check_calls(calls: list[Any]) -> None:
    for call in calls:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[int(call.function.name.removeprefix("tool_"))])


@pytest.mark.parametrize("tokenizer", [WITH_TOKENS, BYTES_ONLY], ids=["tokens", "bytes"])
@pytest.mark.parametrize("name", PARSERS)
def test_required_calls_parse_and_fit_their_schemas(name: str, tokenizer: Tokenizer) -> None:
    chat = chat_format(name, tokenizer)
    start = AnswerStart(tool_use=use(tool_choice="required"))
    grammar = chat.grammar(start, None)
    assert grammar is not None
    for seed in range(6):
        content, _, calls, num_broken = read(chat, start, write(tokenizer, grammar, seed))
        if name != "gpt-oss":
            assert content == ""
        assert calls and num_broken == 0
        check_calls(calls)


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
@pytest.mark.parametrize("name", PARSERS)
def test_call_of_every_tool_fits_its_schema(name: str, index: int) -> None:
    chat = chat_format(name, WITH_TOKENS)
    choice = {"type": "function", "function": {"name": f"tool_{index}"}}
    start = AnswerStart(tool_use=use(tool_choice=choice))
    grammar = chat.grammar(start, None)
    assert grammar is not None
    for seed in range(3):
        calls = read(chat, start, write(WITH_TOKENS, grammar, seed))[2]
        assert [call.function.name for call in calls] == [f"tool_{index}"]
        check_calls(calls)


TAGGED = [p.names[0] for p in TOOL_CALL_PARSERS if isinstance(p, TaggedCalls)]
UNION = {
    "anyOf": [
        {"properties": {"path": {"type": "string", "maxLength": 4}}, "required": ["path"]},
        {"$ref": "#/$defs/lines"},
    ],
    "$defs": {"lines": {"properties": {"line": {"type": "integer"}}, "required": ["line"]}},
}


@pytest.mark.parametrize("name", TAGGED)
def test_union_of_parameters_has_the_properties_of_all_parts(name: str) -> None:
    chat = chat_format(name, WITH_TOKENS)
    tool = {"type": "function", "function": {"name": "open", "parameters": UNION}}
    start = AnswerStart(tool_use=check_tool_use([tool], "required"))
    grammar = chat.grammar(start, None)
    assert grammar is not None
    seen: set[str] = set()
    for seed in range(12):
        for call in read(chat, start, write(WITH_TOKENS, grammar, seed))[2]:
            arguments = json.loads(call.function.arguments)
            assert isinstance(arguments.get("path", ""), str)
            assert type(arguments.get("line", 1)) is int
            seen |= arguments.keys()
    assert seen == {"path", "line"}


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        (UNION, "tools.f.parameters has anyOf"),
        ({"properties": {}, "minProperties": 1}, "tools.f.parameters has minProperties"),
        ({"properties": {}, "not": {}}, "tools.f.parameters has not"),
        ({"properties": {}, "required": ["x"]}, "requires 'x', which is not among its properties"),
        (
            {"properties": {"s": {"type": "string", "format": "email"}}},
            "tools.f.parameters.s has format",
        ),
        (
            {"properties": {"s": {"type": "string", "pattern": "a", "maxLength": 3}}},
            "tools.f.parameters.s has maxLength",
        ),
        (
            {
                "properties": {
                    "s": {"allOf": [{"pattern": "a"}, {"pattern": "b", "type": "string"}]}
                }
            },
            "tools.f.parameters.s has allOf",
        ),
    ],
)
@pytest.mark.parametrize("name", TAGGED)
def test_strict_schema_that_tags_cannot_express_is_refused(
    name: str, parameters: dict[str, Any], problem: str
) -> None:
    chat = chat_format(name, WITH_TOKENS)
    function = {"name": "f", "parameters": parameters, "strict": True}
    with pytest.raises(OptionError) as refused:
        chat.grammar(
            AnswerStart(tool_use=check_tool_use([{"type": "function", "function": function}])), None
        )
    assert problem in str(refused.value)
    del function["strict"]  # without it, the keyword is ignored
    tool_use = check_tool_use([{"type": "function", "function": function}], "required")
    assert chat.grammar(AnswerStart(tool_use=tool_use), None) is not None


MANY: dict[str, Any] = {f"s{i}": {"allOf": [{"$ref": f"#/$defs/s{i + 1}"}] * 16} for i in range(16)}


@pytest.mark.parametrize(
    "parameters",
    [
        {"allOf": [{"$ref": "#"}] * 16},
        {"$ref": "#/$defs/s0", "$defs": MANY},
        {
            "properties": {"x": {"anyOf": [{"$ref": "#/$defs/y"}] * 100}},
            "$defs": {"y": {"anyOf": [{"$ref": "#/$defs/y"}] * 100}},
        },
        {"properties": [1], "required": 5},
        {"properties": {"x": {}}, "required": [[1], None]},
    ],
    ids=["itself", "levels", "types", "no lists", "no names"],
)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", [*TAGGED, "gemma"])
def test_hostile_parameters_end_soon(name: str, parameters: dict[str, Any], strict: bool) -> None:
    chat = chat_format(name, WITH_TOKENS)
    function = {"name": "f", "parameters": parameters, "strict": strict}
    tool_use = check_tool_use([{"type": "function", "function": function}], "required")
    start = AnswerStart(tool_use=tool_use)
    with suppress(OptionError):
        chat.grammar(start, None)
    text = "<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>"
    read(chat, start, WITH_TOKENS.encode(text, add_special=False))


def test_required_answer_of_a_prompted_model_goes_on_only_with_the_mark_of_a_call() -> None:
    """Small models write a line break after a call, which must not oblige them to call again."""
    chat = chat_format("prompted", WITH_TOKENS)
    grammar = chat.grammar(AnswerStart(tool_use=use(tool_choice="required")), None)
    assert grammar is not None
    next_mask = Grammars(lambda: WITH_TOKENS.grammar_tokenizer()).token_mask(grammar)
    mask = np.zeros((WITH_TOKENS.vocab_size + 31) // 32, dtype=np.int32)
    call = '<tool_call>\n{"name": "tool_0", "arguments": {}}\n</tool_call>'
    for text in (None, call):
        ids = [] if text is None else WITH_TOKENS.encode(text, add_special=False)
        assert next_mask(ids, mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    (begin,) = WITH_TOKENS.encode("<tool_call>", add_special=False)
    (less,) = WITH_TOKENS.encode("<", add_special=False)
    assert {256, begin} <= set(allowed) <= {256, begin, less}


@pytest.mark.parametrize("name", PARSERS)
def test_named_call_is_the_only_one(name: str) -> None:
    chat = chat_format(name, WITH_TOKENS)
    choice = {"type": "function", "function": {"name": "tool_2"}}
    start = AnswerStart(tool_use=use(tool_choice=choice))
    grammar = chat.grammar(start, None)
    assert grammar is not None
    for seed in range(4):
        (call,) = read(chat, start, write(WITH_TOKENS, grammar, seed))[2]
        assert call.function.name == "tool_2"
        check_calls([call])


@pytest.mark.parametrize("tokenizer", [WITH_TOKENS, BYTES_ONLY], ids=["tokens", "bytes"])
@pytest.mark.parametrize("name", PARSERS)
def test_auto_calls_of_strict_tools_fit_once_they_begin(name: str, tokenizer: Tokenizer) -> None:
    chat = chat_format(name, tokenizer)
    start = AnswerStart(tool_use=use())
    grammar = chat.grammar(start, None)
    assert grammar is not None
    parser = next(p for p in TOOL_CALL_PARSERS if name in p.names)
    begin = parser.marks[0] if isinstance(parser, ToolCallParser) else ""
    matched = Grammars(lambda: tokenizer.grammar_tokenizer()).token_mask(grammar)
    mask = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.int32)
    if not begin or name == "llama3":
        return
    assert matched(tokenizer.encode("Plain text. " + begin, add_special=False), mask)
    with pytest.raises(OptionError, match=r"response_format rejected a token"):
        matched(tokenizer.encode("\x07", add_special=False), mask)
    for seed in range(4):
        _, _, calls, num_broken = read(chat, start, write(tokenizer, grammar, seed))
        assert num_broken == 0
        check_calls(calls)


@pytest.mark.parametrize("tokenizer", [WITH_TOKENS, BYTES_ONLY], ids=["tokens", "bytes"])
@pytest.mark.parametrize("name", PARSERS)
def test_answer_with_tools_and_a_response_format_is_one_of_them(
    name: str, tokenizer: Tokenizer
) -> None:
    chat = chat_format(name, tokenizer)
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    schema["additionalProperties"] = False
    response = response_grammar({"type": "json_schema", "json_schema": schema})
    start = AnswerStart(tool_use=use())
    grammar = chat.grammar(start, response)
    assert grammar is not None
    kinds = set()
    for seed in range(12):
        content, _, calls, num_broken = read(chat, start, write(tokenizer, grammar, seed))
        assert num_broken == 0
        check_calls(calls)
        kinds.add(bool(calls))
        if not calls:
            jsonschema.validate(json.loads(content), schema)
    assert kinds == {True, False}
    start = AnswerStart(tool_use=use(tool_choice="required"))
    grammar = chat.grammar(start, response)
    assert grammar is not None and read(chat, start, write(tokenizer, grammar, 0))[2]


@pytest.mark.parametrize("prompt_end", ["assistant\n", "assistant\n<think>\n", "<think></think>"])
def test_reasoning_comes_before_required_calls_and_responses(prompt_end: str) -> None:
    tokenizer = WITH_TOKENS
    chat = chat_format("qwen3", tokenizer, reasoning="qwen3")
    start = AnswerStart(prompt_end, tool_use=use(tool_choice="required"))
    plain = AnswerStart(prompt_end)
    response = response_grammar({"type": "json_schema", "json_schema": SCHEMAS[2]})
    for seed in range(4):
        grammar = chat.grammar(start, None)
        assert grammar is not None
        content, _, calls, _ = read(chat, start, write(tokenizer, grammar, seed))
        assert content == "" and calls
        check_calls(calls)
        grammar = chat.grammar(plain, response)
        assert grammar is not None
        content = read(chat, plain, write(tokenizer, grammar, seed))[0]
        jsonschema.validate(json.loads(content), SCHEMAS[2])


def test_reasoning_may_end_with_a_mark_that_is_plain_text() -> None:
    chat = chat_format("qwen3", BYTES_ONLY, reasoning="qwen3")
    grammar = chat.grammar(AnswerStart("<think>\n"), response_grammar({"type": "json_object"}))
    assert grammar is not None
    matched = Grammars(lambda: BYTES_ONLY.grammar_tokenizer()).token_mask(grammar)
    mask = np.zeros((BYTES_ONLY.vocab_size + 31) // 32, dtype=np.int32)
    matched(BYTES_ONLY.encode('Hm <.\n</think>\n\n{"a": 1}', add_special=False), mask)


def test_grammar_is_absent_where_nothing_is_enforced() -> None:
    loose = [{"type": "function", "function": {"name": "f"}}]
    for name in PARSERS:
        chat = chat_format(name, WITH_TOKENS)
        assert chat.grammar(AnswerStart(), None) is None
        assert chat.grammar(AnswerStart(tool_use=check_tool_use(loose)), None) is None


def test_grammar_of_too_many_large_tools_is_refused() -> None:
    chat = chat_format("qwen3", WITH_TOKENS)
    schema = {"type": "object", "properties": {"x": {"enum": ["y" * 1000] * 100}}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(20)
    ]
    start = AnswerStart(tool_use=check_tool_use(tools, "required"))
    with pytest.raises(OptionError, match=rf"^tools make a grammar.* {MAX_ANSWER_GRAMMAR_CHARS}"):
        chat.grammar(start, None)


def test_parser_of_the_recipe_reads_what_its_grammar_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (code,) = re.findall(
        r'```python\n( *"""Tool calls of the.*?)```', RECIPES.read_text(), re.DOTALL
    )
    module: dict[str, Any] = {}
    exec(textwrap.dedent(code), module)
    parsers = (module["PlainCalls"](), *TOOL_CALL_PARSERS)
    monkeypatch.setattr(registry, "TOOL_CALL_PARSERS", parsers)
    chat = chat_format("plain-calls", WITH_TOKENS)
    start = AnswerStart(tool_use=use(tool_choice="required"))
    grammar = chat.grammar(start, None)
    assert grammar is not None
    for seed in range(4):
        content, _, calls, num_broken = read(chat, start, write(WITH_TOKENS, grammar, seed))
        assert content == "" and calls and num_broken == 0
        check_calls(calls)
    ids = WITH_TOKENS.encode("I add. <call>add {}</call> <call>?</call>", add_special=False)
    content, _, calls, num_broken = read(chat, start, ids)
    assert (content, len(calls), num_broken) == ("I add. <call>?</call>", 1, 1)
