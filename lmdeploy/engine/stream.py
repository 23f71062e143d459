"""⑨ The stream of one response: turns outputs of the C++ engine into chunks of text."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from lmdeploy.chat.formats.base import AnswerDecoder
from lmdeploy.chat.stop_words import Answer, RepetitionStop
from lmdeploy.chat.tool_calls import join_tool_calls
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.response import FinishReason, Response

if TYPE_CHECKING:
    import numpy.typing as npt

    from lmdeploy._turbomind import RequestOutput, TokenLogprobs

_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
}

_LOOSE_LOGPROBS = 64  # of this many tokens, log probabilities wait as they came
# Tokens of a chunk with log probabilities: their text in an event is many times as large.
_MAX_LOGPROBS = 256


class LogprobQueue:
    """The log probabilities of tokens in order, packed if there are many.

    Packed, a candidate takes 8 bytes instead of the 120 of its objects, and a token 8 more.
    """

    __slots__ = ("_counts", "_ids", "_loose", "_values")

    def __init__(self) -> None:
        self._loose: list[TokenLogprobs] = []  # behind the packed ones
        self._counts = array("i")  # of candidates, by token
        self._ids = array("i")
        self._values = array("f")  # of the token, then of its candidates

    def __len__(self) -> int:
        return len(self._counts) + len(self._loose)

    def extend(self, items: Sequence[TokenLogprobs]) -> None:
        """Append those of tokens."""
        self._loose += items
        if len(self._loose) <= _LOOSE_LOGPROBS:
            return
        for chosen, top in self._loose:
            self._counts.append(len(top))
            self._values.append(chosen)
            for token, value in top:
                self._ids.append(token)
                self._values.append(value)
        self._loose.clear()

    def first(self, count: int) -> LogprobQueue:
        """Remove and return those of the first `count` tokens."""
        part = LogprobQueue()
        part.extend(self.take(count))
        return part

    def take(self, count: int) -> list[TokenLogprobs]:
        """Remove and return those of the first `count` tokens."""
        counts, found, at = self._counts[:count], [], 0
        for i, size in enumerate(counts):
            first = at + i  # in values, which have one more per token
            top = zip(
                self._ids[at : at + size], self._values[first + 1 : first + 1 + size], strict=True
            )
            found.append((self._values[first], list(top)))
            at += size
        del self._counts[:count], self._ids[:at], self._values[: at + len(counts)]
        rest = count - len(counts)
        found += self._loose[:rest]
        del self._loose[:rest]
        return found


class _Waiting:
    """The outputs that wait for their reader, joined to one.

    A token takes 4 bytes, so a reader that is slow costs less than the KV cache of its request.
    """

    __slots__ = (
        "cached_tokens",
        "last",
        "logits",
        "logprobs",
        "num_stop_tokens",
        "prompt_logprobs",
        "tokens",
    )

    def __init__(self) -> None:
        self.tokens = array("i")
        self.logprobs: LogprobQueue | None = None  # if the request has them
        self.prompt_logprobs: LogprobQueue | None = None
        self.logits: list[npt.NDArray[np.float32]] = []
        self.cached_tokens = 0
        self.last: RequestOutput | None = None  # the output with the finish reason
        self.num_stop_tokens = 0  # at the end of `tokens`

    def add(self, output: RequestOutput, config: GenerationConfig) -> None:
        """Append an output. Only the fields that `config` asks for are read."""
        tokens = output.tokens
        self.tokens.extend(tokens)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if config.logprobs is not None:
            self.logprobs = self.logprobs or LogprobQueue()
            self.logprobs.extend(output.logprobs)
        if config.prompt_logprobs is not None:
            self.prompt_logprobs = self.prompt_logprobs or LogprobQueue()
            self.prompt_logprobs.extend(output.prompt_logprobs)
        if config.output_logits is not None and output.logits is not None:
            self.logits.append(output.logits)
        if output.finish_reason != "none":
            self.last, self.num_stop_tokens = output, min(output.stop_tokens, len(tokens))

    def first_part(self) -> _Waiting | None:
        """Remove and return what a chunk takes first, or None if a chunk takes everything."""
        num_tokens = len(self.tokens) - self.num_stop_tokens
        if self.prompt_logprobs and len(self.prompt_logprobs) > _MAX_LOGPROBS:
            num_tokens = 0
        elif not self.logprobs or num_tokens <= _MAX_LOGPROBS:
            return None
        part = _Waiting()
        part.cached_tokens = self.cached_tokens
        part.logits, self.logits = self.logits, []
        count = min(num_tokens, _MAX_LOGPROBS)
        part.tokens, self.tokens = self.tokens[:count], self.tokens[count:]
        if self.logprobs:
            part.logprobs = self.logprobs.first(count)
        if self.prompt_logprobs:
            part.prompt_logprobs = self.prompt_logprobs.first(_MAX_LOGPROBS)
        return part


class RequestStream:
    """One response as an asynchronous iterator of chunks.

    The last chunk has a finish_reason and nothing else: the others contain all text and tokens.
    Outputs that arrive while the reader is busy become one chunk.

    Only the event loop that created the stream may use it. The stream keeps `prompt_ids` without a
    copy. It calls `forget` with its id when it needs no more outputs.
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: list[int],
        *,
        config: GenerationConfig,
        answer: Answer,
        decoder: AnswerDecoder,
        forget: Callable[[int], None],
    ) -> None:
        self._decoder = decoder
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.config = config
        self._forget = forget
        self.loop = asyncio.get_running_loop()
        self.created = time.monotonic()
        self._waiting: _Waiting | None = None
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # that waits for an output
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
            if self._waiting is None and self._failure is None:
                await self._wait()
                continue
            if self._waiting is None:
                self._done = True
                assert self._failure is not None
                raise self._failure
            part = self._waiting.first_part()
            if part is None:
                part, self._waiting = self._waiting, None
            chunk = self._assemble(part)
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
        self._done = True
        self._waiting = None
        self._wake()
        self._forget(self.request_id)

    def deliver(self, output: RequestOutput | Exception) -> None:
        """Take an output, or the exception that ends the stream."""
        if self._done or self._last is not None:
            return
        if isinstance(output, Exception):
            self._failure = output
        else:
            if self._waiting is None:
                self._waiting = _Waiting()
            self._waiting.add(output, self.config)
        self._wake()

    async def _wait(self) -> None:
        self._reader = self.loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _assemble(self, waiting: _Waiting) -> Response:
        self._cached_tokens = max(self._cached_tokens, waiting.cached_tokens)
        last = waiting.last
        num_kept = len(waiting.tokens)
        if not self.config.include_stop_str_in_output:
            num_kept -= waiting.num_stop_tokens
        reason = None if last is None else _FINISH_REASONS.get(last.finish_reason)
        logprobs_of_tokens = waiting.logprobs.take(num_kept) if waiting.logprobs else []
        self._push(waiting.tokens[:num_kept], logprobs_of_tokens)
        if self._repeats:
            self._answer.finish()
        if self._repeats or self._answer.stopped:
            reason = "stop"
            self._forget(self.request_id)
        elif reason is not None:
            self._answer.finish(waiting.tokens[num_kept:])
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
            logits=_joined(waiting.logits),
            embedding=None if last is None else last.pooled,
            cached_tokens=self._cached_tokens,
            prompt_logprobs=self._prompt_logprobs(waiting.prompt_logprobs),
            reasoning_content=aside.reasoning or None,
            tool_calls=join_tool_calls(aside.tool_calls) or None,
            stop_word=self._answer.stop_word if reason is not None else None,
        )
        if reason == "error" and last is not None:
            chunk.error_code = "bad_request" if last.is_request_fault else "engine_error"
            chunk.error_message, chunk.error_field = last.error, last.error_field or None
        return chunk

    def _push(self, tokens: Sequence[int], logprobs: list[TokenLogprobs]) -> None:
        if self._repetition is None:
            count = self._answer.push_all(tokens)
        else:
            count = self._push_until_repeated(tokens, self._repetition)
        self._tokens += tokens[:count]
        for token, item in zip(tokens[:count], logprobs, strict=False):
            self._logprobs.append(_logprob_dict(token, item))

    def _push_until_repeated(self, tokens: Sequence[int], repetition: RepetitionStop) -> int:
        """Add tokens until the answer ends, and return how many were added."""
        for count, token in enumerate(tokens, 1):
            self._answer.push_all([token])
            self._repeats = repetition.add(token)
            if self._repeats or self._answer.stopped:
                return count
        return len(tokens)

    def _prompt_logprobs(self, logprobs: LogprobQueue | None) -> list[dict[int, float]] | None:
        if not logprobs:
            return None
        offset = self._num_prompt_logprobs + 1
        items = logprobs.take(len(logprobs))
        self._num_prompt_logprobs += len(items)
        return [_logprob_dict(self.prompt_ids[offset + i], item) for i, item in enumerate(items)]


def _joined(logits: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32] | None:
    if len(logits) > 1:
        return cast("npt.NDArray[np.float32]", np.concatenate(logits))
    return logits[0] if logits else None


def _logprob_dict(token: int, logprobs: TokenLogprobs) -> dict[int, float]:
    chosen, top = logprobs
    result = dict(top)
    result.setdefault(token, chosen)
    return result
