"""Tests of LMDeploy's API client against our server."""

from __future__ import annotations

import pytest
from fake_engine import make_engine
from serving import ANSWER, USER, serving

import lmdeploy
from lmdeploy.serve.openai.api_client import APIClient, get_model_list


@pytest.fixture(scope="module")
def url():
    with serving(make_engine(), api_keys=["secret"]) as url:
        yield url


@pytest.fixture
def client(url):
    return APIClient(url + "/", api_key="secret", timeout=60)


def test_available_models_lists_the_served_model(client):
    assert client.available_models == ["m"]


def test_encode_returns_ids_and_length(client):
    ids, length = client.encode("abc")
    assert len(ids) == length == 3
    assert client.encode(["a", "bc"], add_bos=False)[1] == [1, 2]


@pytest.mark.parametrize("messages", ["hello", USER])
def test_chat_completions_v1_returns_the_answer(client, messages):
    [reply] = client.chat_completions_v1("m", messages, temperature=0)
    assert reply["choices"][0]["message"]["content"] == ANSWER


def test_chat_completions_v1_stream_chunks_join_to_the_answer(client):
    chunks = list(client.chat_completions_v1(model="m", messages=USER, stream=True))
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert len(chunks) > 2 and "".join(texts) == ANSWER


def test_completions_v1_and_generate_return_the_same_text(client):
    [whole] = client.completions_v1("m", "hello", max_tokens=4)
    chunks = list(client.completions_v1("m", "hello", max_tokens=4, stream=True))
    text = whole["choices"][0]["text"]
    assert text and "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    [generated] = client.generate("hello", max_tokens=4)
    assert generated["text"] == text
    parts = list(client.generate(input_ids=[5, 6], max_tokens=4, stream=True))
    assert sum(len(part["output_ids"]) for part in parts) == 4


def test_api_client_errors_reach_the_caller(client, url):
    [refused] = client.chat_completions_v1("other", "hello")
    assert refused["error"]["message"] == "The model 'other' does not exist. Use 'm'."
    [refused] = APIClient(url).generate("hello")
    assert refused["error"]["code"] == 401
    with pytest.raises(ValueError, match="rejected the request: Invalid or missing API key"):
        _ = APIClient(url, api_key="wrong").available_models
    with pytest.raises(ValueError, match="http://"):
        APIClient("file:///etc/passwd")


def test_get_model_list_returns_the_served_model_or_raises_the_error(url):
    models = f"{url}/v1/models"
    assert get_model_list(models, {"Authorization": "Bearer secret"}) == ["m"]
    with pytest.raises(ValueError, match="rejected the request: Invalid or missing API key"):
        get_model_list(models)


def test_client_function_returns_a_client(url):
    assert lmdeploy.client(url, "secret").available_models == ["m"]
