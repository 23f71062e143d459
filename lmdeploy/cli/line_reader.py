"""Reads the lines of a chat in a terminal, with editing and a history."""

from __future__ import annotations

import os
import stat
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from lmdeploy.base.files import user_cache_folder
from lmdeploy.cli.interrupts import on_ctrl_c

PROMPT = "you> "
_LEAVE = "Press Ctrl-C again or Ctrl-D to leave."
HISTORY_FILE = "chat_history"
MAX_HISTORY_BYTES = 1 << 20


@contextmanager
def no_echo() -> Iterator[None]:
    """Hide what is typed while a response arrives. The next prompt still receives it."""
    try:
        before = termios.tcgetattr(0)
    except termios.error:  # the input is no terminal
        yield
        return
    without = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(0, termios.TCSANOW, without)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)


class LineReader:
    """Reads one message at a time. Alt-Enter starts a new line in it."""

    def __init__(self, commands: Sequence[str]) -> None:
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._is_pressed = False
        self._session: PromptSession[str] = PromptSession(
            [("bold", PROMPT)],
            history=open_history(),
            completer=WordCompleter(list(commands), sentence=True),
            key_bindings=keys,
            prompt_continuation=" " * len(PROMPT),
            reserve_space_for_menu=len(commands) + 1,
        )

    def __call__(self) -> str:
        """Return the next message. Raise EOFError after Ctrl-D, or Ctrl-C twice without a text.

        Ctrl-C with a text removes the text.
        """
        is_leaving = False
        with on_ctrl_c(self._press):
            while True:
                if is_leaving:
                    print(_LEAVE)
                try:
                    return self._prompt()
                except KeyboardInterrupt:
                    text = self._session.default_buffer.text
                    self._session.default_buffer.reset()
                    if is_leaving and not text:
                        raise EOFError from None
                    is_leaving = not text

    def _prompt(self) -> str:
        """Return a message. Raise KeyboardInterrupt if Ctrl-C is pressed, or was before."""
        # The library loses a signal that comes while a prompt ends.
        text = self._session.prompt(pre_run=self._interrupt, handle_sigint=False)
        if self._is_pressed:
            self._is_pressed = False
            raise KeyboardInterrupt
        return text

    def _press(self) -> None:
        """Remember a signal. In a prompt, the terminal sends Ctrl-C as a key instead."""
        self._is_pressed = True
        loop = self._session.app.loop
        if loop is not None:
            loop.call_soon_threadsafe(self._interrupt)

    def _interrupt(self) -> None:
        """End the prompt if Ctrl-C was pressed."""
        app = self._session.app
        if self._is_pressed and app.is_running and not app.is_done:
            self._is_pressed = False
            app.exit(exception=KeyboardInterrupt)


class _FileHistory(FileHistory):
    def store_string(self, string: str) -> None:
        with suppress(OSError):  # a full disk does not end the chat
            super().store_string(string)


def open_history() -> History:
    """Return the history in the user's cache folder, or one in memory without such a folder.

    Only the user can read the file. Its older half is removed when it is too long.
    """
    folder = user_cache_folder()
    if folder is None:
        return InMemoryHistory()
    path = folder / HISTORY_FILE
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, flags, 0o600), "r+b") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return InMemoryHistory()
            os.fchmod(file.fileno(), 0o600)
            if status.st_size > MAX_HISTORY_BYTES:
                _remove_older_half(file, status.st_size)
    except OSError:
        return InMemoryHistory()
    return _FileHistory(str(path))


def _remove_older_half(file: BinaryIO, size: int) -> None:
    file.seek(max(size // 2, size - MAX_HISTORY_BYTES))
    newer = file.read()
    start = max(newer.find(b"\n# "), 0)  # the beginning of an entry
    file.seek(0)
    file.write(newer[start:])
    file.truncate()
