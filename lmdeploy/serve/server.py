"""Runs the server: reserves the port, loads the model, listens and prints the address."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import sys
import time
from contextlib import closing
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from lmdeploy.base.checks import OptionError, check_instance, check_int, check_strings, refuse
from lmdeploy.base.logs import set_log_level
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.serve.state import ServerOptions

if TYPE_CHECKING:
    from lmdeploy.config.chat_template import ChatTemplateConfig
    from lmdeploy.engine.async_engine import AsyncEngine

logger = logging.getLogger("lmdeploy")

_MAX_KEYS = 1024
_MAX_KEY_CHARS = 4096
_LAST_WORDS_SECONDS = 2  # time to send the errors that end the streams
_LOOK_SECONDS = 0.05  # interval of the checks for a second signal


def bind(server_name: str, server_port: int) -> socket.socket:
    """Reserve an address and return its socket, which does not listen yet. Port 0: any free port.

    Until `listen`, connections of clients fail at once instead of waiting while the model loads.
    Raises ValueError if the address is wrong or in use.
    """
    try:
        info = socket.getaddrinfo(server_name, server_port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise refuse(
            "server_name", server_name, wanted="an address", flag="--server-name"
        ) from None
    sock = socket.socket(info[0], socket.SOCK_STREAM)
    try:
        # SO_REUSEADDR lets bind() succeed while closed connections of the port time out. It is
        # cleared afterwards: two servers that both set it could bind one port until one listens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        sock.close()
        raise _taken(server_name, server_port, error=error) from None
    sock.set_inheritable(True)
    return sock


def listen(sock: socket.socket, server_name: str) -> None:
    """Start to accept connections. Raises ValueError if the port cannot be opened."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.listen(2048)
    except OSError as error:
        raise _taken(server_name, sock.getsockname()[1], error=error) from None


def _taken(server_name: str, server_port: int, *, error: OSError) -> ValueError:
    if error.errno == errno.EADDRNOTAVAIL:
        return refuse(
            "server_name", server_name, wanted="an address of this machine", flag="--server-name"
        )
    return ValueError(
        f"The server cannot listen on {server_name}:{server_port}: {error.strerror}. Choose a free "
        "port (--server-port)."
    )


def curl_line(url: str, model_name: str, *, with_key: bool) -> str:
    """Return a curl command that sends a chat request."""
    ask = [{"role": "user", "content": "Who are you?"}]
    body = {"model": model_name, "messages": ask, "temperature": 0, "max_tokens": 64}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if with_key else ""
    return (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d '{json.dumps(body)}'"
    )


def check_options(options: ServerOptions) -> None:
    """Raise OptionError for an invalid server option."""
    keys = check_strings(
        "api_keys", options.api_keys, max_items=_MAX_KEYS, max_chars=_MAX_KEY_CHARS
    )
    if any(key != key.strip() for key in keys):  # HTTP strips header values
        raise OptionError("api_keys", "contains a key with spaces around it (--api-keys).")
    for i, key in enumerate(keys):
        if not (key.isascii() and key.isprintable()):  # clients encode others differently
            reason = f"contains other characters than printable ASCII in key {i + 1} (--api-keys)."
            raise OptionError("api_keys", reason)
    check_int("server_port", options.server_port, low=0, high=65535, flag="--server-port")
    if options.max_concurrent_requests is not None:
        flag = "--max-concurrent-requests"
        check_int("max_concurrent_requests", options.max_concurrent_requests, low=1, flag=flag)
    check_int("shutdown_timeout", options.shutdown_timeout, low=0, flag="--shutdown-timeout")


def run_server(
    model_path: str,
    backend_config: TurbomindEngineConfig | None,
    *,
    chat_template_config: ChatTemplateConfig | None,
    options: ServerOptions,
) -> None:
    """Load a model and serve it until SIGTERM or Ctrl-C.

    The port is reserved before the model is loaded and opened afterwards.

    Args:
        model_path: a Hugging Face folder, a GGUF file, a hub id, or `smollm2`.
        backend_config: options of the engine. None takes the defaults.
        chat_template_config: replaces the model's own template. None keeps it.
        options: options of the server.

    Raises:
        ValueError: if an option is wrong, the port is in use, or the model cannot be loaded.
    """
    from lmdeploy.engine.async_engine import AsyncEngine
    from lmdeploy.serve.app import make_app

    check_options(options)
    config = TurbomindEngineConfig() if backend_config is None else backend_config
    check_instance("backend_config", config, kind=TurbomindEngineConfig)
    set_log_level(options.log_level)
    sock = bind(options.server_name, options.server_port)
    with closing(sock):
        engine = AsyncEngine.load(
            model_path,
            config,
            chat_template_config=chat_template_config,
            reasoning_parser=options.reasoning_parser,
            tool_call_parser=options.tool_call_parser,
        )
        with closing(engine):
            name = options.model_name or model_path
            options.model_name = name
            app = make_app(engine, options, enable_metrics=config.enable_metrics)
            host = f"[{options.server_name}]" if ":" in options.server_name else options.server_name
            listen(sock, options.server_name)
            url = f"http://{host}:{sock.getsockname()[1]}"
            print("\n".join(engine.start_lines()))
            print(f"Serving {name} at {url}\nSend a request with:")
            print(curl_line(url, name, with_key=bool(options.api_keys)))
            sys.stdout.flush()
            level = options.log_level.lower()
            settings = uvicorn.Config(app, log_level=level, access_log=level in ("debug", "info"))
            GracefulServer(settings, engine, grace=options.shutdown_timeout).run(sockets=[sock])


class GracefulServer(uvicorn.Server):
    """Serves until a signal arrives. Then it closes the engine, which ends all streams properly.

    Running requests continue for `grace` seconds or until a second signal. Then each of them ends
    with an error. A third signal closes the remaining connections.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, *, grace: int) -> None:
        config.timeout_graceful_shutdown = grace + _LAST_WORDS_SECONDS
        super().__init__(config)
        self._engine = engine
        self._grace = grace
        self._hurries = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal. uvicorn's signal handlers call this."""
        if self.should_exit and not self._hurries:
            self._hurries = True
            return
        self.force_exit = self.should_exit  # uvicorn's own rule counts only SIGINT
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the running requests and close the engine. uvicorn calls this when it stops."""
        if self.server_state.tasks and self._grace > 0:
            logger.warning(
                "The server is stopping. Running requests continue for up to %d s "
                "(--shutdown-timeout). The next signal ends them at once.",
                self._grace,
            )
        closing = asyncio.create_task(self._close_engine())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_engine(self) -> None:
        end = time.monotonic() + self._grace
        while not self._hurries and time.monotonic() < end:
            await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.to_thread(self._engine.close)
