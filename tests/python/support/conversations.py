"""Conversations with a prefix cache: what each turn hits, and that hits change no bit."""

from __future__ import annotations

from collections.abc import Iterator

from engine_runs import EngineRun
from parity import prompt

BLOCK = 16  # of EngineRun
ANSWER = 12  # tokens
TURN = 30  # tokens of a message
SYSTEM = 200  # tokens that all conversations begin with
TURNS = 8


def turns(seed: int) -> Iterator[list[int]]:
    """Yield the tokens of each message. The first one follows the system prompt."""
    yield prompt(SYSTEM) + prompt(TURN, seed=100 * seed)
    for turn in range(1, TURNS):
        yield prompt(TURN, seed=100 * seed + turn)


def whole_blocks(num_tokens: int) -> int:
    """Return the tokens of the whole blocks of a prefix."""
    return num_tokens // BLOCK * BLOCK


def check_conversations(warm: EngineRun, cold: EngineRun) -> None:
    """Check that each turn is a hit of all turns before, with the bits of a cold engine."""
    for seed in (0, 1):  # the second conversation leaves the first after the system prompt
        ids: list[int] = []
        for turn, message in enumerate(turns(seed)):
            known = len(ids)
            ids += message
            got, wanted = warm.answer(ids, ANSWER), cold.answer(ids, ANSWER)
            assert got.tokens == wanted.tokens
            assert got.logits.tobytes() == wanted.logits.tobytes()
            assert wanted.cached_tokens == 0
            if turn:  # the last token of an answer is not computed before the next turn
                assert got.cached_tokens == whole_blocks(known - 1)
            ids += got.tokens
