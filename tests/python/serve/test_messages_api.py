"""Tests of Anthropic's API with its own client, over scripted answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from fake_engine import TEMPLATE, make_engine
from rendering import chat_template
from serving import serving

from lmdeploy.chat.formats.base import ModelInfo
from lmdeploy.chat.formats.registry import choose_format
from lmdeploy.chat.templates.prompt_template import PromptTemplate

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"
TOOL = {
    "name": "get_weather",
    "description": "Return the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASK = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "Weather?"}]}


def make(answer: Any, **options: Any) -> Any:
    engine = make_engine(answer, session_len=8192, **options)
    model = ModelInfo("llama", engine.text.tokenizer, TEMPLATE)
    engine.text.chat_format = choose_format(
        model, reasoning_parser="qwen3", tool_call_parser="prompted"
    )
    return engine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(make(lambda prompt: ANSWER if "Weather" in prompt else prompt)) as address:
        yield address


@pytest.fixture
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)


def check(message: anthropic.types.Message) -> None:
    thinking, text, call = message.content
    assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert (thinking.thinking, text.text) == ("Hm.", "I look.")  # type: ignore[union-attr]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})  # type: ignore[union-attr]
    assert text.citations == [] and call.caller == anthropic.types.DirectCaller(type="direct")  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use" and message.id.startswith("msg_")
    assert message.usage.input_tokens > 10 and message.usage.output_tokens > 40


def test_messages_answer_has_thinking_text_and_calls(client: anthropic.Anthropic) -> None:
    check(client.messages.create(**ASK, tools=[TOOL]))


def test_messages_streamed_answer_joins_to_the_whole(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        names = [event.type for event in stream]
        check(stream.get_final_message())
    assert names[0] == "message_start" and names[-1] == "message_stop"
    assert names.count("content_block_start") == names.count("content_block_stop") == 3


def test_messages_conversation_reaches_the_template_in_order(client: anthropic.Anthropic) -> None:
    use = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "7"}]}
    message = client.messages.create(
        model="m",
        max_tokens=2000,
        system=[{"type": "text", "text": "Be kind."}],
        messages=[
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": [{"type": "text", "text": "So."}, use]},  # type: ignore[list-item]
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},  # type: ignore[list-item]
        ],
    )
    (block,) = message.content
    assert block.type == "text"
    places = [
        block.text.index(part)
        for part in (
            "<system>Be kind.",
            "<user>Rome?",
            "<assistant>So.\n",
            '{"name": "get_weather", "arguments": {"city": "Rome"}}',
            "<user><tool_response>\n7\n",
            "<user>And?",
        )
    ]
    assert places == sorted(places)
    assert message.stop_reason == "end_turn"


def test_messages_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    ask = {**ASK, "messages": [{"role": "user", "content": "one two three"}]}
    message = client.messages.create(**ask, stop_sequences=["three", "two"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
    message = client.messages.create(**{**ask, "max_tokens": 3})
    assert message.stop_reason == "max_tokens"


def test_messages_tool_choice_any_is_enforced_by_a_grammar(
    client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars: list[str] = []
    monkeypatch.setattr(
        "lmdeploy.chat.grammar.Grammars.token_mask",
        lambda _, text, *, field: grammars.append(text),
    )
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}):
        client.messages.create(**ASK, tools=[TOOL], tool_choice=choice)
    assert len(grammars) == 2 and all("get_weather" in text for text in grammars)


def test_messages_tool_choice_without_tools_must_not_force_a_call(
    client: anthropic.Anthropic,
) -> None:
    ask: Any = {**ASK, "messages": [{"role": "user", "content": "hello"}]}
    for tools in ({}, {"tools": []}):
        for choice in ({"type": "auto"}, {"type": "none"}):
            message = client.messages.create(**ask, **tools, tool_choice=choice)
            assert message.stop_reason == "end_turn"
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
            with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                client.messages.create(**ask, **tools, tool_choice=choice)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_threads_are_refused_with_the_code_that_clients_know(
    client: anthropic.Anthropic, url: str, stream: bool
) -> None:
    """Clients send only new messages to a server that accepts `thread`."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_0"}):
        body = {**ASK, "thread": thread, "stream": stream}
        reply = httpx.post(f"{url}/v1/messages", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert client.messages.create(**ASK, extra_body={"thread": None}).content


def test_messages_count_tokens_equals_the_usage(client: anthropic.Anthropic) -> None:
    ask = {name: ASK[name] for name in ("model", "messages")}
    count = client.messages.count_tokens(**ask, tools=[TOOL]).input_tokens
    usage = client.messages.create(**ASK, tools=[TOOL]).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("change", "status", "kind", "text"),
    [
        ({"model": "other"}, 404, "not_found_error", "model 'other' does not exist"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens is 0"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].type is 'image'",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "x"}]},
            400,
            "invalid_request_error",
            "tools[0].type is 'web_search_20250305'",
        ),
        ({"tool_choice": {"type": "x"}}, 400, "invalid_request_error", "tool_choice.type is 'x'"),
        ({"mcp_servers": [{"type": "url"}]}, 400, "invalid_request_error", "mcp_servers is not"),
        ({"compaction": {"type": "x"}}, 400, "invalid_request_error", "compaction is not"),
    ],
)
def test_messages_errors_have_the_form_of_the_api(
    url: str, change: dict[str, Any], status: int, kind: str, text: str
) -> None:
    reply = httpx.post(f"{url}/v1/messages", json={**ASK, **change})
    body = reply.json()
    assert (reply.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert text in body["error"]["message"]


def test_messages_models_are_listed(url: str, client: anthropic.Anthropic) -> None:
    listed = httpx.get(f"{url}/anthropic/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["m"]
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("m", "model", "m")
    assert client.models.retrieve("m") == model


def test_messages_overflow_is_recognized_by_its_words(client: anthropic.Anthropic) -> None:
    ask = {**ASK, "messages": [{"role": "user", "content": "word " * 20_000}]}
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* 8192 tokens"):
        client.messages.create(**ask)


def test_messages_output_config_is_a_grammar_and_an_effort(
    client: anthropic.Anthropic, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars: list[str] = []
    monkeypatch.setattr(
        "lmdeploy.chat.grammar.Grammars.token_mask",
        lambda _, text, *, field: grammars.append(text),
    )
    schema = {"type": "object", "properties": {"x": {"const": "unusual"}}}
    form: Any = {"type": "json_schema", "schema": schema}
    client.messages.create(**ASK, output_config={"format": form, "effort": "low"})
    assert len(grammars) == 1 and "unusual" in grammars[0]
    for wrong in ({"type": "xml"}, {"type": "json_schema", "json_schema": schema}, 3):
        body = {**ASK, "output_config": {"format": wrong}}
        error = httpx.post(f"{url}/v1/messages", json=body).json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "json_schema" in error["message"] or "output_format.schema" in error["message"]


def test_messages_key_is_read_from_its_own_header() -> None:
    with serving(make(lambda _: "x"), api_keys=["secret"]) as address:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"Authorization": "Bearer secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": "secret", "Authorization": "Bearer wrong"}, 401),
        ):
            reply = httpx.post(f"{address}/v1/messages", json=ASK, headers=headers)
            assert reply.status_code == status
        assert reply.json()["error"]["type"] == "authentication_error"


SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search"}


def test_messages_tools_of_the_provider_are_skipped_beside_functions(
    url: str, client: anthropic.Anthropic
) -> None:
    tools: Any = [SERVER_TOOL, TOOL]
    check(client.messages.create(**ASK, tools=tools))
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "tool", "name": "gone"}):
        reply = httpx.post(
            f"{url}/v1/messages", json={**ASK, "tools": tools, "tool_choice": choice}
        )
        assert reply.status_code == 400 and "tool_choice" in reply.text


def test_messages_blocks_of_the_providers_tools_are_skipped(client: anthropic.Anthropic) -> None:
    blocks: Any = [
        {"type": "text", "text": "I search."},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "redacted_thinking", "data": "x"},
    ]
    messages: Any = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "on"},
    ]
    shown: Any = client.messages.create(model="m", max_tokens=200, messages=messages)
    assert "I search." in shown.content[0].text


def test_messages_found_tools_are_named_in_the_result_of_a_search(
    client: anthropic.Anthropic,
) -> None:
    found = [{"type": "tool_reference", "tool_name": name} for name in ("Bash", "Read")]
    call = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}
    messages: Any = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [call]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": found}],
        },
    ]
    shown: Any = client.messages.create(model="m", max_tokens=200, messages=messages)
    assert "Bash\nRead" in shown.content[0].text


