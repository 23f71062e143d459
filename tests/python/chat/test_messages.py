"""Tests of message checks: all messages get one form, and errors name the field."""

from __future__ import annotations

from typing import Any

import pytest

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.messages import MAX_TOOL_CALLS, OUR_OWN_KEY, check_messages

FUNCTION = {"name": "f", "arguments": {"x": "é"}}
CALL = {"id": "a", "type": "function", "function": FUNCTION}
USER = {"role": "user", "content": "Hi"}


def test_check_messages_plain_messages_get_one_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [
        {"role": "developer", "content": "Be kind.", "tool_calls": None},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "c", OUR_OWN_KEY: [1, 2]},
    ]
    wanted = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "content": "c"},
    ]
    assert check_messages(given) == wanted
    assert check_messages(given, accept_tools=True) == wanted


def test_check_messages_tool_conversation_gets_one_form() -> None:
    given = [
        USER,
        {"role": "assistant", "thinking": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "7"},
        {"role": "assistant", "reasoning_content": "so", "content": "7.", "tool_calls": []},
    ]
    call = {**CALL, "function": {"name": "f", "arguments": '{"x": "é"}'}}
    assert check_messages(given, accept_tools=True) == [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "a"},
        {"role": "assistant", "content": "7.", "reasoning_content": "so"},
    ]
    for index, text in (
        (1, "thinking is not supported"),
        (2, "role is tool, but tool calls are not"),
    ):
        with pytest.raises(OptionError, match=rf"messages\[1\]\.{text}"):
            check_messages([USER, given[index]])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": "", "name": 3}, "name"),
        ({"role": "user", "content": "", "extra": 3}, "extra"),
        ({"role": "user", "content": "", "tool_call_id": "a"}, "tool_call_id"),
        ({"role": "user", "content": [{"type": "text"}]}, "content.text"),
        ({"role": "assistant", "content": "", "reasoning_content": []}, "reasoning_content"),
        ({"role": "assistant", "tool_calls": [CALL] * (MAX_TOOL_CALLS + 1)}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL, CALL]}, "tool_calls[1].id"),
        ({"role": "tool", "content": "", "tool_call_id": 5}, "tool_call_id"),
        ({"role": "tool", "content": None}, "content"),
    ],
)
def test_check_messages_invalid_field_is_named_in_the_error(message: Any, field: str) -> None:
    with pytest.raises(OptionError) as info:
        check_messages([message], accept_tools=True)
    assert info.value.field == f"messages[0].{field}"
