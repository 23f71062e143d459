"""Runs the server: reserves the port, loads the model, listens and prints the address."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPException
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import uvicorn

from lmdeploy.base.checks import OptionError, check_instance, flag_of, refuse
from lmdeploy.base.logs import set_log_level
from lmdeploy.checkpoint.hub import hub_address
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.option import check
from lmdeploy.serve.http.accepting import BACKLOG, LimitedServer, raise_descriptor_limit
from lmdeploy.serve.http.connections import LimitedProtocol, without_query
from lmdeploy.serve.http.tls import TlsFiles, find_tls_files
from lmdeploy.serve.http.tracing import check_endpoint
from lmdeploy.serve.sampling import read_sampling
from lmdeploy.serve.state import ServerOptions

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from lmdeploy.config.chat_template import ChatTemplateConfig
    from lmdeploy.engine.async_engine import AsyncEngine
    from lmdeploy.engine.core import StartedCore

logger = logging.getLogger("lmdeploy")

_SCHEMES = ("http", "https")
_PROXY_TRIES = 5
_PROXY_SECONDS = 5  # between two tries, and for one try
_LAST_WORDS_SECONDS = 2  # time to send the errors that end the streams
_LAST_RESORT_SECONDS = 20  # for everything after them


def bind(server_name: str, server_port: int) -> socket.socket:
    """Reserve an address and return its socket, which does not listen yet. Port 0: any free port.

    Until `listen`, connections of clients fail at once instead of waiting while the model loads.
    Raises ValueError if the address is wrong or in use.
    """
    try:
        info = socket.getaddrinfo(server_name, server_port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise refuse(
            "server_name", server_name, wanted="an address", flag=flag_of("server_name")
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
        sock.listen(BACKLOG)
    except OSError as error:
        raise _taken(server_name, sock.getsockname()[1], error=error) from None


def _taken(server_name: str, server_port: int, *, error: OSError) -> ValueError:
    if error.errno == errno.EADDRNOTAVAIL:
        return refuse(
            "server_name",
            server_name,
            wanted="an address of this machine",
            flag=flag_of("server_name"),
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
    check(options)
    for i, key in enumerate(options.api_keys):
        if key != key.strip():  # HTTP strips header values
            raise OptionError("api_keys", "contains a key with spaces around it (--api-keys).")
        if not (key.isascii() and key.isprintable()):  # clients encode others differently
            reason = f"contains other characters than printable ASCII in key {i + 1} (--api-keys)."
            raise OptionError("api_keys", reason)
    if options.proxy_url is not None:
        _check_proxy(options.proxy_url)
    read_sampling(options.generation_config)
    if options.otlp_traces_endpoint is not None:
        check_endpoint(options.otlp_traces_endpoint)


def _check_proxy(url: str) -> None:
    """Raise OptionError unless `url` is an address. The error does not show a password in it."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in _SCHEMES and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # such as a port that is no number
        is_address = False
    if not is_address:
        wanted = "http://HOST:PORT or https://HOST:PORT"
        raise refuse("proxy_url", without_password(url), wanted=wanted, flag=flag_of("proxy_url"))


def without_password(url: str) -> str:
    """Return an address without the name and password in it, for messages."""
    before, at, host = url.rpartition("@")
    scheme, slashes, _ = before.partition("://")
    return f"{scheme}{slashes}…@{host}" if at else url