def test_messages_calls_of_neighboring_answers_have_results(client: anthropic.Anthropic) -> None:
    def call(name: str) -> Any:
        block = {"type": "tool_use", "id": name, "name": name, "input": {}}
        return {"role": "assistant", "content": [{"type": "text", "text": f"text {name}"}, block]}

    results = [
        {"type": "tool_result", "tool_use_id": name, "content": f"result {name}"} for name in "ab"
    ]
    messages: Any = [
        {"role": "user", "content": "go"},
        call("a"),
        call("b"),
        {"role": "user", "content": results},
    ]
    shown: Any = client.messages.create(model="m", max_tokens=500, messages=messages)
    assert all(f"result {name}" in shown.content[0].text for name in "ab")


@pytest.mark.parametrize("as_text", [False, True])
def test_messages_billing_header_is_no_part_of_the_prompt(
    client: anthropic.Anthropic, as_text: bool
) -> None:
    rules = "Rules. " * 30
    counts, answers = [], []
    for code in ("aaaaa", "bbbbb"):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={code};"
        blocks = [{"type": "text", "text": text} for text in (header, rules)]
        ask: Any = {
            "model": "m",
            "messages": [{"role": "user", "content": "go"}],
            "system": f"{header}\n{rules}" if as_text else blocks,
        }
        counts.append(client.messages.count_tokens(**ask).input_tokens)
        answers.append(client.messages.create(**ask, max_tokens=400).content[0].text)  # type: ignore[union-attr]
    assert answers[0] == answers[1] and rules.strip() in answers[0]
    assert "billing" not in answers[0] and counts[0] == counts[1]
    only: Any = {**ASK, "system": [{"type": "text", "text": header}]}
    check(client.messages.create(**only, tools=[TOOL]))


def test_messages_late_system_messages_reach_a_template_that_wants_them_first() -> None:
    engine = make(lambda prompt: prompt)
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    engine.text.chat_template = PromptTemplate(chat_template(source))
    user = {"role": "user", "content": "go"}
    late = {"role": "system", "content": "late text"}
    wanted = "<system>first text\n\nlate text<user>go"
    with serving(engine) as address:
        body = {"model": "m", "system": "first text", "messages": [user, late]}
        reply = httpx.post(f"{address}/v1/messages", json={**body, "max_tokens": 100})
        assert reply.json()["content"][0]["text"] == wanted
        assert httpx.post(f"{address}/v1/messages/count_tokens", json=body).status_code == 200
        messages = [
            {"role": "system", "content": "first text"},
            user,
            {**late, "role": "developer"},
        ]
        reply = httpx.post(
            f"{address}/v1/chat/completions", json={"model": "m", "messages": messages}
        )
        assert reply.json()["choices"][0]["message"]["content"] == wanted
        body = {"model": "m", "instructions": "first text", "input": messages[1:]}
        reply = httpx.post(f"{address}/v1/responses", json=body)
        assert reply.json()["output"][0]["content"][0]["text"] == wanted


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/gone", 404, "not_found_error"),
    ],
)
def test_messages_every_refusal_has_a_type_of_the_api(
    url: str, method: str, path: str, status: int, kind: str
) -> None:
    reply = httpx.request(method, url + path)
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
