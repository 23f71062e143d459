"""③ Tokenize in another process, which ends if a text takes too much time or memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from array import array
from contextlib import suppress
from pathlib import Path
from typing import IO

from lmdeploy.chat.bounded import child

_Process = subprocess.Popen[bytes]


class TokenizerProcess:
    """A tokenizer.json in a process of its own. Any thread may use it; texts wait for each other.

    Raise RuntimeError if the file cannot be loaded within the limits of child.py.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._process = self._start()

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Return the ids of `text`. Raise RuntimeError for an error of the library or a limit."""
        data = text.encode()
        with self._lock:
            if self._process.poll() is not None:
                self._finalizer()
                self._process = self._start()
            try:
                _stream(self._process.stdin).write(child._REQUEST.pack(len(data), add_special))
                _stream(self._process.stdin).write(data)
                _stream(self._process.stdin).flush()
                reply = _read_reply(self._process)
            except (OSError, EOFError):
                self._finalizer()
                raise RuntimeError(
                    f"it takes more than {child.MAX_SECONDS} s or too much memory"
                ) from None
        return array("I", reply).tolist()

    def _start(self) -> _Process:
        process = subprocess.Popen(
            [sys.executable, child.__file__, str(self._path)],
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # panics print a stack trace
        )
        self._finalizer = weakref.finalize(self, _stop, process)
        try:
            _read_reply(process)
        except (OSError, EOFError):
            self._finalizer()
            raise RuntimeError("loading it takes too much time or memory") from None
        return process


def _read_reply(process: _Process) -> bytes:
    """Return the data of a reply. Raise EOFError if the process has ended."""
    header = _stream(process.stdout).read(child._REPLY.size)
    if len(header) < child._REPLY.size:
        raise EOFError
    is_error, num_bytes = child._REPLY.unpack(header)
    data = _stream(process.stdout).read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    if is_error:
        raise RuntimeError(data.decode(errors="replace"))
    return data


def _stop(process: _Process) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):  # it still has unsent bytes
            _stream(stream).close()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
