"""A benchmark program that reads cells, one per line, and answers with lines of JSON."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

Answer = dict[str, Any]
CLOSE_TIMEOUT_S = 5.0


class NoAnswer(RuntimeError):
    """The program runs, and says nothing."""


class BenchProcess:
    """Started when made; every wait ends."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> BenchProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                answer = json.loads(line)
            except ValueError:
                continue  # a library may print
            if isinstance(answer, dict):
                self._answers.put(answer)
        self._answers.put(None)

    def answer(self, timeout_s: float) -> Answer:
        """The next line. RuntimeError when the program ended; NoAnswer when the time is over."""
        try:
            found = self._answers.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise NoAnswer(f"{self._command[0]}: no answer in {timeout_s:.0f} s") from None
        if found is None:
            self._answers.put(None)  # for whoever asks next
            raise RuntimeError(f"{self._command[0]}: ended with {self._process.wait()}")
        return found

    def send(self, line: str) -> None:
        """One cell. RuntimeError when nobody reads."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RuntimeError(f"{self._command[0]}: ended with {self._process.poll()}") from error

    def close(self) -> None:
        """Ends the program, whatever it does; one that a driver holds is left behind."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)
