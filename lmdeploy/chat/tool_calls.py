"""Function calls that a model requests, with the names of OpenAI's API."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from lmdeploy.base.checks import OptionError, refuse, show

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass
class FunctionCall:
    """The name of a function and its arguments. The model should write the arguments as JSON."""

    name: str
    arguments: str


@dataclass
class ToolCall:
    """One call, or a part of it in a stream.

    Args:
        id: identifies the call within a conversation. A tool message refers to it.
        function: in a stream, only the first part of a call has the name, and each part has a piece
            of the arguments.
        index: position of the call in the answer.
    """

    id: str
    function: FunctionCall
    index: int = 0
    type: Literal["function"] = "function"


def join_tool_calls(parts: list[ToolCall]) -> list[ToolCall]:
    """Join the parts of a stream to whole calls. The parts do not change."""
    names: dict[int, ToolCall] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        names.setdefault(part.index, part)
        arguments.setdefault(part.index, []).append(part.function.arguments)
    return [
        ToolCall(first.id, FunctionCall(first.function.name, "".join(arguments[index])), index)
        for index, first in names.items()
    ]


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Return function tools in OpenAI's form, each with name, description and parameters.

    Raise OptionError, which names the wrong part.
    """
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise refuse("tools", tools, wanted=f"a list of at most {MAX_TOOLS} tools")
    result = [_check_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    seen = set()
    for index, tool in enumerate(result):
        name = tool["function"]["name"]
        if name in seen:
            raise refuse(
                f"tools[{index}].function.name",
                name,
                wanted="different from the names of the other tools",
            )
        seen.add(name)
    return result


def _check_tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise OptionError(f"{where}.type", f"is {show(kind)}. It must be function.")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise refuse(f"{where}.function", function, wanted="an object with name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wanted = "a name of 1 to 64 letters, digits, underscores and hyphens"
        raise refuse(f"{where}.function.name", name, wanted=wanted)
    description = function.get("description")
    if not isinstance(description, (str, type(None))):
        raise refuse(f"{where}.function.description", description, wanted="a string")
    parameters = function.get("parameters")
    if not isinstance(parameters, (dict, type(None))):
        raise refuse(f"{where}.function.parameters", parameters, wanted="a JSON schema")
    checked = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": checked}
