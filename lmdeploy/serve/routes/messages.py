"""①⑨ POST /v1/messages: Anthropic's API, and the endpoints that belong to it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.base.checks import OptionError, refuse, show
from lmdeploy.chat.tool_calls import ToolCall
from lmdeploy.config.unsupported import MESSAGES, unsupported_body_fields
from lmdeploy.response import Response as Answer
from lmdeploy.serve.errors import JsonResponse, anthropic_error_body
from lmdeploy.serve.jobs import Job, PreparedRequest, Usage
from lmdeploy.serve.routes.base import ApiRouter, Endpoint, check_model, post, respond, state_of
from lmdeploy.serve.routes.conversation import (
    Conversation,
    count_prompt_tokens,
    prepare_conversation,
    runnable_tools,
)
from lmdeploy.serve.sampling import Limits
from lmdeploy.serve.schema import (
    ApiRequest,
    Flag,
    Messages,
    Objects,
    SamplingFields,
    Tools,
    TopK,
    Unsupported,
    Words,
    of_option,
)
from lmdeploy.serve.state import ServerState
from lmdeploy.serve.streaming import (
    HOLE,
    Event,
    EventForm,
    EventJson,
    EventTemplate,
    answer_events,
)

router = ApiRouter()

_BILLING = "x-anthropic-billing-header:"
# Blocks of tools that only Anthropic's servers run.
_SKIPPED_BLOCKS = re.compile(r"redacted_thinking|server_tool_use|mcp_tool_use|\w+_tool_result")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessageFields(ApiRequest):
    """The fields that describe a conversation."""

    model: str
    messages: Messages
    system: str | Objects | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(MessageFields):
    """Body of POST /v1/messages."""

    unsupported: ClassVar[Unsupported] = unsupported_body_fields(MESSAGES)
    max_tokens: int = Field(ge=1, lt=2**31)
    temperature: float | None = of_option("temperature")
    top_k: TopK | None = None
    top_p: float | None = of_option("top_p")
    stop_sequences: Words | None = None
    stream: Flag | None = False
    output_format: dict[str, Any] | None = None

    @property
    def session_id(self) -> None:
        """Return None, because the requests of this API have no session."""
        return None

    @property
    def sampling(self) -> SamplingFields:
        """Return the sampling fields under the names of the other endpoints."""
        return SamplingFields(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=self.stop_sequences,
            response_format=_response_format(
                self.output_format or (self.output_config or {}).get("format")
            ),
        )


def _response_format(output_format: Any) -> dict[str, Any] | None:
    """Return OpenAI's form of an output format."""
    if output_format is None:
        return None
    kind = output_format.get("type") if isinstance(output_format, dict) else output_format
    if kind != "json_schema":
        raise refuse("output_format.type", kind, wanted="json_schema")
    if not isinstance(output_format.get("schema"), dict):
        raise refuse("output_format.schema", output_format.get("schema"), wanted="a JSON schema")
    return {"type": "json_schema", "json_schema": {"schema": output_format.get("schema")}}


_EVENTS = EventForm(anthropic_error_body, is_named=True)


# Requests.


def conversation_of(request: MessageFields) -> Conversation:
    """Return the conversation of a request. Raise OptionError for a wrong field."""
    messages: list[dict[str, Any]] = []
    skipped: list[str] = []
    if request.system and (text := _text("system", _without_billing(request.system))):
        messages.append({"role": "system", "content": text})
    for index, message in enumerate(request.messages):
        messages += _messages_of(f"messages[{index}]", message)
    choice = request.tool_choice or {"type": "auto"}
    return Conversation(
        messages,
        tools=_tools(request.tools or [], skipped=skipped),
        skipped=skipped,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
        options=_template_options(request),
    )


