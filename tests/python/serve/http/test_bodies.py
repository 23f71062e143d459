"""Tests of request bodies: refused ones are freed, incomplete ones are limited."""

from __future__ import annotations

import gc
import json
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from fake_engine import make_engine
from serving import CHAT, connect, post, post_head, read_response, serving

from lmdeploy.serve.errors import ApiError
from lmdeploy.serve.http import bodies
from lmdeploy.serve.routes import base
from lmdeploy.serve.routes.completions import CompletionRequest
from lmdeploy.serve.schema import parse_request

CHAT_PATH = "/v1/chat/completions"


def message_of(reply: httpx.Response) -> str:
    return str(reply.json()["error"]["message"])


def refused(url: str, sent: bytes) -> tuple[int, str]:
    """Send the beginning of a request. Return the status and the body of the response."""
    with connect(url) as sock:
        sock.sendall(sent)
        status, _, text = read_response(sock)
        return status, text


NUMBERS = [{str(i): 1.5} for i in range(50_000)]
REFUSED = {
    "unsupported field": {**CHAT, "documents": NUMBERS},
    "wrong type": {**CHAT, "n": NUMBERS},
    "messages": {"model": "m", "messages": NUMBERS},
    "long prompt": {"model": "m", "messages": "x" * 2_000_000},
    "template options": {**CHAT, "chat_template_kwargs": {"x": NUMBERS * 4, "y": "z" * 4_200_000}},
    "grammar": {
        **CHAT,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": NUMBERS}}},
    },
    "cut": None,
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", REFUSED)
def test_refused_body_is_freed_without_the_garbage_collector(kind: str, stream: bool) -> None:
    body = REFUSED[kind]
    text = json.dumps({**CHAT, "n": NUMBERS} if body is None else {**body, "stream": stream})
    data = text.encode()[: -1 if body is None else None]
    with serving(make_engine()) as url:
        assert post(url, CHAT_PATH, b"{").status_code == 400
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(2):
                reply = post(url, CHAT_PATH, data)
                assert reply.status_code == 400, reply.text
            httpx.get(f"{url}/health")  # the server is done with the refused request
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            gc.enable()
    assert held < 500_000


def test_body_that_is_too_long_is_refused_before_it_is_sent() -> None:
    with serving(make_engine()) as url:
        head = post_head(CHAT_PATH, bodies.MAX_BODY_BYTES + 1)
        assert refused(url, head)[0] == 413


def test_api_key_and_concurrency_are_checked_before_the_body_is_sent() -> None:
    engine = make_engine(lambda _: "a" * 450, step_seconds=0.01)
    with serving(engine, api_keys=["key"], max_concurrent_requests=1) as url:
        key = "Authorization: Bearer key"
        head = post_head(CHAT_PATH, 31 << 20)
        assert refused(url, head)[0] == 401
        headers = {"authorization": "Bearer key"}
        one = threading.Thread(
            target=post, args=(url, CHAT_PATH, CHAT), kwargs={"headers": headers}
        )
        one.start()
        while not engine.running.core.requests:  # type: ignore[attr-defined]
            time.sleep(0.001)
        status, text = refused(url, post_head(CHAT_PATH, 31 << 20, key))
        assert status == 503 and "--max-concurrent-requests" in text
        one.join()


def test_incomplete_bodies_share_a_byte_budget() -> None:
    with serving(make_engine()) as url:
        socks = [connect(url) for _ in range(12)]
        for sock in socks:
            sock.sendall(post_head(CHAT_PATH, bodies.MAX_BODY_BYTES) + b"{" * (1 << 16))
        for sock in socks[8:]:
            status, headers, _ = read_response(sock)
            assert (status, headers["retry-after"]) == (503, "1")
        # Small requests are served in the meantime.
        assert post(url, CHAT_PATH, CHAT).status_code == 200
        for sock in socks:
            sock.close()
        long = json.dumps(CHAT).encode() + b" " * (31 << 20)
        deadline = time.monotonic() + 10
        while post(url, CHAT_PATH, long).status_code == 503:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_incomplete_bodies_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_OPEN_BODIES", 2)
    with serving(make_engine()) as url:
        with connect(url) as first, connect(url) as second:
            for sock in (first, second):
                sock.sendall(post_head(CHAT_PATH, 100) + b"{")
            time.sleep(0.2)
            assert refused(url, post_head(CHAT_PATH, 100) + b"{")[0] == 503
        time.sleep(0.2)
        assert post(url, CHAT_PATH, CHAT).status_code == 200


def test_body_without_a_length_is_limited_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 1 << 17)

    def parts():
        for _ in range(64):
            yield b" " * 4096

    json_type = {"content-type": "application/json"}
    with serving(make_engine()) as url:
        reply = httpx.post(url + CHAT_PATH, content=parts(), headers=json_type)
        assert reply.status_code == 413
        monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 1 << 20)
        monkeypatch.setattr(bodies, "MAX_OPEN_BYTES", 1 << 17)
        reply = httpx.post(url + CHAT_PATH, content=parts(), headers=json_type)
        assert reply.status_code == 503


