"""The two entry points of LMDeploy's Python API."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

# These two imports bind the modules `lmdeploy.pipeline` and `lmdeploy.serve` before the package
# binds the functions of the same names.
from lmdeploy.pipeline import Pipeline
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
    """Loads a model for offline use.

    Args:
        model_path: a Hugging Face folder, a GGUF file, a hub id, or `smollm2`.
        backend_config: options of the engine.
        chat_template_config: replaces the model's own template.
        log_level: DEBUG, INFO, WARNING, ERROR or CRITICAL.

    Raises:
        ValueError: a wrong option, or a model that cannot be loaded.
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
    """Serves a model over HTTP until Ctrl-C; `lmdeploy serve api_server` has more options.

    `shutdown_timeout`: seconds that running answers may go on after that.
    """
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
        run_server(
            model_path, backend_config, chat_template_config=chat_template_config, options=options
        )
