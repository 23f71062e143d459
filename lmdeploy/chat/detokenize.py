"""⑨ From token ids to text that may be shown: stop words and the hold-back they need.

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
    """Turns ids into text one at a time and keeps back half a character."""

    def push(self, token: int) -> str:
        """Text that `token` completes."""
        ...

    @property
    def pending(self) -> bool:
        """Whether half a character is kept back."""
        ...

    def finish(self) -> str:
        """What is left; incomplete characters become U+FFFD."""
        ...


class TokenDetokenizer:
    """A tokenizer's incremental decoder. Ids that only pad the model's vocabulary have no text.

    `begins_text`: a chat template's answer is a text of its own, any other goes on with its prompt.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, *, begins_text: bool) -> None:
        self._stream = tokenizer.stream(skip_special=skip_special, begins_text=begins_text)
        self._vocab_size = tokenizer.vocab_size

    def push(self, token: int) -> str:
        """Text that `token` completes."""
        return self._stream.push(token) if token < self._vocab_size else ""

    @property
    def pending(self) -> bool:
        """Whether half a character is kept back."""
        return self._stream.pending

    def finish(self) -> str:
        """What is left."""
        return self._stream.finish()


class AnswerText:
    """The text of one answer and the tokens it came from.

    A token is released together with the last character of its text, so that streamed text, tokens
    and log probabilities stay aligned. Tokens whose text begins at or after a stop word's beginning
    are dropped. A stop word that is complete before the answer has `min_tokens` tokens is text.
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
        self._released = 0  # characters given away
        # Of tokens not given away: where their text begins and ends, and what has to be given away
        # with them: one character more where they end within one.
        self._spans: deque[tuple[int, int, int]] = deque()
        self._done = False
        self.stopped = False

    def push(self, token: int) -> None:
        """Adds a token. REQUIRES: not stopped."""
        self._num_tokens += 1
        begin = self._released + len(self._held)
        was_pending = self.detokenizer.pending
        text = self.detokenizer.push(token)
        end = begin + len(text)
        if was_pending and text.startswith("\ufffd"):
            begin += 1  # half a character that was none, of the token before
        self._spans.append((begin, end, end + self.detokenizer.pending))
        self._append(text)

    def finish(self) -> None:
        """No token follows: what was held back may go out."""
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
        """Characters of the last token, not yet taken, that the stop word cut off."""
        return self._spans[-1][1] - self._released - len(self._held) if self._spans else 0

    def take(self) -> tuple[str, int]:
        """(text that may be shown, number of tokens that it completes)."""
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
    """An answer that ends, too, at stop words which contain special tokens.

    `gate` matches those in the text that shows special tokens. A token becomes part of the answer
    when it leaves the gate, so none that may begin such a word is shown or counted.
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
        self._waiting: deque[int] = deque()  # pushed, not yet out of the gate

    def push(self, token: int) -> None:
        """Adds a token. REQUIRES: not stopped."""
        if self._gate is None:
            super().push(token)
            return
        self._waiting.append(token)
        self._gate.push(token)
        self._pass(self._gate)

    def finish(self, dropped: Sequence[int] = ()) -> None:
        """No token follows but `dropped` ones, which may complete a stop word."""
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
        shown = min(cut, end - begin)  # of special tokens and reasoning nothing is
        self._held = self._held[: len(self._held) - shown]
        # What is left of the stop word's first character is no text.
        rest = self.detokenizer.finish().removesuffix("\ufffd")
        self._append(rest[: max(len(rest) - (cut - shown), 0)])
        self.stopped = self._done = True
