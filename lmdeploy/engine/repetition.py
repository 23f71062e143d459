"""⑨ Stop answers that repeat themselves."""

from __future__ import annotations

from collections import Counter, deque


class RepetitionStop:
    """Counts the runs of `size` tokens in an answer, and says when one occurred too often.

    It keeps a hash per token, whatever the size.
    """

    def __init__(self, size: int, threshold: int) -> None:
        self._newest: deque[int] = deque(maxlen=size)
        self._size = size
        self._threshold = threshold
        self._counts: Counter[int] = Counter()

    def add(self, token: int) -> bool:
        """Add a token. Return whether the newest run has now occurred `threshold` times."""
        self._newest.append(token)
        if len(self._newest) < self._size:
            return False
        run = hash(tuple(self._newest))
        self._counts[run] += 1
        return self._counts[run] >= self._threshold
