"""Run a server with any engine in a thread, and send requests to it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.serve.app import make_app
from lmdeploy.serve.server import bind
from lmdeploy.serve.state import ServerOptions

USER = [{"role": "user", "content": "hello"}]
CHAT = {"model": "m", "messages": USER}
ANSWER = "You said: HELLO"


@contextmanager
def serving(
    engine: AsyncEngine, *, grace_seconds: int | None = None, **options: Any
) -> Iterator[str]:
    """Start a server of the model `m` and yield its URL."""
    app = make_app(engine, ServerOptions(model_name="m", **options))
    sock = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=grace_seconds)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


def post(url: str, path: str, body: Any, **options: Any) -> httpx.Response:
    """POST JSON, or bytes unchanged."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(url + path, content=data, timeout=60, **options)
