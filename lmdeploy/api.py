"""The entry points of the Python API: `pipeline`, `serve` and `client`, as in LMDeploy."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

# These two imports bind the modules `lmdeploy.pipeline` and `lmdeploy.serve` before the package
# binds the functions of the same names.
from lmdeploy.pipeline import Pipeline
from lmdeploy.serve.openai.api_client import APIClient
from lmdeploy.serve.state import ServerOptions

if TYPE_CHECKING:
    from lmdeploy.config.chat_template import ChatTemplateConfig
    from lmdeploy.config.engine import TurbomindEngineConfig


def pipeline(
    model_path: str,
    backend_config: TurbomindEngineConfig | None = None,
    chat_template_config: ChatTemplateConfig | None = None,
    log_level: str = "WARNING",
) -> Pipeline:
    """Load a model and return a Pipeline for offline use.

    Args:
        model_path: a Hugging Face folder, a GGUF file, a hub id, or `smollm2`.
        backend_config: options of the engine. None takes the defaults.
        chat_template_config: replaces the model's own template. None keeps it.
        log_level: DEBUG, INFO, WARNING, ERROR or CRITICAL.

    Raises:
        ValueError: if an option is wrong or the model cannot be loaded.
    """
    return Pipeline(model_path, backend_config, chat_template_config, log_level)


def serve(
    model_path: str,
    model_name: str | None = None,
    backend_config: TurbomindEngineConfig | None = None,
    chat_template_config: ChatTemplateConfig | None = None,
    *,
    server_name: str = "127.0.0.1",
    server_port: int = 23333,
    log_level: str = "WARNING",
    api_keys: list[str] | str | None = None,
    shutdown_timeout: int = 3,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C.

    `lmdeploy serve api_server` has more options.

    Args:
        model_path: a Hugging Face folder, a GGUF file, a hub id, or `smollm2`.
        model_name: the model's name in the API. None takes `model_path`.
        backend_config: options of the engine. None takes the defaults.
        chat_template_config: replaces the model's own template. None keeps it.
        server_name: address to listen on.
        server_port: TCP port. 0 takes any free port.
        log_level: DEBUG, INFO, WARNING, ERROR or CRITICAL.
        api_keys: keys that clients must send as `Authorization: Bearer <key>`. None or an empty
            list accepts every client.
        shutdown_timeout: seconds that running requests may continue after a signal.

    Raises:
        ValueError: if an option is wrong, the port is in use, or the model cannot be loaded.
        EngineFailure: if the engine has failed, which ends the server.
    """
    from lmdeploy.base.errors import EngineFailure
    from lmdeploy.serve.server import run_server

    options = ServerOptions(
        model_name=model_name,
        server_name=server_name,
        server_port=server_port,
        log_level=log_level,
        api_keys=[api_keys] if isinstance(api_keys, str) else list(api_keys or []),
        shutdown_timeout=shutdown_timeout,
    )
    with suppress(KeyboardInterrupt):
        status = run_server(
            model_path, backend_config, chat_template_config=chat_template_config, options=options
        )
        if status:
            raise EngineFailure("The server has stopped because its engine failed. See its log.")


def client(api_server_url: str = "http://127.0.0.1:23333", api_key: str | None = None) -> APIClient:
    """Return a client of a running server.

    Args:
        api_server_url: address of the server.
        api_key: sent with every request. None sends no key.

    Raises:
        ValueError: if the address does not begin with http:// or https://.
    """
    return APIClient(api_server_url, api_key)
