"""Tools to write a splitter as a program that reads an answer from its beginning to its end.

The program is a generator over an `AnswerReader`. It yields when it needs more text, so it does not
depend on where the text was cut. It continues when more text has arrived or the answer has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from lmdeploy.chat.formats.base import Delta
from lmdeploy.chat.tool_calls import FunctionCall, ToolCall, new_call_id

T = TypeVar("T")
Step = Generator[None, None, T]

_SPACE = re.compile(r"\s*")
_IN_STRING = re.compile(r'[^"\\]*')
_OUT_OF_STRING = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[-+.\w]*")
_CLOSING = {"{": "}", "[": "]"}


class AnswerReader:
    """The unread text of an answer and the parts that have been read.

    Text that is read within an attempt is kept until the attempt ends. If it fails, the text
    becomes content, so no text is lost.
    """

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._text = ""
        self._ended = False
        self._attempt: list[str] | None = None
        self._delta = Delta()
        self._call_id = ""
        self._num_calls = 0

    def feed(self, text: str) -> None:
        """Append text."""
        self._text += text

    def end(self) -> None:
        """Mark the end of the answer: no more text will arrive."""
        self._ended = True

    def take(self) -> Delta:
        """Return the parts since the last time."""
        delta, self._delta = self._delta, Delta()
        return delta

    # Output.

    def add_content(self, text: str) -> None:
        """Append content."""
        self._delta.content += text

    def add_reasoning(self, text: str) -> None:
        """Append reasoning."""
        self._delta.reasoning += text

    def begin_call(self, name: str) -> None:
        """Begin a tool call. The attempt can no longer become content."""
        self._call_id = self._new_id()
        self._num_calls += 1
        self._add_call(FunctionCall(name, ""))
        self.commit()

    def add_arguments(self, text: str) -> None:
        """Append to the arguments of the call that began last."""
        if text:
            self._add_call(FunctionCall("", text))
        self.commit()

    def add_calls(self, parts: Sequence[ToolCall]) -> None:
        """Append calls that another splitter has read."""
        self._delta.tool_calls += parts

    def _add_call(self, function: FunctionCall) -> None:
        part = ToolCall(self._call_id, function, self._num_calls - 1)
        self._delta.tool_calls.append(part)

    # Attempts.

    def commit(self) -> None:
        """Drop the text of the attempt, because its meaning has been added to the output."""
        if self._attempt is not None:
            self._attempt = []

    def begin_attempt(self) -> None:
        """Begin an attempt at text that may not be a call."""
        self._attempt = []

    def give_up(self) -> None:
        """End the attempt. Its text becomes content, because it was no call."""
        self.add_content("".join(self._attempt or []))
        self._attempt = None

    def finish_attempt(self, succeeded: bool) -> None:
        """End the attempt. If it failed, its text since the last commit becomes content."""
        if succeeded:
            self._attempt = None
            return
        self.give_up()
        self._delta.num_broken_calls += 1

    # Input. Each of these is used by `yield from`.

    def content_until(self, marks: Sequence[str]) -> Step[str | None]:
        """Pass content on until one of the marks comes, and begin an attempt with this mark.

        White space before a mark belongs to the attempt. Return the mark, or None at the end.
        """
        while True:
            found = min(
                ((at, -len(mark), mark) for mark in marks if (at := self._text.find(mark)) >= 0),
                default=None,
            )
            if found is not None:
                at, _, mark = found
                content = self._text[:at].rstrip()
                self._take(len(content), self.add_content)
                self._attempt = []
                self._take(at - len(content) + len(mark))
                return mark
            if self._ended:
                self._take(len(self._text), self.add_content)
                return None
            kept = len(self._text) - _longest_prefix_at_end(self._text, marks)
            self._take(len(self._text[:kept].rstrip()), self.add_content)
            yield

    def pass_on(self) -> Step[None]:
        """Pass the rest of the answer on as content."""
        while True:
            self._take(len(self._text), self.add_content)
            if self._ended:
                return
            yield

    def opens_with(self, mark: str) -> Step[bool]:
        """Read white space and `mark` if they come next. Return whether they did."""
        while True:
            size = _end(_SPACE, self._text)
            rest = self._text[size : size + len(mark)]
            if rest == mark:
                self._take(size + len(mark))
                return True
            if self._ended or not mark.startswith(rest):
                return False
            yield

    def text_until(self, mark: str, emit: Callable[[str], None]) -> Step[bool]:
        """Pass text to `emit` until `mark`, and read the mark. Return False if it never comes."""
        return (yield from self.text_until_any((mark,), emit)) is not None

    def text_until_any(self, marks: Sequence[str], emit: Callable[[str], None]) -> Step[str | None]:
        """Pass text to `emit` until one of the marks, and read and return the mark."""
        while text := (yield from self.text_before(marks)):
            emit(text)
        for mark in marks:
            if self._text.startswith(mark):
                self._take(len(mark))
                return mark
        return None

    def text_before(self, marks: Sequence[str]) -> Step[str]:
        """Read text before the next of the marks. Return "" where one comes, and at the end."""
        while True:
            found = [at for mark in marks if (at := self._text.find(mark)) >= 0]
            size = len(self._text)
            if found:
                size = min(found)
            elif not self._ended:
                size -= _longest_prefix_at_end(self._text, marks)
            if size or found or self._ended:
                text = self._text[:size]
                self._take(size)
                return text
            yield

    def unread(self, text: str) -> None:
        """Give text back that was read outside of an attempt."""
        self._text = text + self._text

    def accept(self, literal: str) -> Step[bool]:
        """Read `literal` if it comes next. Return whether it did."""
        while not self._ended and len(self._text) < len(literal):
            if not literal.startswith(self._text):
                return False
            yield
        if not self._text.startswith(literal):
            return False
        self._take(len(literal))
        return True

    def next_char(self) -> Step[str]:
        """Return the next character without reading it, or "" at the end."""
        while not self._text and not self._ended:
            yield
        return self._text[:1]

    def skip_space(self) -> Step[None]:
        """Read white space."""
        while True:
            match = _SPACE.match(self._text)
            self._take(match.end() if match else 0)
            if self._text or self._ended:
                return
            yield

    def json_value(self, emit: Callable[[str], None]) -> Step[bool]:
        """Pass one JSON value to `emit` as it comes. Return False if the text is not JSON.

        Only strings and brackets are checked.
        """
        closing: list[str] = []
        while True:
            char = yield from self.next_char()
            if char == '"':
                if not (yield from self._json_string(emit)):
                    return False
            elif char in _CLOSING:
                closing.append(_CLOSING[char])
                self._take(1, emit)
            elif closing and char == closing[-1]:
                closing.pop()
                self._take(1, emit)
            elif not char or char in "]}" or not (yield from self._between(emit, bool(closing))):
                return False
            if not closing:
                return True

    def _between(self, emit: Callable[[str], None], is_inside: bool) -> Step[bool]:
        """Read what is between strings and brackets, or a scalar outside of all brackets."""
        if is_inside:
            self._take(_end(_OUT_OF_STRING, self._text), emit)
            return True
        is_empty = True
        while size := _end(_SCALAR, self._text):
            is_empty = False
            ends_here = size < len(self._text) or self._ended
            self._take(size, emit)
            if ends_here:
                break
            if not (yield from self.next_char()):
                break
        return not is_empty

    def _json_string(self, emit: Callable[[str], None]) -> Step[bool]:
        self._take(1, emit)
        while True:
            self._take(_end(_IN_STRING, self._text), emit)
            char = yield from self.next_char()
            if char == '"':
                self._take(1, emit)
                return True
            while char == "\\" and len(self._text) < 2 and not self._ended:
                yield
            if not char:
                return False
            if char == "\\":
                self._take(2, emit)

    def word(self, pattern: re.Pattern[str]) -> Step[str]:
        """Read the longest text that the pattern matches character by character."""
        found = ""
        while True:
            size = _end(pattern, self._text)
            found += self._text[:size]
            self._take(size)
            if self._text or self._ended:
                return found
            yield

    def json_text(self) -> Step[str | None]:
        """Read a JSON string and return its value. Return None if the next value is no string."""
        pieces: list[str] = []
        if (yield from self.next_char()) != '"' or not (
            yield from self._json_string(pieces.append)
        ):
            return None
        try:
            value: str = json.loads("".join(pieces), strict=False)
        except ValueError:
            return None
        return value

    def _take(self, size: int, emit: Callable[[str], None] | None = None) -> None:
        """Read `size` characters. They belong to the attempt, if there is one."""
        taken, self._text = self._text[:size], self._text[size:]
        if not taken:
            return
        if self._attempt is not None:
            self._attempt.append(taken)
        if emit is not None:
            emit(taken)


def escaped(text: str) -> str:
    """Return text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return match.end() if match else 0


def _longest_prefix_at_end(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which a mark begins."""
    return max(
        (
            size
            for mark in marks
            for size in range(1, min(len(mark), len(text) + 1))
            if text.endswith(mark[:size])
        ),
        default=0,
    )


class ReadingSplitter:
    """A Splitter that runs a program over an AnswerReader."""

    def __init__(
        self,
        program: Callable[[AnswerReader], Step[Any]],
        *,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._reader = AnswerReader(new_id)
        self._steps = program(self._reader)
        self._is_running = True

    def push(self, text: str) -> Delta:
        """Return the parts that `text` completes."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> Delta:
        """Return the parts that were held back."""
        self._reader.end()
        return self._advance()

    def _advance(self) -> Delta:
        if self._is_running:
            self._is_running = next(self._steps, self) is not self
        return self._reader.take()
