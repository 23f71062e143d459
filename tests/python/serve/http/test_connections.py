"""Tests of connections: slow heads, refused bodies, invalid HTTP, and what the log shows."""

from __future__ import annotations

import logging
import socket
import time

import httpx
import pytest
from fake_engine import make_engine
from serving import CHAT, connect, post, post_head, read_response, serving

from lmdeploy.serve.http import connections

CHAT_PATH = "/v1/chat/completions"


def is_closed(sock: socket.socket, seconds: float = 2) -> bool:
    """Return whether the server closes the connection in that time, and read the rest."""
    sock.settimeout(seconds)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
    return True


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localh"])
def test_head_that_stays_incomplete_closes_the_connection(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with serving(make_engine()) as url, connect(url) as sock:
        sock.sendall(sent)
        assert is_closed(sock)


def test_slow_head_cannot_extend_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with serving(make_engine()) as url, connect(url) as sock:
        # The deadline also applies to the second head on a connection.
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(sock)[0] == 200
        start = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - start < 5:
                sock.sendall(b"G")
                time.sleep(0.05)
        assert 0.4 < time.monotonic() - start < 2


def test_refused_body_cannot_hold_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REST_SECONDS", 0.5)
    with serving(make_engine(), api_keys=["key"]) as url, connect(url) as sock:
        sock.sendall(post_head(CHAT_PATH, 1 << 20))
        assert read_response(sock)[0] == 401
        start = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - start < 5:
                sock.sendall(b" ")
                time.sleep(0.05)
        assert 0.4 < time.monotonic() - start < 2


def test_client_that_sends_a_whole_refused_body_reads_the_error() -> None:
    with serving(make_engine(), api_keys=["key"]) as url, httpx.Client() as client:
        for _ in range(3):  # the connection is used again
            content = b" " * (8 << 20)
            assert client.post(url + CHAT_PATH, content=content).status_code == 401


def test_running_request_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(connections, "REST_SECONDS", 0.2)
    with serving(make_engine(lambda _: "a" * 100, step_seconds=0.01)) as url:
        reply = post(url, CHAT_PATH, CHAT)
    assert reply.json()["choices"][0]["message"]["content"] == "a" * 100


def test_crowd_of_waiting_connections_closes_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_WAITING", 3)
    monkeypatch.setattr(connections, "CROWDED_SECONDS", 0.2)
    with serving(make_engine()) as url:
        socks = [connect(url) for _ in range(6)]  # at the same moment
        time.sleep(0.4)
        assert post(url, CHAT_PATH, CHAT).status_code == 200
        assert is_closed(socks[0])
        socks[5].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(socks[5])[0] == 200
        for sock in socks:
            sock.close()


@pytest.mark.parametrize("keys", [[], ["key"]])
def test_invalid_chunk_of_a_body_logs_no_traceback(
    keys: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    head = b"\r\n".join(
        [
            b"POST /v1/chat/completions HTTP/1.1",
            b"Host: localhost",
            b"Content-Type: application/json",
            b"Transfer-Encoding: chunked",
            b"",
            b"",
        ]
    )
    with serving(make_engine(), api_keys=keys) as url, connect(url) as sock:
        sock.sendall(head)
        if keys:
            assert read_response(sock)[0] == 401
        time.sleep(0.1)
        sock.sendall(b"no size\r\n")
        if not keys:
            status, headers, text = read_response(sock)
            assert (status, headers["content-type"]) == (400, "application/json")
            assert "Invalid HTTP request" in text
        assert is_closed(sock)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET /" + b"a" * 70_000])
def test_invalid_request_receives_a_json_error(sent: bytes) -> None:
    with serving(make_engine()) as url, connect(url) as sock:
        sock.sendall(sent + b"\r\n\r\n")
        status, headers, text = read_response(sock)
        assert (status, headers["content-type"]) == (400, "application/json")
        assert '"invalid_request_error"' in text
        assert is_closed(sock)


def test_access_log_shows_no_query(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(make_engine(), log_level="INFO") as url:
        httpx.get(f"{url}/v1/models?api_key=secret")
    output = "".join(capfd.readouterr())
    assert '"GET /v1/models HTTP/1.1" 200' in output and "secret" not in output