def _without_billing(system: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the system text without a header of Claude Code.

    It changes from request to request, so that no prefix of a prompt would be cached.
    """
    if isinstance(system, str):
        first, _, rest = system.partition("\n")
        return rest.lstrip("\n") if first.startswith(_BILLING) else system
    return [block for block in system if not str(block.get("text", "")).startswith(_BILLING)]


def _template_options(request: MessageFields) -> dict[str, Any]:
    """Return the variables of the chat template."""
    options: dict[str, Any] = {}
    if request.thinking:
        options["enable_thinking"] = request.thinking.get("type") != "disabled"
    effort = (request.output_config or {}).get("effort")
    if effort is not None:
        options["reasoning_effort"] = "high" if effort in ("xhigh", "max") else effort
    return options


def _messages_of(name: str, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages in OpenAI's form that one message becomes."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refuse(f"{name}.role", role, wanted="user or assistant")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise refuse(f"{name}.content", content, wanted="a string or a list of blocks")
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        where = f"{name}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            text.append(_string(where, block, key="text"))
        elif kind == "tool_result" and role == "user":
            yield {
                "role": "tool",
                "tool_call_id": _string(where, block, key="tool_use_id"),
                "content": _result_text(where, block.get("content") or ""),
            }
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_string(where, block, key="thinking"))
        elif role != "assistant" or not _SKIPPED_BLOCKS.fullmatch(str(kind)):
            reason = f"is {show(kind)}, which is not supported for role {role}."
            raise OptionError(f"{where}.type", f"{reason} It must be text or part of a tool call.")
    if role == "assistant":
        result: dict[str, Any] = {"role": role, "content": "".join(text)}
        if thoughts:
            result["reasoning_content"] = "".join(thoughts)
        yield {**result, "tool_calls": calls} if calls else result
    elif text:
        yield {"role": role, "content": "".join(text)}


def _text(name: str, content: Any) -> str:
    """Return a text that may be a list of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(name, content, wanted="a string or a list of text blocks")
    parts = []
    for index, block in enumerate(content):
        where = f"{name}[{index}]"
        if not isinstance(block, dict) or block.get("type") != "text":
            raise refuse(where, block, wanted="a text block")
        parts.append(_string(where, block, key="text"))
    return "".join(parts)


def _result_text(name: str, content: Any) -> str:
    """Return the text of a tool's result. A tool that was searched for becomes a line."""
    if isinstance(content, list):
        content = [
            {"type": "text", "text": _string(name, block, key="tool_name") + "\n"}
            if isinstance(block, dict) and block.get("type") == "tool_reference"
            else block
            for block in content
        ]
    return _text(name, content)


def _string(name: str, block: dict[str, Any], *, key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise refuse(f"{name}.{key}", value, wanted="a string")
    return value


def _tools(tools: list[dict[str, Any]], *, skipped: list[str]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form."""
    converted = []
    for tool in runnable_tools(tools, lambda kind: kind in ("custom", None), skipped=skipped):
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        for key in ("description", "strict"):
            if tool.get(key) is not None:
                function[key] = tool[key]
        converted.append({"type": "function", "function": function})
    return converted


def _tool_choice(choice: dict[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _TOOL_CHOICES:
        raise refuse("tool_choice.type", kind, wanted="auto, any, none or tool")
    return _TOOL_CHOICES[kind]


async def prepare_message(state: ServerState, request: MessagesRequest) -> PreparedRequest:
    """Make the prompt and the options. Raise OptionError for a bad field."""
    return await prepare_conversation(
        state,
        conversation_of(request),
        fields=request.sampling,
        limits=Limits(max_new_tokens=request.max_tokens),
    )


# Responses.


@dataclass
class _OpenBlock:
    """The content block that the events of a stream are in."""

    kind: Literal["thinking", "text", "tool_use"] | None = None
    call: int = -1  # index of the tool call
    index: int = -1
    num_calls: int = field(default=0)


class MessageReply:
    """Builds the JSON of one response."""

    def __init__(self, state: ServerState, request: MessagesRequest) -> None:
        self._state = state
        self._stops = set(request.stop_sequences or ())
        self.response_id = f"msg_{uuid.uuid4().hex}"

    def whole(self, jobs: Sequence[Job], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response without `stream`."""
        (answer,), usage = answers, Usage()
        usage.add(jobs[0], answer)
        blocks: list[dict[str, Any]] = []
        if answer.reasoning_content:
            thinking = answer.reasoning_content
            blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if answer.text:
            blocks.append(_text_block(answer.text))
        blocks += [
            {**_call_block(call), "input": _arguments(call)} for call in answer.tool_calls or []
        ]
        return {**self._message(usage), "content": blocks, **_stop(answer)}

    def events(self, jobs: Sequence[Job]) -> AsyncIterator[bytes]:
        """Yield the events of a response with `stream`."""
        usage, block = Usage(), _OpenBlock()
        for job in jobs:
            usage.prompt[job.prompt_index] = (len(job.stream.prompt_ids), 0)
        message = {**self._message(usage), "content": []}
        first = [{"type": "message_start", "message": message}]

        def bodies(job: Job, piece: Answer) -> Iterator[Event]:
            usage.add(job, piece)
            yield from _block_events(piece, block)
            if piece.finish_reason is not None:
                yield from _close(block)
                yield {"type": "message_delta", "delta": _stop(piece), "usage": _usage(usage)}
                yield {"type": "message_stop"}

        return answer_events(jobs, self._state.metrics, bodies=bodies, first=first, form=_EVENTS)

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._state.model_name,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": _usage(usage),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    body = usage.body()
    cached = body["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": body["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "cache_creation": None,
        "output_tokens": body["completion_tokens"],
        "output_tokens_details": None,
        "server_tool_use": None,
        "service_tier": None,
        "inference_geo": None,
    }


def _stop(answer: Answer) -> dict[str, Any]:
    """Return why an answer ended."""
    if answer.stop_word is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_word}
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons.get(answer.finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": []}


def _call_block(call: ToolCall) -> dict[str, Any]:
    block = {"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}}
    return {**block, "caller": {"type": "direct"}}


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Return the arguments as an object. Broken ones become one text."""
    try:
        value = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_arguments": call.function.arguments}


def _block_events(piece: Answer, block: _OpenBlock) -> Iterator[Event]:
    """Yield the events of one chunk, which may open and close blocks."""
    if piece.reasoning_content:
        if block.kind != "thinking":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            yield from _open(block, "thinking", empty=empty)
        yield _text_template(block.index, "thinking").event(piece.reasoning_content)
    if piece.text:
        if block.kind != "text":
            yield from _open(block, "text", empty=_text_block(""))
        yield _text_template(block.index, "text").event(piece.text)
    for call in piece.tool_calls or []:
        if block.kind != "tool_use" or block.call != call.index:
            yield from _open(block, "tool_use", empty=_call_block(call))
            block.call = call.index
        if call.function.arguments:
            delta = {"type": "input_json_delta", "partial_json": call.function.arguments}
            yield _delta(block.index, delta)


def _open(
    block: _OpenBlock, kind: Literal["thinking", "text", "tool_use"], *, empty: dict[str, Any]
) -> Iterator[EventJson]:
    yield from _close(block)
    block.kind = kind
    block.index += 1
    yield {"type": "content_block_start", "index": block.index, "content_block": empty}


def _close(block: _OpenBlock) -> Iterator[EventJson]:
    if block.kind is not None:
        block.kind = None
        yield {"type": "content_block_stop", "index": block.index}


def _delta(index: int, delta: dict[str, Any]) -> EventJson:
    return {"type": "content_block_delta", "index": index, "delta": delta}


@lru_cache
def _text_template(index: int, kind: Literal["thinking", "text"]) -> EventTemplate:
    """Return the template of the events with text of a block."""
    return EventTemplate(_delta(index, {"type": f"{kind}_delta", kind: HOLE}), _EVENTS)


_ENDPOINT = Endpoint(
    prepare_message,
    MessageReply,
    fields={"prompt": "messages", "stop": "stop_sequences"},
    model=lambda body: body.model,
)


@post(
    router,
    "/v1/messages",
    body=MessagesRequest,
    errors=(404,),
    needs_slot=True,
    events=True,
)
async def messages(request: Request, body: MessagesRequest) -> Response:
    """Serve Anthropic's messages."""
    return await respond(request, endpoint=_ENDPOINT, body=body)


@post(router, "/v1/messages/count_tokens", body=MessageFields, errors=(404,), needs_slot=True)
async def count_tokens(request: Request, body: MessageFields) -> Response:
    """Return the number of tokens of a conversation as a prompt."""
    state = state_of(request)
    check_model(state, body.model)
    num_tokens = await count_prompt_tokens(state, conversation_of(body))
    return JsonResponse({"input_tokens": num_tokens})
