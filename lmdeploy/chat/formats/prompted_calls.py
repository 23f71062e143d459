"""Tool calls for models whose chat template does not describe tools: the prompt explains them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lmdeploy.chat.formats.base import Message, ModelInfo
from lmdeploy.chat.formats.json_calls import JsonCalls
from lmdeploy.chat.tool_calls import Tool

_INSTRUCTIONS = """\
You can call functions. Each line between <tools> and </tools> describes one function:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON, in this form:
<tool_call>
{{"name": "the name", "arguments": {{"parameter": "value"}}}}
</tool_call>
The result of a call comes between <tool_response> and </tool_response>."""


@dataclass(frozen=True)
class PromptedCalls(JsonCalls):
    """Calls that the first message asks for, with results in messages of the user.

    Nothing separates calls. Small models write a line break after a call whatever comes next, so a
    grammar that allowed one only before another call would make them call without end.
    """

    def matches(self, model: ModelInfo) -> bool:
        """Return whether the model has a chat template."""
        return bool(model.template)

    def prepare(
        self, messages: list[Message], tools: Sequence[Tool]
    ) -> tuple[list[Message], Sequence[Tool]]:
        """Write tools, calls and results into the text of the messages."""
        prepared: list[Message] = []
        for message in messages:
            if message["role"] == "tool":
                result = f"<tool_response>\n{message['content']}\n</tool_response>"
                if prepared and prepared[-1]["role"] == "user" and "tool_call_id" in prepared[-1]:
                    prepared[-1]["content"] += "\n" + result
                else:
                    prepared.append({**message, "role": "user", "content": result})
            elif "tool_calls" in message:
                calls = "".join(map(_text_of, message["tool_calls"]))
                content = "\n".join(filter(None, [message["content"], calls]))
                prepared.append({"role": "assistant", "content": content})
            else:
                prepared.append(message)
        return (_with_instructions(prepared, tools) if tools else prepared), ()


def _text_of(call: dict[str, dict[str, str]]) -> str:
    function = call["function"]
    name = json.dumps(function["name"], ensure_ascii=False)
    arguments = function["arguments"] or "{}"
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _with_instructions(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """Add the instructions to the first message, because some templates have no system message."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=lines)
    first = messages[0]
    parts = [first["content"], instructions]
    if first["role"] != "system":
        parts.reverse()
    return [{**first, "content": "\n\n".join(filter(None, parts))}, *messages[1:]]
