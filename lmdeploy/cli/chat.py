"""`lmdeploy chat`: a chat in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmdeploy.base.checks import OptionError
from lmdeploy.cli.engine_flags import engine_config
from lmdeploy.config.chat_template import parse_chat_template
from lmdeploy.config.generation import GenerationConfig

if TYPE_CHECKING:
    from rich.console import Console

    from lmdeploy.pipeline import Pipeline, Session
    from lmdeploy.response import Response

_FULL = "session_len or the KV cache is full; start a new conversation with /clear"
_CLEAR = "Start a new conversation with /clear."
_HELP = "/help: show this text   /clear: start anew   /exit: quit   Ctrl-C: stop the response"


def run_chat(args: argparse.Namespace) -> int:
    """Load the model and chat until /exit or the end of the input. Return the exit status."""
    from rich.console import Console

    from lmdeploy.pipeline import Pipeline

    config, template = engine_config(args), parse_chat_template(args.chat_template)
    console = Console(highlight=False)
    with Pipeline(args.model_path, config, template, args.log_level) as pipeline:
        for line in pipeline.engine.start_lines():
            console.print(line, markup=False)
        console.print(_HELP, style="dim", markup=False)
        talk(pipeline, console, read=lambda: console.input("[bold]you>[/bold] "))
    return 0


def talk(pipeline: Pipeline, console: Console, *, read: Callable[[], str]) -> None:
    """Read messages with `read` and print the responses as they arrive."""
    session = pipeline.session()
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print()
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            session = pipeline.session()
            console.print("Started a new conversation.", style="dim")
        elif line.startswith("/"):
            console.print(_HELP, style="dim", markup=False)
        elif line:
            _answer(pipeline, session, console=console, line=line)


class _Printer:
    """Prints the chunks of a response: reasoning and tool calls dim, content on new lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._style: str | None = None

    def __call__(self, chunk: Response) -> None:
        if chunk.reasoning_content:
            self._print(chunk.reasoning_content, "dim")
        self._print(chunk.text, "none")
        for call in chunk.tool_calls or []:
            if call.function.name:
                self._print(f"\n[{call.function.name}] ", "dim")
            self._print(call.function.arguments, "dim")

    def _print(self, text: str, style: str) -> None:
        if not text:
            return
        if self._style not in (None, style):
            self._console.print()
        self._style = style
        self._console.print(text, end="", style=style, markup=False, soft_wrap=True)


def _answer(pipeline: Pipeline, session: Session, *, console: Console, line: str) -> None:
    limit = pipeline.engine.max_request_tokens
    text = ""
    show = _Printer(console)
    try:
        config = GenerationConfig(max_new_tokens=limit, **pipeline.engine.loaded.sampling)
        for chunk in pipeline.stream_infer(session.messages(line), config):
            text += chunk.text
            show(chunk)
            if chunk.finish_reason == "error":
                console.print(f"\nerror: {chunk.error_message}", style="red", markup=False)
                return
            if chunk.finish_reason == "length":
                console.print(f" [incomplete: {_FULL}]", style="dim", markup=False)
    except KeyboardInterrupt:
        console.print(" [stopped]", style="dim", markup=False)
        session.history.append((line, text))
        return
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False)
        if session.history and isinstance(error, OptionError) and error.field == "prompt":
            console.print(_CLEAR, style="dim", markup=False)
        return
    console.print()
    session.history.append((line, text))
