"""⑨ The stream of one response: turns outputs of the C++ engine into chunks of text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lmdeploy.chat.formats.base import AnswerDecoder
from lmdeploy.chat.stop_words import RepetitionStop, SpecialTokenStopFilter
from lmdeploy.chat.tool_calls import join_tool_calls
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.response import FinishReason, Response

if TYPE_CHECKING:
    from lmdeploy._turbomind import RequestOutput, TokenLogprobs

_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
}


class RequestStream:
    """One response as an asynchronous iterator of chunks.

    The last chunk has a finish_reason and nothing else: the others contain all text and tokens.

    Only the event loop that created the stream may use it. The stream keeps `prompt_ids` without a
    copy. It calls `forget` with its id when it needs no more outputs.
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: list[int],
        *,
        config: GenerationConfig,
        answer: SpecialTokenStopFilter,
        decoder: AnswerDecoder,
        forget: Callable[[int], None],
    ) -> None:
        self._decoder = decoder
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.config = config
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self.created = time.monotonic()
        self._queue: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()
        self._done = False
        self._answer = answer
        size, threshold = config.repetition_ngram_size, config.repetition_ngram_threshold
        self._repetition = RepetitionStop(size, threshold) if size and threshold else None
        self._repeats = False
        self._tokens: list[int] = []  # received, but not yet returned in a chunk
        self._logprobs: list[dict[int, float]] = []
        self._num_released = 0
        self._num_prompt_logprobs = 0
        self._cached_tokens = 0
        self._last: Response | None = None  # the chunk after the one that was returned

    @property
    def num_broken_calls(self) -> int:
        """Return the number of tool calls so far that could not be parsed."""
        return self._decoder.num_broken_calls

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Response:
        if self._last is not None and not self._done:
            self._done = True
            return self._last
        while not self._done:
            output = await self._queue.get()
            if self._done or output is None:
                break
            if isinstance(output, Exception):
                self._done = True
                raise output
            chunk = self._assemble(output)
            if chunk.finish_reason is None:
                if chunk.has_content:
                    return chunk
            elif chunk.has_content:
                self._last = chunk.without_content()
                return replace(
                    chunk, finish_reason=None, error_code=None, error_message=None, error_field=None
                )
            else:
                self._done = True
                return chunk.without_content()
        raise StopAsyncIteration

    def close(self) -> None:
        """Cancel the request unless it has ended. A waiting iterator then ends. Idempotent."""
        if not self._done:
            self._done = True
            self._queue.put_nowait(None)
        self._forget(self.request_id)

    def deliver(self, output: RequestOutput | Exception) -> None:
        """Queue an output, or the exception that ends the stream. The drain thread calls this."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, output)

    def _assemble(self, output: RequestOutput) -> Response:
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        include_stop = self.config.include_stop_str_in_output
        kept = max(len(output.tokens) - (0 if include_stop else output.stop_tokens), 0)
        reason: FinishReason | None = _FINISH_REASONS.get(output.finish_reason)
        self._push(output.tokens[:kept], output.logprobs)
        if self._repeats:
            self._answer.finish()
        if self._repeats or self._answer.stopped:
            reason = "stop"
            self._forget(self.request_id)
        elif reason is not None:
            self._answer.finish(output.tokens[kept:])
            if self._answer.stopped:
                reason = "stop"
        text, count = self._answer.take()
        aside = self._decoder.take_aside()
        if reason == "stop" and self._decoder.num_tool_calls:
            reason = "tool_calls"
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        logprobs, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        self._num_released += count
        chunk = Response(
            text=text,
            generate_token_len=self._num_released,
            input_token_len=len(self.prompt_ids),
            finish_reason=reason,
            token_ids=tokens,
            logprobs=logprobs if self.config.logprobs is not None else None,
            logits=output.logits,
            embedding=output.pooled,
            cached_tokens=self._cached_tokens,
            prompt_logprobs=self._prompt_logprobs(output),
            reasoning_content=aside.reasoning or None,
            tool_calls=join_tool_calls(aside.tool_calls) or None,
            stop_word=self._answer.stop_word if reason is not None else None,
        )
        if reason == "error":
            chunk.error_code = "bad_request" if output.is_request_fault else "engine_error"
            chunk.error_message, chunk.error_field = output.error, output.error_field or None
        return chunk

    def _push(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        for i, token in enumerate(tokens):
            self._answer.push(token)
            self._tokens.append(token)
            if self.config.logprobs is not None and i < len(logprobs):
                self._logprobs.append(_logprob_dict(token, logprobs[i]))
            self._repeats = self._repetition is not None and self._repetition.add(token)
            if self._repeats or self._answer.stopped:
                return

    def _prompt_logprobs(self, output: RequestOutput) -> list[dict[int, float]] | None:
        if self.config.prompt_logprobs is None or not output.prompt_logprobs:
            return None
        offset = self._num_prompt_logprobs + 1
        self._num_prompt_logprobs += len(output.prompt_logprobs)
        return [
            _logprob_dict(self.prompt_ids[offset + i], item)
            for i, item in enumerate(output.prompt_logprobs)
        ]


def _logprob_dict(token: int, logprobs: TokenLogprobs) -> dict[int, float]:
    chosen, top = logprobs
    result = dict(top)
    result.setdefault(token, chosen)
    return result
