"""② Check messages, tools and options of a chat request, and convert them to Harmony's order.

Harmony has one tool call per message, followed by its result. OpenAI's API has several calls in one
message, followed by all results. `read_conversation` converts the latter form to the former.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lmdeploy.base.checks import OptionError, refuse
from lmdeploy.chat.messages import check_messages
from lmdeploy.chat.tool_calls import check_tools

REASONING_EFFORTS = ("low", "medium", "high")
BUILTIN_TOOLS = ("browser", "python")


@dataclass(frozen=True)
class Call:
    """One call: the name of the tool and its arguments as text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class HarmonyMessage:
    """A message in Harmony's order. With a call, `content` is the preamble of the call.

    `keeps_thinking`: the model still needs the reasoning. This is so if the reasoning belongs to a
    call and no answer without a call follows.
    """

    role: Literal["developer", "user", "assistant", "tool"]
    content: str
    thinking: str = ""
    call: Call | None = None  # in a tool message: the call that it answers
    keeps_thinking: bool = False


@dataclass(frozen=True)
class _CheckedMessage:
    """A checked message in the order of the request. `calls` are pairs of id and call."""

    index: int
    role: str
    content: str
    thinking: str = ""
    calls: tuple[tuple[str, Call], ...] = ()
    answers: str | None = None  # id of the call that a tool message answers


def read_conversation(messages: Any) -> list[HarmonyMessage]:
    """Return the turns of a conversation. Raise ValueError, which names the error.

    The first turn may be a developer turn, which joins all system and developer messages in order.
    A tool message answers the call in the preceding assistant message that `tool_call_id` names.
    Without `tool_call_id`, it answers the first call that has no answer.
    """
    checked = check_messages(messages, accept_tools=True)
    given = [_given(index, message) for index, message in enumerate(checked)]
    instructions = [g.content for g in given if g.role == "system" and g.content]
    turns = [HarmonyMessage("developer", "\n\n".join(instructions))] if instructions else []
    rest = [g for g in given if g.role != "system"]
    last_answer = max(
        (i for i, g in enumerate(rest) if g.role == "assistant" and not g.calls), default=-1
    )
    position = 0
    while position < len(rest):
        message = rest[position]
        if message.role == "tool":
            raise OptionError(
                f"messages[{message.index}].role",
                "is tool, but no assistant message with tool_calls comes before. "
                "Remove the message.",
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


def _plain_turn(message: _CheckedMessage) -> HarmonyMessage:
    role: Literal["user", "assistant"] = "assistant" if message.role == "assistant" else "user"
    return HarmonyMessage(role, message.content, message.thinking)


def _call_turns(
    message: _CheckedMessage, results: list[_CheckedMessage], *, keeps_thinking: bool
) -> Iterator[HarmonyMessage]:
    """Yield each call of a message, followed by its results."""
    waiting = [call_id for call_id, _ in message.calls]
    by_call: dict[str, list[_CheckedMessage]] = {call_id: [] for call_id in waiting}
    for result in results:
        call_id = result.answers
        if call_id is None and waiting:
            call_id = waiting[0]
        if call_id is None or call_id not in by_call:
            raise refuse(
                f"messages[{result.index}].tool_call_id",
                call_id,
                wanted="the id of a call in the preceding assistant message",
            )
        by_call[call_id].append(result)
        if call_id in waiting:
            waiting.remove(call_id)
    content, thinking = message.content, message.thinking
    for call_id, call in message.calls:
        yield HarmonyMessage("assistant", content, thinking, call, keeps_thinking)
        content = thinking = ""
        for result in by_call[call_id]:
            yield HarmonyMessage("tool", result.content, call=call)


def _given(index: int, message: dict[str, Any]) -> _CheckedMessage:
    calls = [
        (call["id"], Call(call["function"]["name"], call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]
    return _CheckedMessage(
        index,
        message["role"],
        message["content"],
        message.get("reasoning_content", ""),
        tuple(calls),
        message.get("tool_call_id"),
    )


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """Check `tools`, `reasoning_effort` and `builtin_tools` in the variables of a template.

    None is removed, so that the template uses its own default.
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
