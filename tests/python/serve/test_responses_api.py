"""Tests of the Responses API with OpenAI's client, over scripted answers."""

from __future__ import annotations

import secrets
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from serving import serving
from test_messages_api import ANSWER, CALL, make

from lmdeploy.serve.http import response_store
from lmdeploy.serve.http.response_store import ResponseStore, StoredResponse
from lmdeploy.serve.routes.response_input import input_messages

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


def answer(prompt: str) -> str:
    is_question = prompt.endswith("Weather?\n<assistant>") and "kind" not in prompt
    return ANSWER if is_question else prompt


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(make(answer)) as found:
        yield found


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)


def check(response: Any) -> None:
    reasoning, message, call = response.output
    assert (reasoning.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert reasoning.content[0].text == "Hm." and response.output_text == "I look."
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}')
    assert {item.status for item in response.output} == {"completed"}
    assert response.status == "completed" and response.id.startswith("resp_")
    assert response.usage.output_tokens > 40
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < 10


def test_responses_answer_has_reasoning_message_and_call(client: openai.OpenAI) -> None:
    check(client.responses.create(model="m", input="Weather?", tools=[TOOL]))


def test_responses_streamed_events_join_to_the_whole(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m", input="Weather?", tools=[TOOL]) as stream:
        events = list(stream)
        check(stream.get_final_response())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"] and names[-1] == "completed"
    kinds = {name for name in names if "delta" not in name}
    assert kinds == {
        *("created", "in_progress", "completed", "output_item.added", "output_item.done"),
        *("content_part.added", "content_part.done", "reasoning_text.done", "output_text.done"),
        "function_call_arguments.done",
    }
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == "I look."


def test_responses_reasoning_is_its_own_summary_if_one_is_wanted(client: openai.OpenAI) -> None:
    ask: Any = {
        "model": "m",
        "input": "Weather?",
        "tools": [TOOL],
        "reasoning": {"summary": "auto"},
    }
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        check(response)
        assert response.reasoning is not None and response.reasoning.summary == "auto"
        assert [part.text for part in response.output[0].summary] == ["Hm."]  # type: ignore[union-attr]
    parts = [event for event in events if "reasoning_summary" in event.type]
    assert "".join(e.delta for e in parts if e.type.endswith("text.delta")) == "Hm."
    kinds = [event.type.removeprefix("response.reasoning_summary_") for event in parts]
    assert kinds[0] == "part.added" and kinds[-2:] == ["text.done", "part.done"]


def test_responses_previous_response_is_continued(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="Weather?", tools=[TOOL])
    (call_id,) = [item.call_id for item in first.output if item.type == "function_call"]
    output: Any = {"type": "function_call_output", "call_id": call_id, "output": "7 degrees"}
    second = client.responses.create(
        model="m",
        instructions="Be kind.",
        input=[output, {"role": "user", "content": "Weather?"}],
        previous_response_id=first.id,
    )
    text = second.output_text
    parts = ("<system>Be kind.", "<user>Weather?", "I look.", '"Paris"', "7 degrees", "<user>")
    places = [text.index(part) for part in parts[:-1]]
    assert places == sorted(places)
    assert client.responses.retrieve(first.id).output == first.output
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        client.responses.create(model="m", input="x", previous_response_id=first.id)


def test_responses_are_visible_only_to_the_key_that_made_them(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="hello")
    other = client.with_options(api_key="y")
    for use in (
        lambda: other.responses.retrieve(made.id),
        lambda: other.responses.delete(made.id),
        lambda: other.responses.create(model="m", input="x", previous_response_id=made.id),
        lambda: other.responses.input_items.list(made.id),
        lambda: other.responses.input_tokens.count(input="x", previous_response_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            use()
    assert client.responses.retrieve(made.id).id == made.id


def test_responses_items_are_continued_by_reference(client: openai.OpenAI) -> None:
    question: Any = {"role": "user", "content": "Weather?"}
    first = client.responses.create(model="m", input=[question], tools=[TOOL])
    call = first.output[-1]
    assert call.type == "function_call"
    references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}
    by_id = [question, *references, result]
    whole: Any = [question, *first.output, result]
    texts = [client.responses.create(model="m", input=i).output_text for i in (by_id, whole)]
    assert texts[0] == texts[1] and "I look." in texts[0]
    assert client.responses.create(model="m", input=[{"id": first.output[1].id}, question])
    other = client.with_options(api_key="y")
    with pytest.raises(openai.NotFoundError, match=r"input\[1\].id"):
        other.responses.create(model="m", input=by_id)
    with pytest.raises(openai.BadRequestError, match="twice"):
        client.responses.create(model="m", input=[*references, *references])
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        client.responses.input_tokens.count(input=by_id)


def test_responses_that_are_not_stored_cannot_be_continued(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_responses_compaction_is_not_found(url: str) -> None:
    assert httpx.post(f"{url}/v1/responses/compact", json={"model": "m"}).status_code == 404
    assert httpx.post(f"{url}/v1/responses/resp_0", json={"model": "m"}).status_code == 405


def test_responses_limit_of_tokens_makes_them_incomplete(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="hello", max_output_tokens=3)
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"


def test_responses_stream_at_the_limit_of_tokens_ends_as_incomplete(client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(model="m", input="hello", max_output_tokens=3, stream=True)
    )
    names = [event.type.removeprefix("response.") for event in events]
    assert names[-2:] == ["output_item.done", "incomplete"] and "completed" not in names
    last, item = events[-1], events[-2]
    assert last.type == "response.incomplete" and item.type == "response.output_item.done"
    assert item.item.status == "incomplete"  # type: ignore[union-attr]
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.usage is not None and last.response.usage.output_tokens == 3


def test_responses_input_items_are_those_of_the_whole_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="Weather?", tools=[TOOL])
    (call_id,) = [item.call_id for item in first.output if item.type == "function_call"]
    output: Any = {"type": "function_call_output", "call_id": call_id, "output": "7 degrees"}
    message: Any = {"role": "user", "content": [{"type": "input_text", "text": "And?"}]}
    second = client.responses.create(
        model="m", input=[output, message], previous_response_id=first.id, instructions="Be kind."
    )
    (item,) = client.responses.input_items.list(first.id)
    assert item.type == "message" and item.role == "user"
    assert item.content[0].text == "Weather?"  # type: ignore[union-attr]
    oldest_first = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert oldest_first[0] == item
    assert [item.id for item in oldest_first[1:4]] == [item.id for item in first.output]
    assert [item.type for item in oldest_first[4:]] == ["function_call_output", "message"]
    assert len({item.id for item in oldest_first}) == len(oldest_first) == 6
    assert list(client.responses.input_items.list(second.id)) == oldest_first[::-1]


def test_responses_input_items_are_read_in_pages(client: openai.OpenAI, url: str) -> None:
    ask: Any = [{"role": "user", "content": str(i), "id": "same"} for i in range(5)]
    made = client.responses.create(model="m", input=ask)
    path = f"{url}/v1/responses/{made.id}/input_items"
    key = {"authorization": "Bearer x"}

    def page(**query: Any) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(path, params=query, headers=key).json()
        return found

    first = page(limit=2)
    assert [item["content"][0]["text"] for item in first["data"]] == ["4", "3"]
    assert first["has_more"] and first["first_id"] == first["data"][0]["id"]
    second = page(limit=3, after=first["last_id"])
    assert [item["content"][0]["text"] for item in second["data"]] == ["2", "1", "0"]
    assert not second["has_more"]
    end = page(after=second["last_id"])
    assert (end["data"], end["first_id"], end["has_more"]) == ([], None, False)
    for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "x"}):
        reply = httpx.get(path, params=query, headers=key)
        assert reply.status_code == 400 and reply.json()["error"]["param"] in query


