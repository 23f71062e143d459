"""What is timed and what comes of it: for the timers of both engines. Imports neither of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

BLOCK_TOKENS = 64
Quality = Literal["raw", "balanced"]


@dataclass(frozen=True)
class Cell:
    """What is timed: `batch` sequences with `context` tokens each, then `steps` decode steps.

    `shared`: all sequences have the same prompt and share its blocks.
    """

    context: int
    batch: int
    steps: int
    shared: bool = False

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random ids, the same for every engine."""
        rng = np.random.default_rng(self.context * 1000 + self.batch)
        ids = rng.integers(100, vocab_size - 100, (1 if self.shared else self.batch, self.context))
        rows: list[list[int]] = ids.tolist()
        return rows * self.batch if self.shared else rows

    @property
    def room(self) -> int:
        """Tokens of an answer: early sequences decode while late ones are still read."""
        return self.steps + 2 * self.batch + self.batch * self.context // 1024

    @property
    def session_len(self) -> int:
        """Slots of one sequence, to whole blocks."""
        return -(-(self.context + self.room + 1) // BLOCK_TOKENS) * BLOCK_TOKENS


@dataclass(frozen=True)
class Timing:
    """Tokens per second; `prefill` is None where prompts were shared."""

    prefill: float | None
    decode: float
