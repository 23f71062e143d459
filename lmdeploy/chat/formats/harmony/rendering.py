"""② Render a checked conversation by the chat template to the texts of a prompt.

Text of a request must never become a special token. Otherwise `<|end|><|start|>system…` in the
result of a tool could act as a system message. So if a text spells a special token, a guard is
inserted after its first character before rendering. The rendered prompt is split at the guards, and
each piece is tokenized separately. The model then gets the same text, but not the special token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.formats.harmony.conversation import (
    Call,
    HarmonyMessage,
    read_conversation,
    read_options,
    read_tools,
)
from lmdeploy.chat.tokenizer import without_surrogates
from lmdeploy.chat.tool_calls import JsonText, Tool

if TYPE_CHECKING:
    from lmdeploy.chat.templates.prompt_template import PromptTemplate

_SPECIAL = re.compile(r"<(?=\|\w+\|>)")
_ANALYSIS = "<|channel|>analysis<|message|>"
_COMMENTARY = "<|channel|>commentary<|message|>"
_NEXT_MESSAGE = "<|end|><|start|>assistant"
_BROWSER = "browser."  # the namespace of a built-in tool


def render_prompt(
    template: PromptTemplate,
    messages: Any,
    *,
    tools: Sequence[Tool] = (),
    options: Mapping[str, Any],
) -> list[str]:
    """Return the prompt as texts. Tokenize them one by one and join the ids.

    Args:
        template: the template of the checkpoint or of --chat-template.
        messages: the messages of a request. Roles are system, developer, user, assistant (with
            `reasoning_content` or `thinking`, and `tool_calls`) and tool.
        tools: checked tools.
        options: variables of the template. `reasoning_effort` and `builtin_tools` (browser, python)
            are checked.

    Raise ValueError for a wrong field, or if the template rejects the messages.
    """
    turns, variables = read_conversation(messages), read_options(dict(options))
    if tools:
        variables["tools"] = read_tools(tools)
    guard = secrets.token_hex(16)
    try:
        turns = [_guard_turn(turn, guard) for turn in turns]
        return _render(template, turns, variables=_guarded(variables, guard)).split(guard)
    except RecursionError:
        reason = "is nested too deep. Use flatter JSON schemas."
        raise OptionError("tools", reason) from None


def _guard_turn(turn: HarmonyMessage, guard: str) -> HarmonyMessage:
    call = turn.call
    if call is not None:
        call = Call(call.name, _guarded(call.arguments, guard))
    return replace(
        turn,
        content=_guarded(turn.content, guard),
        thinking=_guarded(turn.thinking, guard),
        call=call,
    )


def _guarded(value: Any, guard: str) -> Any:
    """Return `value` with a guard in every text that spells a special token."""
    if isinstance(value, str):
        return _SPECIAL.sub("<" + guard, without_surrogates(value))
    if isinstance(value, dict):
        return {_guarded(key, guard): _guarded(item, guard) for key, item in value.items()}
    if isinstance(value, list):
        return [_guarded(item, guard) for item in value]
    return value


def _render(
    template: PromptTemplate, turns: Sequence[HarmonyMessage], *, variables: dict[str, Any]
) -> str:
    # Templates support reasoning before a call, but no preamble. So the preamble follows the
    # reasoning after a mark, and the mark is later replaced by the channel of the preamble.
    # Templates also render every call as a call of a function. So calls of the browser, whose names
    # no function can have, are marked too.
    mark = secrets.token_hex(16)
    text = template.render(_template_messages(turns, mark), variables, continues=False)
    text = text.replace(f"functions.{mark}{_BROWSER}", _BROWSER)
    text = text.replace(_ANALYSIS + mark, _COMMENTARY)
    return text.replace(mark, _NEXT_MESSAGE + _COMMENTARY)


def _template_messages(turns: Sequence[HarmonyMessage], mark: str) -> list[dict[str, Any]]:
    """Return messages in the form of GPT-OSS's template, with `thinking` and one call each.

    The filter `tojson` does not change a JsonText. So arguments and results keep their text,
    and the beginning of the prompt stays the same for the prefix cache.
    """
    messages: list[dict[str, Any]] = []
    for turn in turns:
        name = "" if turn.call is None else turn.call.name
        name = mark + name if name.startswith(_BROWSER) else name
        if turn.role == "tool" and turn.call is not None:
            messages.append(
                {"role": "tool", "name": name, "content": JsonText(turn.content, is_parsed=False)}
            )
            continue
        if turn.call is None:
            role = "system" if turn.role == "developer" else turn.role
            message = {"role": role, "content": turn.content}
            messages.append({**message, "thinking": turn.thinking} if turn.thinking else message)
            continue
        if turn.content and not turn.keeps_thinking:
            messages.append({"role": "assistant", "content": turn.content})
        function = {"name": name, "arguments": JsonText(turn.call.arguments, is_parsed=False)}
        calls = [{"type": "function", "function": function}]
        request: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
        thinking = turn.thinking + (mark + turn.content if turn.content else "")
        if thinking and turn.keeps_thinking:
            request["thinking"] = thinking
        messages.append(request)
    return messages
