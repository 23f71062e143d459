"""②③ Render and tokenize in other processes, which end if that takes too much time or memory."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lmdeploy.base.errors import UnavailableError
from lmdeploy.chat.bounded import child

logger = logging.getLogger("lmdeploy")

_PATIENCE_SECONDS = 0.05  # before another process is started
_FAIR_SECONDS = 1.0  # for a request while short ones wait
_SHORT_BYTES = 64 << 10
_GRACE_SECONDS = 1.0  # in which a process must end itself after its own limit
_TRIES = 2
_MAX_REPLY_BYTES = 4 * child.MAX_OUTPUT_CHARS
_LIMITS = (-signal.SIGALRM, -signal.SIGABRT)  # statuses of a process that exceeded its own limits


class ReportedError(RuntimeError):
    """An error that a process reports, after which it continues."""


class LimitError(RuntimeError):
    """A request exceeds the time or memory of a process."""


class BoundedPool:
    """Processes that perform one task, each for one request at a time. Any thread may use them.

    If all are busy, a request waits for one. After _PATIENCE_SECONDS it starts another, up to
    `most`. A short request ends the oldest of the others if that has taken _FAIR_SECONDS. So slow
    requests delay it little. The processes end with the pool.

    Args:
        task: arguments of child.py.
        name: what the processes do, for errors.
        least, most: numbers of processes.

    Raise RuntimeError if the task cannot be prepared within the limits of child.py.
    """

    def __init__(self, *task: str, name: str, least: int, most: int) -> None:
        self.name = name
        self._task = task
        self._most = most
        self._changed = threading.Condition()
        self._workers: list[_Worker] = []  # busy ones, and those that are being started
        self._idle: list[_Worker] = []
        self._num_waiting = 0
        self._is_closed = False
        for _ in range(least):
            worker = _Worker(self)
            worker.start(task)
            self._idle.append(worker)

    def run(self, data: bytes) -> bytes:
        """Return the result of a request.

        Raise ReportedError, LimitError, or UnavailableError if the pool is closed, busy, or loses
        the process for another reason twice.
        """
        for _ in range(_TRIES):
            worker = self._take(may_evict=len(data) <= _SHORT_BYTES)
            is_good = False
            try:
                worker.start(self._task)
                result = worker.run(data)
                is_good = True
                return result
            except ReportedError:
                is_good = True
                raise
            except (OSError, EOFError) as error:
                logger.warning("The process of the %s failed: %s", self.name, error)
                self._check_open()
            finally:
                self._return(worker, is_good=is_good)
        raise UnavailableError(f"The process of the {self.name} ended. Try again later.")

    def close(self) -> None:
        """End the processes. Requests that they have raise UnavailableError. Idempotent."""
        with self._changed:
            self._is_closed = True
            for worker in [*self._workers, *self._idle]:
                worker.kill()
            self._changed.notify_all()

    def _take(self, *, may_evict: bool) -> _Worker:
        """Return a process for one request. Raise UnavailableError if none is free in time."""
        begin = time.monotonic()
        has_waited = False
        with self._changed:
            while True:
                self._check_open()
                if self._idle and (has_waited or not self._num_waiting):  # none overtakes another
                    worker = self._idle.pop()
                    if self._idle:
                        self._changed.notify()
                    break
                now = time.monotonic()
                ready = begin + child.MAX_SECONDS
                if now >= ready:
                    raise UnavailableError(f"The {self.name} is busy. Try again later.")
                running = [worker for worker in self._workers if not worker.is_evicted]
                oldest = min(running, key=lambda worker: worker.since, default=None)
                if len(self._workers) < self._most:
                    ready = begin + _PATIENCE_SECONDS if self._workers else now
                    if ready <= now:
                        worker = _Worker(self)
                        break
                elif may_evict and oldest is not None:
                    ready = min(oldest.since + _FAIR_SECONDS, ready)
                    if ready <= now:
                        oldest.is_evicted = True
                        oldest.kill()
                        continue
                self._num_waiting += 1
                self._changed.wait(min(ready - now, _FAIR_SECONDS))  # `since` may change
                self._num_waiting -= 1
                has_waited = True
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
            raise UnavailableError(f"The {self.name} is closed.")


class TokenizerPool(BoundedPool):
    """A tokenizer.json in processes of its own."""

    def __init__(self, path: Path) -> None:
        # Two, so that a slow text delays none at the beginning.
        super().__init__("tokenizer", str(path), name="tokenizer", least=2, most=4)

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Return the ids of `text`. Raise as `run`."""
        reply = self.run(bytes([add_special]) + text.encode())
        if len(reply) % 4:
            raise UnavailableError("The process of the tokenizer ended. Try again later.")
        return array("I", reply).tolist()


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    channel: socket.socket  # stdin and stdout of the process


