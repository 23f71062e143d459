"""Starting and running the server: load, bind, print where it listens."""

from __future__ import annotations

import json
import logging
import socket
import sys
from typing import TYPE_CHECKING

from lmdeploy.checks import check_int, refuse
from lmdeploy.messages import TurbomindEngineConfig
from lmdeploy.serve.state import ServerOptions

if TYPE_CHECKING:
    from lmdeploy.model import ChatTemplateConfig


def bind(server_name: str, server_port: int) -> socket.socket:
    """A listening socket. ValueError when the address cannot be used. Port 0: any free one."""
    check_int("server_port", server_port, low=0, high=65535, flag="--server-port")
    try:
        info = socket.getaddrinfo(server_name, server_port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise refuse(
            "server_name", server_name, wanted="an address", flag="--server-name"
        ) from None
    sock = socket.socket(info[0], socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ValueError(
            f"server_port: cannot listen on {server_name}:{server_port} ({error.strerror}), wanted "
            "a free port; change --server-port"
        ) from None
    sock.set_inheritable(True)
    return sock


def curl_line(url: str, model_name: str, *, with_key: bool) -> str:
    """A command to paste."""
    body = {"model": model_name, "messages": [{"role": "user", "content": "Who are you?"}]}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if with_key else ""
    return (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d '{json.dumps(body)}'"
    )


def run_server(
    model_path: str,
    backend_config: TurbomindEngineConfig | None,
    *,
    chat_template_config: ChatTemplateConfig | None,
    options: ServerOptions,
) -> None:
    """Serves until interrupted. The port is taken before the model is loaded."""
    import uvicorn

    from lmdeploy.serve.app import make_app
    from lmdeploy.serve.graceful_server import GracefulServer
    from lmdeploy.turbomind.engine import AsyncEngine

    logging.getLogger("lmdeploy").setLevel(options.log_level)
    config = backend_config or TurbomindEngineConfig()
    sock = bind(options.server_name, options.server_port)
    try:
        engine = AsyncEngine.load(
            model_path,
            config,
            chat_template_config=chat_template_config,
            answer_parser=options.reasoning_parser or options.tool_call_parser,
        )
        name = options.model_name or model_path
        options.model_name = name
        app = make_app(engine, options, enable_metrics=config.enable_metrics)
        host = f"[{options.server_name}]" if ":" in options.server_name else options.server_name
        url = f"http://{host}:{sock.getsockname()[1]}"
        print("\n".join(engine.start_lines()))
        print(f"Serving {name} at {url}  (try:)")
        print(curl_line(url, name, with_key=bool(options.api_keys)))
        sys.stdout.flush()
        level = options.log_level.lower()
        settings = uvicorn.Config(app, log_level=level, access_log=level in ("debug", "info"))
        GracefulServer(settings, engine).run(sockets=[sock])
    finally:
        sock.close()
