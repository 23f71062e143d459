"""⑨ Stop an answer at its stop words or repetitions, and hold back text that may begin a word.

Pure and synchronous; one object per answer, used by one coroutine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lmdeploy.chat.detokenize import Detokenizer
    from lmdeploy.chat.formats.text import TextDecoder


class Answer(Protocol):
    """The text of one answer and the tokens that it consists of.

    A token is released together with the last character of its text, so that streamed text, tokens
    and log probabilities stay aligned.
    """

    @property
    def stopped(self) -> bool:
        """Return whether a stop word has ended the answer."""
        ...

    @property
    def stop_word(self) -> str | None:
        """Return the word that ended the answer."""
        ...

    def push_all(self, tokens: Sequence[int]) -> int:
        """Add tokens until the answer is stopped, and return how many were added."""
        ...

    def finish(self, dropped: Sequence[int] = ()) -> None:
        """End the answer. `dropped` are further tokens, which may complete a stop word."""
        ...

    def take(self) -> tuple[str, int]:
        """Return (text that can be shown, number of tokens that it completes)."""
        ...


class PlainAnswer:
    """An answer without stop words, whose tokens are decoded all at once."""

    stopped = False
    stop_word = None

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._text = ""
        self._num_tokens = 0  # that are not released
        self._num_open = 0  # of these, the ones that end within a character

    def push_all(self, tokens: Sequence[int]) -> int:
        """Add tokens, and return how many there are."""
        self._text += self._decoder.push_all(tokens)
        self._num_tokens += len(tokens)
        self._num_open = self._decoder.num_open
        return len(tokens)

    def finish(self, dropped: Sequence[int] = ()) -> None:
        """End the answer and release what was held back."""
        self._text += self._decoder.finish()
        self._num_open = 0

    def take(self) -> tuple[str, int]:
        """Return (text that can be shown, number of tokens that it completes)."""
        text, self._text = self._text, ""
        num_tokens = self._num_tokens - self._num_open
        self._num_tokens = self._num_open
        return text, num_tokens


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


class AnswerText:
    """The text of one answer and the tokens that it consists of.

    A token is released together with the last character of its text, so that streamed text, tokens
    and log probabilities stay aligned. Tokens whose text begins within or after a stop word are
    dropped. A stop word that is complete before the answer has `min_tokens` tokens counts as text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_words: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.detokenizer = detokenizer
        self._matcher = StopMatcher(stop_words)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self._released = 0  # number of released characters
        # For each unreleased token: begin and end of its text, and the characters that must be
        # released with it: one more than `end` if the token ends within a character.
        self._spans: deque[tuple[int, int, int]] = deque()
        self._done = False
        self.stopped = False
        self.stop_word: str | None = None  # the word that ended the answer

    def push(self, token: int) -> None:
        """Add a token. REQUIRES: not stopped."""
        self._push(token, cut=0)

    def push_all(self, tokens: Sequence[int]) -> int:
        """Add tokens until the answer is stopped, and return how many were added."""
        for i, token in enumerate(tokens, 1):
            self.push(token)
            if self.stopped:
                return i
        return len(tokens)

    def _push(self, token: int, *, cut: int) -> int:
        """Add a token without the last `cut` characters, and return how many its text lacks."""
        self._num_tokens += 1
        begin = self._released + len(self._held)
        was_pending = self.detokenizer.pending
        whole = self.detokenizer.push(token)
        text = whole[: max(len(whole) - cut, 0)]
        end = begin + len(text)
        if was_pending and text.startswith("\ufffd"):
            begin += 1  # the previous token ended with an invalid character
        self._spans.append((begin, end, end + self.detokenizer.pending))
        self._append(text)
        return max(cut - len(whole), 0)

    def finish(self) -> None:
        """End the answer and release the text that was held back."""
        if not self.stopped:
            self._append(self.detokenizer.finish())
        self._done = True

    def _append(self, text: str) -> None:
        self._held += text
        if self._num_tokens < self._min_tokens:
            self._matcher.skip(text)
            return
        match = self._matcher.find(text)
        if match is None:
            return
        end, length = match
        cut = len(self._held) - len(text) + end
        self.stop_word = self._held[cut - length : cut]
        if not self._include_stop:
            cut -= length
        self._held = self._held[:cut]
        limit = self._released + cut
        while self._spans and self._spans[-1][0] >= limit:
            self._spans.pop()
        self.stopped = self._done = True

    @property
    def overhang(self) -> int:
        """Return how many characters of the last untaken token the stop word cut off."""
        return self._spans[-1][1] - self._released - len(self._held) if self._spans else 0

    def take(self) -> tuple[str, int]:
        """Return (text that can be shown, number of tokens that it completes)."""
        keep = 0 if self._done else self._matcher.held
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._released += cut
        num_tokens = 0
        while self._spans and (self._done or self._spans[0][2] <= self._released):
            self._spans.popleft()
            num_tokens += 1
        return text, num_tokens


class SpecialTokenStopFilter(AnswerText):
    """The text of an answer that also ends at stop words with special tokens.

    `gate` matches these words in the text with special tokens shown. A token becomes part of the
    answer when it leaves the gate. So no token that may begin such a word is shown or counted.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_words: Sequence[str] = (),
        *,
        gate: AnswerText | None,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        super().__init__(detokenizer, stop_words, include_stop=include_stop, min_tokens=min_tokens)
        self._gate = gate
        self._waiting: deque[int] = deque()  # pushed tokens that are still in the gate

    def push(self, token: int) -> None:
        """Add a token. REQUIRES: not stopped."""
        if self._gate is None:
            super().push(token)
            return
        self._waiting.append(token)
        self._gate.push(token)
        self._pass(self._gate)

    def finish(self, dropped: Sequence[int] = ()) -> None:
        """End the answer. `dropped` are further tokens, which may complete a stop word."""
        if self._gate is not None and not self.stopped:
            for token in dropped:
                if not self._gate.stopped:
                    self._gate.push(token)
            self._gate.finish()
            self._pass(self._gate)
        super().finish()

    def _pass(self, gate: AnswerText) -> None:
        cut = gate.overhang  # of the last token that leaves the gate, which may be a dropped one
        lacking = 0
        for left in range(gate.take()[1], 0, -1):
            if self._waiting and not self.stopped:
                lacking = self._push(self._waiting.popleft(), cut=cut if left == 1 else 0)
        if not gate.stopped or self.stopped:
            return
        # The detokenizer still holds the rest of the cut, or the stop word's first character.
        rest = self.detokenizer.finish().removesuffix("\ufffd")
        self._append(rest[: max(len(rest) - lacking, 0)])
        self.stop_word = self.stop_word or gate.stop_word
        self.stopped = self._done = True


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