def run_server(
    model_path: str,
    backend_config: TurbomindEngineConfig | None,
    *,
    chat_template_config: ChatTemplateConfig | None,
    options: ServerOptions,
    start_core: Callable[[], StartedCore] | None = None,
) -> int:
    """Load a model and serve it until SIGTERM or Ctrl-C, or until the engine fails.

    The port is reserved before the model is loaded and opened afterwards.

    Args:
        model_path: a Hugging Face folder, a GGUF file, a hub id, or `smollm2`.
        backend_config: options of the engine. None takes the defaults.
        chat_template_config: replaces the model's own template. None keeps it.
        options: options of the server.
        start_core: as in `load_engine`.

    Returns:
        the exit status: 1 after the engine has failed, which is logged, else 0.

    Raises:
        ValueError: if an option is wrong, the port is in use, or the model cannot be loaded.
    """
    from lmdeploy.engine.async_engine import AsyncEngine
    from lmdeploy.engine.load import TextOptions, load_engine
    from lmdeploy.serve.app import make_app
    from lmdeploy.serve.http.bodies import return_large_blocks

    check_options(options)
    config = TurbomindEngineConfig() if backend_config is None else backend_config
    check_instance("backend_config", config, kind=TurbomindEngineConfig)
    set_log_level(options.log_level)
    return_large_blocks()
    raise_descriptor_limit()
    tls = find_tls_files() if options.ssl else None
    sock = bind(options.server_name, options.server_port)
    stop_begun = threading.Event()
    with closing(sock), ExitStack() as resources:
        # It ends after the engine is closed, which the stack closes first.
        resources.enter_context(last_resort(stop_begun, grace=options.shutdown_timeout))
        texts = TextOptions(
            chat_template_config, options.reasoning_parser, options.tool_call_parser
        )
        engine = AsyncEngine(*load_engine(model_path, config, options=texts, start_core=start_core))
        resources.callback(engine.close)
        sampling = read_sampling(options.generation_config)
        if sampling is not None:
            engine.text.sampling = sampling
        name = options.model_name or hub_address(model_path)[0]
        options.model_name = name
        app = make_app(engine, options, enable_metrics=config.enable_metrics)
        host = f"[{options.server_name}]" if ":" in options.server_name else options.server_name
        listen(sock, options.server_name)
        url = f"{'http' if tls is None else 'https'}://{host}:{sock.getsockname()[1]}"
        print("\n".join([*engine.start_lines(), format_line(engine, options)]))
        print(f"Serving {name} at {url}\nOpen it in a browser, or send a request with:")
        print(curl_line(url, name, with_key=bool(options.api_keys)))
        sys.stdout.flush()
        server = GracefulServer(
            make_settings(app, options, tls=tls), engine, grace=options.shutdown_timeout
        )
        if options.proxy_url is not None:
            public = _public_url(url, options)
            server.on_stop = register_at_proxy(options.proxy_url, public, model_name=name)
        server.on_begin_stop = stop_begun.set
        server.run(sockets=[sock])
        return int(server.engine_has_failed)


def format_line(engine: AsyncEngine, options: ServerOptions) -> str:
    """Return the line about the parsers of answers that is printed at the start."""
    reasoning, tools = engine.text.chat_format.parser_names
    line = f"Chat format: reasoning {reasoning}, tool calls {tools}"
    if options.reasoning_parser is not None or options.tool_call_parser is not None:
        return line
    return f"{line} (chosen by the model; --reasoning-parser and --tool-call-parser change it)"


def _public_url(url: str, options: ServerOptions) -> str:
    """Return the address of this server for other machines."""
    if options.server_name not in ("0.0.0.0", "::"):
        return url
    proxy = urlsplit(options.proxy_url or "")
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((proxy.hostname, proxy.port or 80))  # sends nothing; it chooses the route
        return f"{urlsplit(url).scheme}://{probe.getsockname()[0]}:{urlsplit(url).port}"