def test_slow_body_receives_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.5)
    with serving(make_engine()) as url, connect(url) as sock:
        sock.sendall(post_head(CHAT_PATH, 100))
        told = b""
        start = time.monotonic()
        sock.settimeout(0.1)
        while not told and time.monotonic() - start < 5:
            sock.sendall(b" ")  # every byte arrives in time, but the body does not
            try:
                told = sock.recv(65536)
            except TimeoutError:
                continue
        assert told.startswith(b"HTTP/1.1 408")
        assert 0.4 < time.monotonic() - start < 2
        assert b"connection: close" in told.lower()
        sock.settimeout(5)
        with suppress(ConnectionResetError):  # the last byte arrived after the response
            while told:
                told = sock.recv(65536)


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/problem+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("text/plain; application/json", 415),
        ("", 415),
        (None, 415),
    ],
)
def test_content_type_must_be_json(value: str | None, status: int) -> None:
    with serving(make_engine()) as url:
        headers = {} if value is None else {"content-type": value}
        reply = httpx.post(url + CHAT_PATH, content=json.dumps(CHAT), headers=headers)
        assert reply.status_code == status
        if status == 415:
            assert "application/json" in message_of(reply)
            assert reply.json()["error"]["param"] == "content-type"
        if value == "application/x-www-form-urlencoded":
            assert "curl" in message_of(reply)


def test_large_bodies_are_parsed_one_at_a_time_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "LARGE_BYTES", 1000)
    running, seen = [], []

    def parse(model: Any, body: bytearray) -> Any:
        running.append(body)
        seen.append((len(body) > 1000, len(running), threading.current_thread().name))
        time.sleep(0.05)
        running.pop()
        return parse_request(model, body)

    monkeypatch.setattr(base, "parse_request", parse)
    large = {**CHAT, "metadata": {"a": "b" * 2000}}
    with serving(make_engine()) as url, ThreadPoolExecutor() as pool:
        replies = list(pool.map(lambda body: post(url, CHAT_PATH, body), [large, CHAT] * 4))
        wrong = post(url, CHAT_PATH, {**large, "n": "x"})
    assert {reply.status_code for reply in replies} == {200}
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "n")
    threads = {name for is_large, _, name in seen if not is_large}
    assert len(threads) == 1 and not threads & {name for is_large, _, name in seen if is_large}
    assert {count for is_large, count, _ in seen if is_large} <= {1, 2}  # with a small one


def test_parsing_does_not_start_the_garbage_collector() -> None:
    body = b'{"model": "m", "prompt": "x", "unknown": [%s{}]}' % (b'{"n": []},' * 100_000)
    assert gc.isenabled()
    before = [stats["collections"] for stats in gc.get_stats()]
    request = parse_request(CompletionRequest, body)
    after = [stats["collections"] for stats in gc.get_stats()]
    assert sum(after) - sum(before) <= 1 and request.prompt == "x" and gc.isenabled()
    with pytest.raises(ApiError, match="not valid JSON"):
        parse_request(CompletionRequest, body[:-1])
    assert gc.isenabled()
