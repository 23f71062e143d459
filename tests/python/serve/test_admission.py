"""Tests of admission: the server limits concurrent requests and releases every slot."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest
from fake_engine import make_engine
from serving import CHAT, connect, post, post_head, serving

from lmdeploy.serve import admission as admission_module
from lmdeploy.serve import app as app_module
from lmdeploy.serve import jobs
from lmdeploy.serve.admission import MAX_HELD_TOKENS, SMALL_TOKENS, Admission
from lmdeploy.serve.errors import ApiError


@pytest.mark.parametrize("stream", [True, False])
def test_admission_requests_above_the_limit_receive_503(stream):
    engine = make_engine(lambda _: "a" * 450, step_seconds=0.002)
    body = {**CHAT, "stream": stream}
    with serving(engine, max_concurrent_requests=1) as url:
        replies = []
        one = threading.Thread(
            target=lambda: replies.append(post(url, "/v1/chat/completions", body))
        )
        one.start()
        while not engine.running.core.requests:
            time.sleep(0.001)
        refused = post(url, "/v1/chat/completions", body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "--max-concurrent-requests" in refused.json()["error"]["message"]
        assert post(url, "/v1/encode", {"input": "a"}).status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200
        one.join()
        assert replies[0].status_code == 200
        wait_until(lambda: post(url, "/v1/encode", {"input": "a"}).status_code == 200)
        for wrong in ({**body, "messages": 1}, {**body, "model": "x"}):
            assert post(url, "/v1/chat/completions", wrong).status_code in (400, 404)
        assert post(url, "/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["body", "prompt", "answer"])
def test_admission_disconnected_client_releases_its_slot(stream, when, monkeypatch):
    admission = Admission(1)
    monkeypatch.setattr(app_module, "Admission", lambda _: admission)
    engine = make_engine(lambda _: "a" * 450, step_seconds=0.005)
    entered = threading.Event()
    if when == "prompt":
        encode = engine.text.tokenizer.encode

        def slow(*args, **options):
            entered.set()
            time.sleep(0.2)
            return encode(*args, **options)

        monkeypatch.setattr(engine.text.tokenizer, "encode", slow, raising=False)
    with serving(engine) as url:
        body = json.dumps({**CHAT, "stream": stream}).encode()
        head = post_head("/v1/chat/completions", len(body))
        with connect(url) as sock:
            sock.sendall(head + (body[:-1] if when == "body" else body))
            if when == "body":
                time.sleep(0.1)
                assert admission.num_requests == 0  # no slot until the body is complete
            elif when == "prompt":
                assert entered.wait(5) and admission.num_requests == 1
            else:
                wait_until(lambda: admission.num_tokens > 0)
        wait_until(lambda: (admission.num_requests, admission.num_tokens) == (0, 0))
        monkeypatch.undo()
        assert post(url, "/v1/chat/completions", CHAT).status_code == 200


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_admission_too_large_request_receives_400_under_any_load(monkeypatch):
    admission = Admission()
    monkeypatch.setattr(app_module, "Admission", lambda _: admission)
    monkeypatch.setattr(admission_module, "SMALL_TOKENS", 0)
    monkeypatch.setattr(jobs, "MAX_PROMPT_TOKENS", 128)
    body = {"model": "m", "prompt": "abc", "max_tokens": 1}
    with serving(make_engine()) as url:
        for held in (0, MAX_HELD_TOKENS):
            admission.num_tokens = held
            assert post(url, "/v1/completions", {**body, "n": 128}).status_code == 400
            small = post(url, "/v1/completions", {**body, "n": 2})
            assert small.status_code == (503 if held else 200)


def test_admission_hold_limits_tokens_of_waiting_prompts():
    admission = Admission()
    first, second, third = (admission.enter() for _ in range(3))
    first.hold(MAX_HELD_TOKENS)
    with pytest.raises(ApiError, match=f"leave room for {SMALL_TOKENS}") as refused:
        second.hold(SMALL_TOKENS + 1)
    assert (refused.value.status, refused.value.retry_after) == (503, 1)
    second.hold(SMALL_TOKENS)
    first.leave()
    first.leave()
    left = MAX_HELD_TOKENS - SMALL_TOKENS
    with pytest.raises(ApiError, match=f"leave room for {left}"):
        third.hold(left + 1)
    third.hold(left)
    assert (admission.num_requests, admission.num_tokens) == (2, MAX_HELD_TOKENS)
    with second, third:
        pass
    assert (admission.num_requests, admission.num_tokens) == (0, 0)
