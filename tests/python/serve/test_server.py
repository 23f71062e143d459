"""Tests of the life of a server: its address, its shutdown and the line that it prints."""

from __future__ import annotations

import base64
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue
from typing import NamedTuple
from unittest.mock import patch

import httpx
import pytest
import uvicorn
from fake_engine import make_engine
from serving import CHAT, post, serving

from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.serve import server
from lmdeploy.serve.app import make_app
from lmdeploy.serve.server import (
    GracefulServer,
    bind,
    check_options,
    curl_line,
    last_resort,
    listen,
    make_settings,
    register_at_proxy,
)
from lmdeploy.serve.state import ServerOptions


@pytest.mark.parametrize("stream", [True, False])
def test_server_shutdown_ends_running_requests(stream):
    engine = make_engine(lambda _: "a" * 450, step_seconds=0.05)
    replies = []

    def ask(url):
        try:
            replies.append(post(url, "/v1/chat/completions", {**CHAT, "stream": stream}))
        except httpx.RemoteProtocolError as error:  # the stream was cut
            replies.append(error)

    with serving(engine, grace_seconds=1) as url:
        client = threading.Thread(target=ask, args=(url,))
        client.start()
        while not engine.running.core.requests:
            time.sleep(0.01)
        time.sleep(0.2)
    client.join()
    if stream:
        assert isinstance(replies[0], httpx.RemoteProtocolError)
    else:
        assert replies[0].status_code == 503
        assert "The server is stopping" in replies[0].json()["error"]["message"]


def test_bind_unusable_address_raises_value_error():
    with bind("127.0.0.1", 0) as sock:
        listen(sock, "127.0.0.1")
        with pytest.raises(ValueError, match=r"--server-port"):
            bind("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(ValueError, match="server_port is 70000"):
        check_options(ServerOptions(server_port=70000))
    for name in ("no such host", "a..b", "a" * 64, "203.0.113.1"):
        with pytest.raises(ValueError, match=r"^server_name is .*--server-name"):
            bind(name, 0)


def test_bind_refuses_connections_until_listen():
    with bind("127.0.0.1", 0) as sock:
        address = sock.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with pytest.raises(ValueError, match=rf"127\.0\.0\.1:{address[1]}.*--server-port"):
            bind("127.0.0.1", address[1])
        listen(sock, "127.0.0.1")
        socket.create_connection(address).close()


def test_bind_reuses_port_with_old_connections():
    with bind("127.0.0.1", 0) as sock:
        listen(sock, "127.0.0.1")
        address = sock.getsockname()
        with socket.create_connection(address) as client:
            served, _ = sock.accept()
            served.close()  # closed first, so that this side keeps the connection in TIME_WAIT
            assert client.recv(1) == b""
    with bind(*address) as sock:
        listen(sock, "127.0.0.1")
        socket.create_connection(address).close()


class Stream(NamedTuple):
    engine: AsyncEngine
    server: GracefulServer
    lines: Iterator[str]

    def rest(self) -> list[dict]:
        """Return the remaining events."""
        return [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]


@contextmanager
def streaming_server(length: int, *, grace: int) -> Iterator[Stream]:
    """Serve an answer of `length` tokens, of which a client has the first. Wait for the end."""
    engine = make_engine(lambda _: "a" * length, step_seconds=0.01, session_len=20_000)
    app = make_app(engine, ServerOptions(model_name="m"))
    with bind("127.0.0.1", 0) as sock:
        listen(sock, "127.0.0.1")
        server = GracefulServer(uvicorn.Config(app, log_level="error"), engine, grace=grace)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/chat/completions"
        with httpx.stream("POST", url, json={**CHAT, "stream": True}, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            yield Stream(engine, server, lines)
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(("grace", "reason"), [(0, None), (1, None), (30, "stop")])
def test_shutdown_timeout_limits_running_answers(grace, reason, caplog):
    length = 100 if reason else 10_000
    with streaming_server(length, grace=grace) as stream:
        stream.server.handle_exit(signal.SIGINT, None)
        told = stream.rest()
    assert ("The next signal ends the process" in caplog.text) == (grace > 0)
    if reason is None:
        assert "closed" in told[-1]["error"]["message"]
    else:
        assert told[-1]["choices"][0]["finish_reason"] == reason


def test_server_whose_engine_fails_ends_its_requests_and_stops(caplog):
    with streaming_server(10_000, grace=30) as stream:
        stream.engine.running.core.fail("out of luck.")
        told = stream.rest()
    assert "out of luck" in told[-1]["error"]["message"]
    assert stream.server.engine_has_failed and stream.engine.running.core.closed
    assert caplog.messages == ["The engine has failed: out of luck. The server stops."]


def test_curl_line_has_url_and_api_key():
    line = curl_line("http://127.0.0.1:23333", "smollm2", with_key=True)
    assert line.startswith("curl http://127.0.0.1:23333/v1/chat/completions") and "Bearer" in line


@pytest.mark.parametrize(
    "url", ["http://", "https://:80", "http://host:port", "http://a:b@:1", "x"]
)
def test_proxy_that_is_no_address_is_refused_at_start(url):
    with pytest.raises(ValueError, match=r"^proxy_url is .*--proxy-url") as refused:
        check_options(ServerOptions(proxy_url=url))
    assert "a:b" not in str(refused.value)


def test_password_of_the_proxy_is_sent_but_never_logged(caplog):
    asked = []

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(500 if len(asked) == 1 else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    caplog.set_level("INFO", logger="lmdeploy")
    deadline = time.monotonic() + 10
    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy, patch.object(server, "_PROXY_SECONDS", 0.1):
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"http://user:secret%21@127.0.0.1:{proxy.server_port}/"
        remove = register_at_proxy(address, "http://127.0.0.1:1", model_name="m")
        while "is registered" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        remove()
        proxy.shutdown()
    login = "Basic " + base64.b64encode(b"user:secret!").decode()
    assert asked == [("/nodes/add", login)] * 2 + [("/nodes/remove", login)]
    assert "did not register" in caplog.text and "secret" not in caplog.text


def test_idle_connections_stay_open_as_long_as_proxies_expect():
    options = ServerOptions()
    assert make_settings(make_app(make_engine()), options, tls=None).timeout_keep_alive == 75
    with pytest.raises(ValueError, match=r"timeout_keep_alive is 0.*--timeout-keep-alive"):
        check_options(ServerOptions(timeout_keep_alive=0))


def test_last_resort_ends_a_process_that_does_not_stop(caplog):
    ends: Queue[int] = Queue()
    begun = threading.Event()
    with patch.object(server, "_LAST_RESORT_SECONDS", -1.9):  # 0.1 s with the other limits
        with last_resort(begun, grace=0, end=ends.put):
            begun.set()
            assert ends.get(timeout=10) == 1
        assert "did not stop" in caplog.text
        with last_resort(threading.Event(), grace=0, end=ends.put):
            pass  # it stops in time, or was never asked to
        time.sleep(0.3)
    assert ends.empty()
