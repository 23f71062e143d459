"""The tool calls of Gemma 4 and FunctionGemma: call:name{key:value,...} between two marks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from lmdeploy.chat.formats.argument_types import PYTHON_NAMES
from lmdeploy.chat.formats.base import ModelInfo, Splitter, ToolCallParser
from lmdeploy.chat.formats.gemma_grammar import ArgumentRules
from lmdeploy.chat.formats.json_calls import call_sequence
from lmdeploy.chat.formats.reader import AnswerReader, ReadingSplitter, Step, escaped
from lmdeploy.chat.grammar import AnswerGrammar
from lmdeploy.chat.tool_calls import Tool, ToolUse, tool_name

_MAX_NAME_CHARS = 256
_MAX_DEPTH = 64  # of lists and objects in arguments
_NAME = re.compile(r"[^{}<\s]*")
_KEY = re.compile(r"[^:,<>{}\[\]\"\n]*")
_WORD = re.compile(r"[-+.\w]*")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")


@dataclass(frozen=True)
class GemmaCalls(ToolCallParser):
    """Calls of the form `begin` call:name{key:value,...} `end`.

    Keys, numbers, true, false and null are plain. A string is enclosed in `quote`, without
    escapes. Lists are [a,b], and objects are {key:value}.
    """

    names: tuple[str, ...]
    begin: str
    end: str
    quote: str

    def matches(self, model: ModelInfo) -> bool:
        """Return whether the template writes such calls."""
        return model.mentions((f"{self.begin}call:", self.quote))

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks around a call and those around a string."""
        return (self.begin, self.end, self.quote)

    def splitter(self, tool_use: ToolUse) -> Splitter:
        """Return an object that splits text into content and tool calls."""
        return ReadingSplitter(self._read)

    def grammar(self, tool_use: ToolUse, grammar: AnswerGrammar) -> str:
        """Return the expression of calls, or of text with calls."""

        def body(tool: Tool) -> str:
            arguments = ArgumentRules(tool, grammar, quote=self.quote).arguments()
            head = grammar.literal(f"call:{tool_name(tool)}")
            return f"{head} {arguments} {grammar.mark(self.end)}"

        bodies = [body(tool) for tool in tool_use.callable]
        return call_sequence(tool_use, grammar, begin=self.begin, bodies=bodies, separator="")

    def _read(self, reader: AnswerReader) -> Step[None]:
        while (yield from reader.content_until((self.begin,))):
            is_whole = yield from self._read_call(reader)
            reader.finish_attempt(is_whole)
            if is_whole:
                yield from reader.opens_with(self.end)

    def _read_call(self, reader: AnswerReader) -> Step[bool]:
        yield from reader.skip_space()
        if not (yield from reader.accept("call:")):
            return False
        name = yield from reader.word(_NAME)
        if not name or len(name) > _MAX_NAME_CHARS or (yield from reader.next_char()) != "{":
            return False
        reader.begin_call(name)
        return (yield from self._read_value(reader, depth=0))

    def _read_value(self, reader: AnswerReader, *, depth: int) -> Step[bool]:
        """Pass a value on as JSON while it arrives. Return False if it is malformed."""
        yield from reader.skip_space()
        char = yield from reader.next_char()
        if char and char in "{[":
            return depth < _MAX_DEPTH and (yield from self._read_items(reader, char, depth=depth))
        if char == '"':
            return (yield from reader.json_value(reader.add_arguments))
        if char == self.quote[0]:
            return (yield from self._read_string(reader))
        word = yield from reader.word(_WORD)
        word = PYTHON_NAMES.get(word, word)
        if not _SCALAR.fullmatch(word):
            return False
        reader.add_arguments(word)
        return True

    def _read_string(self, reader: AnswerReader) -> Step[bool]:
        if not (yield from reader.accept(self.quote)):
            return False
        reader.add_arguments('"')
        is_whole = yield from reader.text_until(
            self.quote, lambda text: reader.add_arguments(escaped(text))
        )
        reader.add_arguments('"')
        return is_whole

    def _read_items(self, reader: AnswerReader, opening: str, *, depth: int) -> Step[bool]:
        """Read the items of a list or an object, with the brackets."""
        closing = "}" if opening == "{" else "]"
        yield from reader.accept(opening)
        reader.add_arguments(opening)
        num_items = 0
        while True:
            yield from reader.skip_space()
            if (yield from reader.accept(closing)):
                reader.add_arguments(closing)
                return True
            if num_items:
                if not (yield from reader.accept(",")):
                    return False
                reader.add_arguments(", ")
                yield from reader.skip_space()
            num_items += 1
            if opening == "{" and not (yield from self._read_key(reader)):
                return False
            if not (yield from self._read_value(reader, depth=depth + 1)):
                return False

    def _read_key(self, reader: AnswerReader) -> Step[bool]:
        """Read a key and the colon. Some models write keys as strings."""
        char = yield from reader.next_char()
        key: str | None
        if char == '"':
            key = yield from reader.json_text()
        elif char == self.quote[0]:
            pieces: list[str] = []
            is_whole = (yield from reader.accept(self.quote)) and (
                yield from reader.text_until(self.quote, pieces.append)
            )
            key = "".join(pieces) if is_whole else None
        else:
            key = (yield from reader.word(_KEY)).strip() or None
        yield from reader.skip_space()
        if key is None or not (yield from reader.accept(":")):
            return False
        reader.add_arguments(json.dumps(key, ensure_ascii=False) + ": ")
        return True
