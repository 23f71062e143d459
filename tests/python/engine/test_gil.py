"""Tests that steps do not need the GIL: the engine runs while another thread holds it."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import pytest
from tiny_engine import collect, make_engine, make_request

TOKENS = 240
HOLD_S = 0.06
ENOUGH_TOKENS = 20  # tokens within one hold; a step takes about 0.2 ms
ATTEMPTS = 20  # the engine's thread may get no core for a while


def hold_gil() -> None:
    """Sleep in C for HOLD_S without releasing the GIL."""
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


def test_engine_generates_while_python_holds_the_gil(engine: Any) -> None:
    most_tokens = 0
    for attempt in range(ATTEMPTS):
        engine.submit(long_request(attempt))
        early = engine.wait_outputs(0)
        hold_gil()
        late = engine.wait_outputs(0)  # returns the available outputs at once
        most_tokens = max(most_tokens, sum(len(output.tokens) for output in late))
        if not any(output.finish_reason != "none" for output in early + late):
            collect(engine)
        if most_tokens >= ENOUGH_TOKENS:
            return
    raise AssertionError(f"{most_tokens} of {ENOUGH_TOKENS} tokens within {HOLD_S} s")


def test_token_mask_waits_for_the_gil(engine: Any) -> None:
    # A token mask is Python code. This shows that the test above would detect a wait.
    asked: list[float] = []

    def allow_all(_: list[int], mask: np.ndarray) -> bool:
        asked.append(time.monotonic())
        mask[:] = -1
        return True

    for attempt in range(ATTEMPTS):  # a thread switch may come between the clock and the hold
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
