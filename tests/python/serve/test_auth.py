"""Tests of API keys, and of the prefix caches that they separate."""

from __future__ import annotations

import httpx
import openai
import pytest
from fake_engine import make_engine
from serving import ANSWER, CHAT, post, serving


def test_api_keys_are_required_except_for_health():
    with serving(make_engine(), api_keys=["first", "second"]) as url:
        for key in ("", "Bearer", "Bearer wrong", "Basic first", "Bearer firs\u00e9"):
            headers = {"authorization": key.encode()}
            reply = post(url, "/v1/chat/completions", CHAT, headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["type"] == "authentication_error"
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="second")
        assert client.chat.completions.create(**CHAT).choices[0].message.content == ANSWER
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="x").models.list()


def salts_of(core, url, *requests):
    """Return the salt of each (API key, fields of the body) as it reaches the engine."""
    for key, fields in requests:
        headers = {"authorization": f"Bearer {key}"}
        reply = post(url, "/v1/chat/completions", CHAT | fields, headers=headers)
        assert reply.status_code == 200
    return [request.cache_salt for request in core.requests[-len(requests) :]]


REQUESTS = [("first", {}), ("second", {}), ("first", {"cache_salt": "x"}), ("first", {})]


def test_prefix_cache_is_separate_for_each_api_key_and_cache_salt():
    engine = make_engine()
    with serving(engine, api_keys=["first", "second"]) as url:
        own, other, salted, again = salts_of(engine.running.core, url, *REQUESTS)
        assert own == again and len({own, other, salted, bytes(16)}) == 4


def test_share_prefix_cache_turns_the_separation_of_api_keys_off():
    engine = make_engine()
    with serving(engine, api_keys=["first", "second"], share_prefix_cache=True) as url:
        own, other, salted, again = salts_of(engine.running.core, url, *REQUESTS)
        assert own == other == again == bytes(16) != salted


def test_cache_salt_without_api_keys_separates_requests():
    engine = make_engine()
    with serving(engine) as url:
        sent = [("any", {}), ("any", {"cache_salt": "x"}), ("any", {"cache_salt": "y"})]
        plain, x, y = salts_of(engine.running.core, url, *sent)
        assert plain == bytes(16) and len({plain, x, y}) == 3
        reply = post(url, "/v1/chat/completions", CHAT | {"cache_salt": ""})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt")
