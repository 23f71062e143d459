"""The special tokens of the Harmony format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class SpecialTokens(Protocol):
    """The part of a tokenizer that the parser uses."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token's text, or None."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Return whether the id is a control token."""
        ...


class Encoder(Protocol):
    """The part of a tokenizer that encodes text."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the ids of a text."""
        ...


@dataclass(frozen=True)
class HarmonyTokens:
    """The ids of the special tokens of the format."""

    start: int
    channel: int
    message: int
    constrain: int
    end: int
    call: int
    return_: int

    @classmethod
    def of(cls, tokenizer: SpecialTokens) -> HarmonyTokens:
        """Return the ids of a tokenizer. Raise ValueError, which names missing tokens."""
        names = ("start", "channel", "message", "constrain", "end", "call", "return")
        ids = {name: tokenizer.token_id(f"<|{name}|>") for name in names}
        missing = [f"<|{name}|>" for name, token_id in ids.items() if token_id is None]
        if missing:
            raise ValueError(
                f"The tokenizer has no {', '.join(missing)}, which the chat format of GPT-OSS "
                "(Harmony) needs."
            )
        return cls(*(token_id for token_id in ids.values() if token_id is not None))

    def begin_final(self, tokenizer: Encoder) -> list[int]:
        """Return the tokens that open the channel `final` after a prompt.

        An answer that follows a grammar begins after them.
        """
        return [self.channel, *tokenizer.encode("final", add_special=False), self.message]
