"""⑨ Convert token ids to text, stop at stop words, and hold back text that may begin one.

Pure and synchronous; one object per answer, used by one coroutine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from lmdeploy.chat.stop_words import StopMatcher

if TYPE_CHECKING:
    from lmdeploy.chat.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """Converts ids to text one at a time and holds back incomplete characters."""

    def push(self, token: int) -> str:
        """Return the text that `token` completes."""
        ...

    @property
    def pending(self) -> bool:
        """Return whether an incomplete character is held back."""
        ...

    def finish(self) -> str:
        """Return the rest of the text. Incomplete characters become U+FFFD."""
        ...


class TokenDetokenizer:
    """A tokenizer's incremental decoder. Ids that only pad the model's vocabulary have no text.

    `begins_text` means that the answer is a new text, as with a chat template. Otherwise the answer
    continues its prompt.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, *, begins_text: bool) -> None:
        self._stream = tokenizer.stream(skip_special=skip_special, begins_text=begins_text)
        self._vocab_size = tokenizer.vocab_size

    def push(self, token: int) -> str:
        """Return the text that `token` completes."""
        return self._stream.push(token) if token < self._vocab_size else ""

    @property
    def pending(self) -> bool:
        """Return whether an incomplete character is held back."""
        return self._stream.pending

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._stream.finish()


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

    def push(self, token: int) -> None:
        """Add a token. REQUIRES: not stopped."""
        self._num_tokens += 1
        begin = self._released + len(self._held)
        was_pending = self.detokenizer.pending
        text = self.detokenizer.push(token)
        end = begin + len(text)
        if was_pending and text.startswith("\ufffd"):
            begin += 1  # the previous token ended with an invalid character
        self._spans.append((begin, end, end + self.detokenizer.pending))
        self._append(text)

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
        cut = gate.overhang
        for _ in range(min(gate.take()[1], len(self._waiting))):
            if not self.stopped:
                super().push(self._waiting.popleft())
        if not gate.stopped or self.stopped:
            return
        begin, end, _ = self._spans[-1] if self._spans else (0, 0, 0)
        shown = min(cut, end - begin)  # special tokens and reasoning show nothing
        self._held = self._held[: len(self._held) - shown]
        # The rest of the stop word's first character is not text.
        rest = self.detokenizer.finish().removesuffix("\ufffd")
        self._append(rest[: max(len(rest) - (cut - shown), 0)])
        self.stopped = self._done = True
