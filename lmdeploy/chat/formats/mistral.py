"""The tool calls of Mistral's models, in both forms that their templates use."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmdeploy.chat.formats.base import (
    ChatFormat,
    Message,
    ModelInfo,
    Splitter,
    ToolCallParser,
)
from lmdeploy.chat.formats.json_calls import call_sequence, json_call_rules, read_json_call
from lmdeploy.chat.formats.reader import AnswerReader, ReadingSplitter, Step
from lmdeploy.chat.grammar import AnswerGrammar, arguments_grammar
from lmdeploy.chat.tool_calls import Tool, ToolUse, tool_name

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w-]*")
_LETTERS = string.ascii_letters + string.digits
_ID_SIZE = 9  # characters; templates reject other ids
_OWN_ID = re.compile(rf"[a-zA-Z0-9]{{{_ID_SIZE}}}")


@dataclass(frozen=True)
class MistralCalls(ToolCallParser):
    """Calls of the form [TOOL_CALLS][{"name": ..., "arguments": ...}] or [TOOL_CALLS]name[ARGS]{}.

    `has_list`: the model writes the first form. Both are read.
    """

    has_list: bool = True
    names: tuple[str, ...] = ("mistral",)

    def matches(self, model: ModelInfo) -> bool:
        """Return whether the template is one of this format."""
        return model.mentions((_BEGIN,))

    def extend(self, chat_format: ChatFormat, model: ModelInfo) -> ChatFormat:
        """Return `chat_format` with the form that the model's template writes."""
        return chat_format.with_tools(replace(self, has_list=not model.mentions((_ARGUMENTS,))))

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks within a call."""
        return (_BEGIN, _ID, _ARGUMENTS)

    def splitter(self, tool_use: ToolUse) -> Splitter:
        """Return an object that splits text into content and tool calls."""
        return ReadingSplitter(self._read, new_id=_new_id)

    def grammar(self, tool_use: ToolUse, grammar: AnswerGrammar) -> str:
        """Return the expression of calls, or of text with calls."""
        if not self.has_list:
            bodies = [
                f"{grammar.literal(tool_name(tool))} {grammar.mark(_ARGUMENTS)} "
                f"{grammar.embed(arguments_grammar(tool))}"
                for tool in tool_use.callable
            ]
            return call_sequence(tool_use, grammar, begin=_BEGIN, bodies=bodies, separator="")
        call = grammar.rule(" | ".join(json_call_rules(tool_use, grammar)))
        more = f'(", " {call}){{0,15}}' if tool_use.is_parallel else ""
        alone = replace(tool_use, is_parallel=False)
        return call_sequence(
            alone, grammar, begin=_BEGIN, bodies=[f'"[" {call} {more} "]"'], separator=""
        )

    def prepare(
        self, messages: list[Message], tools: Sequence[Tool]
    ) -> tuple[list[Message], Sequence[Tool]]:
        """Replace the ids of calls by ids that the templates accept."""
        prepared, tools = super().prepare(messages, tools)
        return [_with_own_ids(message) for message in prepared], tools

    @staticmethod
    def _read(reader: AnswerReader) -> Step[None]:
        while (yield from reader.content_until((_BEGIN,))):
            yield from reader.skip_space()
            if (yield from reader.next_char()) == "[":
                is_whole = yield from _read_list(reader)
            else:
                is_whole = yield from _read_named_call(reader)
            reader.finish_attempt(is_whole)


def _read_list(reader: AnswerReader) -> Step[bool]:
    yield from reader.accept("[")
    while True:
        if not (yield from read_json_call(reader)):
            return False
        yield from reader.skip_space()
        if (yield from reader.accept("]")):
            return True
        if not (yield from reader.accept(",")):
            return False


def _read_named_call(reader: AnswerReader) -> Step[bool]:
    name = yield from reader.word(_NAME)
    if not name:
        return False
    if (yield from reader.accept(_ID)):
        yield from reader.word(_NAME)
    yield from reader.accept(_ARGUMENTS)
    yield from reader.skip_space()
    if (yield from reader.next_char()) != "{":
        return False
    reader.begin_call(name)
    return (yield from reader.json_value(reader.add_arguments))


def _new_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_ID_SIZE))


def _own_id(call_id: str) -> str:
    """Return an id in Mistral's form for the id of a client."""
    if _OWN_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:_ID_SIZE]


def _with_own_ids(message: Message) -> Message:
    changed: dict[str, Any] = {}
    if "tool_call_id" in message:
        changed["tool_call_id"] = _own_id(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "id": _own_id(call["id"])} for call in message["tool_calls"]
        ]
    return {**message, **changed}
