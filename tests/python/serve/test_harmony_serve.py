"""Tests of GPT-OSS over HTTP with the openai package: whole and streamed answers, tools."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from fake_engine import HarmonyTokenizer, make_engine
from harmony_cases import OWN_TEMPLATE, TOOL
from serving import post, serving

from lmdeploy.cli.main import make_parser

USER = {"role": "user", "content": "Weather in Zürich?"}
CHAT = {"model": "m", "messages": [USER]}
ARGUMENTS = '{"place": "Zürich"}'
SEEN: list[str] = []  # prompts, in the order of the calls


def model(prompt: str) -> str:
    """Answer a prompt: call the tool, then repeat its result; without tools, repeat the effort."""
    SEEN.append(prompt)
    effort = prompt.split("Reasoning: ")[1].split("<|end|>")[0].split("\n")[0]
    last = prompt.removesuffix("<|start|>assistant").split("<|start|>")[-1]
    if last.startswith("functions.get_weather"):
        result = last.split("<|message|>")[1].removesuffix("<|end|>")
        return f"<|channel|>final<|message|>It is {result}.<|return|>"
    if "type get_weather" in prompt:
        return (
            "<|channel|>analysis<|message|>I need the wéather.<|end|><|start|>assistant<|channel|>"
            "commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
        )
    return (
        f"<|channel|>analysis<|message|>Effort {effort}.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Good day 👧!<|return|>"
    )


@pytest.fixture(scope="module")
def url() -> Any:
    engine = make_engine(model, session_len=4096, harmony_template=OWN_TEMPLATE)
    engine.running.core.cache_tokens = 4096  # type: ignore[attr-defined]
    with serving(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def joined(stream: Any) -> dict[str, Any]:
    """Join the chunks of choice 0 as a client does."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "reason": None}
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            found["content"] += delta.content or ""
            found["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                entry = found["calls"].setdefault(call.index, {"id": "", "name": "", "text": ""})
                entry["id"] += call.id or ""
                entry["name"] += call.function.name or ""
                entry["text"] += call.function.arguments or ""
            found["reason"] = choice.finish_reason or found["reason"]
    return found


def test_chat_harmony_answer_has_content_and_reasoning(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**CHAT).choices[0]
    assert choice.message.content == "Good day 👧!"
    assert choice.message.reasoning_content == "Effort medium."
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    found = joined(client.chat.completions.create(**CHAT, stream=True))
    assert (found["content"], found["reasoning_content"]) == ("Good day 👧!", "Effort medium.")
    assert (found["calls"], found["reason"]) == ({}, "stop")


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_chat_reasoning_effort_reaches_the_prompt(client: openai.OpenAI, effort: Any) -> None:
    reply = client.chat.completions.create(**CHAT, reasoning_effort=effort)
    assert reply.choices[0].message.reasoning_content == f"Effort {effort}."


def test_chat_tool_call_and_its_result_give_an_answer(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**CHAT, tools=[TOOL])
    message, reason = reply.choices[0].message, reply.choices[0].finish_reason
    assert (message.content, reason) == ("Let me see.", "tool_calls")
    assert message.reasoning_content == "I need the wéather."
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"place": "Zürich"}
    # The client sends the assistant's message back unchanged.
    said = message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    reply = client.chat.completions.create(
        model="m", messages=[USER, said, result], tools=[TOOL], tool_choice="auto"
    )
    assert reply.choices[0].message.content == "It is sunny."
    assert "analysis<|message|>I need the wéather.<|end|>" in SEEN[-1]
    assert f"json<|message|>{ARGUMENTS}<|call|>" in SEEN[-1]


def test_chat_streamed_call_joins_to_the_whole_call(client: openai.OpenAI) -> None:
    found = joined(client.chat.completions.create(**CHAT, tools=[TOOL], stream=True))
    (call,) = found["calls"].values()
    assert (call["name"], call["text"]) == ("get_weather", ARGUMENTS)
    assert call["id"].startswith("call_") and call["id"].count("call_") == 1
    assert (found["content"], found["reason"]) == ("Let me see.", "tool_calls")
    assert found["reasoning_content"] == "I need the wéather."


def test_chat_stream_events_contain_only_new_fields() -> None:
    # Without a pause between the steps, the parts of the call could arrive in one event.
    engine = make_engine(model, step_seconds=0.02, session_len=4096, harmony_template=OWN_TEMPLATE)
    with serving(engine) as slow:
        events = post(slow, "/v1/chat/completions", {**CHAT, "tools": [TOOL], "stream": True}).text
    chunks = [json.loads(line[6:]) for line in events.split("\n\n")[:-2]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(delta for delta in deltas[1:-1]), "no event without news"
    first, second = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta][:2]
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert second == {"index": 0, "function": {"arguments": "{"}}


