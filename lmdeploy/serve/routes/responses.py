"""①⑨ /v1/responses: OpenAI's Responses API with function tools."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr
from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.base.checks import OptionError, refuse
from lmdeploy.config.generation import MAX_LOGPROBS
from lmdeploy.config.unsupported import BODY, RESPONSES, unsupported_body_fields
from lmdeploy.response import Response as Answer
from lmdeploy.serve.auth import owner_of
from lmdeploy.serve.errors import ApiError, JsonResponse, error_response
from lmdeploy.serve.http.response_store import StoredResponse
from lmdeploy.serve.jobs import Job, PreparedRequest, Usage
from lmdeploy.serve.logprobs import chat_logprobs
from lmdeploy.serve.routes.base import ApiRouter, Endpoint, check_model, post, respond, state_of
from lmdeploy.serve.routes.conversation import count_prompt_tokens, prepare_conversation
from lmdeploy.serve.routes.documentation import About
from lmdeploy.serve.routes.response_input import (
    ITEM_QUERY,
    Item,
    ResponseFields,
    conversation_of,
    function_name,
    page_of_items,
    with_namespaces,
)
from lmdeploy.serve.sampling import Limits
from lmdeploy.serve.schema import Items, SamplingFields, Texts, Unsupported
from lmdeploy.serve.state import ServerState
from lmdeploy.serve.streaming import EventForm, EventJson, answer_events

router = ApiRouter()

_LOGPROBS = "message.output_text.logprobs"  # a value of `include`
_EMPTY_TOOL: Item = {"description": None, "parameters": None, "strict": None}


class ResponsesRequest(ResponseFields, SamplingFields):
    """Body of POST /v1/responses."""

    unsupported: ClassVar[Unsupported] = unsupported_body_fields(
        BODY | RESPONSES, built=("metadata", "prompt_cache_key", "safety_identifier", "store")
    )

    model: str
    input: str | Items
    store: bool | None = True
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    metadata: dict[str, str] | None = None
    background: bool | None = False
    include: Texts | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_tool_calls: int | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    _owner: str = PrivateAttr(default="")  # set by the route
    _items: list[Item] = PrivateAttr(default_factory=list)  # all input items

    @property
    def num_logprobs(self) -> int | None:
        """Return how many log probabilities each position has besides the token's own.

        None means that the response has none.
        """
        wanted = self.top_logprobs or _LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None


class InputTokensRequest(ResponseFields):
    """Body of POST /v1/responses/input_tokens."""

    model: str | None = None  # None is the served model
    input: str | Items | None = None


# Requests.


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the `response_format` of chat completions for the field `text`."""
    form = (text or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise refuse("text.format", form, wanted="an object with a type")
    if form.get("type") != "json_schema":
        return form
    if not isinstance(form.get("schema"), dict):
        raise refuse("text.format.schema", form.get("schema"), wanted="a JSON schema")
    schema = {key: form.get(key) for key in ("name", "schema", "strict")}
    return {"type": "json_schema", "json_schema": schema}


async def prepare_response(state: ServerState, request: ResponsesRequest) -> PreparedRequest:
    """Make the prompt and the options. Raise ApiError or OptionError for a bad field."""
    if request.background:
        raise OptionError("background", "is true, but the server answers at once. Remove it.")
    conversation, request._items = conversation_of(
        state, request, given=request.input, owner=request._owner
    )
    response_format = _response_format(request.text) or request.response_format
    fields = request.model_copy(update={"response_format": response_format})
    limits = Limits(max_new_tokens=request.max_output_tokens, logprobs=request.num_logprobs)
    return await prepare_conversation(state, conversation, fields=fields, limits=limits)


# Responses.


@dataclass
class _Output:
    """The output items of a response so far.

    The next text of a message gets the pending log probabilities, which cover all tokens.

    Args:
        names: name of a function as the model sees it → the fields of a call of it.
        has_summaries: the reasoning is its own summary, too. Some clients show only summaries.
    """

    names: dict[str, Item]
    has_summaries: bool
    items: list[Item] = field(default_factory=list)
    is_open: bool = False  # the last item may still grow
    pending: list[Item] = field(default_factory=list)

    def add(self, piece: Answer, logprobs: Sequence[Item] = ()) -> Iterator[EventJson]:
        """Add a chunk and its log probabilities. Yield its events without their numbers."""
        self.pending += logprobs
        if piece.reasoning_content:
            yield from self._add_text("reasoning", piece.reasoning_content)
        if piece.text:
            yield from self._add_text("message", piece.text)
        for call in piece.tool_calls or []:
            if call.function.name:
                yield from self.close()
                name = self.names.get(call.function.name, {"name": call.function.name})
                item = _item("function_call", "fc", call_id=call.id, **name)
                yield from self._open({**item, "arguments": ""})
            if call.function.arguments:
                self.items[-1]["arguments"] += call.function.arguments
                yield self._event("function_call_arguments.delta", delta=call.function.arguments)

    def _add_text(self, kind: str, text: str) -> Iterator[EventJson]:
        last = self.items[-1] if self.items else {}
        if not self.is_open or last.get("type") != kind:
            yield from self.close()
            more: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
            prefix = "msg" if kind == "message" else "rs"
            yield from self._open({**_item(kind, prefix), **more, "content": []})
            part = _part(kind, "")
            yield self._event("content_part.added", content_index=0, part=part)
            self.items[-1]["content"] = [{**part}]
            yield from self._summary("part.added", part={"type": "summary_text", "text": ""})
        self.items[-1]["content"][0]["text"] += text
        also: Item = {"logprobs": self._take_logprobs()} if kind == "message" else {}
        yield self._event(f"{_name(kind)}.delta", content_index=0, delta=text, **also)
        yield from self._summary("text.delta", delta=text)

    def _take_logprobs(self) -> list[Item]:
        """Add the pending log probabilities to the open message, and return them."""
        taken, self.pending = self.pending, []
        part = self.items[-1]["content"][0]
        part["logprobs"] = [*part["logprobs"], *taken]
        return taken

    def _open(self, item: Item) -> Iterator[EventJson]:
        self.is_open = True
        self.items.append({**item})
        added = {"output_index": len(self.items) - 1, "item": {**item}}
        yield {"type": "response.output_item.added", **added}

    def close(self, status: str = "completed") -> Iterator[EventJson]:
        """Yield the events that end the last item."""
        if not self.is_open:
            return
        self.is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **done)
        else:
            part, more = item["content"][0], {}
            if item["type"] == "message":
                self._take_logprobs()
                more = {"logprobs": part["logprobs"]}
            name = f"{_name(item['type'])}.done"
            yield self._event(name, content_index=0, text=part["text"], **more)
            yield self._event("content_part.done", content_index=0, part=part)
            summary = {"type": "summary_text", "text": part["text"]}
            if self.has_summaries and item["type"] == "reasoning":
                item["summary"] = [summary]
            yield from self._summary("text.done", text=part["text"])
            yield from self._summary("part.done", part=summary)
        index = len(self.items) - 1
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _summary(self, event: str, **fields: Any) -> Iterator[EventJson]:
        """Yield an event of the summary, if the last item has one."""
        if self.has_summaries and self.items[-1]["type"] == "reasoning":
            yield self._event(f"reasoning_summary_{event}", summary_index=0, **fields)

    def _event(self, event: str, **fields: Any) -> EventJson:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{event}", **place, **fields}


