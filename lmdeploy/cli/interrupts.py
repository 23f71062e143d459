"""Ctrl-C without an exception in the middle of other code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_ctrl_c(press: Callable[[], object]) -> Iterator[None]:
    """Call `press` at Ctrl-C, instead of raising KeyboardInterrupt between any two instructions.

    In a callback of a library, that exception would be lost or leave half a drawing. Another thread
    than the main thread gets no signals, and `press` is not called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGINT, lambda *_: press())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
