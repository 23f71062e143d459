"""Steps need nothing of Python: the engine runs on while another thread holds the GIL."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import pytest
from tiny_engine import collect, make_engine, make_request

TOKENS = 240
HOLD_S = 0.06
ENOUGH_TOKENS = 20  # within a hold; a step takes about 0.2 ms
ATTEMPTS = 20  # on a machine that gives the engine's thread no core for a while


def hold_gil() -> None:
    """Sleeps in C for HOLD_S without giving the GIL back."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(HOLD_S * 1e6)))


@pytest.fixture
def engine() -> Any:
    made = make_engine()
    yield made
    made.close()


def long_request(request_id: int) -> Any:
    request = make_request(request_id, [1, 2, 3], TOKENS)
    request.ignore_eos = True
    return request


def test_steps_go_on_while_python_holds_the_gil(engine: Any) -> None:
    max_value = 0
    for attempt in range(ATTEMPTS):
        engine.submit(long_request(attempt))
        early = engine.wait_outputs(0)
        hold_gil()
        late = engine.wait_outputs(0)  # what is there, at once
        max_value = max(max_value, sum(len(output.tokens) for output in late))
        if not any(output.finish_reason != "none" for output in early + late):
            collect(engine)
        if max_value >= ENOUGH_TOKENS:
            return
    raise AssertionError(f"got {max_value} tokens within {HOLD_S} s, want {ENOUGH_TOKENS}")


def test_a_grammar_waits_for_the_gil(engine: Any) -> None:
    """It is Python, and asked for: here it shows that the test above can tell."""
    asked: list[float] = []

    def allow_all(_: list[int], mask: np.ndarray) -> bool:
        asked.append(time.monotonic())
        mask[:] = -1
        return True

    for attempt in range(ATTEMPTS):  # a switch of threads may come between the clock and the hold
        asked.clear()
        request = long_request(attempt)
        request.token_mask = allow_all
        engine.submit(request)
        begin = time.monotonic()
        hold_gil()
        collect(engine)
        assert len(asked) == TOKENS
        if not any(begin + 0.001 < moment < begin + HOLD_S for moment in asked):
            return
    raise AssertionError("a Python callback ran while another thread held the GIL")
