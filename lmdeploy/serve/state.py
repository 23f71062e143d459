"""The options of a server and the state that its routes share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmdeploy.chat.formats.base import ChatFormat
    from lmdeploy.engine.async_engine import AsyncEngine
    from lmdeploy.serve.admission import Admission
    from lmdeploy.serve.metrics import ServerMetrics


@dataclass
class ServerOptions:
    """The options of the HTTP server. TurbomindEngineConfig has those of the engine."""

    model_name: str | None = None
    server_name: str = "127.0.0.1"
    server_port: int = 23333
    api_keys: list[str] = field(default_factory=list)
    allow_origins: list[str] = field(default_factory=lambda: ["*"])
    allow_credentials: bool = False
    allow_methods: list[str] = field(default_factory=lambda: ["*"])
    allow_headers: list[str] = field(default_factory=lambda: ["*"])
    disable_fastapi_docs: bool = False
    log_level: str = "WARNING"
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    enable_abort_handling: bool = False
    shutdown_timeout: int = 3  # seconds
    max_concurrent_requests: int | None = None  # None disables the limit


@dataclass
class ServerState:
    """The state that the routes share. Only the server's event loop may use it."""

    engine: AsyncEngine
    model_name: str
    metrics: ServerMetrics
    admission: Admission
    enable_metrics: bool = True
    enable_abort_handling: bool = False
    created: int = 0

    @property
    def chat_format(self) -> ChatFormat:
        return self.engine.loaded.chat_format
