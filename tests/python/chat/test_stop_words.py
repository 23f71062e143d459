"""Tests of stop words: text fed in many pieces gives the result of a plain search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmdeploy.chat.stop_words import StopMatcher

LETTERS = "abc"


def first_end(text: str, words: list[str]) -> tuple[int, int] | None:
    """Return (end, length) of the match that ends first; of several, the longest."""
    ends = [(text.find(word) + len(word), -len(word)) for word in words if word in text]
    end, length = min(ends, default=(0, 0))
    return (end, -length) if ends else None


@given(
    st.lists(st.text(LETTERS, max_size=6), max_size=12),
    st.lists(st.text(LETTERS, min_size=1, max_size=7), max_size=6),
)
def test_stop_matcher_text_in_pieces_equals_plain_search(
    pieces: list[str], words: list[str]
) -> None:
    matcher, fed = StopMatcher(words), ""
    for piece in pieces:
        found = matcher.find(piece)
        before, fed = len(fed), fed + piece
        wanted = first_end(fed, words)
        if wanted is not None:
            assert found == (wanted[0] - before, wanted[1])
            return
        assert found is None
        begins = [n for n in range(1, len(fed) + 1) for w in words if w.startswith(fed[-n:])]
        assert matcher.held == max(begins, default=0)


def test_stop_matcher_longest_words_are_held_and_found() -> None:
    words = ["a" * i + "b" for i in range(1, 250)] + ["a" * 4095 + "c"]
    matcher = StopMatcher(words)
    for _ in range(5000):
        assert matcher.find("a") is None
    assert matcher.held == 4095
    assert matcher.find("xab") == (3, 2)
