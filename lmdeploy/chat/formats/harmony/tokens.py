"""The special tokens of the Harmony format, and whether a model uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class SpecialTokens(Protocol):
    """What of a tokenizer the parser needs."""

    def token_id(self, token: str) -> int | None:
        """The id of a token's text, or None."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token."""
        ...


class Encoder(Protocol):
    """What of a tokenizer makes tokens."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of a text."""
        ...


@dataclass(frozen=True)
class HarmonyTokens:
    """Ids of the special tokens of the format."""

    start: int
    channel: int
    message: int
    constrain: int
    end: int
    call: int
    return_: int

    @classmethod
    def of(cls, tokenizer: SpecialTokens) -> HarmonyTokens:
        """Return the ids of a tokenizer. ValueError names the tokens that it lacks."""
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
        """What opens the channel `final` behind a prompt, for an answer that follows a grammar."""
        return [self.channel, *tokenizer.encode("final", add_special=False), self.message]
