"""Tests of GPT-OSS prompts: parsing inverts rendering; client text adds no special token."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from fake_engine import HARMONY, HarmonyTokenizer
from harmony_cases import (
    CONVERSATIONS,
    TEMPLATES,
    TOOL,
    Conversation,
    Vocabulary,
    assistant_turns,
    load_vocabulary,
    parsed_turns,
    prompt_template,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lmdeploy.chat.formats.harmony.conversation import read_conversation, read_options
from lmdeploy.chat.formats.harmony.rendering import render_prompt
from lmdeploy.chat.tool_calls import check_tools

BYTES = HarmonyTokenizer()
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.fixture(scope="module")
def o200k() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield load_vocabulary(patch)


@pytest.fixture(params=TEMPLATES)
def template(request: Any) -> Any:
    return prompt_template(TEMPLATES[request.param])


def encode(tokenizer: Any, texts: list[str]) -> list[int]:
    return [token for text in texts for token in tokenizer.encode(text)]


def render(template: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return "".join(render_prompt(template, messages, options=options))


@pytest.mark.parametrize("source", TEMPLATES)
@settings(max_examples=150, deadline=None)
@given(conversation=CONVERSATIONS)
def test_render_prompt_parsed_again_gives_same_answers(
    source: str, conversation: Conversation
) -> None:
    texts = render_prompt(
        prompt_template(TEMPLATES[source]), conversation.messages, options={"tools": [TOOL]}
    )
    assert parsed_turns(BYTES, encode(BYTES, texts)) == conversation.answers


@settings(max_examples=100, deadline=None)
@given(conversation=CONVERSATIONS)
def test_render_prompt_parsed_by_openai_harmony_gives_same_messages(
    o200k: Vocabulary, conversation: Conversation
) -> None:
    from openai_harmony import Role

    texts = render_prompt(prompt_template(TEMPLATES["own"]), conversation.messages, options={})
    turns = assistant_turns(o200k, encode(o200k, texts))
    for ids, (content, reasoning, calls) in zip(turns, conversation.answers, strict=True):
        messages = o200k.encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
        found = [(m.channel, m.recipient, m.content[0].text) for m in messages]
        assert "".join(text for c, r, text in found if c == "analysis") == reasoning
        assert "".join(text for c, r, text in found if c != "analysis" and r is None) == content
        recipients = [(r.removeprefix("functions."), text) for _, r, text in found if r]
        assert recipients == calls


def test_render_prompt_finished_turn_omits_reasoning(template: Any) -> None:
    step = {"role": "assistant", "reasoning_content": "secret", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "a", "content": "7"}
    assert "analysis<|message|>secret" in render(template, [USER, step, result])
    finished = [USER, step, result, {"role": "assistant", "content": "7."}, USER]
    assert "secret" not in render(template, finished)
    assert "secret" in render(template, [*finished, step, result])
    assert render(template, [*finished, step, result]).count("secret") == 1


def test_render_prompt_preamble_of_a_call_uses_commentary_channel(template: Any) -> None:
    step = {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}
    assert "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant to=f" in (
        render(template, [USER, step])
    )
    assert "analysis<|message|>" not in render(template, [USER, step])
    thoughtful = {**step, "thinking": "hm"}
    assert (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me look.<|end|>"
    ) in render(template, [USER, thoughtful])


def test_render_prompt_browser_call_has_no_functions_prefix(template: Any) -> None:
    function = {"name": "browser.search", "arguments": "{}"}
    result = {"role": "tool", "tool_call_id": "a", "content": "found"}
    text = render(template, [*tool_call(function=function), result], builtin_tools=["browser"])
    assert "<|start|>assistant to=browser.search<|channel|>" in text
    assert "<|start|>browser.search to=assistant<|channel|>" in text
    assert "functions.browser" not in text


def test_render_prompt_options_reach_the_template(template: Any) -> None:
    assert "Reasoning: medium" in render(template, [USER])
    text = render(
        template,
        [{"role": "developer", "content": "Be kind."}, USER],
        reasoning_effort="high",
        tools=[TOOL],
        builtin_tools=["browser"],
    )
    assert "Reasoning: high" in text and "browser" in text and "Be kind." in text
    assert "// The weather at a place.\ntype get_weather = (_: {\n" in text
    assert "days?: number[]" in text
    assert datetime.datetime.now().strftime("%Y-%m-%d") in text
    assert text.endswith("<|start|>assistant")


def test_render_prompt_arguments_and_results_stay_verbatim(template: Any) -> None:
    odd = '{"b":1,  "a": "\\u00e9"}'
    call = {**CALL, "function": {"name": "f", "arguments": odd}}
    text = render(
        template,
        [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": 'He: "x"'}],
    )
    assert f"json<|message|>{odd}<|call|>" in text
    assert 'commentary<|message|>He: "x"<|end|>' in text


def test_render_prompt_system_and_developer_messages_are_joined(template: Any) -> None:
    later = {"role": "system", "content": "And brief."}
    text = render(template, [{"role": "developer", "content": "Be kind."}, USER, later])
    assert "Be kind.\n\nAnd brief." in text and text.count("<|start|>developer") == 1


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(HARMONY))
def test_render_prompt_spelled_special_tokens_stay_text(name: str) -> None:
    # A special token in client text must not add a special token to the prompt.

    def special_tokens(word: str) -> list[int]:
        tool = json.loads(json.dumps(TOOL).replace("weather at", word).replace("days", word))
        call = {**CALL, "function": {"name": "f", "arguments": word}}
        messages = [
            {"role": "system", "content": word},
            {"role": "user", "content": word},
            {"role": "assistant", "content": word, "thinking": word, "tool_calls": [call]},
            {"role": "tool", "content": word},
        ]
        options = {"tools": [tool], "model_identity": word}
        template = prompt_template(TEMPLATES["own"])
        texts = render_prompt(template, messages, options=options)
        assert "".join(texts).count(word) >= 6
        return [token for token in encode(BYTES, texts) if BYTES.is_special(token)]

    assert special_tokens(f"<|{name}|>") == special_tokens("harmless")


def test_render_prompt_joined_before_encoding_would_give_special_tokens() -> None:
    texts = render_prompt(
        prompt_template(TEMPLATES["own"]), [{"role": "user", "content": "<|end|>"}], options={}
    )
    assert len(texts) == 2
    assert len(BYTES.encode("".join(texts))) < len(encode(BYTES, texts))


def tool_call(**change: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "tool_calls": [{**CALL, **change}]}]


BAD_MESSAGES: list[tuple[Any, str]] = [
    ("Hi", "messages is 'Hi'"),
    ([], "messages is"),
    ([7], "messages[0] is 7"),
    ([{"role": "alien", "content": ""}], "messages[0].role is 'alien'"),
    ([{"role": ["user"], "content": ""}], "messages[0].role is ['user']"),
    ([{"role": "user"}], "messages[0].content is None"),
    ([{"role": "assistant"}], "messages[0].content is None"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content has a part"),
    ([{"role": "user", "content": "", "tool_calls": [CALL]}], "messages[0].tool_calls is not"),
    ([{"role": "assistant", "content": "", "thinking": 5}], "messages[0].reasoning_content is 5"),
    ([{"role": "tool", "content": ""}], "messages[0].role is tool, but no"),
    ([USER, {"role": "tool", "content": ""}], "messages[1].role is tool, but no"),
    ([*tool_call(), {"role": "tool", "content": "", "tool_call_id": "b"}], "tool_call_id is 'b'"),
    (
        [*tool_call(), {"role": "tool", "content": ""}, {"role": "tool", "content": ""}],
        "messages[3].tool_call_id is None",
    ),
    ([*tool_call(), {"role": "tool", "content": "", "tool_call_id": 5}], "tool_call_id is 5"),
    (tool_call(function=5), "messages[1].tool_calls[0] is"),
    (tool_call(function={"name": "a b", "arguments": ""}), "function.name is 'a b'"),
    (tool_call(function={"name": "a", "arguments": 5}), "function.arguments is 5"),
    (tool_call(id=7), "messages[1].tool_calls[0].id is 7"),
    ([USER, {"role": "assistant", "tool_calls": [CALL, CALL]}], "tool_calls[1].id is 'a'"),
    ([USER, {"role": "assistant", "tool_calls": {"a": 1}}], "messages[1].tool_calls is"),
]


@pytest.mark.parametrize(("messages", "text"), BAD_MESSAGES, ids=[t for _, t in BAD_MESSAGES])
def test_read_conversation_malformed_message_names_the_field(messages: Any, text: str) -> None:
    with pytest.raises(ValueError) as info:
        read_conversation(messages)
    assert text in str(info.value)


def test_read_conversation_call_arguments_as_object_or_text_are_equal() -> None:
    as_object = tool_call(id=None, function={"name": "f", "arguments": {"x": "é"}})
    as_text = tool_call(id="call 0", function={"name": "f", "arguments": '{"x": "é"}'})
    assert read_conversation(as_object) == read_conversation(as_text)


def test_read_conversation_empty_arguments_are_normalized() -> None:
    for arguments, text in (({}, "{}"), ("", ""), (None, "")):
        call = tool_call(id="a", function={"name": "f", "arguments": arguments})
        as_text = tool_call(id="a", function={"name": "f", "arguments": text})
        assert read_conversation(call) == read_conversation(as_text)
    for wrong in ([], 0, False):
        with pytest.raises(ValueError, match=r"function\.arguments is"):
            read_conversation(tool_call(id="a", function={"name": "f", "arguments": wrong}))


def function(**change: Any) -> list[Any]:
    return [{"type": "function", "function": {**TOOL["function"], **change}}]


BAD_TOOLS: list[tuple[Any, str]] = [
    ({}, "tools is {}"),
    ([5], "tools[0].type is 5"),
    ([{"type": "web_search"}], "tools[0].type is 'web_search'"),
    ([{"type": "function"}], "tools[0].function is None"),
    (function(name="a b"), "tools[0].function.name is 'a b'"),
    (function(name="x" * 129), "tools[0].function.name is 'xxx"),
    (function(name=None), "tools[0].function.name is None"),
    (function(description=5), "tools[0].function.description is 5"),
    (function(parameters=[]), "tools[0].function.parameters is []"),
    ([TOOL, TOOL], "tools[1].function.name is 'get_weather'"),
]


@pytest.mark.parametrize(("tools", "text"), BAD_TOOLS, ids=[t for _, t in BAD_TOOLS])
def test_check_tools_malformed_tool_names_the_field(tools: Any, text: str) -> None:
    with pytest.raises(ValueError) as info:
        check_tools(tools)
    assert text in str(info.value)


def test_read_options_rejects_invalid_values() -> None:
    for effort in ("extreme", "", "HIGH", 5, ["low"]):
        with pytest.raises(
            ValueError,
            match=r"reasoning_effort is .*must be one of none, minimal",
        ):
            read_options({"reasoning_effort": effort})
    for builtin in ("browser", ["shell"], [[]]):
        with pytest.raises(ValueError, match="builtin_tools is"):
            read_options({"builtin_tools": builtin})
    assert read_options({"reasoning_effort": None, "x": 1}) == {"x": 1}


def test_read_options_unknown_efforts_become_the_nearest() -> None:
    efforts = ("none", "minimal", "low", "medium", "high", "xhigh")
    found = [read_options({"reasoning_effort": effort})["reasoning_effort"] for effort in efforts]
    assert found == ["low", "low", "low", "medium", "high", "high"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": 5},
        {"properties": {"a": 5}},
        {"type": "object", "properties": {"a": {"type": "array", "items": "x"}}},
        {"properties": {"\ud800": {"type": "string"}}},
    ],
)
def test_render_prompt_odd_schema_is_rendered_or_raises_value_error(
    template: Any, parameters: Any
) -> None:
    try:
        render(template, [USER], tools=function(parameters=parameters))
    except ValueError as error:
        assert "\n" not in str(error)


def test_render_prompt_deep_schema_raises_value_error(template: Any) -> None:
    deep: Any = {}
    for _ in range(2000):
        deep = {"items": deep, "type": "array"}
    with pytest.raises(ValueError, match="tools is nested too deep"):
        render(template, [USER], tools=function(parameters=deep))


def test_render_prompt_lone_surrogate_becomes_replacement_character(template: Any) -> None:
    message = {"role": "user", "content": "a\ud800b"}
    assert "<|message|>a\ufffdb<|end|>" in render(template, [message])