def test_responses_input_tokens_equal_the_usage(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="Weather?", tools=[TOOL])
    ask: Any = {"instructions": "Be kind.", "input": "And?", "previous_response_id": first.id}
    for change in (
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ):
        wanted = client.responses.create(model="m", **{**ask, **change}).usage
        count = client.responses.input_tokens.count(model="m", **{**ask, **change})
        assert wanted is not None and count.input_tokens == wanted.input_tokens
        assert count.object == "response.input_tokens"
        assert client.responses.input_tokens.count(**{**ask, **change}) == count
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.input_tokens.count(model="other", input="x")
    with pytest.raises(openai.BadRequestError, match="input is"):
        client.responses.input_tokens.count(model="m")


def test_responses_text_format_is_a_grammar(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars: list[str] = []
    monkeypatch.setattr(
        "lmdeploy.chat.grammar.Grammars.token_mask",
        lambda _, text, *, field: grammars.append(text),
    )
    schema = {"type": "object", "properties": {"x": {"const": "unusual"}}}
    form: Any = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    client.responses.create(model="m", input="hello", text={"format": form})
    client.responses.create(model="m", input="hello", text={"format": {"type": "text"}})
    assert len(grammars) == 1 and "unusual" in grammars[0]
    with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema is None"):
        form = {"type": "json_schema", "name": "n"}
        client.responses.create(model="m", input="hello", text={"format": form})


def test_responses_logprobs_cover_all_tokens_whole_and_streamed(client: openai.OpenAI) -> None:
    ask: Any = {"model": "m", "input": "Weather?", "tools": [TOOL], "top_logprobs": 2}
    ask["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**ask)
    message = whole.output[1]
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs
    assert logprobs and "I look." in "".join(entry.token for entry in logprobs)
    assert all(entry.top_logprobs for entry in logprobs)
    events = list(client.responses.create(**ask, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "I look." in "".join(entry.token for delta in deltas for entry in delta.logprobs)
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    tokens = [entry.token for entry in done.logprobs]
    assert tokens == [entry.token for entry in logprobs][: len(tokens)]


def test_responses_body_repeats_the_request_and_has_every_field(url: str) -> None:
    tool: Any = {"type": "function", "name": "f"}
    ask: Any = {"max_tool_calls": 3, "safety_identifier": "s", "prompt_cache_key": "k"}
    body = {"model": "m", "input": "Weather?", "tools": [tool], **ask}
    made = httpx.post(f"{url}/v1/responses", json=body).json()
    assert {name: made[name] for name in ask} == ask
    assert made["completed_at"] >= made["created_at"]
    assert made["tools"] == [{**tool, "description": None, "parameters": None, "strict": None}]
    for name in ("presence_penalty", "frequency_penalty", "top_logprobs"):
        assert made[name] == 0
    assert made["service_tier"] == "default"


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "is 'web_search'"),
        ({"input": [{"type": "item_reference", "id": 1}]}, "input[0].id", "is 1"),
        ({"input": [{"role": "user", "content": [{}]}]}, "input[0].content[0].type", "is None"),
        ({"background": True}, "background", "is true"),
        ({"conversation": "conv_1"}, "conversation", "is not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "is not supported"),
        ({"guided_regex": "a+"}, "guided_regex", "is not supported"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "is 3"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "is 'long'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "is 0"),
        ({"input": []}, "input", "is []"),
    ],
)
def test_responses_invalid_field_is_named_in_the_error(
    url: str, change: dict[str, Any], param: str, text: str
) -> None:
    reply = httpx.post(f"{url}/v1/responses", json={"model": "m", "input": "x", **change})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert text in error["message"]


def stored(name: str, owner: str = "a", size: int = 10) -> StoredResponse:
    body = {"id": name, "text": "x" * size, "output": []}
    return StoredResponse.of(owner, body, input_items=[])


def test_response_store_is_bounded_by_entries_bytes_and_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    store = ResponseStore(clock=lambda: now)
    monkeypatch.setattr(response_store, "MAX_ENTRIES", 3)
    for i in range(5):
        store.add(stored(str(i)))
    assert len(store) == 3 and store.get("1", owner="a") is None
    monkeypatch.setattr(response_store, "MAX_BYTES", 4000)
    store.add(stored("large", size=2000))
    assert len(store) == 1 and 3000 < store.num_bytes <= 4000 and store.get("large", owner="a")
    store.add(stored("too large", size=4000))
    assert len(store) == 1 and store.get("large", owner="a")
    assert store.remove("large", owner="a") and store.num_bytes == 0
    store.add(stored("old"))
    now = response_store.MAX_AGE_SECONDS + 1.0
    assert store.get("old", owner="a") is None and store.num_bytes == 0


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "the question"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "thought 1"}]},
    {"role": "assistant", "content": "text A"},
    {"type": "function_call", "call_id": "a", "name": "first", "arguments": '{"x": 1}'},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "thought 2"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "text B"}]},
    {"type": "custom_tool_call", "call_id": "b", "name": "second", "input": "free text"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
    {"type": "compaction_summary", "encrypted_content": "x"},
    {"type": "function_call_output", "call_id": "a", "output": "result a"},
    {"type": "custom_tool_call_output", "call_id": "b", "output": "result b"},
]


