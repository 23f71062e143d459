"""Tests of message checks: all messages get one form, and errors name the field."""

from __future__ import annotations

from typing import Any

import pytest

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.messages import MAX_TOOL_CALLS, check_messages

FUNCTION = {"name": "f", "arguments": {"x": "é"}}
CALL = {"id": "a", "type": "function", "function": FUNCTION}
USER = {"role": "user", "content": "Hi"}


def test_check_messages_plain_messages_get_one_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [
        {"role": "developer", "content": "Be kind.", "tool_calls": None},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "c", "gen_tokens": [1, 2]},
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
        {"role": "tool", "content": "7", "tool_call_id": "a", "name": "f"},
        {"role": "assistant", "content": "7.", "reasoning_content": "so"},
    ]
    for index, text in ((1, "tool_calls needs"), (2, "role needs")):
        with pytest.raises(OptionError, match=rf"messages\[1\]\.{text}"):
            check_messages([USER, given[index]])


def test_check_messages_results_answer_calls_in_order_or_by_id() -> None:
    calls = [{**CALL, "id": i, "function": {**FUNCTION, "name": f"f_{i}"}} for i in "abc"]
    system = {"role": "system", "content": "Be kind."}
    results: list[dict[str, Any]] = [{"role": "tool", "content": ""} for _ in range(3)]
    results[0]["tool_call_id"] = "b"
    given = [USER, {"role": "assistant", "tool_calls": calls}, results[0], system, *results[1:]]
    checked = check_messages(given, accept_tools=True)
    answered = [(m["tool_call_id"], m["name"]) for m in checked if m["role"] == "tool"]
    assert answered == [("b", "f_b"), ("a", "f_a"), ("c", "f_c")]


def test_check_messages_result_without_its_call_is_rejected() -> None:
    result = {"role": "tool", "tool_call_id": "z", "content": "7"}
    with pytest.raises(OptionError, match=r"messages\[1\]\.role is tool, but no assistant"):
        check_messages([USER, result], accept_tools=True)
    called = {"role": "assistant", "tool_calls": [CALL]}
    with pytest.raises(OptionError, match=r"messages\[2\]\.tool_call_id is 'z'"):
        check_messages([USER, called, result], accept_tools=True)


def test_check_messages_unknown_keys_are_left_out() -> None:
    given = {**USER, "cache_control": {"type": "ephemeral"}, "tool_call_id": "a"}
    assert check_messages([given]) == [USER]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": "", "name": 3}, "name"),
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "assistant", "content": "", "function_call": {}}, "function_call"),
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
