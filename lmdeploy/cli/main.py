"""The command `lmdeploy`. It reports every failure as one line and an exit status."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from lmdeploy.base.logs import LOG_FORMAT
from lmdeploy.chat.formats.registry import REASONING_PARSERS, TOOL_CALL_PARSERS, parser_names
from lmdeploy.cli.chat import add_sampling_flags
from lmdeploy.cli.engine_flags import OneLineParser, add_common_flags, fail
from lmdeploy.cli.kv_store import add_kv_store_commands
from lmdeploy.cli.lite import add_lite_commands
from lmdeploy.version import __version__


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = OneLineParser(prog="lmdeploy", description="LLM inference with a quantized KV cache.")
    parser.add_argument("-v", "--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chat = commands.add_parser("chat", help="chat with a model in the terminal")
    add_common_flags(chat)
    add_sampling_flags(chat)
    chat.set_defaults(run=_chat)
    serve = commands.add_parser("serve", help="serve a model")
    parser.model_commands, serve.model_commands = ("chat", "serve api_server"), ("api_server",)
    servers = serve.add_subparsers(dest="server", required=True, metavar="SERVER")
    api_server = servers.add_parser("api_server", help="serve an OpenAI-compatible HTTP API")
    add_common_flags(api_server)
    _add_server_flags(api_server)
    api_server.set_defaults(run=_api_server)
    ray = servers.add_parser("ray", help="serve the same API with several engines, on Ray Serve")
    add_common_flags(ray)
    _add_replica_flags(ray)
    _add_server_flags(ray)
    ray.set_defaults(run=_ray)
    add_lite_commands(
        commands.add_parser("lite", help="calibrate the KV cache, or quantize weights")
    )
    add_kv_store_commands(
        commands.add_parser("kv-store", help="show or empty a store of KV blocks")
    )
    check_env = commands.add_parser("check_env", help="show the installation and the hardware")
    check_env.add_argument("--dump-file", default=None, help="also write the report to this file")
    check_env.set_defaults(run=_check_env, log_level="WARNING")
    return parser


def _add_replica_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--num-replicas", type=int, default=1, metavar="N", help="engines (default: %(default)s)"
    )
    group.add_argument(
        "--min-replicas",
        type=int,
        default=None,
        metavar="N",
        help="let Ray Serve run this many to --num-replicas engines, by load (default: all)",
    )
    group.add_argument(
        "--cpus-per-replica",
        type=float,
        default=None,
        metavar="CORES",
        help="cores that Ray reserves for an engine (default: this machine's, divided by N)",
    )
    group.add_argument(
        "--address",
        default=None,
        help="Ray cluster of this machine to join: auto or host:port (default: start one here)",
    )


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--server-name", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    group.add_argument(
        "--server-port",
        type=int,
        default=23333,
        help="TCP port; 0 takes any free port (default: %(default)s)",
    )
    _add_model_flags(group)
    group.add_argument(
        "--api-keys",
        nargs="*",
        default=None,
        help="clients must send one of these keys (default: those in the environment variable "
        "LMDEPLOY_API_KEYS, separated by spaces, or no key)",
    )
    group.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="let requests with different API keys share cached prefixes (default: separate them)",
    )
    _add_http_flags(group)
    group.add_argument(
        "--disable-fastapi-docs",
        action="store_true",
        help="disable /openapi.json, the description of the API",
    )
    group.add_argument(
        "--disable-web-page",
        action="store_true",
        help="disable the web page at / and POST /render_markdown",
    )
    for flag, part, parsers in (
        ("--reasoning-parser", "reasoning", REASONING_PARSERS),
        ("--tool-call-parser", "tool calls", TOOL_CALL_PARSERS),
    ):
        group.add_argument(
            flag,
            choices=parser_names(parsers),
            default=None,
            help=f"format of {part} in responses; none leaves them in the text (default: chosen by "
            "the model)",
        )
    _add_operation_flags(group)
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print the memory plan and exit without loading weights (a hub id is downloaded)",
    )


def _add_operation_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of limits, shutdown, logs and traces."""
    group.add_argument(
        "--enable-abort-handling",
        action="store_true",
        help="enable POST /abort_request, which ends the requests of a session, or all",
    )
    group.add_argument(
        "--allow-terminate-by-client",
        action="store_true",
        help="enable /terminate, which stops the server",
    )
    group.add_argument(
        "--max-concurrent-requests",
        type=int,
        default=None,
        metavar="N",
        help="most requests served at the same time; others receive status 503 (default: no limit)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=int,
        default=3,
        metavar="SECONDS",
        help="time that running requests may continue after SIGTERM or Ctrl-C (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--timeout-keep-alive",
        type=int,
        default=75,
        metavar="SECONDS",
        help="time that a connection without a request stays open (default: %(default)s). A proxy "
        "must close idle connections earlier",
    )
    group.add_argument(
        "--max-log-len",
        type=int,
        default=0,
        metavar="CHARACTERS",
        help="most characters of each prompt in the log, which shows prompts only with "
        "--log-level INFO or DEBUG (default: %(default)s)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        default=None,
        metavar="URL",
        help="OpenTelemetry collector that receives traces over HTTP, such as "
        "http://localhost:4318/v1/traces (default: no traces)",
    )


