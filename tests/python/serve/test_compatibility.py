"""Tests of fields that clients of OpenAI, LMDeploy, vLLM and SGLang send."""

from __future__ import annotations

import json
import logging

import httpx
import pytest
from fake_engine import make_engine
from rendering import chat_template
from serving import ANSWER, CHAT, post, serving

from lmdeploy.chat.templates.prompt_template import PromptTemplate
from lmdeploy.config.unsupported import ANY, UNSUPPORTED
from lmdeploy.serve.routes import ROUTERS

COMPLETION = {"model": "m", "prompt": "a"}
GENERATE = {"prompt": "a"}
BODIES_OF = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/generate": GENERATE}
# vllm-router sends these fields with every request.
OF_ROUTER = {
    "no_stop_trim": False,
    "separate_reasoning": True,
    "include_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "continue_final_message": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
}
WITHOUT_EFFECT = {
    "session_id": 7,
    "metadata": {"a": "b"},
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "store": True,
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "k",
    "service_tier": "flex",
}


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine) as url:
        yield url


def unknown_fields(url):
    text = httpx.get(f"{url}/metrics").text
    [line] = [
        line for line in text.splitlines() if line.startswith("lmdeploy:request_unknown_fields_t")
    ]
    return line, float(line.rsplit(" ", 1)[1])


@pytest.mark.parametrize("path", BODIES_OF)
def test_unknown_fields_are_ignored_and_counted(url, caplog, path):
    before = unknown_fields(url)[1]
    with caplog.at_level(logging.DEBUG, "lmdeploy"):
        reply = post(url, path, {**BODIES_OF[path], "no_such_field": 1, "evil\nname": [{}]})
    assert reply.status_code == 200
    assert unknown_fields(url)[1] == before + 2
    [line] = [r.getMessage() for r in caplog.records if "unknown" in r.getMessage()]
    assert "2 unknown fields" in line and "'no_such_field'" in line and "\n" not in line


def test_unknown_stream_options_are_ignored_and_counted(url):
    before = unknown_fields(url)[1]
    options = {"include_usage": True, "include_obfuscation": True, "x": 1}
    reply = post(url, "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": options})
    assert reply.status_code == 200 and '"usage":{' in reply.text
    assert unknown_fields(url)[1] == before + 1


def test_hostile_field_names_add_no_metric(url):
    lines = len(httpx.get(f"{url}/metrics").text.splitlines())
    post(url, "/v1/completions", {**COMPLETION, **{f"field_{i}": i for i in range(1000)}})
    line, _ = unknown_fields(url)
    assert "field_" not in line
    assert len(httpx.get(f"{url}/metrics").text.splitlines()) <= lines + 1


@pytest.mark.parametrize("path", BODIES_OF)
def test_fields_without_effect_are_accepted(url, path):
    before = unknown_fields(url)[1]
    fields = OF_ROUTER | WITHOUT_EFFECT
    if path != "/v1/chat/completions":
        del fields["continue_final_message"]
    assert post(url, path, {**BODIES_OF[path], **fields}).status_code == 200
    assert unknown_fields(url)[1] == before


@pytest.mark.parametrize("path", BODIES_OF)
def test_unbuilt_field_that_changes_the_answer_is_refused_by_name(url, path):
    for name in (
        "use_beam_search",
        "no_stop_trim",
        "return_hidden_states",
    ):
        error = post(url, path, {**BODIES_OF[path], name: True}).json()["error"]
        assert error["param"] == name and f"{name} is not supported" in error["message"]


def test_no_built_field_is_in_the_table_of_unbuilt_ones():
    routes = [route for router in ROUTERS for route in router.routes]
    models = [route.about.body for route in routes if route.about and route.about.body]
    assert len(models) > 10
    for model in models:
        assert not set(model.unsupported) & set(model.model_fields), model
    assert UNSUPPORTED["user"][1] is ANY


def test_generate_ignores_the_model(url):
    assert post(url, "/generate", {**GENERATE, "model": "other"}).status_code == 200


def last_request(engine, url, path, **fields):
    assert post(url, path, {**BODIES_OF[path], **fields}).status_code == 200
    return engine.running.core.requests[-1]


