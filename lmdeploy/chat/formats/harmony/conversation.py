"""② Check messages, tools and options of a chat request, and convert them to Harmony's order.

Harmony has one tool call per message, followed by its result. OpenAI's API has several calls in one
message, followed by all results. `read_conversation` converts the latter form to the former.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmdeploy.base.checks import refuse
from lmdeploy.chat.messages import check_messages
from lmdeploy.chat.tool_calls import Tool, tool_name

# Effort in OpenAI's API → effort that the model has.
REASONING_EFFORTS = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
}
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


def read_conversation(messages: Any) -> list[HarmonyMessage]:
    """Return the turns of a conversation. Raise ValueError, which names the error.

    The first turn may be a developer turn, which joins all system and developer messages in order.
    """
    checked = check_messages(messages, accept_tools=True)
    instructions = [m["content"] for m in checked if m["role"] == "system" and m["content"]]
    turns = [HarmonyMessage("developer", "\n\n".join(instructions))] if instructions else []
    rest = [message for message in checked if message["role"] != "system"]
    last_answer = max(
        (i for i, m in enumerate(rest) if m["role"] == "assistant" and "tool_calls" not in m),
        default=-1,
    )
    for index, message in enumerate(rest):
        if message["role"] == "tool":
            continue  # it follows the call that it answers
        if "tool_calls" not in message:
            turns.append(_plain_turn(message))
            continue
        results = list(itertools.takewhile(lambda m: m["role"] == "tool", rest[index + 1 :]))
        keeps_thinking = index + len(results) + 1 > last_answer
        turns += _call_turns(message, results, keeps_thinking=keeps_thinking)
    return turns


def _plain_turn(message: dict[str, Any]) -> HarmonyMessage:
    role: Literal["user", "assistant"] = "assistant" if message["role"] == "assistant" else "user"
    return HarmonyMessage(role, message["content"], message.get("reasoning_content", ""))


def _call_turns(
    message: dict[str, Any], results: list[dict[str, Any]], *, keeps_thinking: bool
) -> Iterator[HarmonyMessage]:
    """Yield each call of a message, followed by its results."""
    content, thinking = message["content"], message.get("reasoning_content", "")
    for item in message["tool_calls"]:
        call = Call(item["function"]["name"], item["function"]["arguments"])
        yield HarmonyMessage("assistant", content, thinking, call, keeps_thinking)
        content = thinking = ""
        for result in results:
            if result["tool_call_id"] == item["id"]:
                yield HarmonyMessage("tool", result["content"], call=call)


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """Check `reasoning_effort` and `builtin_tools` in the variables of a template.

    None is removed, so that the template uses its own default. An effort that the model does not
    have becomes the nearest one.
    """
    result = {name: value for name, value in options.items() if value is not None}
    effort = result.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in REASONING_EFFORTS:
            raise refuse(
                "reasoning_effort", effort, wanted="one of " + ", ".join(REASONING_EFFORTS)
            )
        result["reasoning_effort"] = REASONING_EFFORTS[effort]
    builtin = result.get("builtin_tools", [])
    if not isinstance(builtin, list) or any(tool not in BUILTIN_TOOLS for tool in builtin):
        raise refuse("builtin_tools", builtin, wanted="a list of browser and python")
    return result


def read_tools(tools: Sequence[Tool]) -> list[Tool]:
    """Return checked tools in the form of GPT-OSS's template, which needs every field."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool_name(tool),
                "description": tool["function"].get("description") or "",
                "parameters": tool["function"].get("parameters") or {},
            },
        }
        for tool in tools
    ]
