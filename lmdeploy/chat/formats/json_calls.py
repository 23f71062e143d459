"""Tool calls that are JSON objects with a name and arguments, between two marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmdeploy.chat.formats.base import ModelInfo, Splitter, ToolCallParser
from lmdeploy.chat.formats.reader import AnswerReader, ReadingSplitter, Step
from lmdeploy.chat.grammar import AnswerGrammar, arguments_grammar
from lmdeploy.chat.tool_calls import Tool, ToolUse, tool_name

_ARGUMENT_KEYS = ("arguments", "parameters")
_MAX_CALLS = 16  # that a grammar allows in one answer


@dataclass(frozen=True)
class JsonCalls(ToolCallParser):
    """Calls of the form `begin` {"name": ..., "arguments": {...}} `end`.

    Args:
        space: white space that the model writes on both sides of the object.
        arguments_key: the key that the model uses. "arguments" and "parameters" are always read.
        separator: what the model writes between two calls.
        template_marks: texts that the chat templates of these models contain.
        foreign_marks: texts that these templates do not contain.
    """

    names: tuple[str, ...]
    begin: str
    end: str
    space: str = ""
    arguments_key: str = "arguments"
    separator: str = ""
    template_marks: tuple[str, ...] = ()
    foreign_marks: tuple[str, ...] = ()

    def matches(self, model: ModelInfo) -> bool:
        """Return whether the template is one of this format."""
        return model.mentions(self.template_marks, self.foreign_marks)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks around a call."""
        return (self.begin, self.end)

    def splitter(self, tool_use: ToolUse) -> Splitter:
        """Return an object that splits text into content and tool calls."""
        return ReadingSplitter(self._read)

    def grammar(self, tool_use: ToolUse, grammar: AnswerGrammar) -> str:
        """Return the expression of calls, or of text with calls."""
        bodies = [
            f"{grammar.literal(self.space)} {call} {grammar.literal(self.space)} "
            f"{grammar.mark(self.end)}"
            for call in json_call_rules(tool_use, grammar, arguments_key=self.arguments_key)
        ]
        return call_sequence(
            tool_use, grammar, begin=self.begin, bodies=bodies, separator=self.separator
        )

    def _read(self, reader: AnswerReader) -> Step[None]:
        while (yield from reader.content_until((self.begin,))):
            is_whole = yield from read_json_call(reader)
            reader.finish_attempt(is_whole)
            if is_whole:
                yield from reader.opens_with(self.end)


def call_sequence(
    tool_use: ToolUse, grammar: AnswerGrammar, *, begin: str, bodies: Sequence[str], separator: str
) -> str:
    """Return the expression of an answer in which each call is `begin` and one of the bodies."""
    body = grammar.rule(" | ".join(bodies))
    if not tool_use.is_required:
        repeat = "*" if tool_use.is_parallel else "?"
        return f"({grammar.until(begin)} {body}){repeat} {grammar.free_text(without=begin)}"
    call = f"{grammar.mark(begin)} {body}"
    if not tool_use.is_parallel:
        return call
    return f"{call} ({grammar.literal(separator)} {call}){{0,{_MAX_CALLS - 1}}}"


def json_call_rules(
    tool_use: ToolUse,
    grammar: AnswerGrammar,
    *,
    arguments_key: str = "arguments",
) -> list[str]:
    """Return, for each tool, the expression of a JSON object that calls it."""

    def expression(tool: Tool) -> str:
        head = f'{{"name": "{tool_name(tool)}", "{arguments_key}": '
        arguments = grammar.embed(arguments_grammar(tool))
        return f"{grammar.literal(head)} {arguments} {grammar.literal('}')}"

    return [expression(tool) for tool in tool_use.callable]


def read_json_call(
    reader: AnswerReader, *, accepts: Callable[[str], bool] = lambda name: True
) -> Step[bool]:
    """Read one JSON object as a call. Return False where it is not one.

    The call begins as soon as its name is known, if `accepts` returns True for it.
    """
    yield from reader.skip_space()
    if not (yield from reader.accept("{")):
        return False
    name: str | None = None
    early: list[str] = []  # arguments that came before the name
    has_arguments = False
    while True:
        yield from reader.skip_space()
        if (yield from reader.accept("}")):
            break
        key = yield from _read_key(reader)
        if key is None:
            return False
        if key == "name" and name is None:
            name = yield from reader.json_text()
            if name is None or not name.strip() or not accepts(name):
                return False
            if has_arguments:
                reader.begin_call(name)
                reader.add_arguments("".join(early))
        elif key in _ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            if name is not None:
                reader.begin_call(name)
            emit = early.append if name is None else reader.add_arguments
            if not (yield from _read_arguments(reader, emit)):
                return False
        elif not (yield from reader.json_value(lambda text: None)):
            return False
        yield from reader.skip_space()
        yield from reader.accept(",")
    if name is None:
        return False
    if not has_arguments:
        reader.begin_call(name)
        reader.add_arguments("{}")
    return True


def _read_key(reader: AnswerReader) -> Step[str | None]:
    key = yield from reader.json_text()
    if key is None:
        return None
    yield from reader.skip_space()
    if not (yield from reader.accept(":")):
        return None
    yield from reader.skip_space()
    return key


def _read_arguments(reader: AnswerReader, emit: Callable[[str], None]) -> Step[bool]:
    """Read the arguments. Some models write them as JSON within a string."""
    if (yield from reader.next_char()) != '"':
        return (yield from reader.json_value(emit))
    text = yield from reader.json_text()
    if text is None:
        return False
    emit(text)
    return True
