"""The options of a server and the state that its routes share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmdeploy.chat.formats.base import ChatFormat
    from lmdeploy.engine.async_engine import AsyncEngine
    from lmdeploy.serve.admission import Admission
    from lmdeploy.serve.http.bodies import BodyReader
    from lmdeploy.serve.http.response_store import ResponseStore
    from lmdeploy.serve.http.sessions import Sessions
    from lmdeploy.serve.http.tracing import RequestTracer
    from lmdeploy.serve.metrics import ServerMetrics
    from lmdeploy.serve.rendering.process import MarkdownProcess


@dataclass
class ServerOptions:
    """The options of the HTTP server. TurbomindEngineConfig has those of the engine."""

    model_name: str | None = None
    generation_config: str = "auto"  # "none", or a path that replaces the model's own
    proxy_url: str | None = None  # the LMDeploy proxy at which the server registers
    server_name: str = "127.0.0.1"
    server_port: int = 23333
    api_keys: list[str] = field(default_factory=list)
    share_prefix_cache: bool = False  # False separates the prefix caches of the API keys
    allow_origins: list[str] | None = None  # None allows pages of this computer
    allowed_hosts: list[str] = field(default_factory=list)
    allow_credentials: bool = False
    allow_methods: list[str] = field(default_factory=lambda: ["*"])
    allow_headers: list[str] = field(default_factory=lambda: ["*"])
    disable_fastapi_docs: bool = False
    disable_web_page: bool = False
    log_level: str = "WARNING"
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    enable_abort_handling: bool = False
    allow_terminate_by_client: bool = False
    shutdown_timeout: int = 3  # seconds
    timeout_keep_alive: int = 75  # seconds that a connection may idle, as long as proxies expect
    max_concurrent_requests: int | None = None  # None disables the limit
    max_log_len: int = 0  # characters of each prompt in the log
    ssl: bool = False  # the files are in SSL_KEYFILE and SSL_CERTFILE
    otlp_traces_endpoint: str | None = None  # None makes no traces


def _raise_sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


@dataclass
class ServerState:
    """The state that the routes share. Only the server's event loop may use it."""

    engine: AsyncEngine
    model_name: str
    metrics: ServerMetrics
    admission: Admission
    markdown: MarkdownProcess
    bodies: BodyReader
    responses: ResponseStore
    sessions: Sessions
    enable_metrics: bool = True
    enable_abort_handling: bool = False
    allow_terminate: bool = False
    has_keys: bool = False
    terminate: Callable[[], None] = _raise_sigterm
    enable_web_page: bool = True
    max_log_len: int = 0
    created: int = 0
    tracer: RequestTracer | None = None

    @property
    def chat_format(self) -> ChatFormat:
        return self.engine.loaded.chat_format