def register_at_proxy(proxy_url: str, url: str, *, model_name: str) -> Callable[[], None]:
    """Register a server at an LMDeploy proxy in the background. Return what removes it.

    The proxy asks the server for its models, so the server must listen. If the proxy does not
    answer, the registration is tried again a few times. A name and password in the address are sent
    as basic authentication.
    """
    stopped = threading.Event()
    parts = urlsplit(proxy_url)
    shown = without_password(proxy_url)
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    headers = {"Content-Type": "application/json"}
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"

    def send(path: str, body: dict[str, Any]) -> None:
        request = Request(address + path, json.dumps(body).encode(), headers)
        urlopen(request, timeout=_PROXY_SECONDS).close()

    def register() -> None:
        for _ in range(_PROXY_TRIES):
            try:
                send("/nodes/add", {"url": url, "status": {"models": [model_name]}})
            except (OSError, HTTPException) as error:
                logger.error("The proxy %s did not register the server: %s", shown, error)
            else:
                logger.info("The server is registered at the proxy %s.", shown)
                return
            if stopped.wait(_PROXY_SECONDS):
                return

    def remove() -> None:
        stopped.set()
        thread.join(_PROXY_SECONDS)
        with suppress(OSError, HTTPException):
            send("/nodes/remove", {"url": url})

    thread = threading.Thread(target=register, name="proxy", daemon=True)
    thread.start()
    return remove


def make_settings(
    app: Starlette, options: ServerOptions, *, tls: TlsFiles | None
) -> uvicorn.Config:
    """Return uvicorn's settings. The access log has no queries, because they may contain keys."""
    level = options.log_level.lower()
    settings = uvicorn.Config(
        app,
        http=LimitedProtocol,
        loop="uvloop",  # asyncio receives into new blocks of 256 KiB, which fragments the heap
        ws="none",
        log_level=level,
        access_log=level in ("debug", "info"),
        timeout_keep_alive=options.timeout_keep_alive,
        ssl_keyfile=None if tls is None else tls.keyfile,
        ssl_certfile=None if tls is None else tls.certfile,
    )
    logging.getLogger("uvicorn.access").addFilter(without_query)
    return settings


@contextmanager
def last_resort(
    begun: threading.Event, *, grace: int, end: Callable[[int], None] = os._exit
) -> Iterator[None]:
    """End the process if the block has not ended long after a stop has begun.

    Args:
        begun: is set when the stop begins.
        grace: seconds in which running requests may end.
        end: ends the process at once with a status.
    """
    has_ended = threading.Event()
    limit = grace + _LAST_WORDS_SECONDS + _LAST_RESORT_SECONDS

    def watch() -> None:
        begun.wait()
        if not has_ended.wait(limit):
            logger.critical("The server did not stop within %d s. The process ends now.", limit)
            end(1)

    threading.Thread(target=watch, name="last-resort", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()
        begun.set()


class GracefulServer(LimitedServer):
    """Serves until a signal arrives. Then it closes the engine, which ends all streams properly.

    It also stops when the engine has failed, because a failed engine serves no request any more.
    Running requests continue for `grace` seconds. Then each of them ends with an error, and `run`
    returns. A second signal ends the process at once.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, *, grace: int) -> None:
        config.timeout_graceful_shutdown = grace + _LAST_WORDS_SECONDS
        super().__init__(config)
        self._engine = engine
        self._grace = grace
        self.engine_has_failed = False
        # Both are called when the server begins to stop, and on_stop in a worker thread.
        self.on_begin_stop: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, or end the process if it is stopping. uvicorn's signal handlers call this.

        uvicorn would raise the signal again after an orderly stop, and the process would fail.
        """
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server must stop. uvicorn calls this every 0.1 s."""
        if not self.should_exit and not self._engine.healthy:
            reason = self._engine.failure.rstrip(".")
            logger.critical("The engine has failed: %s. The server stops.", reason)
            self.engine_has_failed = self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the running requests and close the engine. uvicorn calls this when it stops."""
        if self.server_state.tasks and self._grace > 0 and not self.engine_has_failed:
            logger.warning(
                "The server is stopping. Running requests continue for up to %d s "
                "(--shutdown-timeout). The next signal ends the process at once.",
                self._grace,
            )
        self.on_begin_stop()
        closing = asyncio.create_task(self._close_engine())
        await asyncio.to_thread(self.on_stop)
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_engine(self) -> None:
        await asyncio.sleep(self._grace)
        # Texts that are being tokenized may occupy all threads of the loop.
        self._engine.text.tokenizer.close()
        await asyncio.to_thread(self._engine.close)
