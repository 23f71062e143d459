"""Run a server with any engine in a thread, and send requests to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any

import httpx

from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.serve.app import make_app
from lmdeploy.serve.http.accepting import LimitedServer
from lmdeploy.serve.http.tls import find_tls_files
from lmdeploy.serve.server import bind, listen, make_settings
from lmdeploy.serve.state import ServerOptions

USER = [{"role": "user", "content": "hello"}]
CHAT = {"model": "m", "messages": USER}
ANSWER = "You said: HELLO"


@contextmanager
def serving(
    engine: AsyncEngine,
    *,
    grace_seconds: int | None = None,
    enable_metrics: bool = True,
    **options: Any,
) -> Iterator[str]:
    """Start a server of the model `m` and yield its URL."""
    settings = ServerOptions(**{"model_name": "m", "log_level": "ERROR", **options})
    tls = find_tls_files() if settings.ssl else None
    app = make_app(engine, settings, enable_metrics=enable_metrics)
    sock = bind("127.0.0.1", 0)
    config = make_settings(app, settings, tls=tls)
    config.timeout_graceful_shutdown = grace_seconds
    listen(sock, settings.server_name)
    server = LimitedServer(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"{'https' if settings.ssl else 'http'}://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


def post(url: str, path: str, body: Any, **options: Any) -> httpx.Response:
    """POST JSON, or bytes unchanged."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    return httpx.post(url + path, content=data, timeout=60, headers=headers, **options)


def connect(url: str) -> socket.socket:
    """Open a TCP connection to the server."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def post_head(path: str, length: int, *headers: str) -> bytes:
    """Return the head of a POST request with a JSON body of `length` bytes."""
    lines = ["Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, *headers, "", ""]).encode()


def read_response(sock: socket.socket) -> tuple[int, dict[str, str], str]:
    """Read one response from a connection: status, headers and body."""
    response = HTTPResponse(sock)
    response.begin()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return response.status, headers, response.read().decode()
