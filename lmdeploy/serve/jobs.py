"""③④ Checks and tokenizes the prompts of a request, and submits one job per choice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError, refuse
from lmdeploy.chat.prompts import encode_text
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.engine.request import is_constrained
from lmdeploy.response import Response, join_pieces
from lmdeploy.serve.errors import ApiError
from lmdeploy.serve.metrics import Progress, ServerMetrics
from lmdeploy.serve.schema import MAX_PROMPTS, CompletionFields

if TYPE_CHECKING:
    from lmdeploy.chat.formats.base import AnswerStart
    from lmdeploy.engine.async_engine import AsyncEngine
    from lmdeploy.engine.stream import RequestStream

# Limits of one HTTP request.
MAX_ANSWERS = 1024
MAX_GRAMMAR_ANSWERS = 128  # with response_format; each running choice takes up to 100 MB
MAX_PROMPT_TOKENS = 1 << 22  # counted once per choice; up to 44 bytes each
MAX_LOGPROB_VALUES = 1 << 22  # about 100 bytes each


@dataclass(frozen=True)
class PreparedRequest:
    """A checked request. AsyncEngine.submit documents `start`."""

    prompts: list[list[int]]
    config: GenerationConfig
    start: AnswerStart | None = None

    @property
    def has_grammar(self) -> bool:
        """Return whether a grammar constrains the answers."""
        tool_use = None if self.start is None else self.start.tool_use
        return is_constrained(self.config) or (tool_use is not None and tool_use.is_constrained)


@dataclass
class Job:
    """One choice of a response while the engine computes it."""

    index: int  # of the choice
    prompt_index: int
    stream: RequestStream
    progress: Progress = field(default_factory=Progress)


@dataclass
class Usage:
    """Token counts over all choices of a response."""

    prompt: dict[int, tuple[int, int]] = field(default_factory=dict)  # index → tokens, cached
    completion: dict[int, int] = field(default_factory=dict)

    def add(self, job: Job, chunk: Response) -> None:
        """Take the counts of a chunk. They are running totals, so later chunks replace earlier."""
        cached = max(chunk.cached_tokens, self.prompt.get(job.prompt_index, (0, 0))[1])
        self.prompt[job.prompt_index] = (chunk.input_token_len, cached)
        self.completion[job.index] = chunk.generate_token_len

    def body(self) -> dict[str, Any]:
        """Return the JSON object `usage`."""
        prompt = sum(tokens for tokens, _ in self.prompt.values())
        completion = sum(self.completion.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(c for _, c in self.prompt.values())},
        }


async def encode_prompts(
    engine: AsyncEngine, prompt: str | list[Any], *, num_new: int
) -> list[list[int]]:
    """Return the token ids of each prompt.

    Prompts are tokenized one by one. The first bad prompt ends the work.

    Args:
        prompt: a string, a list of strings, a list of token ids, or a list of such lists.
        num_new: as in `AsyncEngine.check_prompt`.

    Raises:
        OptionError: if `prompt` has another type, a prompt is bad, or there are too many tokens.
    """
    prompts: list[Any] = [prompt] if isinstance(prompt, str) else prompt
    if prompts and all(type(item) is int for item in prompts):
        prompts = [prompts]
    if not 0 < len(prompts) <= MAX_PROMPTS:
        reason = f"contains {len(prompts)} prompts. It must contain 1 to {MAX_PROMPTS}."
        raise OptionError("prompt", reason)
    is_ids = [isinstance(p, list) and all(type(i) is int for i in p) for p in prompts]
    if not all(ids or isinstance(p, str) for p, ids in zip(prompts, is_ids, strict=True)):
        wanted = "a string, a list of strings, a list of token ids, or a list of such lists"
        raise refuse("prompt", prompt, wanted=wanted)
    result: list[list[int]] = []
    num_tokens = 0
    for item in prompts:
        ids = item
        if isinstance(item, str):
            ids = await asyncio.to_thread(encode_text, engine.text, item, add_special=True)
        engine.check_prompt(ids, num_new=num_new)
        num_tokens += len(ids)
        if num_tokens > MAX_PROMPT_TOKENS:
            reason = f"has {num_tokens} tokens in all. The limit is {MAX_PROMPT_TOKENS}."
            raise OptionError("prompt", reason)
        result.append(ids)
    return result


def check_size(prepared: PreparedRequest, *, max_tokens: int) -> None:
    """Check the number of choices, prompt tokens and log probabilities of one request.

    `max_tokens` is the limit of a prompt plus its response. Raise OptionError above a limit.
    """
    prompts, config = prepared.prompts, prepared.config
    num_answers = len(prompts) * config.n
    limit, where = MAX_ANSWERS, ""
    if prepared.has_grammar:
        limit, where = MAX_GRAMMAR_ANSWERS, " with a grammar"
    if num_answers > limit:
        raise OptionError(
            "n",
            f"is {config.n} for each of {len(prompts)} prompts. One request may have at most "
            f"{limit} answers{where}.",
        )
    num_tokens = sum(len(ids) for ids in prompts) * config.n
    if num_tokens > MAX_PROMPT_TOKENS:
        raise OptionError(
            "n",
            f"is {config.n}, so the prompts have {num_tokens} tokens in all. The limit is "
            f"{MAX_PROMPT_TOKENS}. Lower it or send fewer prompts.",
        )
    values = 0
    for ids in prompts:
        room = max(max_tokens - len(ids), 0)
        if config.logprobs is not None:
            values += min(config.max_new_tokens, room) * (config.logprobs + 1)
        if config.prompt_logprobs is not None:
            values += len(ids) * (config.prompt_logprobs + 1)
    if values * config.n > MAX_LOGPROB_VALUES:
        raise OptionError(
            "logprobs",
            f"asks for up to {values * config.n} log probabilities. The limit is "
            f"{MAX_LOGPROB_VALUES}. Lower n, max_tokens or the number of logprobs.",
        )


async def submit_all(engine: AsyncEngine, prepared: PreparedRequest) -> list[Job]:
    """Submit n choices for every prompt. If one fails, cancel the others and raise its error.

    REQUIRES: check_size accepts the request.
    """
    config = prepared.config
    jobs: list[Job] = []
    grammars = engine.new_grammars()
    try:
        for prompt_index, ids in enumerate(prepared.prompts):
            for choice in range(config.n):
                stream = await engine.submit(
                    ids,
                    config,
                    index=choice,
                    start=prepared.start,
                    grammars=grammars,
                )
                jobs.append(Job(len(jobs), prompt_index, stream))
    except BaseException:
        close_all(jobs)
        raise
    return jobs


def close_all(jobs: Sequence[Job]) -> None:
    """Cancel the jobs that still run."""
    for job in jobs:
        job.stream.close()


def request_error(chunk: Response | None) -> ApiError:
    """Return the error of a response whose finish_reason is `error`. None: it has no chunk."""
    if chunk is None:
        return ApiError(500, "The request ended without a response.")
    message = chunk.error_message or "The request failed."
    if chunk.error_code != "bad_request":
        return ApiError(500, message)
    is_known = chunk.error_field in CompletionFields.model_fields
    return ApiError(400, message, param=chunk.error_field if is_known else None)


async def collect_all(jobs: Sequence[Job], metrics: ServerMetrics) -> list[Response]:
    """Wait for all jobs and return their responses in order.

    If one fails or this coroutine is cancelled, the other requests are cancelled.
    """

    async def one(job: Job) -> Response:
        async with aclosing(metrics.observe(job.stream, job.progress)) as stream:
            chunks = [chunk async for chunk in stream]
        if not chunks or chunks[-1].finish_reason == "error":
            raise request_error(chunks[-1] if chunks else None)
        return join_pieces(chunks)

    tasks = [asyncio.ensure_future(one(job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        close_all(jobs)