@pytest.mark.parametrize("path", BODIES_OF)
def test_synonyms_of_other_servers_reach_the_engine(engine, url, path):
    assert last_request(engine, url, path, min_tokens=3).min_new_tokens == 3
    assert last_request(engine, url, path, temperature=0.5, top_k=-1).top_k == 0
    assert not last_request(engine, url, path, temperature=0.5, do_sample=False).do_sample
    assert last_request(engine, url, path, do_sample=True).do_sample
    room = 512 - len(last_request(engine, url, path).prompt)
    assert last_request(engine, url, path, max_tokens=-1).max_new_tokens == room
    assert last_request(engine, url, path, bad_words=["x"]).bad_sequences == [[120], [32, 120]]


@pytest.mark.parametrize("path", BODIES_OF)
def test_whole_numbers_may_have_a_decimal_point(engine, url, path):
    """Clients in languages with one type of numbers send 5.0."""
    request = last_request(engine, url, path, max_tokens=5.0, top_k=7.0, seed=3.0, min_tokens=1.0)
    assert (request.max_new_tokens, request.top_k, request.seed) == (5, 7, 3)
    assert request.min_new_tokens == 1
    for value in (5.5, "5", 1e300):
        reply = post(url, path, {**BODIES_OF[path], "max_tokens": value})
        assert reply.status_code == 400 and "max_tokens" in reply.text


def test_whole_numbers_of_other_apis_may_have_a_decimal_point(url):
    user = [{"role": "user", "content": "hello"}]
    for path, body in (
        ("/v1/messages", {"model": "m", "messages": user, "max_tokens": 5.0, "top_k": 3.0}),
        ("/v1/responses", {"model": "m", "input": "hello", "max_output_tokens": 5.0}),
        ("/v1/embeddings", {"model": "m", "input": "hello", "dimensions": 2.0}),
    ):
        assert post(url, path, body).status_code == 200, path


@pytest.mark.parametrize("path", BODIES_OF)
def test_repeated_tokens_end_the_answer(path):
    with serving(make_engine(lambda _: "ab" * 100)) as url:
        fields = {"max_tokens": 100, "repetition_ngram_size": 4, "repetition_ngram_threshold": 3}
        reply = post(url, path, {**BODIES_OF[path], **fields}).json()
        text = reply["text"] if path == "/generate" else reply["choices"][0]
        if path != "/generate":
            assert text["finish_reason"] == "stop"
            text = text["message"]["content"] if "message" in text else text["text"]
        # The runs begin at 0, 2 and 4. `baba` occurs a third time only later.
        assert text == "abababab"
        for off in ({"repetition_ngram_size": 0}, {"repetition_ngram_threshold": 0}):
            reply = post(url, path, {**BODIES_OF[path], **fields, **off})
            assert "ab" * 50 in reply.text
        wrong = post(url, path, {**BODIES_OF[path], "repetition_ngram_size": -1})
        assert wrong.status_code == 400 and "repetition_ngram_size" in wrong.text


def test_chat_returns_tokens_and_their_log_probabilities_in_the_choice(url):
    body = {**CHAT, "return_token_ids": True, "return_logprob": True}
    choice = post(url, "/v1/chat/completions", body).json()["choices"][0]
    ids = choice["output_ids"]
    assert ids == choice["message"]["gen_tokens"] and choice["logprobs"] is None
    assert [token for _, token in choice["output_token_logprobs"]] == ids
    assert all(value <= 0 for value, _ in choice["output_token_logprobs"])
    text = post(url, "/v1/chat/completions", {**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0] for event in events]
    assert [token for piece in pieces for token in piece.get("output_ids", [])] == ids
    pairs = [pair for piece in pieces for pair in piece.get("output_token_logprobs", [])]
    assert [token for _, token in pairs] == ids
    plain = post(url, "/v1/chat/completions", CHAT).json()["choices"][0]
    assert not {"output_ids", "output_token_logprobs"} & plain.keys()


