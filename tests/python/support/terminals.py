"""A process on a pseudo-terminal, which a test types into and reads from."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from types import TracebackType

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Terminal:
    """Starts `command` on a terminal of 30 rows and 80 columns. Use it as a context manager."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._main, side = pty.openpty()
        self._output = b""
        self._position = 0  # in the output without formats
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
        # No terminal answers the question for the position of the cursor.
        own = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, **own, **environment},
        )
        os.close(side)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def read_until(self, text: str, timeout: float = 30) -> str:
        """Return what the process prints from the last call up to `text`, without formats."""
        deadline = time.monotonic() + timeout
        while True:
            shown = _CONTROLS.sub("", self._output.decode(errors="replace"))[self._position :]
            if text in shown:
                end = shown.index(text) + len(text)
                self._position += end
                return shown[:end]
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._main], [], [], left)[0], shown
            try:
                self._output += os.read(self._main, 1 << 16)
            except OSError:  # the process has ended
                raise AssertionError(shown) from None
