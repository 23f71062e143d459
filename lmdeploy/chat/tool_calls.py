"""The tools of a request and the calls that a model makes, with the names of OpenAI's API."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Any, Literal

from lmdeploy.base.checks import OptionError, refuse, show

MAX_TOOLS = 1024
Tool = dict[str, Any]
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


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


@dataclass(frozen=True)
class JsonText:
    """JSON in a message for a template. The filter `tojson` inserts the text unchanged.

    `is_parsed` gives the template an object that is also this text, as in bounded/child.py, unless
    the text is no object. Otherwise it is a text.
    """

    text: str
    is_parsed: bool


def new_call_id() -> str:
    """Return an id that no other call has."""
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and how an answer may use them.

    Args:
        tools: all tools, as the client sent them. The prompt describes them.
        callable: the tools that the answer may call.
        is_required: the answer must call a tool.
        is_parallel: the answer may have several calls.
    """

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    is_required: bool = False
    is_parallel: bool = True

    @property
    def is_constrained(self) -> bool:
        """Return whether a grammar must ensure that calls fit their schemas."""
        return self.is_required or any(map(is_strict, self.callable))


def is_strict(tool: Tool) -> bool:
    """Return whether calls of a checked tool must follow its schema exactly."""
    return tool["function"].get("strict") is True


def tool_name(tool: Tool) -> str:
    """Return the name of a checked tool."""
    name: str = tool["function"]["name"]
    return name


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a checked tool's arguments."""
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}


def check_tool_use(
    tools: Any, tool_choice: Any = None, *, parallel_tool_calls: bool | None = None
) -> ToolUse | None:
    """Return the tools of a request, or None if the answer must not call any.

    Args:
        tools: function tools in OpenAI's form.
        tool_choice: none, auto, required, a named function, or allowed_tools.

    Raise OptionError, which names the wrong part.
    """
    checked = tuple(check_tools(tools))
    if not checked:
        if tool_choice not in (None, "none", "auto"):
            raise refuse(
                "tool_choice", tool_choice, wanted="none or auto, because there are no tools"
            )
        return None
    parallel = parallel_tool_calls is not False
    if tool_choice in (None, "auto", "required"):
        return ToolUse(checked, checked, tool_choice == "required", parallel)
    if tool_choice == "none":
        return None
    mode, names = _chosen_names(tool_choice)
    by_name = {tool_name(tool): tool for tool in checked}
    unknown = [name for name in names if name not in by_name]
    if unknown or not names:
        raise refuse(
            "tool_choice", unknown[0] if unknown else names, wanted="the name of one of the tools"
        )
    chosen = tuple(by_name[name] for name in dict.fromkeys(names))
    if mode == "function":
        return ToolUse(checked, chosen, is_required=True, is_parallel=False)
    return ToolUse(checked, chosen, mode == "required", parallel)


def _chosen_names(tool_choice: Any) -> tuple[str, list[str]]:
    """Return the mode and the names in a `tool_choice` that is an object."""
    wanted = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
    kind = tool_choice.get("type") if isinstance(tool_choice, dict) else None
    holder = tool_choice.get(kind, tool_choice) if isinstance(kind, str) else None
    if not isinstance(holder, dict):
        raise refuse("tool_choice", tool_choice, wanted=wanted)
    if kind == "allowed_tools":
        mode, entries = holder.get("mode", "auto"), holder.get("tools")
        if mode not in ("auto", "required") or not isinstance(entries, list):
            raise refuse("tool_choice", tool_choice, wanted="allowed_tools with mode and tools")
        return mode, [_name_in(entry, wanted=wanted) for entry in entries[:MAX_TOOLS]]
    if kind != "function":
        raise refuse("tool_choice", tool_choice, wanted=wanted)
    return "function", [_name_in(tool_choice, wanted=wanted)]


def _name_in(entry: Any, *, wanted: str) -> str:
    function = entry.get("function", entry) if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse("tool_choice", entry, wanted=wanted)
    return name


def check_tools(tools: Any) -> list[Tool]:
    """Return function tools in OpenAI's form, unchanged.

    Raise OptionError, which names the wrong part.
    """
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise refuse("tools", tools, wanted=f"a list of at most {MAX_TOOLS} tools")
    seen = set()
    for index, tool in enumerate(tools):
        _check_tool(f"tools[{index}]", tool)
        name = tool_name(tool)
        if name in seen:
            wanted = "different from the names of the other tools"
            raise refuse(f"tools[{index}].function.name", name, wanted=wanted)
        seen.add(name)
    return tools


def _check_tool(where: str, tool: Any) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise OptionError(f"{where}.type", f"is {show(kind)}. It must be function.")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise refuse(f"{where}.function", function, wanted="an object with name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wanted = "a name of 1 to 128 letters, digits, underscores and hyphens"
        raise refuse(f"{where}.function.name", name, wanted=wanted)
    for key, types, wanted in (
        ("description", str, "a string"),
        ("parameters", dict, "a JSON schema"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(key)
        if not isinstance(value, (types, type(None))):
            raise refuse(f"{where}.function.{key}", value, wanted=wanted)
