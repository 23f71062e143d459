"""Tests of connections beyond the limit of file descriptors."""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from fake_engine import make_engine
from serving import CHAT, connect, post, post_head, read_response, serving
from test_connections import CHAT_PATH, is_closed

from lmdeploy.serve.http import accepting, connections

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
ROOM = 8  # connections


@contextmanager
def crowded(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[str]:
    """Serve slow answers with descriptors for about `ROOM` connections and their clients."""
    gc.collect()  # so that sockets of earlier tests do not become free descriptors later
    with (
        serving(make_engine(lambda _: "a" * 60, step_seconds=0.01), **options) as url,
        ExitStack() as files,
    ):
        httpx.get(f"{url}/health")  # the event loop opens descriptors of its own
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        lowest = 0
        while lowest < highest:  # without gaps, a number shows how many are in use
            lowest = os.open(os.devnull, os.O_RDONLY)
            files.callback(os.close, lowest)
        monkeypatch.setattr(accepting, "first_reserved_descriptor", lambda: lowest + 1 + 2 * ROOM)
        yield url


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "Refused" in record.getMessage()]


def test_streams_beyond_the_descriptors_are_refused_and_served_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses: list[int] = []

    def ask(url: str) -> None:
        while True:
            reply = post(url, CHAT_PATH, {**CHAT, "stream": True})
            statuses.append(reply.status_code)
            if reply.status_code == 200:
                assert reply.text.endswith("data: [DONE]\n\n")
                return
            assert reply.headers["retry-after"] == "1"
            assert reply.json()["error"]["type"] == "server_error"
            time.sleep(0.2)

    with crowded(monkeypatch) as url:
        start = time.monotonic()
        clients = [threading.Thread(target=ask, args=(url,)) for _ in range(3 * ROOM)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        seconds = time.monotonic() - start
    assert statuses.count(200) == 3 * ROOM and set(statuses) == {200, 503}
    assert 1 <= len(refusals(caplog)) <= 1 + seconds
    assert "ulimit -n" in refusals(caplog)[0]
    assert "Traceback" not in caplog.text


def test_refusal_has_the_form_of_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "first_reserved_descriptor", lambda: 0)
    with serving(make_engine()) as url:
        reply = post(url, "/v1/messages", {})
        assert reply.status_code == 503 and reply.headers["connection"] == "close"
        assert reply.json()["type"] == "error" and "descriptors" in reply.json()["error"]["message"]


@pytest.mark.parametrize("sent", [HEALTH, b"GET /", post_head(CHAT_PATH, 100)])
def test_connection_that_waits_for_its_client_makes_room(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CROWDED_SECONDS", 0.3)
    with crowded(monkeypatch) as url, ExitStack() as clients:
        waiting = [clients.enter_context(connect(url)) for _ in range(ROOM)]
        for sock in waiting:
            sock.sendall(sent)
        time.sleep(0.5)
        for _ in range(3 * ROOM):
            assert httpx.get(f"{url}/health").status_code == 200
        assert is_closed(waiting[0]) and not is_closed(waiting[-1], seconds=0.2)


def test_idle_connections_make_room_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CROWDED_SECONDS", 0.3)
    with crowded(monkeypatch) as url, ExitStack() as clients:
        waiting = [clients.enter_context(connect(url)) for _ in range(ROOM)]
        for sock in waiting[1:]:
            sock.sendall(b"GET /")
        time.sleep(0.1)
        waiting[0].sendall(HEALTH)
        assert read_response(waiting[0])[0] == 200
        time.sleep(0.5)
        assert httpx.get(f"{url}/health").status_code == 200
        assert is_closed(waiting[0]) and not is_closed(waiting[1], seconds=0.2)


def test_clients_that_do_not_read_cannot_hold_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "MAX_REFUSALS", 2)
    monkeypatch.setattr(accepting, "REFUSAL_SECONDS", 0.3)
    monkeypatch.setattr(connections, "CROWDED_SECONDS", 60)
    with crowded(monkeypatch) as url, ExitStack() as clients:
        socks = [clients.enter_context(connect(url)) for _ in range(ROOM + 5)]
        socks[-1].sendall(HEALTH)
        status, headers, _ = read_response(socks[-1])
        assert (status, headers["retry-after"]) == (503, "1")
        assert is_closed(socks[-2])


def test_failures_of_accept_are_logged_once_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "_RETRY_SECONDS", 0.001)
    accept, failures = accepting._next_connection, [errno.EMFILE] * 50

    async def fail(sock: socket.socket) -> socket.socket:
        if failures:
            number = failures.pop()
            raise OSError(number, os.strerror(number))
        return await accept(sock)

    monkeypatch.setattr(accepting, "_next_connection", fail)
    with serving(make_engine()) as url:
        assert httpx.get(f"{url}/health").status_code == 200
    assert not failures and len(refusals(caplog)) == 1
    assert "accept() failed: Too many open files" in caplog.text
    assert all(record.exc_info is None for record in caplog.records)
    assert logging.ERROR in {record.levelno for record in caplog.records}


def test_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    code = """if True:
        import resource
        from lmdeploy.serve.http import accepting
        accepting.raise_descriptor_limit()
        print(resource.getrlimit(resource.RLIMIT_NOFILE), accepting.first_reserved_descriptor())
    """
    limit = 'ulimit -Sn 300 && ulimit -Hn 400 && exec "$@"'
    command = ["bash", "-c", limit, "bash", sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "(400, 400) 336\n"
