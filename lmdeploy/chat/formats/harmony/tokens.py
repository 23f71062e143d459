"""The special tokens of the Harmony format, and whether a model uses it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger("lmdeploy")

PARSER_NAME = "gpt-oss"  # of --reasoning-parser and --tool-call-parser, as in LMDeploy
MODEL_TYPE = "gpt_oss"


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
        """Those of a tokenizer. ValueError names the ones that it has not."""
        names = ("start", "channel", "message", "constrain", "end", "call", "return")
        ids = {name: tokenizer.token_id(f"<|{name}|>") for name in names}
        missing = [f"<|{name}|>" for name, token_id in ids.items() if token_id is None]
        if missing:
            raise ValueError(
                f"tokenizer: no {', '.join(missing)}; the chat format of GPT-OSS (Harmony) needs "
                "these tokens"
            )
        return cls(*(token_id for token_id in ids.values() if token_id is not None))

    def begin_final(self, tokenizer: Encoder) -> list[int]:
        """What opens the channel `final` behind a prompt, for an answer that follows a grammar."""
        return [self.channel, *tokenizer.encode("final", add_special=False), self.message]


def find_harmony(
    model_type: str, tokenizer: SpecialTokens, *, answer_parser: str | None
) -> HarmonyTokens | None:
    """Tokens of GPT-OSS's answer format, for that model and where `answer_parser` asks for it.

    Raises ValueError when it is asked for and the tokenizer lacks the tokens; a model of that type
    without them gives plain answers.
    """
    if answer_parser is None and model_type != MODEL_TYPE:
        return None
    try:
        return HarmonyTokens.of(tokenizer)
    except ValueError as error:
        if answer_parser is not None:
            raise ValueError(f"{error}; remove --reasoning-parser and --tool-call-parser") from None
        logger.warning("%s: answers are not parsed", error)
        return None
