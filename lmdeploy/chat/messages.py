"""② Check the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmdeploy.base.checks import OptionError, refuse, show

MAX_MESSAGES = 4096
# What return_token_ids adds to a message, which clients send back as it came: ignored.
OUR_OWN_KEY = "gen_tokens"
ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: Any) -> list[dict[str, str]]:
    """A conversation with plain text contents. OptionError names the message that is wrong.

    A content may be a text or a list of `{"type": "text", "text": ...}` parts. What a `name` is
    for, the chat template knows.
    """
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise refuse("messages", messages, wanted=f"a list of 1 to {MAX_MESSAGES} messages")
    return [_check_message(i, message) for i, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, str]:
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise refuse(name, message, wanted="an object with role and content")
    role = message.get("role")
    known = ("role", "content", "name", *([OUR_OWN_KEY] if role == "assistant" else []))
    for key, value in message.items():
        if key not in known and value not in (None, []):
            raise OptionError(f"{name}.{key}", "not supported, wanted role and content; remove it")
    if not isinstance(role, str) or role not in ROLES:
        raise refuse(f"{name}.role", role, wanted="one of " + ", ".join(ROLES))
    if role == "tool":
        raise OptionError(f"{name}.role", "tool calls are not supported; remove the message")
    content = text_of(name, message.get("content"))
    checked = {"role": "system" if role == "developer" else role, "content": content}
    speaker = message.get("name")
    if speaker is None:
        return checked
    if not isinstance(speaker, str):
        raise refuse(f"{name}.name", speaker, wanted="a text")
    return {**checked, "name": speaker}


def text_of(name: str, content: Any) -> str:
    """The text of a message's content, joined when it comes in parts. OptionError for others."""
    if isinstance(content, list):
        content = "".join(_check_part(name, part) for part in content)
    if not isinstance(content, str):
        raise refuse(f"{name}.content", content, wanted="a text or a list of text parts")
    return content


def _check_part(name: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise OptionError(
            f"{name}.content", f"got a part of type {show(kind)}, wanted text; remove the part"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise refuse(f"{name}.content.text", text, wanted="a text")
    return text


def is_continued(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is an answer that the model goes on with."""
    return bool(messages) and messages[-1]["role"] == "assistant"
