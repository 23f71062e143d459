"""Tests of the life of a server: its address, its shutdown and the line that it prints."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time

import httpx
import pytest
import uvicorn
from fake_engine import make_engine
from serving import CHAT, post, serving

from lmdeploy.serve.app import make_app
from lmdeploy.serve.server import GracefulServer, bind, check_options, curl_line, listen
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
        while not engine.loaded.cpp_engine.requests:
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


@pytest.mark.parametrize(("grace", "reason"), [(0, None), (1, None), (30, "stop")])
def test_shutdown_timeout_limits_running_answers(grace, reason, caplog):
    length = 100 if reason else 10_000
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
            server.handle_exit(signal.SIGINT, None)
            told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        thread.join()
    assert ("The next signal ends the process" in caplog.text) == (grace > 0)
    if reason is None:
        assert "closed" in told[-1]["error"]["message"]
    else:
        assert told[-1]["choices"][0]["finish_reason"] == reason


def test_curl_line_has_url_and_api_key():
    line = curl_line("http://127.0.0.1:23333", "smollm2", with_key=True)
    assert line.startswith("curl http://127.0.0.1:23333/v1/chat/completions") and "Bearer" in line
