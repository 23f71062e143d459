"""Check the messages of a conversation, as clients and callers send them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmdeploy.base.checks import OptionError, refuse, show

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 1024  # per message
ROLES = ("system", "developer", "user", "assistant", "tool")
# The model chose the name of a call, so only names that a prompt cannot contain are rejected.
_CALL_NAME = re.compile(r"[^\s<>]{1,256}")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_UNSUPPORTED_KEYS = ("audio", "function_call", "images", "videos")


def check_messages(messages: Any, *, accept_tools: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a conversation, checked and in one form.

    Each message has `role` (developer becomes system) and `content`, a string. It has `name` if one
    was given. A message of the assistant may also have `reasoning_content`. With `accept_tools`, it
    may have `tool_calls`, whose `arguments` are strings, and a message of a tool has
    `tool_call_id` and the `name` of the call that it answers. Unknown keys are left out.

    Raises:
        OptionError: a message is wrong. The error names it and the field.
    """
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise refuse("messages", messages, wanted=f"a list of 1 to {MAX_MESSAGES} messages")
    checked = [
        _check_message(f"messages[{index}]", message, accept_tools=accept_tools)
        for index, message in enumerate(messages)
    ]
    _match_results(checked)
    return checked


def _check_message(name: str, message: Any, *, accept_tools: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise refuse(name, message, wanted="an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refuse(f"{name}.role", role, wanted="one of " + ", ".join(ROLES))
    if not accept_tools and (role == "tool" or message.get("tool_calls")):
        field = "role" if role == "tool" else "tool_calls"
        reason = "needs tool calls, which are off. Start the server with --tool-call-parser."
        raise OptionError(f"{name}.{field}", reason)
    for key in _UNSUPPORTED_KEYS if role == "assistant" else ("tool_calls", *_UNSUPPORTED_KEYS):
        if message.get(key) not in (None, []):
            raise OptionError(f"{name}.{key}", f"is not supported for role {role}. Remove it.")
    content, checked = message.get("content"), _check_texts(name, message, role=role)
    if role == "assistant":
        if calls := list(_check_calls(name, message.get("tool_calls"))):
            checked["tool_calls"] = calls
        if content is None and (calls or "reasoning_content" in checked):
            content = ""
    return {
        "role": "system" if role == "developer" else role,
        "content": text_of(name, content),
        **checked,
    }


def _check_texts(name: str, message: dict[str, Any], *, role: str) -> dict[str, Any]:
    """Return the string fields besides role and content."""
    keys: tuple[str, ...] = ("name",)
    if role == "tool":
        keys += ("tool_call_id",)
    elif role == "assistant":
        keys += _REASONING_KEYS
    checked: dict[str, Any] = {}
    for key in keys:
        value = message.get(key)
        if value is None:
            continue
        field = "reasoning_content" if key in _REASONING_KEYS else key
        if not isinstance(value, str):
            raise refuse(f"{name}.{field}", value, wanted="a string")
        checked.setdefault(field, value)
    return checked


def _match_results(messages: list[dict[str, Any]]) -> None:
    """Give each tool message the id and the name of the call that it answers.

    It answers a call of the preceding assistant messages. Without `tool_call_id`, it answers the
    first call that has no answer.
    """
    names: dict[str, str] = {}
    waiting: list[str] = []
    previous = ""
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "system":
            continue
        follows, previous = previous == role == "assistant", role
        if role != "tool":
            if not follows:
                names, waiting = {}, []
            calls = message.get("tool_calls", [])
            names |= {call["id"]: call["function"]["name"] for call in calls}
            waiting += [call["id"] for call in calls]
            continue
        if not names:
            raise OptionError(
                f"messages[{index}].role",
                "is tool, but no assistant message with tool_calls comes before. "
                "Remove the message.",
            )
        call_id = message.get("tool_call_id", waiting[0] if waiting else None)
        if call_id not in names:
            wanted = "the id of a call in the preceding assistant message"
            raise refuse(f"messages[{index}].tool_call_id", call_id, wanted=wanted)
        message["tool_call_id"] = call_id
        message.setdefault("name", names[call_id])
        if call_id in waiting:
            waiting.remove(call_id)


def _check_calls(name: str, calls: Any) -> Iterator[dict[str, Any]]:
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
            wanted = "a name of 1 to 256 characters without spaces, < or >"
            raise refuse(f"{where}.function.name", tool, wanted=wanted)
        arguments = function.get("arguments")
        if arguments is None:
            arguments = ""
        if isinstance(arguments, dict):  # the form that chat templates use
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str):
            raise refuse(f"{where}.function.arguments", arguments, wanted="a string with JSON")
        call_id = f"call {index}" if call.get("id") is None else call["id"]
        if not isinstance(call_id, str) or call_id in seen:
            raise refuse(
                f"{where}.id", call_id, wanted="a string that no other call of the message has"
            )
        seen.add(call_id)
        checked = {"name": tool, "arguments": arguments}
        yield {"id": call_id, "type": "function", "function": checked}


def text_of(name: str, content: Any) -> str:
    """Return the content of a message as text. It may be a list of text parts."""
    if isinstance(content, list):
        content = "".join(_check_part(name, part) for part in content)
    if not isinstance(content, str):
        raise refuse(f"{name}.content", content, wanted="a string or a list of text parts")
    return content


def _check_part(name: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise OptionError(
            f"{name}.content", f"has a part of type {show(kind)}. Every part must be text."
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise refuse(f"{name}.content.text", text, wanted="a string")
    return text


def is_continued(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last message is an answer that the model continues.

    Raise OptionError if it ends with tool calls, whose results must follow.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return False
    if messages[-1].get("tool_calls"):
        raise OptionError("messages", "ends with tool_calls. Add a tool message for each of them.")
    return True
