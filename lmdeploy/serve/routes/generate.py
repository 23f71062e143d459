"""①⑨ POST /generate: LMDeploy's plain endpoint. It takes text or ids and returns both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.prompts import encode_text
from lmdeploy.config.generation import MAX_LOGPROBS
from lmdeploy.config.unsupported import BODY, GENERATE, unsupported_body_fields
from lmdeploy.response import Response as Answer
from lmdeploy.serve.jobs import Job, PreparedRequest
from lmdeploy.serve.logprobs import LOWEST, token_logprobs
from lmdeploy.serve.routes.base import ApiRouter, Endpoint, post, respond
from lmdeploy.serve.sampling import Limits, make_config
from lmdeploy.serve.schema import (
    Ids,
    SamplingFields,
    TokenLimit,
    TopK,
    Unsupported,
    of_option,
)
from lmdeploy.serve.state import ServerState
from lmdeploy.serve.streaming import HOLE, Event, EventTemplate, answer_events

router = ApiRouter()


class GenerateRequest(SamplingFields):
    """Body of POST /generate.

    As in LMDeploy, the defaults sample from the model's unmodified distribution.
    """

    unsupported: ClassVar[Unsupported] = unsupported_body_fields(BODY | GENERATE)

    prompt: str | None = None
    input_ids: Ids | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(default=-1, ge=-1, lt=2**31)
    top_logprobs_num: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_tokens: TokenLimit = 128
    temperature: float | None = of_option("temperature", default=1.0)
    top_p: float | None = of_option("top_p", default=1.0)
    top_k: TopK | None = 0

    @property
    def returns_prompt(self) -> bool:
        """Return whether the response contains log probabilities of the prompt."""
        return bool(self.return_logprob) and self.logprob_start_len not in (None, -1)


async def prepare_generate(state: ServerState, request: GenerateRequest) -> PreparedRequest:
    """Make the prompt and the options. Raise OptionError for a bad field."""
    if (request.prompt is None) == (request.input_ids is None):
        if request.prompt is None:
            raise OptionError("prompt", "is missing. Send prompt or input_ids.")
        raise OptionError("prompt", "cannot be combined with input_ids. Remove one of them.")
    if request.top_logprobs_num and not request.return_logprob:
        reason = f"is {request.top_logprobs_num}, but return_logprob is not set. Set it to true."
        raise OptionError("top_logprobs_num", reason)
    ids = request.input_ids
    if ids is None:
        ids = await asyncio.to_thread(
            encode_text, state.engine.text, request.prompt or "", add_special=True
        )
    else:
        state.engine.check_prompt(ids, name="input_ids")
    num_logprobs = (request.top_logprobs_num or 0) if request.return_logprob else None
    limits = Limits(
        max_new_tokens=request.max_tokens,
        logprobs=num_logprobs,
        prompt_logprobs=0 if request.returns_prompt else None,
    )
    room = max(state.engine.max_request_tokens - len(ids), 1)
    config = make_config(request, limits, model_defaults=state.engine.text.sampling, room=room)
    return PreparedRequest([ids], config)


class GenerateReply:
    """Builds the JSON of one response. In a stream every event contains only the new tokens."""

    response_id = None

    def __init__(self, state: ServerState, request: GenerateRequest) -> None:
        self._state = state
        self._request = request
        self._num_prompt = 0  # tokens of the prompt whose log probabilities are known

    def whole(self, jobs: Sequence[Job], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response without `stream`."""
        return self._body(jobs[0], answers[0])

    def _body(self, job: Job, answer: Answer) -> dict[str, Any]:
        """Return the JSON object with `text`, `output_ids` and `meta_info`."""
        reason = answer.finish_reason
        meta: dict[str, Any] = {
            "prompt_tokens": answer.input_token_len,
            "completion_tokens": answer.generate_token_len,
            "cached_tokens": answer.cached_tokens,
            "finish_reason": None if reason is None else {"type": reason},
        }
        if self._request.returns_prompt and answer.prompt_logprobs:
            meta["input_token_logprobs"] = self._prompt(job, answer.prompt_logprobs)
        if self._request.return_logprob:
            meta["output_token_logprobs"] = token_logprobs(answer)
            if self._request.top_logprobs_num:
                meta["output_top_logprobs"] = [self._top(item) for item in answer.logprobs or []]
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}

    def _prompt(self, job: Job, logprobs: list[dict[int, float]]) -> list[list[float | None]]:
        """Return the new log probabilities of the prompt from logprob_start_len on.

        No position predicts the first token, so it has none.
        """
        values: list[dict[int, float] | None] = [
            *([None] if self._num_prompt == 0 else []),
            *logprobs,
        ]
        start, self._num_prompt = self._num_prompt, self._num_prompt + len(values)
        tokens = job.stream.prompt_ids[start : self._num_prompt]
        pairs: list[list[float | None]] = [
            [None if item is None else max(item[token], LOWEST), token]
            for token, item in zip(tokens, values, strict=True)
        ]
        return pairs[max((self._request.logprob_start_len or 0) - start, 0) :]

    def _top(self, item: dict[int, float]) -> list[list[float]]:
        ranked = sorted(item.items(), key=lambda pair: -pair[1])
        return [
            [max(value, LOWEST), token] for token, value in ranked[: self._request.top_logprobs_num]
        ]

    def events(self, jobs: Sequence[Job]) -> AsyncIterator[bytes]:
        """Yield the events of a response with `stream`."""
        template: EventTemplate | None = None

        def bodies(job: Job, chunk: Answer) -> list[Event]:
            nonlocal template
            body = self._body(job, chunk)
            meta = body["meta_info"]
            if self._request.return_logprob or chunk.finish_reason is not None:
                return [body]
            if template is None:
                holes = {"completion_tokens": HOLE, "cached_tokens": HOLE}
                sample = {"text": HOLE, "output_ids": HOLE, "meta_info": {**meta, **holes}}
                template = EventTemplate(sample)
            ids, num_tokens = chunk.token_ids, chunk.generate_token_len
            return [template.event(chunk.text, ids, num_tokens, chunk.cached_tokens)]

        return answer_events(jobs, self._state.metrics, bodies=bodies)


_ENDPOINT = Endpoint(prepare_generate, GenerateReply, fields={"logprobs": "top_logprobs_num"})


@post(router, "/generate", body=GenerateRequest, needs_slot=True, events=True)
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Serve LMDeploy's plain generation."""
    return await respond(request, endpoint=_ENDPOINT, body=body)
