"""A limit for the time that a part of a text takes, so that the other parts are still rendered."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

MAX_PART_SECONDS = 1  # of CPU time, for a block of code or a formula


def _raise(*_: object) -> NoReturn:
    raise TimeoutError


@contextmanager
def part_limit() -> Iterator[None]:
    """Raise TimeoutError after MAX_PART_SECONDS, also in a regular expression. Main thread only."""
    old = signal.signal(signal.SIGVTALRM, _raise)
    # Again and again, because code that the interpreter calls by itself swallows exceptions.
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_PART_SECONDS, MAX_PART_SECONDS / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)
