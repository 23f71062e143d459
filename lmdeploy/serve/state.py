"""The options of a server and the state that its routes share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from lmdeploy.base.checks import check_instance
from lmdeploy.base.logs import LOG_LEVELS
from lmdeploy.config.option import Option

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


def _reasoning_parsers() -> tuple[str, ...]:
    from lmdeploy.chat.formats.registry import REASONING_PARSERS, parser_names

    return parser_names(REASONING_PARSERS)


def _tool_call_parsers() -> tuple[str, ...]:
    from lmdeploy.chat.formats.registry import TOOL_CALL_PARSERS, parser_names

    return parser_names(TOOL_CALL_PARSERS)


_NAMES = Option(high=1024)


@dataclass
class ServerOptions:
    """The options of the HTTP server. TurbomindEngineConfig has those of the engine.

    Args:
        model_name: name of the model in the API (default: its path).
        generation_config: defaults of the sampling fields: auto (the model's
            generation_config.json), none or lmdeploy (neutral ones), or the path of another
            generation_config.json or of its folder. They apply to fields that a request lacks.
        proxy_url: LMDeploy proxy at which the server registers as soon as it listens (default:
            none). The proxy then sends it requests.
        server_name: address to listen on. 0.0.0.0 also accepts other computers.
        server_port: TCP port; 0 takes any free port.
        api_keys: clients must send one of these keys (default: those in the environment variable
            LMDEPLOY_API_KEYS, separated by spaces, or no key). Without a key, everybody who reaches
            the server can use it.
        share_prefix_cache: let requests with different API keys share cached prefixes (default:
            separate them). That saves computation, but response times then tell a client what
            others have sent.
        allow_origins: CORS: origins of web pages that may use the server, such as
            https://example.com; * allows all (default: pages of this computer).
        allowed_hosts: other names under which clients reach the server, such as a proxy's; *
            accepts all (default: the local names if server_name is a loopback address, else all).
            Requests for other names are refused.
        allow_credentials: CORS: allow cookies and logins (default: off).
        allow_methods: CORS: allowed HTTP methods (default: all).
        allow_headers: CORS: allowed request headers (default: all).
        disable_fastapi_docs: disable /openapi.json, the description of the API.
        disable_web_page: disable the web page at / and POST /render_markdown.
        log_level: lowest level of the messages. DEBUG also shows tracebacks.
        reasoning_parser: format of reasoning in responses; none leaves it in the text (default:
            chosen by the model).
        tool_call_parser: format of tool calls in responses; none leaves them in the text (default:
            chosen by the model).
        enable_abort_handling: enable POST /abort_request, which ends the requests of a session, or
            all.
        allow_terminate_by_client: enable /terminate, which stops the server.
        shutdown_timeout: time that running requests may continue after SIGTERM or Ctrl-C. Then they
            end with an error.
        timeout_keep_alive: time that a connection without a request stays open. A proxy must close
            idle connections earlier.
        max_concurrent_requests: most requests served at the same time; others receive status 503
            (default: no limit). A limit keeps waiting times short.
        max_log_len: most characters of each prompt in the log, which shows prompts only with
            log_level INFO or DEBUG. Logs then contain what users write.
        ssl: serve HTTPS with the PEM files in the environment variables SSL_KEYFILE and
            SSL_CERTFILE.
        otlp_traces_endpoint: OpenTelemetry collector that receives traces over HTTP, such as
            http://localhost:4318/v1/traces (default: no traces). Every request that generates then
            sends a span.
    """

    model_name: Annotated[
        str | None, Option(check=partial(check_instance, "model_name", kind=str))
    ] = None
    generation_config: Annotated[str, Option(metavar="PATH")] = "auto"
    proxy_url: Annotated[str | None, Option(metavar="URL")] = None
    server_name: str = "127.0.0.1"
    server_port: Annotated[int, Option(low=0, high=65535)] = 23333
    api_keys: Annotated[list[str], replace(_NAMES, num_values="*")] = field(default_factory=list)
    share_prefix_cache: bool = False
    allow_origins: Annotated[list[str] | None, replace(_NAMES, metavar="ORIGIN")] = None
    allowed_hosts: Annotated[list[str], replace(_NAMES, metavar="NAME")] = field(
        default_factory=list
    )
    allow_credentials: bool = False
    allow_methods: Annotated[list[str], _NAMES] = field(default_factory=lambda: ["*"])
    allow_headers: Annotated[list[str], _NAMES] = field(default_factory=lambda: ["*"])
    disable_fastapi_docs: bool = False
    disable_web_page: bool = False
    log_level: Annotated[str, Option(choices=LOG_LEVELS, flags=None)] = "WARNING"
    reasoning_parser: Annotated[str | None, Option(choices=_reasoning_parsers)] = None
    tool_call_parser: Annotated[str | None, Option(choices=_tool_call_parsers)] = None
    enable_abort_handling: bool = False
    allow_terminate_by_client: bool = False
    shutdown_timeout: Annotated[int, Option(low=0, metavar="SECONDS")] = 3
    timeout_keep_alive: Annotated[int, Option(low=1, metavar="SECONDS")] = 75
    max_concurrent_requests: Annotated[int | None, Option(low=1, metavar="N")] = None
    max_log_len: Annotated[int, Option(low=0, metavar="CHARACTERS")] = 0
    ssl: bool = False
    otlp_traces_endpoint: Annotated[str | None, Option(metavar="URL")] = None


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
    options: ServerOptions = field(default_factory=ServerOptions)
    enable_metrics: bool = True
    terminate: Callable[[], None] = _raise_sigterm
    created: int = 0
    tracer: RequestTracer | None = None

    @property
    def chat_format(self) -> ChatFormat:
        return self.engine.text.chat_format