@pytest.mark.parametrize("value", ["true", True])
def test_stream_may_be_a_text(url, value):
    text = post(url, "/v1/chat/completions", {**CHAT, "stream": value}).text
    assert text.startswith("data: ")
    whole = post(url, "/v1/chat/completions", {**CHAT, "stream": "false"})
    assert json.loads(whole.text)["choices"][0]["message"]["content"] == ANSWER


OPEN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well"}]


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<assistant>Well"),
        ({"continue_final_message": True}, "<assistant>Well"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<assistant>Well"),
        ({"continue_final_message": False}, "<assistant>Well\n<assistant>"),
        ({"add_generation_prompt": True}, "<assistant>Well\n<assistant>"),
        ({"add_generation_prompt": False}, "<assistant>Well\n"),
    ],
)
def test_chat_prompt_ends_as_the_request_says(fields, end):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    engine = make_engine()
    engine.text.chat_template = PromptTemplate(chat_template(template))
    with serving(engine) as url:
        request = last_request(engine, url, "/v1/chat/completions", messages=OPEN, **fields)
    assert bytes(request.prompt).decode() == f"<user>hello\n{end}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"messages": OPEN, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
    ],
)
def test_chat_contradicting_prompt_ends_are_refused(url, fields, param):
    reply = post(url, "/v1/chat/completions", {**CHAT, **fields})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


LONG = "x" * 600
OVERFLOWS = [
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/v1/chat/completions", {**CHAT, "messages": LONG * 5}, "messages"),
    ("/v1/chat/completions", {"model": "m", "input_ids": [97] * 600}, "input_ids"),
    ("/v1/completions", {**COMPLETION, "prompt": LONG}, "prompt"),
    ("/v1/completions", {**COMPLETION, "prompt": ["a", LONG * 10]}, "prompt"),
    ("/generate", {"prompt": LONG}, "prompt"),
    ("/generate", {"input_ids": [97] * 600}, "input_ids"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param"), OVERFLOWS)
def test_context_overflow_has_the_code_and_text_that_clients_recognize(
    url, path, body, param, stream
):
    reply = post(url, path, {**body, "stream": stream})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error" and error["param"] == param
    start = f"This model's maximum context length is 512 tokens. However, {param} has "
    assert error["message"].startswith(start)
    assert error["message"].endswith("Shorten it or raise --session-len.")


def chunks_of(url, path, body):
    events = post(url, path, {**body, "stream": True}).text.split("\n\n")
    assert events[-2] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (64, "stop")])
def test_chat_stream_ends_with_an_empty_delta(url, max_tokens, reason):
    chunks = chunks_of(url, "/v1/chat/completions", {**CHAT, "max_tokens": max_tokens})
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert (last["delta"], last["finish_reason"]) == ({}, reason)
    assert all(set(c["delta"]) == {"content"} and c["finish_reason"] is None for c in middle)
    assert "".join(c["delta"]["content"] for c in middle) == ANSWER[:max_tokens]


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (64, "stop")])
def test_completion_and_generate_streams_end_with_an_empty_chunk(url, max_tokens, reason):
    *_, last = chunks_of(url, "/v1/completions", {**COMPLETION, "max_tokens": max_tokens})
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", reason)
    *_, last = chunks_of(url, "/generate", {**GENERATE, "max_tokens": max_tokens})
    assert (last["text"], last["output_ids"]) == ("", [])
    assert last["meta_info"]["finish_reason"] == {"type": reason}


