"""The reasoning of most models: text between two marks, such as <think> and </think>."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmdeploy.chat.formats.base import (
    AnswerStart,
    CallsInside,
    Delta,
    ModelInfo,
    ReasoningParser,
    Splitter,
)
from lmdeploy.chat.formats.reader import AnswerReader, ReadingSplitter, Step
from lmdeploy.chat.grammar import AnswerGrammar
from lmdeploy.chat.tool_calls import ToolCall


@dataclass(frozen=True)
class Think(ReasoningParser):
    """Reasoning between `begin` and `end` at the beginning of an answer.

    The prompt may end with `begin`, or with `begin` and `end` where thinking is off.

    Args:
        model_types: the types of the models whose default this is.
        begins_open: if neither mark is in the prompt's end, the answer begins with reasoning.
        is_fallback: this is the default of every model whose template contains the marks.
    """

    names: tuple[str, ...]
    begin: str = "<think>"
    end: str = "</think>"
    model_types: tuple[str, ...] = ()
    begins_open: bool = False
    is_fallback: bool = False

    def matches(self, model: ModelInfo) -> bool:
        """Return whether the model's type is known, or its template contains the marks."""
        if self.end not in model.template:
            return False
        return self.is_fallback or model.model_type in self.model_types

    @property
    def marks(self) -> tuple[str, ...]:
        """Return both marks."""
        return (self.begin, self.end)

    def splitter(self, start: AnswerStart) -> Splitter:
        """Return an object that splits text into reasoning and content."""
        is_open = self._is_open(start)
        return ReadingSplitter(lambda reader: self._read(reader, start.calls, is_open=is_open))

    def grammar(self, start: AnswerStart, grammar: AnswerGrammar) -> str:
        """Return the expression of the reasoning."""
        space = grammar.rule(r"/\n{0,2}/")
        rest = f"{grammar.until(self.end)} {space}"
        if self._is_open(start):
            return rest
        if start.prompt_end.rstrip().endswith(self.end):
            return ""
        return f"({grammar.mark(self.begin)} {rest})?"

    def _is_open(self, start: AnswerStart) -> bool:
        """Return whether the prompt leaves the reasoning open."""
        if start.continue_final_message:
            return start.prompt_end.rfind(self.begin) > start.prompt_end.rfind(self.end)
        last = start.prompt_end.rstrip()
        return last.endswith(self.begin) or (self.begins_open and not last.endswith(self.end))

    def _read(
        self, reader: AnswerReader, calls: CallsInside | None, *, is_open: bool
    ) -> Step[None]:
        if (yield from reader.opens_with(self.begin)) or is_open:
            yield from reader.skip_space()
            reasoning = _SpaceHolder(reader.add_reasoning)
            if (yield from self._read_reasoning(reader, calls, emit=reasoning.add)):
                yield from reader.skip_space()
            else:
                reasoning.flush()
        yield from reader.pass_on()

    def _read_reasoning(
        self, reader: AnswerReader, calls: CallsInside | None, *, emit: Callable[[str], None]
    ) -> Step[bool]:
        """Read reasoning and its end mark. Return whether the mark came, or calls instead of it."""
        if calls is None:
            return (yield from reader.text_until(self.end, emit))
        while True:
            mark = yield from reader.text_until_any((self.end, calls.mark), emit)
            if mark != calls.mark:
                return mark is not None
            attempt = _CallAttempt(calls)
            while attempt.may_be_call and (text := (yield from reader.text_before((self.end,)))):
                reader.unread(attempt.add(text))
            if attempt.may_be_call:  # the end mark or the end of the answer comes next
                is_closed = yield from reader.accept(self.end)
                parts = [] if is_closed else attempt.finish()
                if parts:
                    reader.add_calls(parts)
                else:
                    emit(attempt.text)
                return bool(is_closed or parts)
            emit(attempt.text)


class _CallAttempt:
    """Text within reasoning that may be calls, because it begins with their mark."""

    def __init__(self, calls: CallsInside) -> None:
        self._splitter = calls.splitter()
        self._found = Delta()
        self.text = ""
        self.add(calls.mark)

    @property
    def may_be_call(self) -> bool:
        """Return whether there are only calls and white space so far."""
        return not self._found.num_broken_calls and not self._found.content.strip()

    def add(self, text: str) -> str:
        """Add text up to where it is no call. Return the rest."""
        for used, char in enumerate(text):
            if not self.may_be_call:
                return text[used:]
            self.text += char
            self._found.add(self._splitter.push(char))
        return ""

    def finish(self) -> list[ToolCall]:
        """Return the calls if the text is calls to its end, or else nothing."""
        self._found.add(self._splitter.finish())
        return self._found.tool_calls if self.may_be_call else []


class _SpaceHolder:
    """Passes text on, but holds white space back until other text follows."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._space = ""

    def add(self, text: str) -> None:
        """Pass on all but the white space at the end."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._emit(shown)

    def flush(self) -> None:
        """Pass the white space on."""
        self._emit(self._space)