def test_responses_history_with_text_between_calls_is_one_turn(client: openai.OpenAI) -> None:
    messages = input_messages(HISTORY, skipped=[])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["content"] == "text A\n\ntext B"
    assert messages[1]["reasoning_content"] == "thought 1\n\nthought 2"
    shown: Any = client.responses.create(model="m", input=HISTORY)  # type: ignore[arg-type]
    for text in ("text A", "text B", "first", "second", "free text", "result a", "result b"):
        assert shown.output_text.count(text) == 1, text
    again = client.responses.create(model="m", input="more", previous_response_id=shown.id)
    assert again.usage.input_tokens > shown.usage.input_tokens  # type: ignore[union-attr]
    stored = {item.type for item in client.responses.input_items.list(shown.id)}
    assert {"custom_tool_call", "web_search_call"} <= stored


HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    {"type": "namespace", "name": "files", "tools": [{"type": "custom"}]},
    {"type": "image_generation"},
    {"type": "local_shell"},
    {"type": "tool_search"},
    {"type": "mcp", "server_label": "x"},
    {"type": "made_up"},
]


def count_of(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith(f"lmdeploy:{name}{{")]
    return float(line.split()[-1])


def test_responses_tools_of_other_providers_are_skipped(url: str, client: openai.OpenAI) -> None:
    before = count_of(url, "request_skipped_tools_total")
    tools: Any = [*HOSTED, TOOL]
    for choice in (
        "auto",
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "auto", "tools": [HOSTED[0], TOOL]},
    ):
        answered = client.responses.create(
            model="m", input="Weather?", tools=tools, tool_choice=choice
        )
        check(answered)
        assert [tool.type for tool in answered.tools] == [tool["type"] for tool in tools]
    assert count_of(url, "request_skipped_tools_total") == before + 4 * len(HOSTED)