def _add_http_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--allow-origins",
        nargs="+",
        default=None,
        metavar="ORIGIN",
        help="CORS: origins of web pages that may use the server, such as https://example.com; * "
        "allows all (default: pages of this computer)",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="other names under which clients reach the server, such as a proxy's; * accepts all "
        "(default: the local names if --server-name is a loopback address, else all)",
    )
    for flag, text in (
        ("--allow-methods", "allowed HTTP methods"),
        ("--allow-headers", "allowed request headers"),
    ):
        group.add_argument(flag, nargs="+", default=["*"], help=f"CORS: {text} (default: all)")
    group.add_argument(
        "--allow-credentials",
        action="store_true",
        help="CORS: allow cookies and logins (default: off)",
    )
    group.add_argument(
        "--ssl",
        action="store_true",
        help="serve HTTPS with the PEM files in the environment variables SSL_KEYFILE and "
        "SSL_CERTFILE",
    )


def _add_model_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of the model in the API and of the proxy."""
    group.add_argument(
        "--model-name", default=None, help="name of the model in the API (default: its path)"
    )
    group.add_argument(
        "--generation-config",
        default="auto",
        metavar="PATH",
        help="defaults of the sampling fields: auto (the model's generation_config.json), none or "
        "lmdeploy (neutral ones), or the path of another generation_config.json or of its folder "
        "(default: auto)",
    )
    group.add_argument(
        "--proxy-url",
        default=None,
        metavar="URL",
        help="LMDeploy proxy at which the server registers as soon as it listens (default: none)",
    )


def _chat(args: argparse.Namespace) -> int:
    from lmdeploy.cli.chat import run_chat

    return run_chat(args)


def _api_server(args: argparse.Namespace) -> int:
    from lmdeploy.cli.serve import run_api_server

    return run_api_server(args)


def _ray(args: argparse.Namespace) -> int:
    from lmdeploy.cli.serve import run_ray

    return run_ray(args)


def _check_env(args: argparse.Namespace) -> int:
    from lmdeploy.cli.check_env import run_check_env

    return run_check_env(args.dump_file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    The status is 0 for success, 2 for wrong input, 1 for an internal error and 130 after Ctrl-C.
    """
    args = make_parser().parse_args(argv)
    logging.basicConfig(format=LOG_FORMAT)
    logging.getLogger("lmdeploy").setLevel(args.log_level)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except (ValueError, OSError, MemoryError) as error:
        if args.log_level == "DEBUG":
            raise
        fail(str(error) or type(error).__name__)
    except Exception as error:
        if args.log_level == "DEBUG":
            raise
        fail(f"{type(error).__name__}: {error} (--log-level DEBUG shows the traceback)", 1)


if __name__ == "__main__":
    sys.exit(main())
