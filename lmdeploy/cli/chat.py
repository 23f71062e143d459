"""`lmdeploy chat`: a chat in the terminal."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, cast

from lmdeploy.base.checks import OptionError
from lmdeploy.cli.engine_flags import engine_config
from lmdeploy.cli.interrupts import on_ctrl_c
from lmdeploy.cli.option_flags import add_flags, flag_values
from lmdeploy.config.chat_template import parse_chat_template
from lmdeploy.config.generation import GenerationConfig

if TYPE_CHECKING:
    from rich.console import Console

    from lmdeploy.pipeline import Pipeline, Session
    from lmdeploy.response import Response

COMMANDS = {
    "/help": "show this text",
    "/clear": "start a new conversation",
    "/exit": "leave; exit, quit, /quit and Ctrl-D do the same",
}
_LEAVING = ("/exit", "/quit", "exit", "quit")
_KEYS = {
    "Ctrl-C": "stop the response",
    "Alt-Enter": "start a new line in the message",
    "Up, Ctrl-R": "earlier messages, search in them",
}
_START = "/help lists the commands. Ctrl-C stops a response, Ctrl-D leaves."
_FULL = "session_len or the KV cache is full; start a new conversation with /clear"
_CLEAR = "Start a new conversation with /clear."
_CHOSEN_BY_MODEL = "chosen by the model"
# The fields of GenerationConfig that have flags, and what happens without the flag.
_SAMPLING_FLAGS = {
    "temperature": _CHOSEN_BY_MODEL,
    "top_p": _CHOSEN_BY_MODEL,
    "top_k": _CHOSEN_BY_MODEL,
    "min_p": _CHOSEN_BY_MODEL,
    "repetition_penalty": _CHOSEN_BY_MODEL,
    "max_new_tokens": "no limit",
    "random_seed": "a new one for each response",
}
# A model could send commands to the terminal. Tabs and line ends are harmless.
_VISIBLE: dict[int, int | None] = {c: 0x2400 + c for c in range(0x20) if chr(c) not in "\t\n"}
_VISIBLE |= {ord("\r"): None, 0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_HOW_TO_SAMPLE = {"temperature", "top_p", "top_k", "min_p"}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of sampling. Without a flag, the model's own value is used."""
    add_flags(
        parser,
        GenerationConfig,
        title="sampling",
        names=_SAMPLING_FLAGS,
        defaults=_SAMPLING_FLAGS,
    )


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given fields of GenerationConfig. Raise ValueError for a wrong value."""
    values = flag_values(GenerationConfig, args, _SAMPLING_FLAGS)
    given = {name: value for name, value in values.items() if value is not None}
    if given.keys() & _HOW_TO_SAMPLE:
        given["do_sample"] = True  # even if the model's default is the most likely token
    GenerationConfig(**given)
    return given


def run_chat(args: argparse.Namespace) -> int:
    """Load the model and chat until /exit or the end of the input. Return the exit status."""
    from rich.console import Console

    from lmdeploy.pipeline import Pipeline

    config, template = engine_config(args), parse_chat_template(args.chat_template)
    options = sampling_options(args)
    console = Console(highlight=False)
    with Pipeline(args.model_path, config, template, args.log_level) as pipeline:
        for line in pipeline.engine.start_lines():
            console.print(line, markup=False, style="dim")
        console.print(_START, markup=False, style="dim")
        with message_reader(console) as read:
            talk(pipeline, console, read=read, options=options)
    return 0


@contextmanager
def message_reader(console: Console) -> Iterator[Callable[[], str]]:
    """Yield the function that reads messages: with editing in a terminal, else line by line."""
    if not (sys.stdin.isatty() and console.is_terminal):
        yield lambda: console.input("[bold]you>[/bold] ")
        return
    from lmdeploy.cli.line_reader import LineReader, no_echo

    with no_echo():
        yield LineReader(list(COMMANDS))


def talk(
    pipeline: Pipeline,
    console: Console,
    *,
    read: Callable[[], str],
    options: dict[str, Any] | None = None,
) -> None:
    """Read messages with `read` and print the responses as they arrive.

    Args:
        options: fields of GenerationConfig that replace the model's defaults.
    """
    session = pipeline.session()
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:  # between a response and the next prompt
            if not console.is_terminal:
                raise
            continue
        if line.lower() in _LEAVING:
            return
        if line == "/clear":
            session = pipeline.session()
            console.print("Started a new conversation.", style="dim")
        elif re.fullmatch(r"/\w*", line):
            console.print(_help(line), style="dim", markup=False)
        elif line:
            with suppress(KeyboardInterrupt):  # another one while the response ends
                _answer(pipeline, session, console=console, line=line, options=options or {})


def _help(command: str) -> str:
    rows = [f"  {name:<11}{text}" for name, text in (COMMANDS | _KEYS).items()]
    if command == "/help":
        return "\n".join(rows)
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ". The commands are:"
    return "\n".join([f"{command} is not a command{hint}", *([] if near else rows)])


def visible(text: str) -> str:
    """Return `text` with symbols in the place of control characters."""
    return text.translate(_VISIBLE)


class _Write(Protocol):
    def __call__(self, text: str, style: str = "") -> None: ...


@contextmanager
def _writer(console: Console) -> Iterator[_Write]:
    """Yield the function that writes the text of a response: formatted in a terminal, else raw."""
    if console.is_terminal and not console.is_dumb_terminal:
        from lmdeploy.cli.chat_markdown import THEME, MarkdownPrinter

        console.print()
        with console.use_theme(THEME), MarkdownPrinter(console) as printer:
            yield lambda text, style="": printer.write(visible(text), style)
        return
    last: str | None = None

    def write(text: str, style: str = "") -> None:
        nonlocal last
        if not text:
            return
        if last not in (None, style):
            console.print()
        last = style
        shown = visible(text) if console.is_terminal else text
        console.print(shown, end="", style=style or "none", markup=False, soft_wrap=True)

    try:
        yield write
    finally:
        if last is not None:
            console.print()


@contextmanager
def _until_ctrl_c(stream: Iterator[Response]) -> Iterator[Iterator[Response]]:
    """Yield the chunks of a stream. Ctrl-C raises KeyboardInterrupt where a chunk is awaited."""
    is_pressed = is_waiting = False

    def press() -> None:
        nonlocal is_pressed
        is_pressed = True
        if is_waiting:
            raise KeyboardInterrupt

    def chunks() -> Iterator[Response]:
        nonlocal is_waiting
        chunk: Response | None
        while True:
            is_waiting = True
            chunk = None if is_pressed else next(stream, None)
            is_waiting = False
            if is_pressed:
                raise KeyboardInterrupt
            if chunk is None:
                return
            yield chunk

    with on_ctrl_c(press):
        yield chunks()


def _show(chunk: Response, write: _Write) -> None:
    """Write a chunk: reasoning and tool calls dim."""
    write(chunk.reasoning_content or "", "dim")
    write(chunk.text)
    for call in chunk.tool_calls or []:
        if call.function.name:
            write(f"\n[{call.function.name}] ", "dim")
        write(call.function.arguments, "dim")


def _answer(
    pipeline: Pipeline,
    session: Session,
    *,
    console: Console,
    line: str,
    options: dict[str, Any],
) -> None:
    """Print the response and add the turn to the session, also after Ctrl-C."""
    limit = pipeline.engine.max_request_tokens
    text, last = "", None
    note, style = "", "dim"
    try:
        config = GenerationConfig(
            **{"max_new_tokens": limit} | pipeline.engine.text.sampling | options
        )
        stream = pipeline.stream_infer(session.messages(line), config)
        with (
            _until_ctrl_c(stream) as chunks,
            _writer(console) as write,
            closing(cast("Generator[Response]", stream)),
        ):
            for last in chunks:
                text += last.text
                _show(last, write)
    except KeyboardInterrupt:
        note = "[stopped]"
    except ValueError as error:
        note, style = f"error: {error}", "red"
        if session.history and isinstance(error, OptionError) and error.field == "prompt":
            note += f"\n{_CLEAR}"
    if last is not None and last.finish_reason == "error":
        note, style = f"error: {last.error_message}", "red"
    elif last is not None and last.finish_reason == "length":
        is_own = last.generate_token_len >= options.get("max_new_tokens", limit + 1)
        note = f"[incomplete: {'--max-new-tokens is reached' if is_own else _FULL}]"
    if note:
        console.print(note, style=style, markup=False)
    if console.is_terminal:
        console.print()
    if style == "dim" and (text or not note):
        session.history.append((line, text))
