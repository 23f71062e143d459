"""①⑨ POST /v1/completions: continues prompts without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.chat.detokenize import TokenDetokenizer
from lmdeploy.chat.tokenizer import without_surrogates
from lmdeploy.config.generation import MAX_LOGPROBS
from lmdeploy.config.unsupported import BODY, unsupported_body_fields
from lmdeploy.response import Response as Answer
from lmdeploy.response import join_pieces
from lmdeploy.serve.jobs import Job, PreparedRequest, Usage, encode_prompts
from lmdeploy.serve.logprobs import CompletionLogprobs
from lmdeploy.serve.routes.base import ApiRouter, Endpoint, post, respond
from lmdeploy.serve.sampling import Limits, make_config
from lmdeploy.serve.schema import (
    CompletionFields,
    Prompts,
    Unsupported,
)
from lmdeploy.serve.state import ServerState
from lmdeploy.serve.streaming import HOLE, Event, EventJson, EventTemplate, answer_events

router = ApiRouter()


class CompletionRequest(CompletionFields):
    """Body of POST /v1/completions."""

    unsupported: ClassVar[Unsupported] = unsupported_body_fields(BODY)

    prompt: str | Prompts
    echo: bool | None = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(default=16, ge=-1, lt=2**31)
    return_token_ids: bool | None = False


async def prepare_completion(state: ServerState, request: CompletionRequest) -> PreparedRequest:
    """Make the prompts and the options. Raise OptionError for a bad field."""
    limit = request.max_completion_tokens
    if limit is None:
        limit = 16 if request.max_tokens is None else request.max_tokens
    limits = Limits(
        max_new_tokens=limit,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
        n=request.n or 1,
    )
    room = state.engine.max_request_tokens
    config = make_config(request, limits, model_defaults=state.engine.text.sampling, room=room)
    num_new = min(config.max_new_tokens, 1)
    prompts = await encode_prompts(state.engine, request.prompt, num_new=num_new)
    return PreparedRequest(prompts, config)


class CompletionReply:
    """Builds the JSON of one completion response."""

    def __init__(self, state: ServerState, request: CompletionRequest) -> None:
        self._state = state
        self._request = request
        self._tokenizer = state.engine.text.tokenizer
        self.response_id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()

    def whole(self, jobs: Sequence[Job], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response without `stream`."""
        usage = Usage()
        choices = []
        for job, answer in zip(jobs, answers, strict=True):
            usage.add(job, answer)
            choices.append(self._choice(job, answer))
        return {**self._head(), "choices": choices, "usage": usage.body()}

    def events(self, jobs: Sequence[Job]) -> AsyncIterator[bytes]:
        """Yield the events of a response with `stream`."""
        usage = Usage()
        request = self._request
        wanted = request.streams_usage
        is_plain = not (request.echo or request.logprobs is not None or request.return_token_ids)
        held: dict[int, list[Answer]] = {}  # chunks that contain only prompt logprobs

        def body_of(choice: dict[str, Any]) -> EventJson:
            body = {**self._head(), "choices": [choice]}
            return {**body, "usage": None} if wanted else body

        @cache
        def template(index: int) -> EventTemplate:
            return EventTemplate(body_of(_plain_choice(index, HOLE, finish_reason=None)))

        def bodies(job: Job, chunk: Answer) -> Iterator[Event]:
            usage.add(job, chunk)
            if is_plain and chunk.token_ids and chunk.finish_reason is None:
                yield template(job.index).event(chunk.text)
                return
            if not chunk.token_ids and not chunk.text and chunk.finish_reason is None:
                held.setdefault(job.index, []).append(chunk)
                return
            chunk = join_pieces([*held.pop(job.index, ()), chunk])
            choice = self._choice(job, chunk)
            if choice["logprobs"] and not choice["logprobs"]["tokens"]:
                choice["logprobs"] = None
            yield body_of(choice)

        def last() -> Iterator[EventJson]:
            if wanted:
                yield {**self._head(), "choices": [], "usage": usage.body()}

        return answer_events(jobs, self._state.metrics, bodies=bodies, last=last)

    def _choice(self, job: Job, chunk: Answer) -> dict[str, Any]:
        echo = bool(self._request.echo) and job.index not in self._echoed
        self._echoed.add(job.index)
        prompt_text = self._prompt_text(job) if echo else ""
        text = prompt_text + chunk.text
        choice = _plain_choice(job.index, text, finish_reason=chunk.finish_reason)
        if self._request.return_token_ids:
            choice["gen_tokens"] = chunk.token_ids
        if self._request.logprobs is not None:
            if job.index not in self._logprobs:
                self._logprobs[job.index] = CompletionLogprobs(
                    self._tokenizer,
                    self._request.logprobs,
                    skip_special=self._request.skip_special_tokens is not False,
                )
            maker = self._logprobs[job.index]
            if echo:
                values = [None, *(chunk.prompt_logprobs or [])]
                maker.add_prompt(job.stream.prompt_ids, values, text=prompt_text)
            maker.add_answer(chunk.token_ids, chunk.logprobs or [])
            choice["logprobs"] = maker.take()
        return choice

    def _prompt_text(self, job: Job) -> str:
        prompt = self._request.prompt
        if not isinstance(prompt, str) and job.prompt_index < len(prompt):
            prompt = prompt[job.prompt_index]
        if isinstance(prompt, str):
            return without_surrogates(prompt)
        stream = TokenDetokenizer(self._tokenizer, skip_special=False, begins_text=True)
        return "".join(map(stream.push, job.stream.prompt_ids)) + stream.finish()

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._state.model_name,
        }


def _plain_choice(index: int, text: str, *, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


_ENDPOINT = Endpoint(
    prepare_completion,
    CompletionReply,
    model=lambda body: body.model,
    echoes=lambda body: bool(body.echo),
)


@post(
    router, "/v1/completions", body=CompletionRequest, errors=(404,), needs_slot=True, events=True
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Serve OpenAI's completions."""
    return await respond(request, endpoint=_ENDPOINT, body=body)
