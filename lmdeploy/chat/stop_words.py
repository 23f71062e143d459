"""⑨ Find stop words in a text that arrives in chunks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several words in a text that arrives in pieces.

    It searches, by str.find, only for words whose first letter occurs. Invariant: `_tail` is the
    longest suffix of the text so far that is a prefix of a word. So text before it can never become
    part of a match.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = sorted(set(words))
        self._by_letter: dict[str, list[str]] = {}
        for word in self._words:
            self._by_letter.setdefault(word[0], []).append(word)
        self._tail = ""

    @property
    def held(self) -> int:
        """Return the number of characters at the end of the text that may begin a word."""
        return len(self._tail)

    def find(self, text: str) -> tuple[int, int] | None:
        """Add `text` and return (end of the match in `text`, length of the word), or None.

        If several words end at the same character, the longest one matches.
        """
        known = len(self._tail)
        text = self._tail + text
        letters = self._by_letter.keys() & set(text)
        if not letters:
            self._tail = ""
            return None
        ends = []
        for letter in letters:
            for word in self._by_letter[letter]:
                # A word that ends within the tail would have been found before.
                place = text.find(word, max(known - len(word) + 1, 0))
                if place >= 0:
                    ends.append((place + len(word), -len(word)))
        if ends:
            end, length = min(ends)
            return end - known, -length
        self._tail = self._longest_begin(text)
        return None

    def skip(self, text: str) -> None:
        """Add `text` and ignore words that end in it."""
        self._tail = self._longest_begin(self._tail + text)

    def _longest_begin(self, text: str) -> str:
        """Return the longest suffix of `text` that is a proper prefix of a word."""
        for place, letter in enumerate(text):
            if letter in self._by_letter:
                end = text[place:]
                # Longer words that begin with `end` follow it in sorted order.
                index = bisect_right(self._words, end)
                if index < len(self._words) and self._words[index].startswith(end):
                    return end
        return ""