def test_responses_functions_in_a_namespace_are_called_by_both_names() -> None:
    inner = {"type": "function", "name": "read", "description": "Read.", "parameters": {}}
    space = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [inner]}
    call = CALL.replace("get_weather", "mcp__files__read")
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return call if prompt.endswith("Read it.\n<assistant>") else "done"

    question: Any = {"role": "user", "content": "Read it."}
    engine = make(reply)
    engine.running.core.cache_tokens = 4096
    with serving(engine) as own:
        client = openai.OpenAI(base_url=f"{own}/v1", api_key="x", max_retries=0)
        tools: Any = [space, TOOL]
        made = client.responses.create(model="m", input=[question], tools=tools)
        with client.responses.stream(model="m", input=[question], tools=tools) as stream:
            streamed = stream.get_final_response()
        for response in (streamed, made):
            (found,) = response.output
            assert found.type == "function_call"
            assert (found.name, found.namespace) == ("read", "mcp__files")
        assert "mcp__files__read" in prompts[0] and "Files." in prompts[0]
        result = {"type": "function_call_output", "call_id": found.call_id, "output": "text"}
        history: Any = [question, *made.output, result]
        assert client.responses.create(model="m", input=history, tools=tools).output_text == "done"
        assert call in prompts[-1]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "namespace", "tools": []}, TOOL]}, "tools[0].name"),
        ({"tools": [TOOL, {"type": "namespace", "name": "n", "tools": [1]}]}, "tools[1].tools"),
        ({"tools": HOSTED[:2]}, "tools[0].type"),
        ({"tools": [*HOSTED, TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        (
            {
                "tools": [*HOSTED, TOOL],
                "tool_choice": {"type": "custom", "name": "apply_patch"},
            },
            "tool_choice",
        ),
        (
            {
                "tools": [*HOSTED, TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "web_search"}],
                },
            },
            "tool_choice",
        ),
    ],
)
def test_responses_that_need_a_tool_of_another_provider_are_refused(
    url: str, change: dict[str, Any], param: str
) -> None:
    reply = httpx.post(f"{url}/v1/responses", json={"model": "m", "input": "x", **change})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("bound", ["MAX_ENTRIES", "MAX_BYTES"])
