"""Tests of the server with SmolLM2: grammars, prefix cache, cancellation, dry run."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest
from serving import post, serving
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy import GenerationConfig, Pipeline, TurbomindEngineConfig
from lmdeploy.cli.main import main
from lmdeploy.engine.async_engine import AsyncEngine

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine():
    # The model nearly prefers another first word about Paris: a window in int8 decides that tie.
    config = TurbomindEngineConfig(
        quant_policy=16,
        kv_window="16bit",
        session_len=2048,
        max_batch_size=8,
        deterministic=True,
    )
    return AsyncEngine.load("smollm2", config, progress=False)


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_generate_options_that_exclude_every_token_give_bad_request(engine):
    only_b = {"type": "regex_schema", "regex_schema": "b"}
    token = engine.text.tokenizer.encode("b", add_special=False)
    config = GenerationConfig(response_format=only_b, bad_token_ids=token)

    async def ask():
        return [piece async for piece in engine.generate([1], config)]

    last = asyncio.run(ask())[-1]
    assert (last.finish_reason, last.error_code) == ("error", "bad_request")
    assert "No token is allowed" in last.error_message


def wait_until_idle(engine):
    deadline = time.monotonic() + 10
    while engine.stats().num_running + engine.stats().num_waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_chat_smollm2_answers_paris(client):
    options = {"model": "m", "messages": PARIS, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    assert "Paris" in whole
    stream = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


def test_chat_same_seed_repeats_the_sample(client):
    def sample(seed):
        reply = client.chat.completions.create(
            model="m", messages=PARIS, temperature=1.5, seed=seed, max_tokens=24, n=2
        )
        return [choice.message.content for choice in reply.choices]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert len(set(sample(1))) == 2


def test_chat_repeated_prompt_reports_cached_tokens(client):
    messages = [{"role": "user", "content": "Tell me about the sea. " * 40}]
    options = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 8}
    client.chat.completions.create(**options)
    usage = client.chat.completions.create(**options).usage
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 128


def test_chat_json_schema_gives_valid_json(client):
    reply = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
        temperature=0,
        max_tokens=200,
    )
    person = json.loads(reply.choices[0].message.content)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)


def test_chat_streamed_call_has_one_part_per_chunk(client):
    function = {"name": "add_person", "parameters": SCHEMA}
    stream = client.chat.completions.create(
        model="m",
        messages=PARIS,
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "add_person"}},
        temperature=0,
        stream=True,
    )
    parts = [chunk.choices[0].delta.tool_calls or [] for chunk in stream]
    assert max(map(len, parts)) == 1  # clients such as Instructor read only the first
    arguments = "".join(part[0].function.arguments for part in parts if part)
    assert set(json.loads(arguments)) == {"name", "age"}


def test_chat_regex_is_followed_and_bad_grammars_receive_400(url):
    def ask(response_format):
        body = {"model": "m", "messages": PARIS, "response_format": response_format}
        return httpx.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": 30}, timeout=60)

    reply = ask({"type": "regex_schema", "regex_schema": "call me [a-z]{1,10}"})
    assert reply.json()["choices"][0]["message"]["content"].startswith("call me ")
    for bad in (
        {"type": "regex_schema", "regex_schema": "(("},
        {"type": "regex_schema", "regex_schema": "(a{1000}){1000}{1000}"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}},
    ):
        reply = ask(bad)
        assert reply.status_code == 400
        assert "response_format" in reply.json()["error"]["message"]
    assert httpx.get(f"{url}/health").status_code == 200


def test_chat_stop_word_is_never_shown(client):
    messages = [{"role": "user", "content": "Write a short story about a lighthouse."}]
    options = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**options).choices[0].message.content
    assert len(whole) > 60
    for start in range(5, 50, 7):
        stop = whole[start : start + 5]
        stream = client.chat.completions.create(**options, stop=stop, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole[: whole.index(stop)]


def test_chat_cancelled_streams_free_all_blocks(engine, client):
    for i in range(10):
        stream = client.chat.completions.create(
            model="m", messages=PARIS, stream=True, max_tokens=500, extra_body={"ignore_eos": True}
        )
        for _, _chunk in zip(range(i), stream, strict=False):
            pass
        stream.close()
    wait_until_idle(engine)
    stats = engine.stats()
    assert stats.blocks_active == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    engine.running.core.check_integrity()


def test_generate_logprobs_equal_log_softmax_of_logits(engine):
    import numpy as np

    pipeline = Pipeline("", engine=engine)
    config = GenerationConfig(max_new_tokens=4, logprobs=3, output_logits="generation")
    answer = pipeline("Hello", config)
    assert answer.logits.shape[0] == 4
    for row, token, values in zip(answer.logits, answer.token_ids, answer.logprobs, strict=True):
        row = row.astype(np.float64)
        reference = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert values[token] == pytest.approx(reference[token], abs=1e-4)
        assert len(values) == 3


def test_dry_run_prints_the_memory_plan(capsys):
    assert main(["serve", "api_server", "smollm2", "--dry-run", "--quant-policy", "16"]) == 0
    text = capsys.readouterr().out
    for part in ("format nvfp4", "6,600 bytes per token", "reserved bytes", "touched bytes"):
        assert part in text


def test_model_format_other_than_the_file_is_rejected(capsys):
    command = ["serve", "api_server", "smollm2", "--dry-run", "--model-format"]
    assert main([*command, "gguf"]) == 0
    with pytest.raises(SystemExit) as info:
        main([*command, "hf"])
    assert info.value.code == 2
    assert (
        "model_format is hf. It must be gguf for smollm2 (--model-format)."
        in capsys.readouterr().err
    )


def test_api_keys_share_no_cached_prefix(tmp_path):
    folder = save_model(make_model(TINY_MODELS[0]), tmp_path)
    engine = AsyncEngine.load(str(folder), TurbomindEngineConfig(session_len=512), progress=False)
    body = {"model": "m", "prompt": [5 + i % 50 for i in range(300)], "max_tokens": 1}

    def cached(key, **fields):
        headers = {"authorization": f"Bearer {key}"}
        reply = post(url, "/v1/completions", body | fields, headers=headers)
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with serving(engine, api_keys=["first", "second"]) as url:
        assert [cached("first"), cached("second"), cached("first", cache_salt="x")] == [0, 0, 0]
        hits = [cached("first"), cached("second"), cached("first", cache_salt="x")]
        assert min(hits) > 0 and len(set(hits)) == 1
