"""The command `lmdeploy`. It reports every failure as one line and an exit status."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from lmdeploy.base.logs import LOG_FORMAT
from lmdeploy.chat.formats.registry import REASONING_PARSERS, TOOL_CALL_PARSERS, parser_names
from lmdeploy.cli.engine_flags import OneLineParser, add_common_flags, fail
from lmdeploy.cli.lite import add_lite_commands
from lmdeploy.version import __version__


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = OneLineParser(prog="lmdeploy", description="LLM inference with a quantized KV cache.")
    parser.add_argument("-v", "--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chat = commands.add_parser("chat", help="chat with a model in the terminal")
    add_common_flags(chat)
    chat.set_defaults(run=_chat)
    serve = commands.add_parser("serve", help="serve a model")
    servers = serve.add_subparsers(dest="server", required=True, metavar="SERVER")
    api_server = servers.add_parser("api_server", help="serve an OpenAI-compatible HTTP API")
    add_common_flags(api_server)
    _add_server_flags(api_server)
    api_server.set_defaults(run=_api_server)
    add_lite_commands(
        commands.add_parser("lite", help="calibrate the KV cache and choose its formats")
    )
    check_env = commands.add_parser("check_env", help="show the installation and the hardware")
    check_env.add_argument("--dump-file", default=None, help="also write the report to this file")
    check_env.set_defaults(run=_check_env, log_level="WARNING")
    return parser


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
    group.add_argument(
        "--model-name", default=None, help="name of the model in the API (default: its path)"
    )
    group.add_argument(
        "--api-keys",
        nargs="*",
        default=None,
        help="clients must send one of these keys (default: no key)",
    )
    for flag, text in (
        ("--allow-origins", "allowed origins"),
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
        "--disable-fastapi-docs",
        action="store_true",
        help="disable the pages /docs and /openapi.json",
    )
    for flag, part, parsers in (
        ("--reasoning-parser", "reasoning", REASONING_PARSERS),
        ("--tool-call-parser", "tool calls", TOOL_CALL_PARSERS),
    ):
        group.add_argument(
            flag,
            choices=parser_names(parsers),
            default=None,
            help=f"format of {part} in responses (default: chosen by the model)",
        )
    group.add_argument(
        "--enable-abort-handling",
        action="store_true",
        help="enable POST /abort_request, which ends all requests",
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
        "--dry-run",
        action="store_true",
        help="print the memory plan and exit without loading weights (a hub id is downloaded)",
    )


def _chat(args: argparse.Namespace) -> int:
    from lmdeploy.cli.chat import run_chat

    return run_chat(args)


def _api_server(args: argparse.Namespace) -> int:
    from lmdeploy.cli.serve import run_api_server

    return run_api_server(args)


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
