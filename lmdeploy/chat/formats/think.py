"""The reasoning of most models: text between two marks, such as <think> and </think>."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmdeploy.chat.formats.base import AnswerStart, ModelInfo, ReasoningParser, Splitter
from lmdeploy.chat.formats.reader import AnswerReader, ReadingSplitter, Step
from lmdeploy.chat.grammar import AnswerGrammar


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
        return ReadingSplitter(lambda reader: self._read(reader, is_open=is_open))

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

    def _read(self, reader: AnswerReader, *, is_open: bool) -> Step[None]:
        if (yield from reader.opens_with(self.begin)) or is_open:
            yield from reader.skip_space()
            reasoning = _SpaceHolder(reader.add_reasoning)
            if (yield from reader.text_until(self.end, reasoning.add)):
                yield from reader.skip_space()
            else:
                reasoning.flush()
        yield from reader.pass_on()


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
