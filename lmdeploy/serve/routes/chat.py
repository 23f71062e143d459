"""①⑨ POST /v1/chat/completions: renders messages as a prompt and returns the response."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.prompts import start_of_ids
from lmdeploy.chat.tool_calls import ToolCall
from lmdeploy.config.generation import MAX_LOGPROBS
from lmdeploy.config.unsupported import BODY, CHAT, unsupported_body_fields
from lmdeploy.response import Response as Answer
from lmdeploy.serve.jobs import Job, PreparedRequest, Usage
from lmdeploy.serve.logprobs import chat_logprobs, token_logprobs
from lmdeploy.serve.routes.base import ApiRouter, Endpoint, post, respond
from lmdeploy.serve.routes.conversation import Conversation, prepare_conversation
from lmdeploy.serve.sampling import Limits, make_config
from lmdeploy.serve.schema import (
    CompletionFields,
    Messages,
    PromptIds,
    TokenLimit,
    Tools,
    Unsupported,
)
from lmdeploy.serve.state import ServerState
from lmdeploy.serve.streaming import HOLE, Event, EventJson, EventTemplate, answer_events

router = ApiRouter()


class ChatCompletionRequest(CompletionFields):
    """Body of POST /v1/chat/completions."""

    unsupported: ClassVar[Unsupported] = unsupported_body_fields(BODY | CHAT)

    messages: str | Messages | None = None  # a string: one user message
    input_ids: PromptIds | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_tokens: TokenLimit | None = None
    return_token_ids: bool | None = False
    return_logprob: bool | None = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None


# Fields that the chat template reads.
_OF_MESSAGES = ("tools", "reasoning_effort", "enable_thinking", "chat_template_kwargs")


async def prepare_chat(state: ServerState, request: ChatCompletionRequest) -> PreparedRequest:
    """Make the prompt and the options. Raise ApiError or OptionError for a bad field."""
    if request.top_logprobs and not request.logprobs:
        raise OptionError(
            "top_logprobs",
            f"is {request.top_logprobs}, but logprobs is not set. Set logprobs to true.",
        )
    if request.messages and request.input_ids:
        raise OptionError("input_ids", "cannot be combined with messages. Remove one of them.")
    for name in _OF_MESSAGES if request.input_ids else ():
        if getattr(request, name) not in (None, [], {}):
            raise OptionError("input_ids", f"cannot be combined with {name}, which needs messages.")
    limits = Limits(
        max_new_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(
            (request.top_logprobs or 0) if request.logprobs or request.return_logprob else None
        ),
        n=request.n or 1,
    )
    if request.messages:
        return await _prepare_messages(state, request, limits=limits)
    if not request.input_ids:
        raise OptionError("messages", "is empty. Send at least one message.")
    ids, model = request.input_ids, state.engine.text
    state.engine.check_prompt(ids, name="input_ids")
    room = max(state.engine.max_request_tokens - len(ids), 1)
    config = make_config(request, limits, model_defaults=model.sampling, room=room)
    return PreparedRequest([ids], config, start=start_of_ids(model, ids))


async def _prepare_messages(
    state: ServerState, request: ChatCompletionRequest, *, limits: Limits
) -> PreparedRequest:
    messages = request.messages
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    conversation = Conversation(
        messages or [],
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        options=_template_options(request),
        begins_answer=_begins_answer(request, messages or []),
    )
    prepared = await prepare_conversation(state, conversation, fields=request, limits=limits)
    continues = prepared.start is not None and prepared.start.continue_final_message
    has_text = bool(messages and messages[-1].get("content"))
    if request.continue_final_message and has_text and not continues:
        reason = f"is not supported by the chat format {state.chat_format.name}. Remove it."
        raise OptionError("continue_final_message", reason)
    return prepared


def _template_options(request: ChatCompletionRequest) -> dict[str, Any]:
    """Return the variables of the chat template."""
    options = dict(request.chat_template_kwargs or {})
    for name in ("enable_thinking", "reasoning_effort"):
        if getattr(request, name) is not None:
            options[name] = getattr(request, name)
    return options


def _begins_answer(
    request: ChatCompletionRequest, messages: Sequence[dict[str, Any]]
) -> bool | None:
    """Return `begins_answer` of `encode_chat`. Raises OptionError for fields that contradict."""
    continues, begins = request.continue_final_message, request.add_generation_prompt
    if continues:
        if begins:
            reason = "cannot be combined with continue_final_message. Set one of them to false."
            raise OptionError("add_generation_prompt", reason)
        if messages[-1].get("role") != "assistant":
            reason = "is true, but the last message is not an assistant message. Set it to false."
            raise OptionError("continue_final_message", reason)
        return None
    return begins if continues is None or begins is False else True


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
        self.response_id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, jobs: Sequence[Job], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response without `stream`."""
        usage = Usage()
        choices = []
        for job, answer in zip(jobs, answers, strict=True):
            usage.add(job, answer)
            message = {"role": "assistant", "refusal": None, **self._message(answer)}
            if self._request.return_token_ids:
                message["gen_tokens"] = answer.token_ids
            choices.append(
                {
                    "index": job.index,
                    "message": message,
                    "logprobs": self._logprobs(answer),
                    "finish_reason": answer.finish_reason,
                    **self._tokens(answer),
                }
            )
        return {**self._head("chat.completion"), "choices": choices, "usage": usage.body()}

    def events(self, jobs: Sequence[Job]) -> AsyncIterator[bytes]:
        """Yield the events of a response with `stream`."""
        usage = Usage()
        request = self._request
        wanted = request.streams_usage
        is_plain = not (request.logprobs or request.return_logprob or request.return_token_ids)

        def chunk(job: Job, delta: dict[str, Any], *, piece: Answer | None) -> EventJson:
            body = self._chunk(job, delta, piece=piece)
            return {**body, "usage": None} if wanted else body

        @cache
        def template(index: int, part: str) -> EventTemplate:
            return EventTemplate(chunk(jobs[index], {part: HOLE}, piece=None))

        def bodies(job: Job, piece: Answer) -> Iterator[Event]:
            usage.add(job, piece)
            delta = self._delta(piece)
            if is_plain and piece.finish_reason is None and len(delta) == 1:
                ((part, value),) = delta.items()
                if isinstance(value, str):
                    yield template(job.index, part).event(value)
                    return
            has_tokens = request.logprobs or self._tokens(piece)
            if delta or piece.finish_reason is not None or has_tokens:
                yield chunk(job, delta, piece=piece)

        def last() -> Iterator[EventJson]:
            if wanted:
                head = self._head("chat.completion.chunk")
                yield {**head, "choices": [], "usage": usage.body()}

        first = [chunk(job, {"role": "assistant", "content": ""}, piece=None) for job in jobs]
        return answer_events(jobs, self._state.metrics, bodies=bodies, first=first, last=last)

    @staticmethod
    def _message(answer: Answer) -> dict[str, Any]:
        calls = [_call_body(call) for call in answer.tool_calls or []]
        message: dict[str, Any] = {
            "content": answer.text or (None if calls else ""),
            "reasoning_content": answer.reasoning_content,
            "annotations": [],
        }
        return {**message, "tool_calls": calls} if calls else message

    def _delta(self, piece: Answer) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.text:
            delta["content"] = piece.text
        if piece.reasoning_content:
            delta["reasoning_content"] = piece.reasoning_content
        if piece.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.tool_calls]
        if self._request.return_token_ids and piece.token_ids:
            delta["gen_tokens"] = piece.token_ids
        return delta

    def _chunk(self, job: Job, delta: dict[str, Any], *, piece: Answer | None) -> EventJson:
        choice = {
            "index": job.index,
            "delta": delta,
            "logprobs": self._logprobs(piece) if piece is not None and piece.token_ids else None,
            "finish_reason": None if piece is None else piece.finish_reason,
            **({} if piece is None else self._tokens(piece)),
        }
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self._created,
            "model": self._state.model_name,
        }

    def _tokens(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of LMDeploy with the tokens of an answer, if they are wanted."""
        fields: dict[str, Any] = {}
        if self._request.return_token_ids and answer.token_ids:
            fields["output_ids"] = answer.token_ids
        if self._request.return_logprob and answer.token_ids:
            fields["output_token_logprobs"] = token_logprobs(answer)
        return fields

    def _logprobs(self, piece: Answer) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(
            self._state.engine.text.tokenizer,
            piece.token_ids,
            logprobs=piece.logprobs or [],
            num_top=self._request.top_logprobs or 0,
        )


_ENDPOINT = Endpoint(
    prepare_chat, ChatReply, fields={"prompt": "messages"}, model=lambda body: body.model
)


@post(
    router,
    "/v1/chat/completions",
    body=ChatCompletionRequest,
    errors=(404,),
    needs_slot=True,
    events=True,
)
async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
    """Serve OpenAI's chat completions."""
    return await respond(request, endpoint=_ENDPOINT, body=body)