@pytest.mark.parametrize(
    "body", [{**CHAT, "logprobs": True}, {**COMPLETION, "logprobs": 1}], ids=["chat", "completion"]
)
def test_stream_chunks_without_tokens_have_no_logprobs(url, body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    choices = [chunk["choices"][0] for chunk in chunks_of(url, path, {**body, "max_tokens": 3})]
    assert choices[-1]["logprobs"] is None
    entries = [c["logprobs"] for c in choices if c["logprobs"] is not None]
    assert sum(len(e.get("content") or e.get("tokens")) for e in entries) == 3


def test_chat_message_has_null_refusal_and_reasoning(url):
    message = post(url, "/v1/chat/completions", CHAT).json()["choices"][0]["message"]
    expected = {"role": "assistant", "content": ANSWER, "refusal": None, "reasoning_content": None}
    assert {name: message[name] for name in expected} == expected


OF_ALL = {"200", "403", "421"}
OF_POST = OF_ALL | {"400", "408", "413", "415", "500", "503"}
STATUSES = {
    "/health": OF_ALL | {"503"},
    "/v1/models": OF_ALL,
    "/v1/models/{name}": OF_ALL | {"404"},
    "/metrics": OF_ALL | {"404"},
    "/v1/engine/stats": OF_ALL | {"404"},
    "/abort_request": OF_POST | {"501"},
    "/render_markdown": OF_POST | {"404"},
    "/v1/chat/completions": OF_POST | {"404"},
    "/v1/completions": OF_POST | {"404"},
    "/generate": OF_POST,
    "/v1/encode": OF_POST,
    "/v1/embeddings": OF_POST | {"404"},
    "/pooling": OF_POST | {"404"},
    "/get_ppl": OF_POST,
    "/sleep": OF_ALL | {"400", "500", "503"},
    "/wakeup": OF_ALL | {"400", "500", "503"},
    "/wake_up": OF_ALL | {"400", "500", "503"},
    "/is_sleeping": OF_ALL,
    "/terminate": OF_ALL | {"400"},
    "/v1/messages": OF_POST | {"404"},
    "/v1/messages/count_tokens": OF_POST | {"404"},
    "/anthropic/v1/models": OF_ALL,
    "/v1/responses": OF_POST | {"404"},
    "/v1/responses/input_tokens": OF_POST | {"404"},
    "/v1/responses/{response_id}": OF_ALL | {"404"},
    "/v1/responses/{response_id}/input_items": OF_ALL | {"400", "404"},
}


def error_model(path):
    is_anthropic = path.startswith(("/v1/messages", "/anthropic"))
    return "AnthropicError" if is_anthropic else "ErrorResponse"


@pytest.mark.parametrize("keys", [[], ["secret"]])
def test_openapi_describes_every_status_and_content_type(keys):
    with serving(make_engine(), api_keys=keys) as url:
        headers = {"authorization": "Bearer secret"}
        schema = httpx.get(f"{url}/openapi.json", headers=headers).json()
        assert set(schema["paths"]) == set(STATUSES)
        operations = [(p, o) for p, found in schema["paths"].items() for o in found.values()]
        for path, operation in operations:
            protected = bool(keys) and path != "/health"
            responses = operation["responses"]
            assert set(responses) == STATUSES[path] | ({"401"} if protected else set()), path
            assert ("security" in operation) == protected
            types = {"application/json"}
            if path in (*BODIES_OF, "/v1/messages", "/v1/responses"):
                types = {"application/json", "text/event-stream"}
            if path == "/metrics":
                types = {"text/plain"}
            assert set(responses["200"]["content"]) == types
            for status, response in responses.items():
                if status != "200":
                    [content] = response["content"].values()
                    is_anthropic = path.startswith(("/v1/messages", "/anthropic"))
                    model = "AnthropicError" if is_anthropic else "ErrorResponse"
                    assert content["schema"] == {"$ref": f"#/components/schemas/{model}"}
        names = set(schema["components"]["schemas"])
        assert not names & {"HTTPValidationError", "ValidationError"}


@pytest.mark.parametrize(
    ("start", "expected"), [(0, "abc"), (2, "c"), (9, ""), (-1, None), (None, None)]
)
def test_generate_returns_logprobs_of_the_prompt_from_the_start_on(url, start, expected):
    body = {"prompt": "abc", "return_logprob": True, "logprob_start_len": start, "max_tokens": 2}
    wanted = [[None if char == "a" else -0.5, ord(char)] for char in expected or ""]
    meta = post(url, "/generate", body).json()["meta_info"]
    assert meta.get("input_token_logprobs", None) == (None if expected is None else wanted)
    parts = [chunk["meta_info"] for chunk in chunks_of(url, "/generate", body)]
    assert [pair for part in parts for pair in part.get("input_token_logprobs", [])] == wanted
    without = post(url, "/generate", {**body, "return_logprob": False}).json()["meta_info"]
    assert "input_token_logprobs" not in without
