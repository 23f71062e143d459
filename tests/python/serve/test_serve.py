"""Tests of the HTTP server with the openai package and raw requests, on a scripted engine."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest
from fake_engine import make_engine
from serving import ANSWER, CHAT, connect, post, post_head, serving

from lmdeploy.chat.messages import MAX_MESSAGES
from lmdeploy.chat.tool_calls import MAX_TOOLS
from lmdeploy.config.generation import MAX_STOP_WORD_CHARS, MAX_STOP_WORDS


@pytest.fixture(scope="module")
def url():
    with serving(make_engine()) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_models_and_health_endpoints_respond(url, client):
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    error = httpx.get(f"{url}/v1/models/other/one").json()["error"]
    assert error["message"] == "The model 'other/one' does not exist. Use 'm'."
    assert error["code"] == "model_not_found"
    assert httpx.get(f"{url}/health").status_code == 200


def test_chat_returns_answer_and_usage(client):
    reply = client.chat.completions.create(**CHAT, seed=1, temperature=0)
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert choice.message.role == "assistant"
    assert reply.usage.completion_tokens == len(ANSWER)
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + len(ANSWER)


def test_chat_messages_as_one_string_are_accepted(url):
    reply = post(url, "/v1/chat/completions", {**CHAT, "messages": "hello"})
    assert reply.status_code == 200
    message = reply.json()["choices"][0]["message"]
    assert message["role"] == "assistant" and message["annotations"] == []
    assert "tool_calls" not in message  # where it is present, it must be a list


@pytest.mark.parametrize("stop", [None, "HELLO", ["said: H", "zzz"], [" said"]])
@pytest.mark.parametrize("n", [1, 3])
def test_chat_stream_equals_whole_answer(client, stop, n):
    options = {**CHAT, "n": n, **({"stop": stop} if stop else {})}
    whole = client.chat.completions.create(**options)
    texts, reasons, usage = [""] * n, [None] * n, None
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["stop"] * n
    assert usage == whole.usage


def test_chat_logprobs_describe_each_token(client):
    reply = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, max_tokens=2)
    content = reply.choices[0].logprobs.content
    assert [item.token for item in content] == ["Y", "o"]
    assert content[0].bytes == [ord("Y")] and len(content[0].top_logprobs) == 2
    assert reply.choices[0].finish_reason == "length"


def test_completions_accepts_all_forms_of_prompts(client):
    def texts(prompt, **options):
        reply = client.completions.create(model="m", prompt=prompt, max_tokens=64, **options)
        return [choice.text for choice in reply.choices]

    assert texts("a") == ["You said: A"]
    assert texts(["a", "b"]) == ["You said: A", "You said: B"]
    assert texts([97, 98]) == ["You said: AB"]
    assert texts([[97], [98]], n=2) == ["You said: A"] * 2 + ["You said: B"] * 2
    assert texts("a", echo=True) == ["aYou said: A"]
    assert texts([97], echo=True) == ["aYou said: A"]


def test_completions_stream_equals_whole_answer(client):
    stream = client.completions.create(
        model="m", prompt=["a", "b"], max_tokens=64, stream=True, echo=True, logprobs=1
    )
    texts = ["", ""]
    tokens = [[], []]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == ["aYou said: A", "bYou said: B"] == ["".join(item) for item in tokens]


def test_completions_echo_returns_prompt_logprobs(client):
    reply = client.completions.create(model="m", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    choice = reply.choices[0]
    assert choice.text == "abc" and choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2]


def test_completions_echo_accepts_prompt_of_session_len(client):
    options = {"model": "m", "max_tokens": 0, "echo": True, "logprobs": 0}
    choice = client.completions.create(prompt="a" * 512, **options).choices[0]
    assert len(choice.logprobs.token_logprobs) == 512
    with pytest.raises(openai.BadRequestError, match="session_len is 512"):
        client.completions.create(prompt="a" * 513, **options)


def test_generate_and_encode_return_text_and_ids(url):
    body = {"prompt": "hi", "return_logprob": True, "max_tokens": 4}
    reply = post(url, "/generate", body).json()
    assert reply["text"] == "You " and len(reply["output_ids"]) == 4
    assert reply["meta_info"]["finish_reason"] == {"type": "length"}
    assert reply["meta_info"]["output_token_logprobs"][0] == [-0.5, ord("Y")]
    events = post(url, "/generate", {"prompt": "hi", "stream": True}).text.split("\n\n")
    assert events[-2] == "data: [DONE]"
    parts = [json.loads(event[6:])["text"] for event in events[:-2]]
    assert "".join(parts) == "You said: HI"
    assert post(url, "/v1/encode", {"input": "ab"}).json() == {"input_ids": [97, 98], "length": 2}
    assert post(url, "/v1/encode", {"input": ["a", "bc"]}).json()["length"] == [1, 2]


def test_metrics_endpoint_exports_every_metric(url):
    post(url, "/v1/chat/completions", CHAT)
    text = httpx.get(f"{url}/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "gpu_cache_usage_perc",
        "prefix_cache_hit_rate",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "iter_token_latency_bucket",
        "e2e_request_latency_seconds_bucket",
    ):
        assert f"lmdeploy:{name}{{" in text, name
    assert 'prefix_cache_hit_rate{model_name="m"} 0.5' in text
    for line in (
        'kv_cache_info{calibration="",k_offset="none",mode="nvfp4",model_name="m",'
        'quality="balanced",recent_tokens="64",rotation="true",scale_search="true",'
        'sink_tokens="64",window="16bit"} 1.0',
        'gemm_info{gemm_input_dtype="int16",model_name="m"} 1.0',
        'kv_cache_window_blocks_total{model_name="m"} 6.0',
        'kv_cache_window_blocks_active{model_name="m"} 2.0',
        'kv_cache_window_blocks_cached{model_name="m"} 1.0',
        'state_checkpoints_total{model_name="m"} 12.0',
        'state_checkpoints_kept{model_name="m"} 5.0',
        'prefix_cut_tokens_total{model_name="m"} 7.0',
        'num_nonfinite_kv_total{model_name="m"} 9.0',
        'kv_clipped_values_total{group="full",model_name="m"} 0.0',
        'kv_clipped_values_total{group="window_128",model_name="m"} 0.0',
    ):
        assert f"lmdeploy:{line}" in text, line


BAD_CHAT = [
    ({"tools": [{"type": "function"}]}, "tools[0].function is None"),
    ({"tool_choice": "required"}, "tool_choice is 'required'. It must be none or auto"),
    ({"functions": [{}]}, "functions is not supported"),
    ({"use_beam_search": True}, "use_beam_search is not supported"),
    ({"separate_reasoning": False}, "separate_reasoning is not supported"),
    ({"stream": "yes"}, "stream is 'yes'"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage is 'yes'"),
    ({"stop_token_ids": [1, 2, "x"]}, "stop_token_ids[2] is 'x'. It must be a valid integer"),
    ({"stop_token_ids": [1] * 5000}, "stop_token_ids has 5000 items. It must have at most 4096."),
    ({"do_preprocess": False}, "do_preprocess is not supported"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"temperature": 9}, "temperature is 9"),
    ({"temperature": True}, "temperature is True"),
    ({"top_k": -2}, "top_k is -2"),
    ({"top_k": 1.5}, "top_k is 1.5"),
    ({"priority": 2**31}, "priority is 2147483648"),
    ({"priority": "high"}, "priority is 'high'"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": -2}, "max_tokens is -2"),
    ({"max_tokens": 10**30}, "max_tokens is "),
    ({"n": 0}, "n is 0"),
    ({"n": 10**6}, "n is 1000000"),
    (
        {"n": 128, "logprobs": True, "top_logprobs": 100},
        "log probabilities. The limit is 4194304",
    ),
    (
        {"stop": ["a"] * 10**6},
        "stop is a list of 1000000 items. It must be a list of at most 256",
    ),
    (
        {"stop": [""]},
        "stop contains ''. Every item must be a non-empty string of at most 4096 characters",
    ),
    ({"stop": ["a" * 4096] * 17}, "stop has 69632 characters in 17 words"),
    ({"stop": 3}, "stop is 3"),
    ({"logit_bias": {"x": 1}}, "logit_bias is {'x': 1.0}. It must be an object whose keys"),
    ({"logit_bias": {"99999": 1}}, "logit_bias contains token id 99999"),
    ({"logit_bias": {"1": 1000}}, "logit_bias is 1000"),
    ({"stop_token_ids": [99999]}, "stop_token_ids contains token id 99999"),
    ({"top_logprobs": 3}, "top_logprobs is 3, but logprobs is not set"),
    ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    *(
        (
            {"response_format": {"type": "json_schema", "json_schema": holder}},
            "response_format.json_schema.schema",
        )
        for holder in ({"name": "x"}, {"name": "x", "strict": True}, {}, {"schema": None})
    ),
    ({"messages": []}, "messages is empty"),
    ({"messages": 7}, "messages is 7"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is None"),
    ({"messages": [{"role": "alien", "content": ""}]}, "messages[0].role is 'alien'"),
    ({"messages": None, "input_ids": [99999]}, "token id 99999"),
]


@pytest.mark.parametrize(("change", "text"), BAD_CHAT, ids=[text for _, text in BAD_CHAT])
def test_chat_invalid_field_is_named_in_the_error(url, change, text):
    reply = post(url, "/v1/chat/completions", {**CHAT, **change})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert text in error["message"] and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error" and error["code"] == 400
    assert len(error["message"]) < 500
    assert post(url, "/v1/chat/completions", CHAT).status_code == 200


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"model": "m", "prompt": "a", "temperature": NaN}', "NaN is not allowed"),
        (b'{"model": "m", "prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"a": ' + b"[" * 100_000, "JSON"),
        (b'{"model": "m", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"model": "m"}', "prompt is missing"),
        (b'{"model": "m", "prompt": []}', "prompt contains 0 prompts"),
        (b'{"model": "m", "prompt": ""}', "prompt is empty"),
        (
            b'{"model": "m", "prompt": ["a", 1]}',
            "prompt is ['a', 1]. It must be a string, a list of strings",
        ),
        (b'{"model": "m", "prompt": [999999]}', "token id 999999"),
        (b'{"model": "m", "prompt": [-1]}', "token id -1"),
        (b'{"model": "m", "prompt": "' + b"x" * 3000 + b'"}', "prompt has 3000 characters"),
        (
            json.dumps({"model": "m", "prompt": ["a"] * 9, "n": 128}).encode(),
            "n is 128 for each of 9 prompts. One request may have at most 1024",
        ),
        (b'{"model": "m", "prompt": "a", "suffix": "b"}', "suffix is not supported"),
        (b'{"model": "m", "prompt": "a", "best_of": 4}', "best_of is not supported"),
    ],
)
def test_completions_invalid_body_is_named_in_the_error(url, body, text):
    reply = post(url, "/v1/completions", body)
    assert reply.status_code == 400
    assert text in reply.json()["error"]["message"]


def test_chat_do_preprocess_true_is_accepted(url):
    assert post(url, "/v1/chat/completions", {**CHAT, "do_preprocess": True}).status_code == 200


def test_priority_reaches_the_engine_from_every_endpoint():
    engine = make_engine()
    with serving(engine) as url:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"model": CHAT["model"], "prompt": "hi"}),
            ("/generate", {"prompt": "hi"}),
        ):
            for more, wanted in (({}, 0), ({"priority": -5}, -5)):
                assert post(url, path, {**body, **more}).status_code == 200
                assert engine.running.core.requests[-1].priority == wanted


def test_generate_default_samples_from_the_whole_distribution():
    engine = make_engine()
    with serving(engine) as url:
        core = engine.running.core
        for more, wanted in (({}, (1.0, 0, 1.0)), ({"top_k": 3, "temperature": 2}, (2.0, 3, 1.0))):
            post(url, "/generate", {"prompt": "hi", **more})
            request = core.requests[-1]
            assert request.do_sample
            assert (request.temperature, request.top_k, request.top_p) == wanted


def test_server_unknown_path_or_method_lists_valid_ones(url):
    reply = post(url, "/chat/completions", CHAT)
    assert reply.status_code == 404
    text = reply.json()["error"]["message"]
    nearest = text.partition("The nearest paths are ")[2].removesuffix(".").split(", ")
    assert len(nearest) == 3 and nearest[0] == "/v1/chat/completions"
    reply = httpx.get(f"{url}/v1/completions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert " Use POST." in reply.json()["error"]["message"]
    reply = httpx.put(f"{url}/v1/responses/resp_1")
    assert (reply.status_code, reply.headers["allow"]) == (405, "DELETE, GET, HEAD")


@pytest.mark.parametrize("path", ["/health", "/", "/v1/models", "/v1/models/m", "/metrics"])
def test_server_answers_head_as_get_without_a_body(url, path):
    head, get = httpx.head(f"{url}{path}"), httpx.get(f"{url}{path}")
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-type", "content-length") if path != "/metrics" else ("content-type",):
        assert head.headers[name] == get.headers[name]


@pytest.mark.parametrize("path", ["/terminate", "/v1/chat/completions"])
def test_server_does_not_act_on_head(url, path):
    reply = httpx.head(f"{url}{path}")
    assert reply.status_code == 405 and "HEAD" not in reply.headers["allow"]


def test_streams_are_not_buffered_by_proxies(url):
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "m", "prompt": "a"}),
        ("/generate", {"prompt": "a"}),
        ("/v1/responses", {"model": "m", "input": "a"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
    ):
        headers = post(url, path, {**body, "stream": True}).headers
        assert headers["content-type"].startswith("text/event-stream"), path
        assert headers["x-accel-buffering"] == "no", path


def test_server_errors_have_fitting_statuses(url):
    reply = post(url, "/v1/chat/completions", {**CHAT, "model": "gpt-99"})
    assert reply.status_code == 404 and reply.json()["error"]["param"] == "model"
    assert httpx.get(f"{url}/nothing").status_code == 404
    assert httpx.get(f"{url}/nothing").json()["error"]["code"] == 404
    assert httpx.get(f"{url}/v1/chat/completions").status_code == 405
    assert post(url, "/v1/completions", b" " * (33 << 20)).status_code == 413


def allowed_origin(reply):
    return reply.headers.get("access-control-allow-origin")


def test_cors_allowed_origin_can_read_answers_and_errors():
    home, other = {"origin": "https://a.test"}, {"origin": "https://b.test"}
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "x-mine"}
    path = "/v1/chat/completions"
    with serving(make_engine(), api_keys=["key"], allow_origins=["https://a.test"]) as url:
        # A browser first sends a preflight request, without the key.
        before = httpx.options(f"{url}{path}", headers=home | ask)
        assert (before.status_code, allowed_origin(before)) == (200, "https://a.test")
        assert "POST" in before.headers["access-control-allow-methods"]
        assert before.headers["access-control-allow-headers"] == "x-mine"
        assert allowed_origin(httpx.options(f"{url}{path}", headers=other | ask)) is None
        key = {"authorization": "Bearer key"}
        for headers, status in ((key, 200), ({}, 401), (key | {"x": "y"}, 400)):
            body = b"{" if status == 400 else CHAT
            reply = post(url, path, body, headers=home | headers)
            assert (reply.status_code, allowed_origin(reply)) == (status, "https://a.test")
            assert allowed_origin(post(url, path, body, headers=other | headers)) is None


def test_disable_fastapi_docs_removes_the_documentation(url):
    assert httpx.get(f"{url}/openapi.json").status_code == 200
    assert httpx.get(f"{url}/docs").status_code == 404  # such pages load programs from a CDN
    with serving(make_engine(), disable_fastapi_docs=True) as without:
        assert httpx.get(f"{without}/openapi.json").status_code == 404
        assert post(without, "/v1/chat/completions", CHAT).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_chat_disconnect_cancels_the_request(stream):
    engine = make_engine(lambda _: "a" * 450, step_seconds=0.005)
    with serving(engine) as url:
        body = json.dumps({**CHAT, "stream": stream}).encode()
        with connect(url) as sock:
            sock.sendall(post_head("/v1/chat/completions", len(body)) + body)
            if stream:
                assert sock.recv(100)
            while not engine._streams:
                time.sleep(0.001)
            time.sleep(0.1)
        deadline = time.monotonic() + 5
        while not engine.running.core.cancelled and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.running.core.cancelled == [1]
        assert httpx.get(f"{url}/health").status_code == 200


def test_chat_concurrent_clients_receive_their_own_answers():
    with serving(make_engine(step_seconds=0.001)) as url:

        async def run():
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")

            async def one(i):
                message = {"role": "user", "content": f"number {i}"}
                stream = await client.chat.completions.create(
                    model="m", messages=[message], stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*(one(i) for i in range(40)))

        assert asyncio.run(run()) == [f"You said: NUMBER {i}" for i in range(40)]


def test_health_failed_engine_returns_503():
    engine = make_engine(lambda _: "a" * 450, step_seconds=0.005)
    with serving(engine) as url:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={**CHAT, "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            engine.running.core.fail("out of luck")
            rest = "\n".join(lines)
        assert "out of luck" in rest and "[DONE]" not in rest
        reply = httpx.get(f"{url}/health")
        assert reply.status_code == 503 and "out of luck" in reply.json()["error"]["message"]
        assert post(url, "/v1/chat/completions", CHAT).status_code == 503


def test_abort_request_all_ends_streams_with_finish_reason_abort():
    engine = make_engine(lambda _: "a" * 450, step_seconds=0.005)
    with serving(engine, enable_abort_handling=True) as url:
        body = {**CHAT, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert post(url, "/abort_request", {"abort_all": True}).json() == {"aborted": 1}
            rest = [line for line in lines if line.startswith("data: {")]
        last = json.loads(rest[-1].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "abort"
        assert engine.running.core.cancelled
        refused = post(url, "/abort_request", {"session_id": -1})
        assert refused.status_code == 400 and "abort_all" in refused.text
        assert post(url, "/v1/completions", {"model": "m", "prompt": "a"}).status_code == 200


def test_abort_request_without_flag_returns_501(url):
    reply = post(url, "/abort_request", {"abort_all": True})
    assert reply.status_code == 501 and "--enable-abort-handling" in reply.text


def test_chat_neutral_values_of_unsupported_fields_are_accepted(url):
    unused = {
        "kwargs": {"a": 1},
        "metadata": {},
        "verbosity": None,
        "safety_identifier": "someone",
        "prompt_cache_key": "key",
        "logprobs": False,
        "top_logprobs": 0,
        "session_id": -1,
        "stream_options": {"include_obfuscation": False},
    }
    assert post(url, "/v1/chat/completions", {**CHAT, **unused}).status_code == 200
    for field, value in {"adapter_name": "b", "top_logprobs": 2}.items():
        reply = post(url, "/v1/chat/completions", {**CHAT, field: value})
        assert reply.status_code == 400 and field in reply.text


def test_openapi_describes_every_request_body(url):
    schema = httpx.get(f"{url}/openapi.json").json()
    posts = {path: item["post"] for path, item in schema["paths"].items() if "post" in item}
    assert posts.keys() >= {"/v1/chat/completions", "/v1/completions", "/generate"}
    without_body = {"/sleep", "/wakeup", "/wake_up", "/terminate"}
    assert {path for path, post in posts.items() if "requestBody" not in post} == without_body
    for path in posts.keys() - without_body:
        operation = posts[path]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        name = body["$ref"].removeprefix("#/components/schemas/")
        assert schema["components"]["schemas"][name]["properties"]
    assert "StreamOptions" in schema["components"]["schemas"]
    chat = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    limits = {}
    for name in ("messages", "tools", "input_ids", "stop"):
        for part in chat[name]["anyOf"]:
            if part["type"] == "array":
                limits[name] = (part.get("minItems"), part.get("maxItems"))
    assert limits == {
        "messages": (1, MAX_MESSAGES),
        "tools": (None, MAX_TOOLS),
        "input_ids": (1, None),
        "stop": (None, MAX_STOP_WORDS),
    }
    assert chat["stop"]["anyOf"][0]["maxLength"] == MAX_STOP_WORD_CHARS
