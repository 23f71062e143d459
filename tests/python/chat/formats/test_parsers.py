"""Tests of the reasoning and tool-call parsers for text.

The properties hold for all parsers: the result does not depend on where a text is cut, and no text
is lost.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdeploy.chat.formats.base import (
    AnswerStart,
    CallsInside,
    Delta,
    ReasoningParser,
    Splitter,
    ToolCallParser,
)
from lmdeploy.chat.formats.registry import REASONING_PARSERS, TOOL_CALL_PARSERS
from lmdeploy.chat.formats.tagged_calls import TaggedCalls
from lmdeploy.chat.tool_calls import ToolUse, check_tool_use, join_tool_calls

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["C", "F"]},
        "where": {"type": "object", "properties": {"x": {"type": "number"}}},
    },
    "required": ["city"],
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


TOOLS = [tool("get_weather"), tool("f")]


def tool_use(**options: Any) -> ToolUse:
    found = check_tool_use(TOOLS, **options)
    assert found is not None
    return found


def tool_parser(name: str) -> ToolCallParser:
    (found,) = [parser for parser in TOOL_CALL_PARSERS if name in parser.names]
    assert isinstance(found, ToolCallParser)
    return found


def think(name: str) -> ReasoningParser:
    (found,) = [parser for parser in REASONING_PARSERS if name in parser.names]
    assert isinstance(found, ReasoningParser)
    return found


def split(splitter: Splitter, chunks: Iterable[str]) -> Delta:
    """Return the joined parts of an answer that arrives in chunks. Ids become indices."""
    whole = Delta()
    for chunk in chunks:
        whole.add(splitter.push(chunk))
    whole.add(splitter.finish())
    whole.tool_calls = join_tool_calls(whole.tool_calls)
    for call in whole.tool_calls:
        call.id = str(call.index)
    return whole


def calls_of(delta: Delta) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in delta.tool_calls]


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)] or [text]


TEXT_PARSERS = [p for p in TOOL_CALL_PARSERS if isinstance(p, ToolCallParser)]
QWEN_CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Pa}ris\\""}}\n</tool_call>'
ANSWERS: dict[str, list[tuple[str, str, list[tuple[str, str]], int]]] = {
    # parser → answer, content, calls, number of broken calls
    "qwen3": [
        ("Hello <b>you</b>\n", "Hello <b>you</b>\n", [], 0),
        (f"I look.\n\n{QWEN_CALL}", "I look.", [("f", '{"city": "Pa}ris\\""}')], 0),
        (f"{QWEN_CALL}\n{QWEN_CALL}\n", "\n", [("f", '{"city": "Pa}ris\\""}')] * 2, 0),
        (f"{QWEN_CALL} Done.", " Done.", [("f", '{"city": "Pa}ris\\""}')], 0),
        ('<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}', "", [("f", '{"a": [1, {}]}')], 0),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")], 0),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')], 0),
        ("<tool_call>\nf(1)\n</tool_call>", "<tool_call>\nf(1)\n</tool_call>", [], 1),
        ('<tool_call>{"name": 5}', '<tool_call>{"name": 5}', [], 1),
        (
            '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
            [],
            1,
        ),
        (
            '<tool_call>{"arguments": {}, "name": " "}</tool_call>',
            '<tool_call>{"arguments": {}, "name": " "}</tool_call>',
            [],
            1,
        ),
        ('a <tool_call>{"name": "f", "arg', 'a <tool_call>{"name": "f", "arg', [], 1),
        ('<tool_call>{"name": "f", "arguments": {"a": ]}', "]}", [("f", '{"a": ')], 1),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')], 1),
    ],
    "internlm2": [
        (
            'Yes.<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>\n',
            "Yes.\n",
            [("f", '{"a": 1}')],
            0,
        ),
        ("<|action_start|><|interpreter|>", "<|action_start|><|interpreter|>", [], 0),
    ],
    "qwen3coder": [
        (
            'So.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"ris\n</b>\n'
            "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            "So.",
            [("get_weather", '{"city": "Pa\\"ris\\n</b>", "days": 3}')],
            0,
        ),
        (
            "<tool_call><function=f><parameter=units>C</parameter><parameter=where>{}</parameter>"
            "<parameter=other>5</parameter></function></tool_call>",
            "",
            [("f", '{"units": "C", "where": {}, "other": "5"}')],
            0,
        ),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")], 0),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", [], 1),
        ("<tool_call><function=f><parameter=city>Par", "", [("f", '{"city": "Par"')], 1),
    ],
    "glm45": [
        (
            "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n",
            "\n",
            [("f", '{"city": "5", "days": 5}')],
            0,
        ),
    ],
    "glm47": [
        (
            "A<tool_call>f<arg_key>days</arg_key><arg_value>x</arg_value></tool_call>"
            "<tool_call>f</tool_call>",
            "A",
            [("f", '{"days": "x"}'), ("f", "{}")],
            0,
        ),
        ("<tool_call><arg_key>", "<tool_call><arg_key>", [], 1),
    ],
    "deepseek-v32": [
        (
            "A\n\n<｜DSML｜function_calls>\n"
            '<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="city" string="true">5\n</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="x" string="false">[1]</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n"
            '<｜DSML｜invoke name="get_weather">\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>B",
            "AB",
            [("f", '{"city": "5\\n", "x": [1]}'), ("get_weather", "{}")],
            0,
        ),
    ],
    "seed_oss": [
        (
            "A\n<seed:tool_call>\n<function=f>\n<parameter=where>{'a': [None, True]}</parameter>\n"
            "<parameter=tags>[1e999]</parameter>\n</function>\n</seed:tool_call>",
            "A",
            [("f", '{"where": {"a": [null, true]}, "tags": "[1e999]"}')],
            0,
        ),
        (
            "<seed:tool_call><function=f><parameter=where>{'a': f()}</parameter></function>"
            "</seed:tool_call>",
            "",
            [("f", '{"where": "{\'a\': f()}"}')],
            0,
        ),
    ],
    "minimax_m2": [
        (
            'A\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">5</parameter>\n'
            '<parameter name="where">{"a": 1}</parameter>\n</invoke>\n'
            '<invoke name="get_weather">\n</invoke>\n</minimax:tool_call>',
            "A",
            [("f", '{"city": "5", "where": {"a": 1}}'), ("get_weather", "{}")],
            0,
        ),
        ('<minimax:tool_call>\n<invoke name="f"', '<minimax:tool_call>\n<invoke name="f"', [], 1),
    ],
    "mistral": [
        (
            'A[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, '
            '{"name": "f", "arguments": {}}]',
            "A",
            [("f", '{"a": 1}'), ("f", "{}")],
            0,
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{}', "", [("f", '{"a": 1}'), ("f", "{}")], 0),
        ("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{} B", " B", [("f", "{}")], 0),
        ("[TOOL_CALLS] I do not know.", "[TOOL_CALLS] I do not know.", [], 1),
    ],
    "gemma": [
        (
            'A<|tool_call>call:f{city:<|"|>Pa"ri\\s\n{}<|"|>,days:-3,where:{x:1.5e2,y:[]}}'
            "<tool_call|><|tool_call>call:get_weather{}<tool_call|> B",
            "A B",
            [
                ("f", '{"city": "Pa\\"ri\\\\s\\n{}", "days": -3, "where": {"x": 1.5e2, "y": []}}'),
                ("get_weather", "{}"),
            ],
            0,
        ),
        (
            '<|tool_call>call:f{ <|"|>a b<|"|> : [true, None, <|"|><|"|>] }<tool_call|>',
            "",
            [("f", '{"a b": [true, null, ""]}')],
            0,
        ),
        ("<|tool_call>call it", "<|tool_call>call it", [], 1),
        ("<|tool_call>call:f{a:b}", "b}", [("f", '{"a": ')], 1),
        ("<|tool_call>call:f" + "{a:" * 65, "{a:", [("f", '{"a": ' * 64)], 1),
    ],
    "functiongemma": [
        (
            "<start_function_call>call:f{city:<escape>Ulm<escape>}<end_function_call>",
            "",
            [("f", '{"city": "Ulm"}')],
            0,
        ),
    ],
    "llama3": [
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')], 0),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}} B',
            " B",
            [("f", "{}"), ("f", "{}")],
            0,
        ),
        ('{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', [], 0),
        ('{"age": 5, "of": [{}]} ', '{"age": 5, "of": [{}]} ', [], 0),
        ('<|python_tag|>{"age": 5}', '<|python_tag|>{"age": 5}', [], 1),
        ('{"name": "f", "parameters": {"a": ]}', "]}", [("f", '{"a": ')], 1),
        ('Yes. {"name": "f", "parameters": {}}', 'Yes. {"name": "f", "parameters": {}}', [], 0),
    ],
}
CASES = [(name, *case) for name, cases in ANSWERS.items() for case in cases]


@pytest.mark.parametrize(("name", "text", "content", "calls", "num_broken"), CASES)
def test_splitter_reads_calls_and_returns_broken_ones_as_content(
    name: str, text: str, content: str, calls: list[tuple[str, str]], num_broken: int
) -> None:
    whole = split(tool_parser(name).splitter(tool_use()), [text])
    assert (whole.content, calls_of(whole), whole.num_broken_calls) == (content, calls, num_broken)
    assert split(tool_parser(name).splitter(tool_use()), text) == whole, "one character at a time"


PIECES = st.sampled_from(
    [
        *(mark for parser in TEXT_PARSERS for mark in parser.marks),
        *(text for _, text, *_ in CASES),
        '{"name": "f", "arguments": ',
        '{"a": "b\\"}"}',
        "f",
        '"',
        "\\",
        "}",
        "]",
        "\n ",
        "<",
        "é",
    ]
)


@pytest.mark.parametrize("parser", TEXT_PARSERS, ids=lambda parser: parser.names[0])
@given(st.lists(PIECES | st.text(max_size=3), max_size=8), st.lists(st.integers(0, 999)))
def test_splitter_result_does_not_depend_on_cuts(
    parser: ToolCallParser, pieces: list[str], places: list[int]
) -> None:
    text = "".join(pieces)
    whole = split(parser.splitter(tool_use()), [text])
    assert split(parser.splitter(tool_use()), cut(text, places)) == whole
    assert split(parser.splitter(tool_use()), text) == whole
    if not whole.tool_calls:
        assert whole.content == text


THINKING = [
    # parser, end of the prompt, answer → reasoning, content
    ("qwen3", "assistant\n", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", "assistant\n", "Yes </think>.", "", "Yes </think>."),
    ("qwen3", "assistant\n<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes.\n", "", "Yes.\n"),
    ("qwen3", "<think>\n", "Hm. \n", "Hm. \n", ""),
    ("deepseek-r1", "<Assistant>", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek-r1", "<Assistant>", "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    ("gemma", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("gemma", "<|channel>thought\n<channel|>", "Yes.", "", "Yes."),
    ("deepseek-r1", "<Assistant></think>", "Yes.", "", "Yes."),
]


@pytest.mark.parametrize(("name", "prompt_end", "text", "reasoning", "content"), THINKING)
def test_think_splits_reasoning_from_content(
    name: str, prompt_end: str, text: str, reasoning: str, content: str
) -> None:
    start = AnswerStart(prompt_end)
    whole = split(think(name).splitter(start), [text])
    assert (whole.reasoning, whole.content) == (reasoning, content)
    assert split(think(name).splitter(start), text) == whole


def test_think_continued_answer_begins_within_its_message() -> None:
    inside = AnswerStart("<think>\nI", continue_final_message=True)
    assert split(think("qwen3").splitter(inside), [" see</think>Yes"]) == Delta("Yes", "see")
    after = AnswerStart("<think>x</think>Y", continue_final_message=True)
    assert split(think("qwen3").splitter(after), ["es"]) == Delta("es")


CODER_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nTurin\n</parameter>\n</function>\n"
    "</tool_call>"
)
OPEN_CALLS = [
    # tool parser, answer → reasoning, content, calls
    ("qwen3coder", f"I look.\n{CODER_CALL}", "I look.", "", ["get_weather"]),
    ("qwen3coder", f"I look.\n{CODER_CALL}\n{CODER_CALL}\n", "I look.", "", ["get_weather"] * 2),
    ("qwen3", f"I look.\n{QWEN_CALL}", "I look.", "", ["f"]),
    ("qwen3", f"{QWEN_CALL}", "", "", ["f"]),
    ("prompted", f"I look.\n{QWEN_CALL}", "I look.", "", ["f"]),
    # Reasoning about calls stays reasoning.
    ("qwen3", "The tag <tool_call> begins it. Hm", "The tag <tool_call> begins it. Hm", "", []),
    ("qwen3", f"A draft: {QWEN_CALL} Hm", f"A draft: {QWEN_CALL} Hm", "", []),
    ("qwen3", f"A draft: {QWEN_CALL}</think>Yes.", f"A draft: {QWEN_CALL}", "Yes.", []),
    ("qwen3", f"A draft: {QWEN_CALL}\n</think>", f"A draft: {QWEN_CALL}", "", []),
    ("qwen3", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', "", []),
    ("qwen3", f"A <tool_call> tag.\n{QWEN_CALL}", "A <tool_call> tag.", "", ["f"]),
    ("qwen3", f"Hm.</think>{QWEN_CALL}", "Hm.", QWEN_CALL, []),  # for the next splitter
]


@pytest.mark.parametrize(("name", "text", "reasoning", "content", "names"), OPEN_CALLS)
def test_calls_end_reasoning_that_is_never_closed(
    name: str, text: str, reasoning: str, content: str, names: list[str]
) -> None:
    parser = tool_parser(name)
    calls = CallsInside(parser.marks[0], lambda: parser.splitter(tool_use()))
    start = AnswerStart("<think>\n", tool_use=tool_use(), calls=calls)
    whole = split(think("qwen3").splitter(start), [text])
    assert (whole.reasoning, whole.content) == (reasoning, content)
    assert [call.function.name for call in whole.tool_calls] == names
    assert split(think("qwen3").splitter(start), text) == whole
    for size in (2, 3, 7, 19):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert split(think("qwen3").splitter(start), pieces) == whole


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (
            {"$ref": "#/$defs/P", "$defs": {"P": {"properties": {"n": {"type": "integer"}}}}},
            '{"n": 3}',
        ),
        ({"allOf": [{"properties": {"n": {"type": "integer"}}}]}, '{"n": 3}'),
        ({"oneOf": [{"properties": {"n": {"type": "integer"}}}, {}]}, '{"n": 3}'),
        ({"$ref": "#/$defs/gone"}, '{"n": "3"}'),
        ({"$ref": "#"}, '{"n": "3"}'),
    ],
)
def test_tagged_arguments_have_the_types_of_resolved_parameters(
    schema: dict[str, Any], wanted: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    found = check_tool_use([tool])
    assert found is not None
    text = "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    assert calls_of(split(tool_parser("qwen3coder").splitter(found), [text])) == [("f", wanted)]


def test_json_calls_arguments_arrive_as_they_come() -> None:
    splitter = tool_parser("qwen3").splitter(tool_use())
    splitter.push('<tool_call>{"name": "f", ')
    parts = [splitter.push(text) for text in ('"arguments": {"city"', ': "Par', 'is"}', "}")]
    names = [[call.function.name for call in part.tool_calls] for part in parts]
    arguments = ["".join(c.function.arguments for c in part.tool_calls) for part in parts]
    assert names[0][0] == "f" and arguments == ['{"city"', ': "Par', 'is"}', ""]
    assert json.loads("".join(arguments)) == {"city": "Paris"}


@pytest.mark.parametrize(
    "example",
    ["", "{name}{key}{value}", "<c>{name}<k>{key}</k>{value}", "<c>{name}<k>{value}</k>{key}</c>"],
)
def test_tagged_calls_from_text_that_is_no_call_is_rejected(example: str) -> None:
    with pytest.raises(ValueError, match="is not an example of a call"):
        TaggedCalls.from_example(("x",), example, template_marks=())


def test_tagged_calls_from_example_cuts_every_tag() -> None:
    example = '<a>\n<b={name}>\n<c k="{key}" s={is_string}>\n{value}\n</c>\n</b>\n</a>'
    calls = TaggedCalls.from_example(("x",), example, template_marks=())
    assert calls.marks == ("<a>", "</a>", "<b=", '<c k="', '" s=', "</c>", "</b>")
    assert (calls.kinds, calls.line, calls.value_line) == (("true>", "false>"), "\n", "\n")
