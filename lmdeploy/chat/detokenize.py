"""⑨ Convert token ids to text as they arrive.

Pure and synchronous; one object per answer, used by one coroutine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

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
    continues its prompt. `skip_special` leaves out special tokens other than `shown`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool,
        *,
        begins_text: bool,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._stream = tokenizer.stream(
            skip_special=skip_special, begins_text=begins_text, shown=shown
        )
        self._vocab_size = tokenizer.vocab_size

    def push(self, token: int) -> str:
        """Return the text that `token` completes."""
        return self._stream.push(token) if token < self._vocab_size else ""

    def push_all(self, tokens: Sequence[int]) -> str:
        """Return the text that tokens complete."""
        return self._stream.push_all(tokens)

    @property
    def num_open(self) -> int:
        """Return how many of the newest tokens wait for the end of a character.

        REQUIRES: all tokens came by `push_all`.
        """
        return self._stream.num_open

    @property
    def pending(self) -> bool:
        """Return whether an incomplete character is held back."""
        return self._stream.pending

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._stream.finish()
