"""Tests of hostile requests: excessive cost, early disconnects, invalid text, blame for errors."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
import tracemalloc

import httpx
import pytest
from fake_engine import FakeTokenizer, make_engine
from serving import CHAT, connect, post, post_head, serving

import lmdeploy
from lmdeploy.base.checks import OptionError
from lmdeploy.base.errors import EngineFailure, UnavailableError
from lmdeploy.chat.grammar import Grammar
from lmdeploy.chat.prompts import MAX_OPTIONS_DEPTH, MAX_OPTIONS_SIZE, check_template_options
from lmdeploy.config.generation import GenerationConfig, sampling_defaults
from lmdeploy.response import Response
from lmdeploy.serve import jobs as generation
from lmdeploy.serve import server
from lmdeploy.serve.errors import ApiError, to_api_error
from lmdeploy.serve.jobs import PreparedRequest, collect_all, request_error, submit_all
from lmdeploy.serve.metrics import ServerMetrics
from lmdeploy.serve.routes import encode
from lmdeploy.serve.routes.chat import ChatCompletionRequest
from lmdeploy.serve.routes.completions import CompletionRequest
from lmdeploy.serve.schema import parse_request

JSON_FORMAT = {"type": "json_object"}
COMPLETION = {"model": "m", "prompt": "a"}


@pytest.fixture(scope="module")
def url():
    with serving(make_engine()) as url:
        yield url


def refused(reply, *, param, status=400):
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param)
    assert error["code"] in (status, "context_length_exceeded")
    return error["message"]


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def schema_of(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def deep(levels):
    schema = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"x": nested(200)}, f"more than {MAX_OPTIONS_DEPTH} levels"),
        ({"x": "y" * (MAX_OPTIONS_SIZE + 1)}, f"more than {MAX_OPTIONS_SIZE} characters"),
        ({"x": ["aaaa"] * (MAX_OPTIONS_SIZE // 4)}, f"more than {MAX_OPTIONS_SIZE} characters"),
    ],
    ids=["deep", "long", "many"],
)
def test_chat_template_kwargs_above_the_limits_are_rejected(url, options, text):
    reply = post(url, "/v1/chat/completions", {**CHAT, "chat_template_kwargs": options})
    assert text in refused(reply, param="chat_template_kwargs")


def test_chat_template_kwargs_within_the_limits_are_accepted(url):
    check_template_options({"x": nested(MAX_OPTIONS_DEPTH - 3), "y": {"z": "a" * 1000}})
    options = {"enable_thinking": False, "documents": [{"title": "a"}], "tools": []}
    body = {**CHAT, "chat_template_kwargs": options}
    assert post(url, "/v1/chat/completions", body).status_code == 200


def test_chat_template_kwargs_with_tools_are_rejected(url):
    body = {**CHAT, "chat_template_kwargs": {"tools": [{"type": "function"}]}}
    reply = post(url, "/v1/chat/completions", body)
    assert "set by the server" in refused(reply, param="chat_template_kwargs.tools")


def test_completions_grammar_is_compiled_once_per_request(monkeypatch):
    compiled, masks = [], []
    make, copy = Grammar.__init__, Grammar.token_mask
    monkeypatch.setattr(
        Grammar, "__init__", lambda *args, **more: compiled.append(1) or make(*args, **more)
    )
    monkeypatch.setattr(Grammar, "token_mask", lambda self: masks.append(1) or copy(self))
    body = {**COMPLETION, "prompt": ["a", "b"], "n": 3, "response_format": JSON_FORMAT}
    with serving(make_engine()) as url:
        assert post(url, "/v1/completions", body).status_code == 200
        assert (len(compiled), len(masks)) == (1, 6)
        many = {**body, "n": 65}
        text = refused(post(url, "/v1/completions", many), param="n")
        assert "at most 128 answers with a grammar" in text
        assert len(compiled) == 1
        del many["response_format"]
        assert post(url, "/v1/completions", {**many, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ({"type": "regex_schema", "regex_schema": "("}, "response_format"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": 3}}}, "response_format"),
        ({"type": "regex_schema", "regex_schema": 7}, "response_format.regex_schema"),
        ({"type": "json_schema", "json_schema": nested(1)}, "response_format.json_schema"),
        (schema_of({"description": "\ud800"}), "response_format.json_schema"),
        (schema_of({"const": 10**400}), "response_format.json_schema"),
        (schema_of(deep(130)), "response_format.json_schema"),
    ],
)
def test_completions_invalid_grammar_receives_400(url, response_format, param):
    body = {**COMPLETION, "response_format": response_format}
    refused(post(url, "/v1/completions", body), param=param)


def test_submit_deep_schema_raises_option_error():
    config = GenerationConfig(response_format=schema_of(deep(5000)))
    engine = make_engine()
    with pytest.raises(OptionError, match=r"response_format\.json_schema is nested too deep"):
        asyncio.run(engine.submit([1], config))
    engine.close()


class SlowTokenizer(FakeTokenizer):
    """Waits in every call and records the texts."""

    def __init__(self):
        self.texts = []

    def encode(self, text, add_special=True):
        self.texts.append(text)
        time.sleep(0.005)
        return super().encode(text, add_special)


def send_and_leave(url, path, body, *, after):
    data = json.dumps(body).encode()
    with connect(url) as sock:
        sock.sendall(post_head(path, len(data)) + data)
        deadline = time.monotonic() + 10
        while not after() and time.monotonic() < deadline:
            time.sleep(0.002)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**COMPLETION, "prompt": ["a"] * 1000}),
        ("/v1/completions", {**COMPLETION, "prompt": ["a"] * 1000, "stream": True}),
        ("/v1/encode", {"input": ["a"] * 1000}),
    ],
    ids=["whole", "stream", "encode"],
)
def test_encode_disconnect_stops_the_encoding(path, body):
    tokenizer = SlowTokenizer()
    with serving(make_engine(tokenizer=tokenizer)) as url:
        send_and_leave(url, path, body, after=lambda: len(tokenizer.texts) > 5)
        time.sleep(0.2)
        done = len(tokenizer.texts)
        time.sleep(0.2)
        assert len(tokenizer.texts) == done < 500


class AbsentTokenizer(FakeTokenizer):
    """Fails as a tokenizer whose process ends."""

    def encode(self, text, add_special=True):
        raise UnavailableError("The process of the tokenizer ended. Try again later.")


def test_a_tokenizer_that_is_unavailable_is_503():
    with serving(make_engine(tokenizer=AbsentTokenizer())) as url:
        for path, body in (
            ("/v1/completions", {**COMPLETION, "prompt": "a"}),
            ("/v1/completions", {**COMPLETION, "prompt": "a", "stream": True}),
            ("/v1/chat/completions", CHAT),
            ("/v1/messages", {**CHAT, "max_tokens": 4}),
            ("/v1/responses", {"model": "m", "input": "a"}),
            ("/v1/encode", {"input": "a"}),
        ):
            reply = post(url, path, body)
            assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1"), path
            assert "tokenizer ended" in reply.text


@pytest.mark.parametrize("stream", [True, False])
def test_completions_disconnect_stops_submitting_choices(stream):
    engine = make_engine(lambda _: "a" * 100_000, step_seconds=0.005, session_len=200_000)
    engine.running.core.cache_tokens = 200_000
    make = engine._make_request

    def slow(*args, **options):
        time.sleep(0.01)
        return make(*args, **options)

    engine._make_request = slow
    core = engine.running.core
    body = {**COMPLETION, "n": 100, "max_tokens": 100_000, "stream": stream}
    with serving(engine) as url:
        send_and_leave(url, "/v1/completions", body, after=lambda: len(core.requests) > 5)
        time.sleep(0.2)
        assert len(core.requests) < 50
        assert sorted(core.cancelled) == [request.id for request in core.requests]
        assert not engine._streams


def test_completions_first_invalid_prompt_stops_the_encoding():
    tokenizer = SlowTokenizer()
    with serving(make_engine(tokenizer=tokenizer)) as url:
        body = {**COMPLETION, "prompt": ["x" * 600, "b", "c"]}
        assert "has 600 tokens" in refused(post(url, "/v1/completions", body), param="prompt")
    assert tokenizer.texts == ["x" * 600]


def test_encode_tokens_above_the_limit_are_rejected(url, monkeypatch):
    monkeypatch.setattr(encode, "MAX_ENCODED_TOKENS", 10)
    assert post(url, "/v1/encode", {"input": ["a" * 5] * 2}).json()["length"] == [5, 5]
    reply = post(url, "/v1/encode", {"input": ["a" * 4] * 3})
    assert "has 12 tokens in all. The limit is 10" in refused(reply, param="input")


def test_collect_all_failed_choice_cancels_the_others():
    engine = make_engine(lambda _: "a" * 400, step_seconds=0.005)

    async def run():
        jobs = await submit_all(engine, PreparedRequest([[1]], GenerationConfig(n=3)))
        jobs[1].stream.deliver(EngineFailure("out of luck"))
        with pytest.raises(EngineFailure):
            await collect_all(jobs, ServerMetrics(engine, "m"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert sorted(engine.running.core.cancelled) == [1, 2, 3]
    engine.close()


def test_stream_close_wakes_a_waiting_reader():
    engine = make_engine(lambda _: "a" * 400, step_seconds=0.5)

    async def run():
        stream = await engine.submit([1])
        waiter = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(waiter, 0.3)

    asyncio.run(run())
    engine.close()


def events_of(reply):
    lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("stream", [True, False])
def test_completions_echo_accepts_invalid_text(url, stream):
    body = {**COMPLETION, "echo": True, "stream": stream, "logprobs": 0, "max_tokens": 3}
    for prompt, text in (("a\ud800b", "a\ufffdb"), ([97, 257, 98], "ab")):
        reply = post(url, "/v1/completions", {**body, "prompt": prompt})
        assert reply.status_code == 200
        bodies = events_of(reply) if stream else [reply.json()]
        assert "".join(b["choices"][0]["text"] for b in bodies) == text + "You"


def test_errors_accept_invalid_text(url):
    message = {"role": "\ud800", "content": "a"}
    reply = post(url, "/v1/chat/completions", {**CHAT, "messages": [message]})
    assert "must be one of" in refused(reply, param="messages[0].role")
    format_ = {"type": "regex_schema", "regex_schema": "\ud800"}
    body = {**COMPLETION, "response_format": format_}
    assert post(url, "/v1/completions", body).status_code == 200


def test_to_api_error_uses_field_names_of_requests():
    config = OptionError("stop_words", "is 3. It must be a list.")
    told = to_api_error(config)
    assert (told.status, told.param) == (400, "stop")
    assert told.message == "stop is 3. It must be a list."
    assert to_api_error(OptionError("random_seed", "x")).param == "seed"
    assert to_api_error(OptionError("max_new_tokens", "x")).param == "max_tokens"
    assert to_api_error(EngineFailure("x")).status == 503
    error = ApiError(413, "x")
    assert to_api_error(error) is error
    told = to_api_error(ValueError("n: x"))
    assert (told.status, told.param) == (500, None)
    again = pickle.loads(pickle.dumps(config))
    assert (again.field, str(again)) == (config.field, str(config))


@pytest.mark.parametrize("stream", [True, False])
def test_chat_internal_error_returns_500(stream, caplog):
    engine = make_engine()

    def wrong(*args, **options):
        raise ValueError("temperature: list.index(x): x not in list")

    engine._make_request = wrong
    with serving(engine) as url:
        reply = post(url, "/v1/chat/completions", {**CHAT, "stream": stream})
        assert "Internal error: ValueError" in refused(reply, param=None, status=500)
        assert reply.json()["error"]["type"] == "server_error"
    assert "list.index" in caplog.text


def test_chat_stream_of_a_failed_engine_ends_with_503():
    engine = make_engine(lambda _: "a" * 450, step_seconds=0.005)
    body = {**CHAT, "stream": True}
    with (
        serving(engine) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        engine.running.core.fail("out of luck")
        events = [line for line in lines if line.startswith("data: ")]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == 503 and "out of luck" in error["message"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"api_keys": ""}, "api_keys contains ''"),
        ({"api_keys": ["a", ""]}, "api_keys contains ''"),
        ({"api_keys": [None]}, "api_keys contains None"),
        ({"api_keys": " a"}, "api_keys contains a key with spaces"),
        ({"api_keys": "clé"}, "api_keys contains .* in key 1"),
        ({"api_keys": ["a", "a\tb"]}, "api_keys contains .* in key 2"),
        ({"backend_config": {"session_len": 8}}, "backend_config is .* a TurbomindEngineConfig"),
        ({"log_level": "LOUD"}, "log_level is 'LOUD'"),
    ],
)
def test_serve_invalid_options_are_rejected_before_loading(options, text):
    with pytest.raises(ValueError, match=text):
        lmdeploy.serve("no/such/model", server_port=0, **options)


@pytest.mark.parametrize(
    ("route", "body", "param", "status"),
    [
        ("chat/completions", b'{"model":"m","messages":[%s0]}' % (b"0," * 2**20), "messages", 400),
        (
            "chat/completions",
            b'{"model":"m","input_ids":[%s""]}' % (b'"",' * 2**20),
            "input_ids",
            400,
        ),
        ("completions", b'{"model":"m","prompt":"a","stop":[%s0]}' % (b"0," * 2**20), "stop", 400),
        ("completions", b'{"model":"m","prompt":[%s[]]}' % (b"[]," * 2**20), None, 413),
        ("completions", b'{"%s":1}' % (b"a" * 2**22), "model", 400),
    ],
    ids=["messages", "input_ids", "stop", "prompts", "name"],
)
def test_request_with_a_million_errors_gets_one_short_message(url, route, body, param, status):
    reply = post(url, f"/v1/{route}", body)
    assert len(refused(reply, param=param, status=status)) < 1000


def test_parse_request_brackets_in_strings_are_not_counted_as_values():
    text = '\\"a",[{' * 2**19
    request = parse_request(CompletionRequest, json.dumps({"model": "m", "prompt": text}).encode())
    assert request.prompt == text
    with pytest.raises(ApiError, match="values"):
        parse_request(CompletionRequest, b'{"model":"m","prompt":[%s0]}' % (b"0," * 2**21))


def test_parse_request_errors_use_little_memory():
    body = json.dumps({"model": "m", "messages": [0] * 2**18}).encode()
    many = json.dumps({"model": "m", **{f"x{i}": i for i in range(2**16)}}).encode()
    bias = json.dumps(
        {"model": "m", "prompt": "a", "logit_bias": {str(i): "" for i in range(2**16)}}
    )
    for model, text, name in (
        (ChatCompletionRequest, body, "messages"),
        (CompletionRequest, many, "prompt"),
        (CompletionRequest, bias.encode(), "logit_bias"),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(ApiError, match=f"^{name} "):
                parse_request(model, text)
            assert tracemalloc.get_traced_memory()[1] < 16 * len(text) + 4_000_000
        finally:
            tracemalloc.stop()


def test_submit_choices_share_one_prompt():
    engine = make_engine()

    async def run():
        ids = [97, 98, 99]
        streams = [await engine.submit(ids, index=i) for i in range(3)]
        for stream in streams:
            assert stream.prompt_ids is ids
            stream.close()

    try:
        asyncio.run(run())
    finally:
        engine.close()


def test_chat_input_ids_with_messages_are_rejected(url):
    body = {**CHAT, "input_ids": [97]}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert "combined with messages" in refused(reply, param="input_ids")
    body = {"model": "m", "input_ids": [97], "max_tokens": 1}
    for name, value in (("chat_template_kwargs", {"a": 1}), ("enable_thinking", True)):
        reply = httpx.post(f"{url}/v1/chat/completions", json={**body, name: value})
        assert f"combined with {name}" in refused(reply, param="input_ids")
    unused = {"chat_template_kwargs": {}, "enable_thinking": None, "tools": []}
    assert httpx.post(f"{url}/v1/chat/completions", json={**body, **unused}).status_code == 200
    for route, base in (("v1/chat/completions", {"model": "m"}), ("generate", {})):
        reply = httpx.post(f"{url}/{route}", json={**base, "input_ids": [10**6]})
        assert "10" in refused(reply, param="input_ids")


def test_chat_returned_message_is_accepted_again(url):
    body = {**CHAT, "return_token_ids": True}
    message = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["gen_tokens"]
    body["messages"] = [*CHAT["messages"], message, *CHAT["messages"]]
    assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200


def test_serve_is_a_function_after_importing_its_package():
    import lmdeploy.serve.app

    assert callable(lmdeploy.serve)


def test_sampling_defaults_invalid_values_are_replaced_with_a_warning(caplog):
    given = {"top_k": -1, "temperature": "hot", "top_p": 0.5, "do_sample": False, "min_p": None}
    taken = sampling_defaults(given)
    assert taken == {**sampling_defaults({}), "top_p": 0.5, "do_sample": False}
    assert "generation_config.json: top_k is -1" in caplog.text
    assert "temperature is 'hot'" in caplog.text and "The default 0.7 is used" in caplog.text


def test_completions_greedy_model_samples_only_on_request():
    engine = make_engine()
    engine.text.sampling = sampling_defaults({"do_sample": False})
    core = engine.running.core
    with serving(engine) as url:
        for more, samples in (
            ({}, False),
            ({"seed": 3}, False),
            ({"temperature": 1}, True),
            ({"temperature": 0}, False),
            ({"top_p": 0.9}, True),
            ({"top_k": 5}, True),
        ):
            assert post(url, "/v1/completions", {**COMPLETION, **more}).status_code == 200
            assert core.requests[-1].do_sample == samples, more


@pytest.mark.parametrize(
    "more",
    [{"prompt": [[97] * 400] * 4}, {"prompt": ["a" * 400] * 4}, {"prompt": "a" * 400, "n": 4}],
    ids=["ids", "texts", "answers"],
)
def test_completions_total_prompt_tokens_are_limited(url, monkeypatch, more):
    monkeypatch.setattr(generation, "MAX_PROMPT_TOKENS", 1500)
    reply = post(url, "/v1/completions", {**COMPLETION, "max_tokens": 1, **more})
    param = "n" if "n" in more else "prompt"
    text = refused(reply, param=param)
    assert text.startswith(param) and "1600 tokens in all" in text
    monkeypatch.setattr(generation, "MAX_PROMPT_TOKENS", 1600)
    assert post(url, "/v1/completions", {**COMPLETION, "max_tokens": 1, **more}).status_code == 200


def test_check_healthy_closed_engine_is_reported_as_closed():
    engine = make_engine()
    engine.close()
    with pytest.raises(EngineFailure, match=r"^The engine is closed\.$"):
        engine.check_healthy()


def test_serve_that_cannot_listen_closes_its_engine(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr("lmdeploy.engine.load.load_engine", lambda *_, **__: ())
    monkeypatch.setattr("lmdeploy.engine.async_engine.AsyncEngine", lambda: engine)

    def listen(*_):
        raise ValueError("cannot listen")

    monkeypatch.setattr(server, "listen", listen)
    with pytest.raises(ValueError, match="cannot listen"):
        lmdeploy.serve("m", server_port=0)
    assert engine.failure == "The engine is closed."


def test_server_disconnect_within_the_body_logs_no_error(caplog):
    with serving(make_engine()) as url:
        with connect(url) as sock:
            sock.sendall(post_head("/generate", 100) + b"{")
        time.sleep(0.2)
        assert httpx.get(f"{url}/health").status_code == 200
    assert "ClientDisconnect" not in caplog.text


def test_errors_use_field_names_of_their_route(url):
    long = "a" * 5000
    chat = {**CHAT, "messages": [{"role": "user", "content": long}]}
    text = refused(post(url, "/v1/chat/completions", chat), param="messages")
    assert ". However, messages has " in text
    refused(post(url, "/v1/completions", {**COMPLETION, "prompt": long}), param="prompt")
    refused(post(url, "/v1/encode", {"input": long}), param="input")
    body = {"prompt": "a", "return_logprob": True, "top_logprobs_num": 999}
    refused(post(url, "/generate", body), param="top_logprobs_num")
    text = refused(post(url, "/v1/completions", {"\ud800": 1}), param="model")
    assert text.startswith("model is missing")


def test_request_error_of_a_failed_answer_is_logged(caplog):
    chunk = Response("", 0, 1, "error", error_code="engine_error", error_message="NaN logits")
    assert to_api_error(request_error(chunk)).status == 500
    assert "NaN logits" in caplog.text
    chunk.error_code, chunk.error_message = "bad_request", "response_format allows no such token."
    chunk.error_field = "response_format"
    told = to_api_error(request_error(chunk))
    assert (told.status, told.param) == (400, "response_format")
    for field in (None, "token_mask"):  # a field that requests do not have
        chunk.error_field = field
        assert to_api_error(request_error(chunk)).param is None
