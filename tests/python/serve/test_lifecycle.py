"""Tests of /sleep, /wakeup, /is_sleeping and /terminate on a scripted engine."""

from __future__ import annotations

import json

import httpx
import pytest
from fake_engine import make_engine
from serving import ANSWER, CHAT, post, serving
from starlette.testclient import TestClient

from lmdeploy.serve.app import make_app
from lmdeploy.serve.state import ServerOptions


def is_sleeping(url: str) -> bool:
    answer: bool = httpx.get(f"{url}/is_sleeping").json()["is_sleeping"]
    return answer


def test_a_sleeping_server_refuses_requests_until_it_wakes() -> None:
    with serving(make_engine()) as url:
        assert not is_sleeping(url)
        for _ in range(2):  # the second changes nothing
            assert httpx.post(f"{url}/sleep?level=1").json() == {"is_sleeping": True}
        assert is_sleeping(url)
        assert httpx.get(f"{url}/health").json() == {"status": "sleeping"}
        refused = post(url, "/v1/chat/completions", CHAT)
        assert refused.status_code == 503
        assert "/wakeup" in refused.json()["error"]["message"]
        assert httpx.get(f"{url}/metrics").status_code == 200
        assert httpx.post(f"{url}/wakeup").json() == {"is_sleeping": False}
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        reply = post(url, "/v1/chat/completions", CHAT).json()
        assert reply["choices"][0]["message"]["content"] == ANSWER


def test_a_server_wakes_when_both_parts_have_been_asked_for() -> None:
    with serving(make_engine()) as url:
        httpx.post(f"{url}/sleep")
        assert httpx.post(f"{url}/wakeup?tags=weights").json() == {"is_sleeping": True}
        assert httpx.post(f"{url}/wake_up?tags=kv_cache").json() == {"is_sleeping": False}
        assert httpx.post(f"{url}/sleep?level=3").status_code == 400
        assert httpx.post(f"{url}/wakeup?tags=cache").status_code == 400


def test_sleep_ends_running_responses_with_abort() -> None:
    engine = make_engine(lambda _: "x" * 400, step_seconds=0.02)
    with serving(engine) as url:
        body = {**CHAT, "stream": True, "max_tokens": 400}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            assert httpx.post(f"{url}/sleep").status_code == 200
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "abort"


def test_an_engine_that_cannot_wake_says_why_and_still_sleeps() -> None:
    engine = make_engine()
    with serving(engine) as url:
        httpx.post(f"{url}/sleep")
        restart = engine.running.restart

        def fail() -> None:
            raise MemoryError("There is no memory.")

        engine.running.restart = fail  # type: ignore[assignment]
        refused = httpx.post(f"{url}/wakeup")
        assert refused.status_code == 503
        assert "There is no memory." in refused.json()["error"]["message"]
        assert is_sleeping(url)
        engine.running.restart = restart
        assert httpx.post(f"{url}/wakeup").json() == {"is_sleeping": False}


def test_an_engine_closes_while_it_sleeps() -> None:
    engine = make_engine()
    engine.sleep()
    engine.close()
    assert not engine.healthy


@pytest.mark.parametrize("path", ["/sleep", "/wakeup", "/terminate"])
def test_operators_need_a_key_or_the_same_machine(path: str) -> None:
    for keys, client, headers, status in (
        ([], "10.0.0.7", {}, 403),
        ([], "testclient", {}, 403),
        ([], "127.0.0.1", {"Sec-Fetch-Site": "cross-site"}, 403),
        ([], "127.0.0.1", {}, 200),
        (["k"], "127.0.0.1", {}, 401),
        (["k"], "10.0.0.7", {"Authorization": "Bearer k"}, 200),
    ):
        options = ServerOptions("m", api_keys=keys, allow_terminate_by_client=True)
        app = make_app(make_engine(), options)
        app.state.server.terminate = lambda: None
        with TestClient(app, "http://localhost", client=(client, 5000)) as http:
            assert http.post(path, headers=headers).status_code == status


def test_terminate_needs_its_flag() -> None:
    calls = []
    for allowed, status in ((False, 400), (True, 200)):
        options = ServerOptions("m", allow_terminate_by_client=allowed)
        app = make_app(make_engine(), options)
        app.state.server.terminate = lambda: calls.append(1)
        with TestClient(app, "http://localhost", client=("::1", 5000)) as http:
            assert http.get("/terminate").status_code == status
    assert len(calls) == 1
