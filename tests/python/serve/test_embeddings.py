"""Tests of /v1/embeddings, /pooling and /get_ppl with the openai package, on a scripted engine."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from fake_engine import HIDDEN_SIZE, make_engine
from serving import post, serving

from lmdeploy.serve.schema import MAX_PROMPTS

# The scripted engine returns [m, 0, NaN, 2 m] for the mean m of the pooled bytes.
UNIT = [1 / math.sqrt(5), 0.0, 0.0, 2 / math.sqrt(5)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(make_engine()) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_embeddings_have_length_one_in_both_encodings(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="m", input=["ab", "c"])  # the package asks for base64
    assert [item.index for item in reply.data] == [0, 1]
    for item in reply.data:
        assert np.allclose(item.embedding, UNIT)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (3, 3)
    floats = client.embeddings.create(model="m", input="ab", encoding_format="float")
    assert np.allclose(floats.data[0].embedding, UNIT)


@pytest.mark.parametrize("given", ["ab", [97, 98], ["ab"], [[97, 98]]])
def test_pooling_returns_the_last_or_the_mean_state_of_every_form_of_input(
    url: str, given: object
) -> None:
    for pooling, mean in ((None, 98), ("last", 98), ("mean", 97.5)):
        reply = post(url, "/pooling", {"input": given, "pooling": pooling}).json()
        assert reply["data"] == [{"object": "pooling", "index": 0, "data": [mean, 0, 0, 2 * mean]}]


def test_dimensions_keep_the_first_values_and_the_length(url: str) -> None:
    body = {"model": "m", "input": "a", "dimensions": 1}
    assert post(url, "/v1/embeddings", body).json()["data"][0]["embedding"] == [1.0]
    body |= {"normalize": False, "encoding_format": "base64"}
    encoded = post(url, "/v1/embeddings", body).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == [97.0]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["a", [1]] * MAX_PROMPTS}, "input"),
        ({"input": [[10**9]]}, "input"),
        ({"input": "a" * 600}, "input"),
        ({"dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ],
)
def test_a_wrong_field_is_named(url: str, path: str, change: dict[str, object], field: str) -> None:
    reply = post(url, path, {"model": "m", "input": "a", **change})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


def test_embeddings_of_another_model_are_refused(url: str) -> None:
    assert post(url, "/v1/embeddings", {"model": "other", "input": "a"}).status_code == 404


def test_get_ppl_returns_the_mean_loss_of_text_and_ids(url: str) -> None:
    # The scripted engine gives every token the log probability -0.5.
    assert post(url, "/get_ppl", {"input": "abc"}).json() == {"ppl": 0.5}
    assert post(url, "/get_ppl", {"input": [97, 98]}).json() == {"ppl": 0.5}
    for wrong in ("", "a", [], [97], [97, 10**9], ["a", "b"], None):
        reply = post(url, "/get_ppl", {"input": wrong})
        assert reply.status_code == 400, wrong
        assert reply.json()["error"]["param"] == "input", wrong