def test_response_store_removes_from_the_owner_who_holds_most(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = stored("a0").num_bytes
    monkeypatch.setattr(response_store, bound, 6 if bound == "MAX_ENTRIES" else 6 * size)
    store = ResponseStore()
    for i in range(2):
        store.add(stored(f"a{i}", "a"))
    for i in range(20):
        store.add(stored(f"b{chr(97 + i)}", "b"))
    assert all(store.get(f"a{i}", owner="a") for i in range(2))
    assert store.get("bt", owner="b") and store.get("bf", owner="b") is None
    for i in range(2, 10):
        store.add(stored(f"a{i}", "a"))
    assert [sum(name[0] == owner for name in store._entries) for owner in "ab"] == [3, 3]
    assert list(store._ids["a"]) == ["a7", "a8", "a9"] and store.num_bytes <= 6 * size


def test_response_store_counts_the_memory_that_it_takes() -> None:
    items = [{"n": [[], {}]} for _ in range(10_000)]
    tracemalloc.start()
    store = ResponseStore()
    for i in range(20):
        output = [{"id": secrets.token_hex(18), "type": "message"} for _ in range(2000)]
        store.add(StoredResponse.of("a", {"id": str(i), "output": output}, input_items=items))
    del output
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    taken -= sys.getsizeof(items)
    assert 0.9 * taken < store.num_bytes < 1.1 * taken
    found = store.get("3", owner="a").read_conversation()
    assert found[0] == items[0] and len(found) == 12_000
    for i in range(20):
        store.remove(str(i), owner="a")
    assert not store._response_ids and store.num_bytes == 0


def test_owner_of_a_response_is_the_key_in_any_header(client: openai.OpenAI, url: str) -> None:
    made = client.responses.create(model="m", input="hello")
    for headers in (
        {"Authorization": "bearer x"},
        {"authorization": "BEARER  x"},
        {"x-api-key": "x"},
        {"X-Api-Key": "x", "Authorization": "Bearer x"},
    ):
        found = httpx.get(f"{url}/v1/responses/{made.id}", headers=headers)
        assert found.status_code == 200 and found.json()["id"] == made.id
    for headers in (
        {},
        {"authorization": "Basic x"},
        {"x-api-key": "X"},
        {"x-api-key": "Bearer x"},
    ):
        assert httpx.get(f"{url}/v1/responses/{made.id}", headers=headers).status_code == 404
