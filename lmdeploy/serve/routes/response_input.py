"""① The conversation in a request of OpenAI's Responses API, and its input items."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from lmdeploy.base.checks import OptionError, refuse, show
from lmdeploy.config.unsupported import RESPONSES, unsupported_body_fields
from lmdeploy.serve.errors import ApiError
from lmdeploy.serve.http.response_store import StoredResponse
from lmdeploy.serve.routes.conversation import Conversation, runnable_tools
from lmdeploy.serve.schema import ApiRequest, Tools, Unsupported
from lmdeploy.serve.state import ServerState

Item = dict[str, Any]
MAX_ITEMS = 100  # in one response of GET /v1/responses/{response_id}/input_items
_DEFAULT_ITEMS = 20
# The query of that endpoint, as /openapi.json describes it.
ITEM_QUERY: dict[str, Item] = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS},
    "order": {"type": "string", "enum": ["asc", "desc"]},
}
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_SUMMARIES = ("auto", "concise", "detailed", None)
# Type of an item → the beginning of its id.
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
# Items of tools that only OpenAI's servers run, and what agents record beside a conversation.
_SKIPPED_ITEMS = (
    *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"),
    *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
    *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    *("tool_search_call", "tool_search_output", "program", "program_output", "ghost_snapshot"),
    *("compaction", "compaction_summary", "context_compaction"),
)
_BETWEEN = "\n\n"  # of texts that become one message


class ResponseFields(ApiRequest):
    """The fields that describe a conversation, besides `model` and `input`."""

    unsupported: ClassVar[Unsupported] = unsupported_body_fields(RESPONSES)
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None

    @property
    def effort(self) -> str | None:
        """Return the effort of the reasoning."""
        effort = (self.reasoning or {}).get("effort")
        if not isinstance(effort, (str, type(None))):
            raise refuse("reasoning.effort", effort, wanted="a string")
        return effort

    @property
    def summary(self) -> str | None:
        """Return the kind of summary of the reasoning that is wanted."""
        reasoning = self.reasoning or {}
        summary = reasoning.get("summary") or reasoning.get("generate_summary")
        if summary not in _SUMMARIES:
            raise refuse("reasoning.summary", summary, wanted="auto, concise or detailed")
        return summary


def conversation_of(
    state: ServerState, request: ResponseFields, *, given: str | list[Item], owner: str
) -> tuple[Conversation, list[Item]]:
    """Return the conversation of a request and all its input items.

    Both begin with the conversation of `previous_response_id`.

    Args:
        state: the state of the server.
        request: the fields of the request.
        given: its `input`.
        owner: the hash of its key.

    Raise ApiError or OptionError for a wrong field.
    """
    skipped: list[str] = []
    if not isinstance(given, str):
        given = _with_references(state, given, owner=owner)
    messages = input_messages(given, skipped=skipped)
    items = with_ids([{"role": "user", "content": given}] if isinstance(given, str) else given)
    if request.previous_response_id is not None:
        earlier = _previous(state, request.previous_response_id, owner=owner)
        messages = [*input_messages(earlier, skipped=[]), *messages]
        items = with_ids([*earlier, *items])
    instructions = [{"role": "system", "content": request.instructions or ""}]
    conversation = Conversation(
        [*(instructions if request.instructions else []), *messages],
        tools=_tools(request.tools or [], skipped=skipped),
        tool_choice=_tool_choice(request.tool_choice),
        skipped=skipped,
        parallel_tool_calls=request.parallel_tool_calls,
        options={} if request.effort is None else {"reasoning_effort": request.effort},
        begins_answer=True if messages and messages[-1]["role"] == "assistant" else None,
    )
    return conversation, items


def _previous(state: ServerState, name: str, *, owner: str) -> list[Item]:
    """Return the input and output items of a stored response."""
    found = state.responses.get(name, owner=owner)
    if found is None:
        message = f"previous_response_id is {show(name)}, but there is no such response."
        raise ApiError(
            404, message, param="previous_response_id", code="previous_response_not_found"
        )
    return found.read_conversation()


def _with_references(state: ServerState, items: Sequence[Item], *, owner: str) -> list[Item]:
    """Return input items with the output items of stored responses in place of references.

    Each may be referred to once, so that a short request does not become a long prompt.
    """
    seen: set[str] = set()
    result = []
    for index, item in enumerate(items):
        kind = item.get("type") or (None if item.keys() <= {"id", "type"} else "message")
        if kind in (None, "item_reference"):
            name, item_id = f"input[{index}].id", item.get("id")
            if not isinstance(item_id, str) or item_id in seen:
                raise refuse(
                    name, item_id, wanted="the id of an item that is not referred to twice"
                )
            seen.add(item_id)
            found = state.responses.get_item(item_id, owner=owner)
            if found is None:
                message = f"{name} is {show(item_id)}, but no stored response has such an item."
                raise ApiError(404, message, param=name)
            item = found
        result.append(item)
    return result


def input_messages(items: str | list[Item], *, skipped: list[str]) -> list[dict[str, Any]]:
    """Return input items as messages of chat completions. Raise OptionError for a wrong item.

    Reasoning, text and function calls that come one after the other belong to one message of the
    assistant, whose results follow it. The types of items that the server leaves out are added to
    `skipped`.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if item.get("type") in _SKIPPED_ITEMS:
            skipped.append(item["type"])
        else:
            _add_item(messages, f"input[{index}]", item=item)
    return messages