def test_chat_call_without_text_has_null_content(url: str) -> None:
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    with serving(make_engine(lambda _: call, harmony_template=OWN_TEMPLATE)) as other:
        message = post(other, "/v1/chat/completions", CHAT).json()["choices"][0]["message"]
    assert message["content"] is None and message["reasoning_content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_chat_tool_choice_none_removes_tools_from_the_prompt(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**CHAT, tools=[TOOL], tool_choice="none")
    assert reply.choices[0].finish_reason == "stop" and "get_weather" not in SEEN[-1]


@pytest.mark.parametrize("stream", [True, False])
def test_chat_call_cut_by_max_tokens_finishes_with_length(
    client: openai.OpenAI, stream: bool
) -> None:
    answer = HarmonyTokenizer().encode(model("Reasoning: x<|end|>type get_weather"))
    limit = len(answer) - 4
    if stream:
        chunks = client.chat.completions.create(**CHAT, tools=[TOOL], max_tokens=limit, stream=True)
        found = joined(chunks)
        text, reason = found["calls"][0]["text"], found["reason"]
    else:
        reply = client.chat.completions.create(**CHAT, tools=[TOOL], max_tokens=limit)
        text = reply.choices[0].message.tool_calls[0].function.arguments
        reason = reply.choices[0].finish_reason
    assert reason == "length"
    assert text and ARGUMENTS.startswith(text) and text != ARGUMENTS


def test_chat_choices_have_stop_words_and_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**CHAT, n=2, stop=["Effort", " day"], logprobs=True)
    for choice in reply.choices:
        assert (choice.message.content, choice.finish_reason) == ("Good", "stop")
        assert choice.message.reasoning_content == "Effort medium."
        assert choice.logprobs.content


def test_chat_input_ids_are_answered_like_messages(url: str) -> None:
    ids = post(url, "/v1/encode", {"input": "Hi", "do_preprocess": True}).json()["input_ids"]
    reply = post(url, "/v1/chat/completions", {"model": "m", "input_ids": ids}).json()
    assert reply["choices"][0]["message"]["reasoning_content"] == "Effort medium."


def test_completions_harmony_model_returns_plain_text(url: str) -> None:
    prompt = "Reasoning: x\n"
    reply = post(url, "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 500}).json()
    assert reply["choices"][0]["text"] == "analysisEffort x.assistantfinalGood day 👧!"


BAD = [
    ({"reasoning_effort": "extreme"}, "reasoning_effort is 'extreme'. It must be one of"),
    ({"reasoning_effort": 5}, "reasoning_effort is 5"),
    ({"chat_template_kwargs": {"reasoning_effort": "x"}}, "reasoning_effort is 'x'"),
    ({"tool_choice": "required"}, "tool_choice is 'required'. It must be none or auto"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice is {"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search'"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name is 'get_weather'"),
    ({"tools": 5}, "tools is 5"),
    ({"functions": [{}]}, "functions is not supported"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is tool, but no"),
    (
        {"messages": [{"role": "user", "content": "<|e|>" * 4500}]},
        "messages spells 4500 special tokens",
    ),
    ({"messages": [{"role": "user", "content": "<|end|>" * 2000}]}, "messages has 1"),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[text for _, text in BAD])
def test_chat_harmony_invalid_field_is_named_in_the_error(
    url: str, change: dict[str, Any], text: str
) -> None:
    reply = post(url, "/v1/chat/completions", {**CHAT, **change})
    error = reply.json()["error"]
    assert reply.status_code == 400 and text in error["message"]
    assert error["param"] == text.split(" ")[0]


def test_chat_deeply_nested_tools_do_not_break_the_server(url: str) -> None:
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    body = json.dumps({**CHAT, "tools": [TOOL]}).encode()
    body = body.replace(b'"unit": {', b'"deep": ' + deep + b', "unit": {')
    assert post(url, "/v1/chat/completions", body).status_code in (200, 400)
    assert post(url, "/v1/chat/completions", CHAT).status_code == 200


def test_chat_model_without_tool_parser_rejects_tools() -> None:
    with serving(make_engine()) as url:
        reply = post(url, "/v1/chat/completions", {**CHAT, "tools": [TOOL]})
        assert reply.status_code == 400
        assert "tools needs a tool-call parser" in reply.json()["error"]["message"]
        accepted = {"tools": [], "tool_choice": "auto", "reasoning_effort": "low"}
        assert post(url, "/v1/chat/completions", {**CHAT, **accepted}).status_code == 200


def test_parser_flags_accept_only_known_parsers() -> None:
    parse = make_parser().parse_args
    command = ["serve", "api_server", "x"]
    assert parse([*command, "--reasoning-parser", "gpt-oss"]).reasoning_parser == "gpt-oss"
    assert parse([*command, "--tool-call-parser", "gpt-oss"]).tool_call_parser == "gpt-oss"
    with pytest.raises(SystemExit):
        parse([*command, "--reasoning-parser", "deepthought"])


def test_harmony_does_not_continue_a_final_message(url: str) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    body = {**CHAT, "messages": messages, "continue_final_message": True}
    error = post(url, "/v1/chat/completions", body).json()["error"]
    assert error["param"] == "continue_final_message" and "gpt-oss" in error["message"]
