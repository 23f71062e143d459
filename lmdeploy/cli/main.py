"""`lmdeploy …`: parse, run, and turn every expected failure into one line and a status."""

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
    """The whole command line."""
    parser = OneLineParser(prog="lmdeploy", description="LLM inference with a quantized KV cache.")
    parser.add_argument("-v", "--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    add_common_flags(chat)
    chat.set_defaults(run=_chat)
    serve = commands.add_parser("serve", help="serve a model")
    servers = serve.add_subparsers(dest="server", required=True, metavar="SERVER")
    api_server = servers.add_parser("api_server", help="an OpenAI-compatible HTTP server")
    add_common_flags(api_server)
    _add_server_flags(api_server)
    api_server.set_defaults(run=_api_server)
    add_lite_commands(commands.add_parser("lite", help="calibrate a cache, choose its formats"))
    check_env = commands.add_parser("check_env", help="what is installed, what the machine has")
    check_env.add_argument("--dump-file", default=None, help="write the report there as well")
    check_env.set_defaults(run=_check_env, log_level="WARNING")
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--server-name", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    group.add_argument(
        "--server-port", type=int, default=23333, help="0: any free port (default: %(default)s)"
    )
    group.add_argument("--model-name", default=None, help="its name in the API; default: the path")
    group.add_argument("--api-keys", nargs="*", default=None, help="keys that clients must send")
    for flag, text in (
        ("--allow-origins", "origins that browsers may call from"),
        ("--allow-methods", "HTTP methods that browsers may use"),
        ("--allow-headers", "request headers that browsers may send"),
    ):
        group.add_argument(flag, nargs="+", default=["*"], help=f"CORS: {text} (default: all)")
    group.add_argument(
        "--allow-credentials",
        action="store_true",
        help="CORS: browsers may send cookies and logins (default: not)",
    )
    group.add_argument("--disable-fastapi-docs", action="store_true", help="no /docs")
    for flag, part, parsers in (
        ("--reasoning-parser", "reasoning", REASONING_PARSERS),
        ("--tool-call-parser", "tool calls", TOOL_CALL_PARSERS),
    ):
        group.add_argument(
            flag,
            choices=parser_names(parsers),
            default=None,
            help=f"format of {part} in answers (default: chosen by the model)",
        )
    group.add_argument(
        "--enable-abort-handling", action="store_true", help="POST /abort_request ends all answers"
    )
    group.add_argument(
        "--max-concurrent-requests",
        type=int,
        default=None,
        metavar="N",
        help="more at once are told to try again later, with status 503 (default: any number)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=int,
        default=3,
        metavar="SECONDS",
        help="how long running answers may go on after SIGTERM or Ctrl-C (default 3)",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print the memory plan and exit before weights are loaded (a hub id is downloaded)",
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
    """Runs a command; the exit status. 2: wrong input, 1: our failure, 130: interrupted."""
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
        fail(f"{type(error).__name__}: {error} (--log-level DEBUG shows where)", 1)


if __name__ == "__main__":
    sys.exit(main())
