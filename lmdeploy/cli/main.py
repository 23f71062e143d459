"""The command `lmdeploy`. It reports every failure as one line and an exit status."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from lmdeploy.base.logs import LOG_FORMAT
from lmdeploy.cli.chat import add_sampling_flags
from lmdeploy.cli.engine_flags import OneLineParser, add_common_flags, fail
from lmdeploy.cli.kv_store import add_kv_store_commands
from lmdeploy.cli.lite import add_lite_commands
from lmdeploy.cli.option_flags import add_flags
from lmdeploy.replicas.options import ReplicaOptions
from lmdeploy.serve.state import ServerOptions
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
    add_flags(ray, ReplicaOptions, title="replicas")
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


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ServerOptions, title="server")
    parser.set_defaults(api_keys=None)  # then those of the environment are used
    parser.add_argument(
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
