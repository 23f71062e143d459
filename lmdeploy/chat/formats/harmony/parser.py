"""⑨ Parse an answer in the Harmony format to reasoning, content and tool calls, token by token.

Pure and synchronous; one object per answer. Any sequence of tokens is accepted:

* A body ends with <|end|>, <|call|>, <|return|>, <|start|> or <|channel|>. A header ends with
  <|message|>. A header without a body is dropped, and so is text between a body and the next
  <|start|>. <|message|>, <|constrain|> and other special tokens inside a body are ignored.
* Bodies of other roles than the assistant are dropped, because the model invented them.
* A body with an unknown channel, or without one, is content.
* An answer without any <|channel|> or <|message|> is content as a whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from lmdeploy.chat.formats.base import Delta
from lmdeploy.chat.formats.harmony.tokens import HarmonyTokens, SpecialTokens
from lmdeploy.chat.tool_calls import FunctionCall, ToolCall, join_tool_calls, new_call_id

# Longer text before the first <|message|> is content and not a header.
_MAX_PLAIN_HEADER_BYTES = 256
_FUNCTIONS = "functions."
_CHANNELS = ("analysis", "commentary", "final")
_NO_TOOLS = ("", "assistant", "user", "all")  # recipients that are not tools


class Kind(Enum):
    """The part of an answer to which a piece of text belongs."""

    CONTENT = "content"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    DROPPED = "dropped"


@dataclass
class _Header:
    """Bytes between <|start|> and <|message|>."""

    role: bytearray = field(default_factory=bytearray)
    channel: bytearray | None = None
    constrain: bytearray | None = None
    is_first: bool = (
        False  # first header of the answer, whose `<|start|>assistant` is in the prompt
    )

    def append(self, data: bytes) -> None:
        """Append text to the section that began last."""
        for section in (self.constrain, self.channel, self.role):
            if section is not None:
                section += data
                return

    @property
    def is_plain(self) -> bool:
        """Return whether this may be an answer without any format."""
        return self.is_first and self.channel is None and self.constrain is None

    def kind(self) -> tuple[Kind, str]:
        """Return the kind of the body, and the name of the tool of a tool call."""
        role = _words(self.role)
        channel = _words(self.channel or b"")
        author = "assistant" if self.is_first or not role else role[0]
        if not author.startswith(("assistant", "to=", *_CHANNELS)):
            return Kind.DROPPED, ""
        recipients = [word[3:] for word in channel + role if word.startswith("to=")]
        recipient = recipients[0] if recipients else ""
        name = recipient.removeprefix(_FUNCTIONS)
        if name and recipient not in _NO_TOOLS:
            return Kind.TOOL_CALL, name
        is_analysis = (channel or role)[:1] == ["analysis"]
        return (Kind.REASONING if is_analysis else Kind.CONTENT), ""


def _words(section: bytes | bytearray) -> list[str]:
    return section.decode("utf-8", "replace").split()


class HarmonyParser:
    """The state machine. Call `push` for every token and then `finish`, and join the parts.

    `in_final`: the prompt has already opened the channel `final`. A line break joins two bodies of
    the same kind. A character with bytes in several tokens is returned when it is complete. Invalid
    UTF-8 becomes U+FFFD.
    """

    def __init__(
        self,
        tokenizer: SpecialTokens,
        tokens: HarmonyTokens | None = None,
        *,
        in_final: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens or HarmonyTokens.of(tokenizer)
        # None inside a body, whose kind is `_kind`.
        self._header: _Header | None = None if in_final else _Header(is_first=True)
        self._kind = Kind.CONTENT
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._written: set[Kind] = set()
        self._owes_break = False
        self._call_id = ""
        self._num_calls = 0

    @property
    def num_tool_calls(self) -> int:
        """Return the number of tool calls begun so far."""
        return self._num_calls

    @property
    def pending_content(self) -> bool:
        """Return whether an incomplete character of the content is held back."""
        in_content = self._header is None and self._kind is Kind.CONTENT
        return in_content and bool(self._decoder.getstate()[0])

    def push(self, token: int) -> Delta:
        """Return the parts that `token` adds."""
        tokens = self._tokens
        if token in (tokens.start, tokens.end, tokens.call, tokens.return_):
            return self._begin_header(_Header())
        if token == tokens.channel:
            if self._header is None:
                return self._begin_header(_Header(channel=bytearray()))
            self._header.channel, self._header.constrain = bytearray(), None
        elif token == tokens.constrain and self._header is not None:
            self._header.constrain = bytearray()
        elif token == tokens.message and self._header is not None:
            return self._begin_body(*self._header.kind())
        elif token in (tokens.constrain, tokens.message) or self._tokenizer.is_special(token):
            pass
        elif self._header is None:
            return self._text(self._decoder.decode(self._tokenizer.token_bytes(token)))
        else:
            return self._extend_header(self._tokenizer.token_bytes(token))
        return Delta()

    def finish(self) -> Delta:
        """Return the rest of the answer. An incomplete character becomes U+FFFD."""
        header = self._header
        if header is None:
            return self._end_body()
        text = header.role.decode("utf-8", "replace")
        recipient = text.strip()
        self._header = _Header()
        if not header.is_plain or recipient.startswith("to=") or "to=".startswith(recipient):
            return Delta()
        return Delta(content=text)

    def _extend_header(self, data: bytes) -> Delta:
        header = self._header
        if header is None:
            raise RuntimeError("a header must not be extended inside a body")
        header.append(data)
        if not header.is_plain or len(header.role) <= _MAX_PLAIN_HEADER_BYTES:
            return Delta()
        result = self._begin_body(Kind.CONTENT, "")
        result.add(self._text(self._decoder.decode(bytes(header.role))))
        return result

    def _begin_header(self, header: _Header) -> Delta:
        parts = self._end_body() if self._header is None else Delta()
        self._header = header
        return parts

    def _begin_body(self, kind: Kind, name: str) -> Delta:
        self._header = None
        self._kind = kind
        self._owes_break = kind in self._written
        if kind is not Kind.TOOL_CALL:
            return Delta()
        self._call_id = new_call_id()
        self._num_calls += 1
        return Delta(tool_calls=[self._call_part(name=name)])

    def _end_body(self) -> Delta:
        return self._text(self._decoder.decode(b"", True))

    def _text(self, text: str) -> Delta:
        if not text or self._kind is Kind.DROPPED:
            return Delta()
        if self._kind is Kind.TOOL_CALL:
            return Delta(tool_calls=[self._call_part(arguments=text)])
        self._written.add(self._kind)
        if self._owes_break:
            text, self._owes_break = "\n" + text, False
        return Delta(content=text) if self._kind is Kind.CONTENT else Delta(reasoning=text)

    def _call_part(self, *, name: str = "", arguments: str = "") -> ToolCall:
        return ToolCall(self._call_id, FunctionCall(name, arguments), self._num_calls - 1)


def parse_answer(tokenizer: SpecialTokens, token_ids: Iterable[int]) -> Delta:
    """Parse a whole answer, and join its tool calls. Raise ValueError for unknown ids."""
    parser = HarmonyParser(tokenizer)
    pieces = [*(parser.push(token_id) for token_id in token_ids), parser.finish()]
    return Delta(
        content="".join(piece.content for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        tool_calls=join_tool_calls([part for piece in pieces for part in piece.tool_calls]),
    )


class KnownTokens(SpecialTokens, Protocol):
    """A tokenizer with a known number of ids."""

    @property
    def vocab_size(self) -> int:
        """Return the largest id plus one."""
        ...


class HarmonyDecoder:
    """An AnswerDecoder whose text is the content. It sets the other parts aside.

    Stop words are therefore matched only in the content and not in the reasoning.
    """

    def __init__(
        self, tokenizer: KnownTokens, tokens: HarmonyTokens, *, in_final: bool = False
    ) -> None:
        self._parser = HarmonyParser(tokenizer, tokens, in_final=in_final)
        self._vocab_size = tokenizer.vocab_size
        self._aside = Delta()
        self.splits = True
        self.num_broken_calls = 0  # all text of a call is its arguments

    @property
    def num_tool_calls(self) -> int:
        """Return the number of tool calls begun so far."""
        return self._parser.num_tool_calls

    def push(self, token: int) -> str:
        """Return the content that `token` completes. Ids that only pad the vocabulary have none."""
        return self._sort(self._parser.push(token)) if token < self._vocab_size else ""

    @property
    def pending(self) -> bool:
        """Return whether an incomplete character of the content is held back."""
        return self._parser.pending_content

    def finish(self) -> str:
        """Return the rest of the content."""
        return self._sort(self._parser.finish())

    def take_aside(self) -> Delta:
        """Return reasoning and parts of tool calls since the last call."""
        aside, self._aside = self._aside, Delta()
        return aside

    def _sort(self, parts: Delta) -> str:
        content, parts.content = parts.content, ""
        self._aside.add(parts)
        return content
