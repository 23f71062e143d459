"""Calls of functions that a model asks for, with the names of OpenAI's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class FunctionCall:
    """A function's name and its arguments as the model wrote them: JSON, unless it erred."""

    name: str
    arguments: str


@dataclass
class ToolCall:
    """One call, or in a stream a part of it.

    Args:
        id: tells the calls of a conversation apart; a tool message refers to it.
        function: in a stream the name comes with the call's first part and is empty afterwards,
            and the arguments are those of the part.
        index: of the call in the answer.
    """

    id: str
    function: FunctionCall
    index: int = 0
    type: Literal["function"] = "function"


def join_tool_calls(parts: list[ToolCall]) -> list[ToolCall]:
    """The whole calls of an answer from the parts of its stream, which stay as they are."""
    names: dict[int, ToolCall] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        names.setdefault(part.index, part)
        arguments.setdefault(part.index, []).append(part.function.arguments)
    return [
        ToolCall(first.id, FunctionCall(first.function.name, "".join(arguments[index])), index)
        for index, first in names.items()
    ]