def _item(kind: str, prefix: str, **fields: Any) -> Item:
    item_id = f"{prefix}_{secrets.token_hex(16)}"
    return {"id": item_id, "type": kind, "status": "in_progress", **fields}


def _names(tools: Sequence[Item]) -> dict[str, Item]:
    """Return the fields of a call of each tool that is in a namespace."""
    return {
        function_name(tool["name"], tool["namespace"]): {
            "name": tool["name"],
            "namespace": tool["namespace"],
        }
        for tool in with_namespaces(tools)
        if tool.get("type") == "function" and isinstance(tool.get("namespace"), str)
    }


def _part(kind: str, text: str) -> Item:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _name(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


class ResponsesReply:
    """Builds the JSON of one response, and stores the response when it is complete."""

    def __init__(self, state: ServerState, request: ResponsesRequest) -> None:
        self._state = state
        self._request = request
        self.response_id = f"resp_{secrets.token_hex(24)}"
        self._created = int(time.time())
        self._output = _Output(_names(request.tools or []), request.summary is not None)
        self._usage = Usage()

    def whole(self, jobs: Sequence[Job], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response without `stream`."""
        self._usage.add(jobs[0], answers[0])
        for _ in self._output.add(answers[0], self._logprobs(answers[0])):
            pass
        return self._finish(answers[0], list(self._output.close(_status(answers[0]))))

    def events(self, jobs: Sequence[Job]) -> AsyncIterator[bytes]:
        """Yield the events of a response with `stream`."""
        number = 0

        def numbered(event: EventJson) -> EventJson:
            nonlocal number
            number += 1
            return {**event, "sequence_number": number - 1}

        def bodies(job: Job, piece: Answer) -> Iterator[EventJson]:
            self._usage.add(job, piece)
            events = list(self._output.add(piece, self._logprobs(piece)))
            if piece.finish_reason is not None:
                events += self._output.close(_status(piece))
                body = self._finish(piece, events)
                events.append({"type": f"response.{body['status']}", "response": body})
            yield from map(numbered, events)

        def failed(error: ApiError) -> EventJson:
            code = str(error.code or error.status)
            told = {"code": code, "message": error.message, "param": error.param}
            return numbered({"type": "error", **told})

        begun = self._body("in_progress")
        first = [
            numbered({"type": f"response.{name}", "response": begun})
            for name in ("created", "in_progress")
        ]
        form = EventForm(failed, is_named=True)
        return answer_events(jobs, self._state.metrics, bodies=bodies, first=first, form=form)

    def _logprobs(self, piece: Answer) -> list[Item]:
        if self._request.num_logprobs is None:
            return []
        found: list[Item] = chat_logprobs(
            self._state.engine.text.tokenizer,
            piece.token_ids,
            logprobs=piece.logprobs or [],
            num_top=self._request.num_logprobs,
        )["content"]
        return found

    def _finish(self, answer: Answer, events: list[EventJson]) -> dict[str, Any]:
        """Return the body of the complete response, and store it unless `store` is false.

        `events` are those of the last item, which is closed now.
        """
        body = self._body(_status(answer))
        if body["status"] == "incomplete":
            reason = "max_output_tokens" if answer.finish_reason == "length" else "aborted"
            body["incomplete_details"] = {"reason": reason}
        body["usage"] = self._usage_body(answer)
        request = self._request
        if request.store is not False:
            stored = StoredResponse.of(request._owner, body, input_items=request._items)
            self._state.responses.add(stored)
        return body

    def _usage_body(self, answer: Answer) -> dict[str, Any]:
        usage = self._usage.body()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": usage["total_tokens"],
        }

    def _num_reasoning_tokens(self) -> int:
        """Return the number of tokens that the text of the reasoning has alone."""
        tokenizer = self._state.engine.text.tokenizer
        items = [item for item in self._output.items if item["type"] == "reasoning"]
        texts = [item["content"][0]["text"] for item in items]
        return sum(len(tokenizer.encode(text, add_special=False)) for text in texts)

    def _body(self, status: str) -> dict[str, Any]:
        request, sampling = self._request, self._state.engine.text.sampling
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "frequency_penalty": request.frequency_penalty or 0.0,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self._state.model_name,
            "output": self._output.items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "presence_penalty": request.presence_penalty or 0.0,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": request.effort, "summary": request.summary},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": _or(request.temperature, sampling["temperature"]),
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [
                {**(_EMPTY_TOOL if tool.get("type") == "function" else {}), **tool}
                for tool in request.tools or []
            ],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": _or(request.top_p, sampling["top_p"]),
            "truncation": "disabled",
            "usage": None,
        }


def _or(value: float | None, default: Any) -> Any:
    return default if value is None else value


def _status(answer: Answer) -> str:
    return "completed" if answer.finish_reason in ("stop", "tool_calls") else "incomplete"


# Field of an error → its name in a body.
_FIELDS = {"prompt": "input", "messages": "input", "max_new_tokens": "max_output_tokens"}
_ENDPOINT = Endpoint(
    prepare_response,
    ResponsesReply,
    fields=_FIELDS,
    model=lambda body: body.model,
)


@post(
    router,
    "/v1/responses",
    body=ResponsesRequest,
    errors=(404,),
    needs_slot=True,
    events=True,
)
async def responses(request: Request, body: ResponsesRequest) -> Response:
    """Serve OpenAI's responses."""
    body._owner = owner_of(request)
    return await respond(request, endpoint=_ENDPOINT, body=body)


@router.on("/v1/responses/compact", "POST", about=None)
async def compact(request: Request) -> Response:
    """Refuse a compaction: clients expect 404, but this path fits that of a stored response."""
    return error_response(ApiError(404, "Compaction is not supported. Send shorter conversations."))


@post(
    router,
    "/v1/responses/input_tokens",
    body=InputTokensRequest,
    errors=(404,),
    needs_slot=True,
)
async def input_tokens(request: Request, body: InputTokensRequest) -> Response:
    """Return the number of tokens of a conversation as a prompt."""
    state = state_of(request)
    if body.model is not None:
        check_model(state, body.model)
    owner = owner_of(request)
    conversation, _ = conversation_of(state, body, given=body.input or [], owner=owner)
    try:
        num_tokens = await count_prompt_tokens(state, conversation)
    except OptionError as error:
        raise error.renamed(_FIELDS.get(error.field, error.field)) from error
    return JsonResponse({"object": "response.input_tokens", "input_tokens": num_tokens})


@router.on("/v1/responses/{response_id}", "GET", about=About((404,)))
async def get_response(request: Request) -> Response:
    """Return a stored response."""
    response_id = request.path_params["response_id"]
    found = state_of(request).responses.get(response_id, owner=owner_of(request))
    if found is None:
        return _unknown(response_id)
    return Response(found.body, media_type="application/json")


@router.on(
    "/v1/responses/{response_id}/input_items", "GET", about=About((400, 404), query=ITEM_QUERY)
)
async def list_input_items(request: Request) -> Response:
    """Return the input items of a stored response, which begin with the earlier responses'."""
    response_id = request.path_params["response_id"]
    found = state_of(request).responses.get(response_id, owner=owner_of(request))
    if found is None:
        return _unknown(response_id)
    return JsonResponse(page_of_items(found, request.query_params))


@router.on("/v1/responses/{response_id}", "DELETE", about=About((404,)))
async def delete_response(request: Request) -> Response:
    """Remove a stored response."""
    response_id = request.path_params["response_id"]
    if not state_of(request).responses.remove(response_id, owner=owner_of(request)):
        return _unknown(response_id)
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


def _unknown(response_id: str) -> Response:
    return error_response(ApiError(404, f"There is no response {json.dumps(response_id[:100])}."))
