"""①⑨ POST /v1/chat/completions: renders messages as a prompt and returns the response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Field

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.formats.base import AnswerStart, ChatFormat
from lmdeploy.chat.prompts import encode_chat
from lmdeploy.chat.tool_calls import ToolCall
from lmdeploy.config.generation import MAX_LOGPROBS
from lmdeploy.config.unsupported import BODY, CHAT, unsupported_body_fields
from lmdeploy.response import Response as Answer
from lmdeploy.serve.jobs import Job, PreparedRequest, Usage
from lmdeploy.serve.logprobs import chat_logprobs
from lmdeploy.serve.routes.base import Endpoint, post, respond
from lmdeploy.serve.sampling import Limits, make_config
from lmdeploy.serve.schema import (
    CompletionFields,
    Ids,
    Objects,
    Unsupported,
    check_value,
)
from lmdeploy.serve.state import ServerState
from lmdeploy.serve.streaming import EventJson, answer_events

router = APIRouter()


class ChatCompletionRequest(CompletionFields):
    """Body of POST /v1/chat/completions."""

    unsupported: ClassVar[Unsupported] = unsupported_body_fields(BODY | CHAT)

    # Field that needs a chat format with tools → values that every model accepts.
    of_answer_format: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True),
        "reasoning_effort": (None,),
    }

    messages: str | Objects | None = None  # a string: one user message
    input_ids: Ids | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    return_token_ids: bool | None = False
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None

    def check_plain(self) -> None:
        """Raise ApiError 400 for a field that needs a chat format with tools."""
        for name, accepted in self.of_answer_format.items():
            check_value(name, getattr(self, name), accepted=accepted)


# Fields that the chat template reads.
_OF_MESSAGES = ("tools", "reasoning_effort", "enable_thinking", "chat_template_kwargs")


async def prepare_chat(state: ServerState, request: ChatCompletionRequest) -> PreparedRequest:
    """Make the prompt and the options. Raises ApiError or OptionError for a bad field."""
    if request.top_logprobs and not request.logprobs:
        raise OptionError(
            "top_logprobs",
            f"is {request.top_logprobs}, but logprobs is not set. Set logprobs to true.",
        )
    chat_format = state.chat_format
    options = _template_options(request, chat_format)
    if request.messages and request.input_ids:
        raise OptionError("input_ids", "cannot be combined with messages. Remove one of them.")
    for name in _OF_MESSAGES if request.input_ids else ():
        if getattr(request, name) not in (None, [], {}):
            raise OptionError("input_ids", f"cannot be combined with {name}, which needs messages.")
    if request.messages:
        messages = request.messages
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids, start = await asyncio.to_thread(
            encode_chat, state.engine.loaded, messages, template_options=options
        )
    elif request.input_ids:
        ids = request.input_ids
        template = state.engine.loaded.chat_template
        start = AnswerStart(
            continue_final_message=template is not None and template.continue_final_message
        )
        state.engine.check_prompt(ids, name="input_ids")
    else:
        raise OptionError("messages", "is empty. Send at least one message.")
    limits = Limits(
        max_new_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        n=request.n or 1,
    )
    room = max(state.engine.max_request_tokens - len(ids), 1)
    config = make_config(request, limits, model_defaults=state.engine.loaded.sampling, room=room)
    grammar = None
    if options.get("tools"):
        grammar = chat_format.tool_grammar(options["tools"], request.tool_choice)
    if grammar is not None and request.response_format is not None:
        reason = "cannot be combined with this tool_choice. Remove one of them."
        raise OptionError("response_format", reason)
    return PreparedRequest([ids], config, start=start, grammar=grammar)


def _template_options(request: ChatCompletionRequest, chat_format: ChatFormat) -> dict[str, Any]:
    """Return the variables of the chat template.

    Raises ApiError or OptionError for fields that the chat format cannot follow.
    """
    options = dict(request.chat_template_kwargs or {})
    if request.enable_thinking is not None:
        options["enable_thinking"] = request.enable_thinking
    if not chat_format.accepts_tools:
        request.check_plain()
        check_value("chat_template_kwargs.tools", options.get("tools"), accepted=(None, []))
        return options
    if request.tools is not None:
        options["tools"] = request.tools
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
    return chat_format.check_options(options, tool_choice=request.tool_choice)


def _call_body(call: ToolCall) -> dict[str, Any]:
    """Return the JSON of a whole tool call."""
    return {"id": call.id, "type": call.type, "function": asdict(call.function)}


def _call_delta(call: ToolCall) -> dict[str, Any]:
    """Return the JSON of a part of a tool call.

    Only the first part has id, type and name. Clients join the others by index.
    """
    if call.function.name:
        return {"index": call.index, **_call_body(call)}
    return {"index": call.index, "function": {"arguments": call.function.arguments}}


class ChatReply:
    """Builds the JSON of one chat response."""

    def __init__(self, state: ServerState, request: ChatCompletionRequest) -> None:
        self._state = state
        self._request = request
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, jobs: Sequence[Job], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response without `stream`."""
        usage = Usage()
        choices = []
        for job, answer in zip(jobs, answers, strict=True):
            usage.add(job, answer)
            message = {"role": "assistant", **self._message(answer)}
            if self._request.return_token_ids:
                message["gen_tokens"] = answer.token_ids
            choices.append(
                {
                    "index": job.index,
                    "message": message,
                    "logprobs": self._logprobs(answer),
                    "finish_reason": answer.finish_reason,
                }
            )
        return {**self._head("chat.completion"), "choices": choices, "usage": usage.body()}

    def events(self, jobs: Sequence[Job]) -> AsyncIterator[bytes]:
        """Yield the events of a response with `stream`."""
        usage = Usage()
        wanted = self._request.streams_usage

        def chunk(job: Job, delta: dict[str, Any], *, piece: Answer | None) -> EventJson:
            body = self._chunk(job, delta, piece=piece)
            return {**body, "usage": None} if wanted else body

        def bodies(job: Job, piece: Answer) -> Iterator[EventJson]:
            usage.add(job, piece)
            delta = self._delta(piece)
            if delta or piece.finish_reason is not None or self._request.logprobs:
                yield chunk(job, delta, piece=piece)

        def last() -> Iterator[EventJson]:
            if wanted:
                head = self._head("chat.completion.chunk")
                yield {**head, "choices": [], "usage": usage.body()}

        first = [chunk(job, {"role": "assistant", "content": ""}, piece=None) for job in jobs]
        return answer_events(jobs, self._state.metrics, bodies=bodies, first=first, last=last)

    def _message(self, answer: Answer) -> dict[str, Any]:
        if not self._state.chat_format.splits_answers:
            return {"content": answer.text}
        calls = [_call_body(call) for call in answer.tool_calls or []]
        return {
            "content": answer.text or (None if calls else ""),
            "reasoning_content": answer.reasoning_content,
            "tool_calls": calls or None,
        }

    def _delta(self, piece: Answer) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.text or not self._state.chat_format.splits_answers:
            delta["content"] = piece.text
        if piece.reasoning_content:
            delta["reasoning_content"] = piece.reasoning_content
        if piece.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.tool_calls]
        if self._request.return_token_ids:
            delta["gen_tokens"] = piece.token_ids
        return delta

    def _chunk(self, job: Job, delta: dict[str, Any], *, piece: Answer | None) -> EventJson:
        choice = {
            "index": job.index,
            "delta": delta,
            "logprobs": None if piece is None else self._logprobs(piece),
            "finish_reason": None if piece is None else piece.finish_reason,
        }
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._state.model_name,
        }

    def _logprobs(self, piece: Answer) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(
            self._state.engine.loaded.tokenizer,
            piece.token_ids,
            logprobs=piece.logprobs or [],
            num_top=self._request.top_logprobs or 0,
        )


_ENDPOINT = Endpoint(prepare_chat, ChatReply, fields={"prompt": "messages"})


@post(router, "/v1/chat/completions", body=ChatCompletionRequest)
async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
    """Serve OpenAI's chat completions."""
    return await respond(request, endpoint=_ENDPOINT, body=body)
