"""③ Tokenize in other processes, which end if a text takes too much time or memory."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lmdeploy.base.errors import UnavailableError
from lmdeploy.chat.bounded import child

logger = logging.getLogger("lmdeploy")

_Process = subprocess.Popen[bytes]
_MIN_PROCESSES = 2  # one for a slow text
_MAX_PROCESSES = 4
_FAIR_SECONDS = 1.0  # for a text while short ones wait
_SHORT_BYTES = 64 << 10
_GRACE_SECONDS = 1.0  # in which a process must end itself after its own limit
_TRIES = 2
_MAX_REPLY_BYTES = 1 << 30
_LIMITS = (-signal.SIGALRM, -signal.SIGABRT)  # statuses of a process that exceeded its own limits


class TokenizerPool:
    """A tokenizer.json in processes of its own. Any thread may use it.

    Each process tokenizes one text. If all are busy, a text waits until one is free. A short text
    ends the oldest of the others if that has taken _FAIR_SECONDS. So slow texts delay it little.

    Raise RuntimeError if the file cannot be loaded within the limits of child.py.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = threading.Condition()
        self._workers: list[_Worker] = []  # busy ones, and those that are being started
        self._idle: list[_Worker] = []
        self._is_closed = False
        for _ in range(_MIN_PROCESSES):
            worker = _Worker(self)
            worker.start(path)
            self._idle.append(worker)

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Return the ids of `text`.

        Raise RuntimeError for an error of the library or a limit, and UnavailableError if the pool
        is closed, busy, or loses the process for another reason twice.
        """
        data = text.encode()
        for _ in range(_TRIES):
            worker = self._take(may_evict=len(data) <= _SHORT_BYTES)
            is_good = False
            try:
                worker.start(self._path)
                ids = worker.encode(data, add_special=add_special)
                is_good = True
                return ids
            except _LibraryError:
                is_good = True
                raise
            except (OSError, EOFError) as error:
                logger.warning("The process of the tokenizer failed: %s", error)
                self._check_open()
            finally:
                self._return(worker, is_good=is_good)
        raise UnavailableError("The process of the tokenizer ended. Try again later.")

    def close(self) -> None:
        """End the processes. Texts that they tokenize raise UnavailableError. Idempotent."""
        with self._changed:
            self._is_closed = True
            for worker in [*self._workers, *self._idle]:
                worker.kill()
            self._changed.notify_all()

    def _take(self, *, may_evict: bool) -> _Worker:
        """Return a process for one text. Raise UnavailableError if none is free in time."""
        end = time.monotonic() + child.MAX_SECONDS
        with self._changed:
            while True:
                self._check_open()
                if self._idle:
                    worker = self._idle.pop()
                    break
                if len(self._workers) < _MAX_PROCESSES:
                    worker = _Worker(self)
                    break
                now = time.monotonic()
                if now >= end:
                    raise UnavailableError("The tokenizer is busy. Try again later.")
                running = [worker for worker in self._workers if not worker.is_evicted]
                oldest = min(running, key=lambda worker: worker.since, default=None)
                ready = end
                if may_evict and oldest is not None:
                    ready = min(oldest.since + _FAIR_SECONDS, end)
                    if ready <= now:
                        oldest.is_evicted = True
                        oldest.kill()
                        continue
                self._changed.wait(ready - now)
            self._workers.append(worker)
            return worker

    def _return(self, worker: _Worker, *, is_good: bool) -> None:
        with self._changed:
            worker.since = math.inf
            self._workers.remove(worker)
            is_kept = is_good and not worker.is_evicted and not self._is_closed
            if is_kept:
                self._idle.append(worker)
            self._changed.notify()
        if not is_kept:
            worker.stop()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("The tokenizer is closed.")


class _LibraryError(RuntimeError):
    """An error of the library, after which the process continues."""


class _Worker:
    """A process. One thread at a time uses it, and any thread may kill it."""

    def __init__(self, pool: TokenizerPool) -> None:
        self.since = math.inf  # when the current text began
        self.is_evicted = False  # another text needs its place
        self._pool = weakref.ref(pool)
        self._lock = threading.Lock()
        self._is_killed = False
        self._process: _Process | None = None
        self._finalizer: Callable[[], object] = lambda: None

    def start(self, path: Path) -> None:
        """Start the process if none runs. Raise RuntimeError if it cannot load the file."""
        if self._process is not None and self._process.poll() is None:
            return
        self._finalizer()
        with self._lock:
            if self._is_killed:
                raise EOFError("it was ended")
            process = subprocess.Popen(
                [sys.executable, child.__file__, str(path)],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # panics print a stack trace
            )
            self._process = process
            self._finalizer = weakref.finalize(self._pool() or self, _stop, process)
        try:
            with _deadline(process, child.MAX_LOAD_SECONDS):
                _read_reply(process)
        except (OSError, EOFError):
            code = process.wait()
            self.stop()
            if self.is_evicted or self._is_killed:
                raise EOFError("it was ended") from None
            if code not in _LIMITS:
                raise EOFError(f"it ended with status {code} while it loaded") from None
            raise RuntimeError("loading it takes too much time or memory") from None

    def encode(self, data: bytes, *, add_special: bool) -> list[int]:
        """Return the ids of a text. Raise EOFError or OSError if the process ends by no limit."""
        process = self._process
        assert process is not None
        self.since = time.monotonic()
        try:
            with _deadline(process, child.MAX_SECONDS):
                _stream(process.stdin).write(child._REQUEST.pack(len(data), add_special))
                _stream(process.stdin).write(data)
                _stream(process.stdin).flush()
                reply = _read_reply(process)
        except (OSError, EOFError):
            process.kill()
            code = process.wait()
            if self.is_evicted:
                raise UnavailableError(
                    "The text takes the tokenizer long, and others wait. Try again later."
                ) from None
            if code in _LIMITS:
                raise RuntimeError(
                    f"it takes more than {child.MAX_SECONDS} s or too much memory"
                ) from None
            raise EOFError(f"it ended with status {code}") from None
        return array("I", reply).tolist()

    def kill(self) -> None:
        """End the process, so that the thread that uses it continues. It is not started again."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """End the process and close its pipes."""
        self._finalizer()


@contextmanager
def _deadline(process: _Process, seconds: float) -> Iterator[None]:
    """Kill a process that has not ended itself by its own limit, such as a stopped one."""
    timer = threading.Timer(seconds + _GRACE_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read_reply(process: _Process) -> bytes:
    """Return the data of a reply. Raise EOFError if the process has ended."""
    header = _stream(process.stdout).read(child._REPLY.size)
    if len(header) < child._REPLY.size:
        raise EOFError
    is_error, num_bytes = child._REPLY.unpack(header)
    if num_bytes > _MAX_REPLY_BYTES:
        raise EOFError
    data = _stream(process.stdout).read(num_bytes)
    if len(data) < num_bytes or (not is_error and num_bytes % 4):
        raise EOFError
    if is_error:
        raise _LibraryError(data.decode(errors="replace"))
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