class _Worker:
    """A process. One thread at a time uses it, and any thread may kill it."""

    def __init__(self, pool: BoundedPool) -> None:
        self.since = math.inf  # when the current request began
        self.is_evicted = False  # another request needs its place
        self._name = pool.name
        self._pool = weakref.ref(pool)
        self._lock = threading.Lock()
        self._is_killed = False
        self._running: _Running | None = None
        self._finalizer: Callable[[], object] = lambda: None

    def start(self, task: tuple[str, ...]) -> None:
        """Start the process if none runs. Raise RuntimeError if it cannot prepare for its task."""
        if self._running is not None and self._running.process.poll() is None:
            return
        self._finalizer()
        with self._lock:
            if self._is_killed:
                raise EOFError("it was ended")
            self._running = _start(task)
            self._finalizer = weakref.finalize(self._pool() or self, _stop, self._running)
        try:
            _exchange(self._running, b"", seconds=child.MAX_LOAD_SECONDS)
        except (OSError, EOFError):
            code = self._end()
            self.stop()
            if self.is_evicted or self._is_killed:
                raise EOFError("it was ended") from None
            if code not in _LIMITS:
                raise EOFError(f"it ended with status {code} while it loaded") from None
            raise LimitError("loading it takes too much time or memory") from None

    def run(self, data: bytes) -> bytes:
        """Return the result of a request. Raise EOFError or OSError if it ends by no limit."""
        assert self._running is not None
        self.since = time.monotonic()
        request = child._REQUEST.pack(len(data)) + data
        try:
            return _exchange(self._running, request, seconds=child.MAX_SECONDS)
        except (OSError, EOFError):
            code = self._end()
            if self.is_evicted:
                raise UnavailableError(
                    f"The request takes the {self._name} long, and others wait. Try again later."
                ) from None
            if code in _LIMITS:
                raise LimitError(
                    f"it takes more than {child.MAX_SECONDS:g} s or too much memory"
                ) from None
            raise EOFError(f"it ended with status {code}") from None

    def _end(self) -> int:
        """End the process unless it has ended. Return its status."""
        assert self._running is not None
        self._running.process.kill()
        return self._running.process.wait()

    def kill(self) -> None:
        """End the process, so that the thread that uses it continues. It is not started again."""
        with self._lock:
            self._is_killed = True
            if self._running is not None:
                self._running.process.kill()

    def stop(self) -> None:
        """End the process and close its channel."""
        self._finalizer()


def _start(task: tuple[str, ...]) -> _Running:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, child.__file__, *task],
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,  # panics print a stack trace
        )
    return _Running(process, ours)


def _exchange(running: _Running, request: bytes, *, seconds: float) -> bytes:
    """Send a request and return the reply. Raise OSError or EOFError if none comes in time.

    A process ends by its own limit before `seconds` and _GRACE_SECONDS, unless it is stopped.
    """
    end = time.monotonic() + seconds + _GRACE_SECONDS

    def receive(num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            running.channel.settimeout(max(end - time.monotonic(), 0))
            num_read = running.channel.recv_into(rest)
            if num_read == 0:
                raise EOFError
            rest = rest[num_read:]
        return data

    running.channel.settimeout(seconds + _GRACE_SECONDS)
    running.channel.sendall(request)
    is_error, num_bytes = child._REPLY.unpack(receive(child._REPLY.size))
    if num_bytes > _MAX_REPLY_BYTES:
        raise EOFError
    data = bytes(receive(num_bytes))
    if is_error:
        raise ReportedError(data.decode(errors="replace"))
    return data


def _stop(running: _Running) -> None:
    running.process.kill()
    running.process.wait()
    running.channel.close()
