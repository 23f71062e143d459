"""Tests of /abort_request with the session_id of running requests."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_engine import make_engine
from serving import USER, post, serving

from lmdeploy.serve.http.sessions import Sessions


def finish_reason(body: dict[str, Any]) -> str:
    """Return the finish_reason of a response of any endpoint."""
    choice = body["choices"][0] if "choices" in body else body["meta_info"]["finish_reason"]
    return choice["finish_reason"] if "choices" in body else choice["type"]


@pytest.mark.parametrize("session_id", [3, "mine"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_abort_request_ends_only_the_requests_of_a_session(
    path: str, session_id: int | str
) -> None:
    engine = make_engine(lambda _: "a" * 450, step_seconds=0.005)
    with serving(engine, enable_abort_handling=True) as url, ThreadPoolExecutor() as pool:
        body = {"model": "m", "max_tokens": 300}
        body |= {"messages": USER} if "chat" in path else {"prompt": "hello"}
        other = pool.submit(post, url, path, {**body, "session_id": 4})
        # Another request of the session is already in the engine.
        first = pool.submit(post, url, path, {**body, "session_id": session_id})
        while len(engine._streams) < 2:
            time.sleep(0.001)
        with httpx.stream(
            "POST",
            url + path,
            json={**body, "stream": True, "session_id": session_id},
            timeout=60,
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            ended = post(url, "/abort_request", {"session_id": session_id})
            assert ended.json() == {"aborted": 2}
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert finish_reason(rest[-1]) == finish_reason(first.result().json()) == "abort"
        assert finish_reason(other.result().json()) == "length"
        refused = post(url, "/abort_request", {"session_id": session_id})
        assert refused.status_code == 400 and "no running request has it" in refused.text


@pytest.mark.parametrize("session_id", [9, "other", 1.5, -1, None])
def test_abort_request_refuses_a_session_without_requests(session_id: Any) -> None:
    with serving(make_engine(), enable_abort_handling=True) as url:
        refused = post(url, "/abort_request", {"session_id": session_id})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "session_id"


def test_sessions_keep_a_session_only_while_it_has_requests() -> None:
    sessions = Sessions()
    with sessions.run(1, []):
        with sessions.run(1, []), sessions.run("1", []), sessions.run(-1, []):
            assert set(sessions._requests) == {("", 1), ("", "1"), ("", None)}
            assert len(sessions._requests["", 1]) == 2
        assert sessions.request_ids(1) == [] and sessions.request_ids("1") is None
        assert sessions.request_ids(1, owner="other") is None
    assert not sessions._requests


@pytest.mark.parametrize("body", [{"session_id": 7}, {"abort_all": True}])
def test_abort_request_ends_only_requests_of_the_same_key(body: dict[str, Any]) -> None:
    engine = make_engine(lambda _: "a" * 450, step_seconds=0.005)
    with (
        serving(engine, enable_abort_handling=True, api_keys=["one", "two"]) as url,
        ThreadPoolExecutor() as pool,
    ):
        ask = {"model": "m", "messages": USER, "max_tokens": 300, "session_id": 7}
        answers = {
            key: pool.submit(
                post, url, "/v1/chat/completions", ask, headers={"Authorization": f"Bearer {key}"}
            )
            for key in ("one", "two")
        }
        while len(engine._streams) < 2:
            time.sleep(0.001)
        # The key is the same, however the header spells it.
        ended = post(url, "/abort_request", body, headers={"x-api-key": "two"})
        assert ended.json() == {"aborted": 1}
        assert finish_reason(answers["two"].result().json()) == "abort"
        assert finish_reason(answers["one"].result().json()) == "length"
