"""② Messages, tools and options of a chat request, checked and brought into Harmony's order.

Harmony has one tool call per message, each followed by its result; OpenAI's API has several in one
message, followed by all results. `read_conversation` makes the former of the latter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lmdeploy.base.checks import OptionError, refuse
from lmdeploy.chat.messages import MAX_MESSAGES, OUR_OWN_KEY, ROLES, text_of
from lmdeploy.chat.tool_calls import check_tools

REASONING_EFFORTS = ("low", "medium", "high")
BUILTIN_TOOLS = ("browser", "python")
MAX_TOOL_CALLS = 1024  # of one message
# Of a call that a client sends back: the model chose it.
_CALL_NAME = re.compile(r"[^\s<>]{1,256}")
_THOUGHTS = ("reasoning_content", "thinking")
_KEYS = {
    "assistant": ("role", "content", "name", "tool_calls", OUR_OWN_KEY, *_THOUGHTS),
    "tool": ("role", "content", "name", "tool_call_id"),
}
_KEYS_OF_OTHERS = ("role", "content", "name")


@dataclass(frozen=True)
class Call:
    """One call: the tool's name and its arguments as text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """A message in Harmony's order. `content` of a turn with a call is its preamble.

    `keeps_thinking` is whether the model still needs the reasoning: it belongs to a call, and no
    answer without a call follows.
    """

    role: Literal["developer", "user", "assistant", "tool"]
    content: str
    thinking: str = ""
    call: Call | None = None  # of a tool turn: the call that it answers
    keeps_thinking: bool = False


@dataclass(frozen=True)
class _Given:
    """A message as it was sent, checked. `calls` are pairs of id and call."""

    index: int
    role: str
    content: str
    thinking: str = ""
    calls: tuple[tuple[str, Call], ...] = ()
    answers: str | None = None  # id of the call that a tool message answers


def read_conversation(messages: Any) -> list[Turn]:
    """Turns of a conversation: at most one developer turn, first. ValueError names what is wrong.

    The texts of all system and developer messages make the developer turn, in order. A tool message
    answers the call of the assistant message before it that `tool_call_id` names, or the first
    one without an answer when it names none.
    """
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise refuse("messages", messages, wanted=f"a list of 1 to {MAX_MESSAGES} messages")
    given = [_read_message(index, message) for index, message in enumerate(messages)]
    instructions = [g.content for g in given if g.role in ("system", "developer") and g.content]
    turns = [Turn("developer", "\n\n".join(instructions))] if instructions else []
    rest = [g for g in given if g.role not in ("system", "developer")]
    last_answer = max(
        (i for i, g in enumerate(rest) if g.role == "assistant" and not g.calls), default=-1
    )
    position = 0
    while position < len(rest):
        message = rest[position]
        if message.role == "tool":
            raise OptionError(
                f"messages[{message.index}].role",
                "got tool without a call before it, wanted an assistant message with tool_calls; "
                "remove the message",
            )
        position += 1
        if not message.calls:
            turns.append(_plain_turn(message))
            continue
        results = []
        while position < len(rest) and rest[position].role == "tool":
            results.append(rest[position])
            position += 1
        turns += _call_turns(message, results, keeps_thinking=position > last_answer)
    return turns


def _plain_turn(message: _Given) -> Turn:
    role: Literal["user", "assistant"] = "assistant" if message.role == "assistant" else "user"
    return Turn(role, message.content, message.thinking)


def _call_turns(message: _Given, results: list[_Given], *, keeps_thinking: bool) -> Iterator[Turn]:
    """Each call of a message, followed by its results."""
    waiting = [call_id for call_id, _ in message.calls]
    by_call: dict[str, list[_Given]] = {call_id: [] for call_id in waiting}
    for result in results:
        call_id = result.answers
        if call_id is None and waiting:
            call_id = waiting[0]
        if call_id is None or call_id not in by_call:
            raise refuse(
                f"messages[{result.index}].tool_call_id",
                call_id,
                wanted="the id of a call in the assistant message before it",
            )
        by_call[call_id].append(result)
        if call_id in waiting:
            waiting.remove(call_id)
    content, thinking = message.content, message.thinking
    for call_id, call in message.calls:
        yield Turn("assistant", content, thinking, call, keeps_thinking)
        content = thinking = ""
        for result in by_call[call_id]:
            yield Turn("tool", result.content, call=call)


def _read_message(index: int, message: Any) -> _Given:
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise refuse(name, message, wanted="an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refuse(f"{name}.role", role, wanted="one of " + ", ".join(ROLES))
    keys = _KEYS.get(role, _KEYS_OF_OTHERS)
    for key, value in message.items():
        if key not in keys and value not in (None, []):
            raise OptionError(f"{name}.{key}", f"not supported in a message of {role}; remove it")
    thoughts = [message[key] for key in _THOUGHTS if message.get(key) is not None]
    for thought in thoughts:
        if not isinstance(thought, str):
            raise refuse(f"{name}.reasoning_content", thought, wanted="a text")
    calls = tuple(_read_calls(name, message.get("tool_calls"))) if role == "assistant" else ()
    content = message.get("content")
    if content is None and role == "assistant" and (calls or thoughts):
        content = ""
    answers = message.get("tool_call_id")
    if answers is not None and not isinstance(answers, str):
        raise refuse(f"{name}.tool_call_id", answers, wanted="a text")
    return _Given(
        index, role, text_of(name, content), thoughts[0] if thoughts else "", calls, answers
    )


def _read_calls(name: str, calls: Any) -> Iterator[tuple[str, Call]]:
    if calls is None:
        return
    if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
        raise refuse(
            f"{name}.tool_calls", calls, wanted=f"a list of at most {MAX_TOOL_CALLS} calls"
        )
    seen = set()
    for index, call in enumerate(calls):
        where = f"{name}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise refuse(where, call, wanted="an object with id, type and function")
        tool = function.get("name")
        if not isinstance(tool, str) or not _CALL_NAME.fullmatch(tool):
            wanted = "a name of 1 to 256 characters without spaces, < and >"
            raise refuse(f"{where}.function.name", tool, wanted=wanted)
        arguments = function.get("arguments")
        if arguments is None:
            arguments = ""
        if isinstance(arguments, dict):  # as chat templates take them
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str):
            raise refuse(f"{where}.function.arguments", arguments, wanted="a text with JSON")
        call_id = f"call {index}" if call.get("id") is None else call["id"]
        if not isinstance(call_id, str) or call_id in seen:
            raise refuse(f"{where}.id", call_id, wanted="a text that no other call of it has")
        seen.add(call_id)
        yield call_id, Call(tool, arguments)


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """Checks `tools`, `reasoning_effort` and `builtin_tools` among a template's variables.

    What is None is left out, so that the template's own default holds.
    """
    result = {name: value for name, value in options.items() if value is not None}
    effort = result.get("reasoning_effort")
    if effort is not None and effort not in REASONING_EFFORTS:
        raise refuse("reasoning_effort", effort, wanted="low, medium or high")
    builtin = result.get("builtin_tools", [])
    if not isinstance(builtin, list) or any(tool not in BUILTIN_TOOLS for tool in builtin):
        raise refuse("builtin_tools", builtin, wanted="a list of browser and python")
    tools = check_tools(result.pop("tools", None))
    return {**result, "tools": tools} if tools else result