def _add_item(messages: list[dict[str, Any]], name: str, *, item: Item) -> None:
    kind = item.get("type", "message")
    last = messages[-1] if messages else {}
    has_calls = last.get("role") == "assistant" and "tool_calls" in last
    if kind == "message":
        role = item.get("role")
        text = _text(f"{name}.content", item.get("content"))
        if role == last.get("role") == "assistant" and (has_calls or not last["content"]):
            last["content"] = _joined(last["content"], text)
        else:
            messages.append({"role": role, "content": text})
    elif kind == "reasoning":
        thoughts = _text(name, item.get("content") or item.get("summary") or "")
        if has_calls:
            last["reasoning_content"] = _joined(last.get("reasoning_content", ""), thoughts)
        else:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
    elif kind in ("function_call", "custom_tool_call"):
        if last.get("role") != "assistant":
            messages.append({"role": "assistant", "content": ""})
        arguments = item.get("arguments")
        if kind == "custom_tool_call":  # its input is text
            arguments = {"input": _text(f"{name}.input", item.get("input"))}
        called = function_name(item.get("name"), item.get("namespace"))
        function = {"name": called, "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = _text(f"{name}.output", item.get("output"))
        call_id = item.get("call_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    else:
        wanted = "message, reasoning, function_call or function_call_output"
        raise refuse(f"{name}.type", kind, wanted=wanted)


def _joined(one: str, other: str) -> str:
    return one + (_BETWEEN if one and other else "") + other


def _text(name: str, content: Any) -> str:
    """Return a text that may be a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(name, content, wanted="a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text" if kind != "refusal" else "refusal") if kind is not None else None
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            reason = f"is {show(kind)}. It must be a text part with a string."
            raise OptionError(f"{name}[{index}].type", reason)
        texts.append(text)
    return "".join(texts)


def function_name(name: Any, namespace: Any) -> Any:
    """Return the name of a function as the model sees it, which includes its namespace."""
    if isinstance(name, str) and isinstance(namespace, str):
        return f"{namespace}__{name}"
    return name


def with_namespaces(tools: Sequence[Item]) -> Iterator[Item]:
    """Yield tools, with those in a namespace, which clients run, in its place.

    Each of these has its `namespace`. The description of the namespace is part of the first one's.

    Raise OptionError for a wrong namespace.
    """
    for index, tool in enumerate(tools):
        if tool.get("type") != "namespace":
            yield tool
            continue
        namespace, inner = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str):
            raise refuse(f"tools[{index}].name", namespace, wanted="a string")
        if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
            raise refuse(f"tools[{index}].tools", inner, wanted="a list of tools")
        introduction = tool.get("description")
        for one in inner:
            texts = [text for text in (introduction, one.get("description")) if text]
            yield {**one, "namespace": namespace, "description": _BETWEEN.join(map(str, texts))}
            introduction = None


def _tools(tools: Sequence[Item], *, skipped: list[str]) -> list[Item]:
    """Return tools in the form of chat completions."""
    each = list(with_namespaces(tools))
    kept = runnable_tools(each, lambda kind: kind == "function", skipped=skipped)
    keys = ("description", "parameters", "strict")
    result = []
    for tool in kept:
        function = {key: tool[key] for key in keys if tool.get(key) is not None}
        function["name"] = function_name(tool.get("name"), tool.get("namespace"))
        result.append({"type": "function", "function": function})
    return result


def _tool_choice(choice: str | Item | None) -> str | Item | None:
    """Return a choice without the tools that the server cannot run."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice
    tools = choice.get("tools")
    if not isinstance(tools, list):
        return choice
    kept = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"]
    return {**choice, "tools": kept or tools}


# Input items of stored responses.


def with_ids(items: Sequence[Item]) -> list[Item]:
    """Return items in the form in which the API returns them: each has a type, status and own id.

    Text of a message becomes a text part.
    """
    seen: set[str] = set()
    result = []
    for item in items:
        kind = item.get("type", "message")
        item_id = item.get("id")
        if not isinstance(item_id, str) or item_id in seen:
            item_id = f"{_PREFIXES.get(kind, kind)}_{secrets.token_hex(16)}"
        seen.add(item_id)
        whole = {**item, "id": item_id, "type": kind, "status": item.get("status") or "completed"}
        if kind == "message" and isinstance(item["content"], str):
            whole["content"] = [_text_part(item["role"], item["content"])]
        result.append(whole)
    return result


def _text_part(role: str, text: str) -> Item:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def page_of_items(stored: StoredResponse, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the input items that a query selects with `after`, `limit` and `order`.

    The newest come first unless `order` is asc. Raise OptionError for a wrong value.
    """
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise refuse("order", order, wanted="asc or desc")
    limit = query.get("limit", str(_DEFAULT_ITEMS))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:4]) <= MAX_ITEMS:
        raise refuse("limit", limit, wanted=f"an integer from 1 to {MAX_ITEMS}")
    items = stored.read_input_items()[:: 1 if order == "asc" else -1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise refuse("after", after, wanted="the id of an input item")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(items),
    }
