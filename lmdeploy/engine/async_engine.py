"""④⑨ The asynchronous engine: takes token ids and streams chunks of text, one stream per request.

One thread waits for the outputs of the C++ engine and passes each to the event loop of its request.
That loop turns the tokens into text.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError, flag_of
from lmdeploy.chat.detokenize import AnswerText, SpecialTokenStopFilter, TokenDetokenizer
from lmdeploy.chat.formats.base import AnswerDecoder, AnswerStart
from lmdeploy.chat.formats.text import TextDecoder
from lmdeploy.chat.grammar import Grammars
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.engine.load import LoadedEngine, load_engine
from lmdeploy.engine.request import (
    bad_sequences,
    check_token_ids,
    is_constrained,
    set_sampling,
    sort_stop_words,
)
from lmdeploy.engine.stream import RequestStream
from lmdeploy.response import Response

if TYPE_CHECKING:
    from lmdeploy import _turbomind
    from lmdeploy.config.chat_template import ChatTemplateConfig

logger = logging.getLogger("lmdeploy")

_WAIT_MS = 200


class EngineFailure(RuntimeError):
    """The engine has failed, is closed, or belongs to another process."""


class AsyncEngine:
    """Owns the C++ engine, the tokenizer and the chat template of one model.

    Any event loop may call `submit` and `generate`. Any thread may call `close`.
    """

    def __init__(self, loaded: LoadedEngine) -> None:
        self.loaded = loaded
        self._ids = itertools.count(1)
        self._streams: dict[int, RequestStream] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._failure = ""  # why the drain thread failed
        self._has_warned = False  # the drain thread has warned of clipped values
        self._closing = threading.Event()
        self._closed = False
        self._close_lock = threading.RLock()
        self._drain_thread = threading.Thread(target=self._drain, name="tm-drain", daemon=True)
        self._drain_thread.start()
        _running.add(self)

    @classmethod
    def load(
        cls,
        model_path: str,
        config: TurbomindEngineConfig | None = None,
        *,
        chat_template_config: ChatTemplateConfig | None = None,
        reasoning_parser: str | None = None,
        tool_call_parser: str | None = None,
        progress: bool = True,
    ) -> AsyncEngine:
        """Load a model and return its engine. `load_engine` documents the options and errors."""
        config = config or TurbomindEngineConfig()
        return cls(
            load_engine(
                model_path,
                config,
                chat_template_config=chat_template_config,
                reasoning_parser=reasoning_parser,
                tool_call_parser=tool_call_parser,
                progress=progress,
            )
        )

    @property
    def max_request_tokens(self) -> int:
        """Return the largest prompt plus response that session_len and the cache allow."""
        return self.loaded.cpp_engine.memory_plan().max_sequence_tokens

    @property
    def healthy(self) -> bool:
        """Return whether the engine has not failed, is open and belongs to this process."""
        if self.in_other_process or self._closing.is_set() or self._failure:
            return False
        return self.loaded.cpp_engine.healthy

    @property
    def failure(self) -> str:
        """Return why the engine is not healthy, or "" if it is."""
        if self.in_other_process:
            return (
                f"The engine was created before a fork and works only in process {self._pid}. "
                "Create it in the process that uses it."
            )
        if self._closing.is_set():
            return "The engine is closed."
        return self._failure or self.loaded.cpp_engine.failure

    @property
    def in_other_process(self) -> bool:
        """Return whether this process is a fork of the process that created the engine."""
        return os.getpid() != self._pid

    def cache_line(self) -> str:
        """Return one line that describes the KV cache."""
        from lmdeploy.engine.kv_quality import cache_line

        return cache_line(
            self.loaded.kv,
            self.loaded.cpp_engine.memory_plan(),
            session_len=self.loaded.session_len,
        )

    def start_lines(self) -> list[str]:
        """Return the lines about the device and the KV cache that a command prints at its start."""
        return [line for line in (self.loaded.device_line, self.cache_line()) if line]

    def stats(self) -> _turbomind.EngineStats:
        """Return the counters of the C++ engine."""
        return self.loaded.cpp_engine.stats()

    def check_prompt(
        self, prompt_ids: list[int], *, num_new: int = 1, name: str = "prompt"
    ) -> None:
        """Raise OptionError if the engine can never serve a prompt.

        Args:
            num_new: tokens that must fit after the prompt: 0 if max_new_tokens is 0, else 1.
            name: the field that the error names.
        """
        if not prompt_ids:
            raise OptionError(name, "is empty. It must have at least 1 token.")
        limit, session_len = self.max_request_tokens, self.loaded.session_len
        wanted = len(prompt_ids) + num_new
        got = f"has {len(prompt_ids)} tokens"
        got += " and needs room for the answer, but" if num_new else ", but"
        if wanted > limit and wanted > session_len:
            raise OptionError(
                name,
                f"{got} session_len is {session_len}. "
                f"Shorten it or raise {flag_of('session_len')}.",
            )
        if wanted > limit:
            raise OptionError(
                name,
                f"{got} the KV cache holds {limit} tokens. "
                f"Shorten it or raise {flag_of('cache_max_entry_count')}.",
            )
        top = max(prompt_ids)
        if top >= self.loaded.vocab_size or min(prompt_ids) < 0:
            bad = top if top >= self.loaded.vocab_size else min(prompt_ids)
            raise OptionError(
                name,
                f"contains token id {bad}. Ids must be 0 to {self.loaded.vocab_size - 1}.",
            )

    def new_grammars(self) -> Grammars:
        """Return a new cache of compiled grammars, which all requests of one call share."""
        return Grammars(lambda: self.loaded.tokenizer.grammar_tokenizer(self.loaded.vocab_size))

    async def submit(
        self,
        prompt_ids: list[int],
        config: GenerationConfig | None = None,
        *,
        index: int = 0,
        start: AnswerStart | None = None,
        grammar: str | None = None,
        grammars: Grammars | None = None,
    ) -> RequestStream:
        """Submit one request and return the stream of its response.

        Args:
            prompt_ids: token ids of the prompt. The stream keeps this list without a copy.
            config: options of the request. None takes the defaults.
            index: added to the random seed, so that the n choices of a prompt differ.
            start: the state in which the prompt of a conversation ends. The chat format then splits
                the response into reasoning, content (the text) and tool calls. None means a plain
                prompt, whose text the response continues.
            grammar: a grammar in llguidance's notation that replaces `response_format`. None
                applies `response_format`.
            grammars: the compiled grammars of the call. None compiles this request's grammar alone.

        Raises:
            OptionError: if the request is wrong.
            EngineFailure: if the engine has failed, is closed, or belongs to another process.
        """
        config = config or GenerationConfig()
        self.check_healthy()
        request, prompt_ids, answer, decoder = await asyncio.to_thread(
            self._make_request,
            prompt_ids,
            config,
            index=index,
            start=start,
            grammar=grammar,
            grammars=grammars or self.new_grammars(),
        )
        stream = RequestStream(
            request.id,
            prompt_ids,
            config=config,
            answer=answer,
            decoder=decoder,
            forget=self.forget,
        )
        with self._lock:
            self._streams[stream.request_id] = stream
        try:
            self.loaded.cpp_engine.submit(request)
        except BaseException:
            with self._lock:
                self._streams.pop(stream.request_id, None)
            self.check_healthy()
            raise
        try:
            self.check_healthy()
        except EngineFailure:
            self.forget(stream.request_id)
            raise
        return stream

    async def generate(
        self, prompt_ids: list[int], config: GenerationConfig | None = None, *, index: int = 0
    ) -> AsyncIterator[Response]:
        """Submit a request and yield its chunks. Closing the iterator early cancels the request."""
        stream = await self.submit(prompt_ids, config, index=index)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            stream.close()

    def forget(self, request_id: int) -> None:
        """Cancel a request if it still runs, and discard its outputs."""
        if self.in_other_process:
            return
        with self._lock:
            known = self._streams.pop(request_id, None)
        if known is not None and not self._closing.is_set():
            self.loaded.cpp_engine.cancel(request_id)

    def abort_all(self) -> int:
        """End all running and waiting requests with finish_reason `abort`. Return their number.

        The responses keep the tokens generated so far. Call it in the event loop that submits: a
        request that another loop is just submitting continues.
        """
        with self._lock:
            ids = list(self._streams)
        for request_id in ids:
            self.loaded.cpp_engine.cancel(request_id)
        return len(ids)

    def close(self) -> None:
        """Stop the engine. Streams that still run raise EngineFailure.

        A second caller waits for the first. If an interrupt ends `close`, it can be called again.
        """
        if self.in_other_process:
            return
        with self._close_lock:
            if not self._closed:
                self._closing.set()
                self.loaded.on_close()
                self._drain_thread.join()
                self.loaded.cpp_engine.close()
                self._closed = True

    def check_healthy(self) -> None:
        """Raise EngineFailure if the engine cannot serve requests."""
        self.check_process()
        if self._closing.is_set():
            raise EngineFailure(self.failure)
        if not self.healthy:
            raise EngineFailure(f"The engine has failed: {self.failure}")

    def check_process(self) -> None:
        """Raise EngineFailure if the engine belongs to another process."""
        if self.in_other_process:
            raise EngineFailure(self.failure)

    def _make_request(
        self,
        prompt_ids: list[int],
        config: GenerationConfig,
        *,
        index: int,
        start: AnswerStart | None,
        grammar: str | None,
        grammars: Grammars,
    ) -> tuple[Any, list[int], SpecialTokenStopFilter, AnswerDecoder]:
        # Runs in a worker thread because tokenizing stop words and compiling a grammar take time.
        # Returns the caller's own list of ids if nothing is added, so that n choices share it.
        constrained = is_constrained(config) and grammar is None
        if start is not None and constrained:
            prefix = self.loaded.chat_format.constrained_prefix()
            prompt_ids = [*prompt_ids, *prefix] if prefix else prompt_ids
        self.check_prompt(prompt_ids, num_new=min(config.max_new_tokens, 1))
        check_token_ids(config, self.loaded.vocab_size)
        room = self.max_request_tokens - len(prompt_ids)
        request = self.loaded.new_request()
        request.id = next(self._ids)
        request.prompt = prompt_ids
        request.max_new_tokens = min(config.max_new_tokens, room)
        request.min_new_tokens = min(config.min_new_tokens or 0, request.max_new_tokens)
        request.ignore_eos = config.ignore_eos
        request.eos_ids = [] if config.ignore_eos else list(self.loaded.eos_ids)
        template = self.loaded.chat_template
        of_template = template.stop_words if start is not None and template is not None else []
        stop_ids, plain_words, special_words = sort_stop_words(
            [*(config.stop_words or []), *of_template], self.loaded.tokenizer
        )
        request.stop_sequences = [[i] for i in [*(config.stop_token_ids or []), *stop_ids]]
        request.bad_sequences = bad_sequences(config, self.loaded.tokenizer)
        request.num_logprobs = -1 if config.logprobs is None else config.logprobs
        request.num_prompt_logprobs = (
            -1 if config.prompt_logprobs is None else config.prompt_logprobs
        )
        request.logits_output = config.output_logits or "none"
        set_sampling(request, config, index=index)
        wanted = grammar or config.response_format
        if wanted is not None:
            request.token_mask = grammars.token_mask(wanted)
        decoder = self._decoder(config, start, constrained=constrained)
        answer = self._answer_text(
            config, plain_words, special_words=special_words, start=start, decoder=decoder
        )
        return request, prompt_ids, answer, decoder

    def _decoder(
        self, config: GenerationConfig, start: AnswerStart | None, *, constrained: bool
    ) -> AnswerDecoder:
        skip_special = config.skip_special_tokens
        if start is None:
            return TextDecoder(
                TokenDetokenizer(self.loaded.tokenizer, skip_special, begins_text=False)
            )
        return self.loaded.chat_format.decoder(
            start, skip_special=skip_special, constrained=constrained
        )

    def _answer_text(
        self,
        config: GenerationConfig,
        plain_words: list[str],
        *,
        special_words: list[str],
        start: AnswerStart | None,
        decoder: AnswerDecoder,
    ) -> SpecialTokenStopFilter:
        include_stop, min_tokens = config.include_stop_str_in_output, config.min_new_tokens or 0
        gate = None
        if special_words:
            begins_text = start is not None and not start.continue_final_message
            shown = TokenDetokenizer(
                self.loaded.tokenizer, skip_special=False, begins_text=begins_text
            )
            # The stop word that ends first wins, so the gate searches all words. If the chat format
            # splits responses, the gate's text is not the content, so plain words are not its task.
            is_split = start is not None and self.loaded.chat_format.splits_answers
            words = special_words if is_split else [*special_words, *plain_words]
            gate = AnswerText(shown, words, include_stop=include_stop, min_tokens=min_tokens)
        return SpecialTokenStopFilter(
            decoder, plain_words, gate=gate, include_stop=include_stop, min_tokens=min_tokens
        )

    def _drain(self) -> None:
        cpp_engine = self.loaded.cpp_engine
        reason = "The engine was closed."
        try:
            while not self._closing.is_set():
                outputs = cpp_engine.wait_outputs(_WAIT_MS)
                for output in outputs:
                    self._deliver(output)
                if not self._has_warned and any(out.finish_reason != "none" for out in outputs):
                    self._warn_of_clipping()
                if not outputs and not cpp_engine.healthy:
                    reason = f"The engine has failed: {cpp_engine.failure}"
                    break
        except BaseException as error:  # without this thread no request would ever end
            logger.exception("The outputs of the engine could not be delivered.")
            self._failure = str(error) or repr(error)
            reason = f"The engine has failed: {self._failure}"
        ended = self._end_all(EngineFailure(reason))
        if self._failure:  # no thread would read the outputs
            for request_id in ended:
                cpp_engine.cancel(request_id)

    def _warn_of_clipping(self) -> None:
        """Log one warning if values of K or V were clipped to the range of their KV format."""
        num_values = sum(count for _, count in self.loaded.cpp_engine.stats().clipped)
        if num_values == 0:
            return
        self._has_warned = True
        logger.warning(
            "%d values of K or V exceeded the range of their KV format and were clipped. Use "
            "--kv-quality best with a calibration file, or another KV format. The metric "
            "lmdeploy:kv_clipped_values_total counts them.",
            num_values,
        )

    def _deliver(self, output: Any) -> None:
        with self._lock:
            if output.finish_reason == "none":
                stream = self._streams.get(output.request_id)
            else:
                stream = self._streams.pop(output.request_id, None)
        if stream is not None:
            try:
                stream.deliver(output)
            except RuntimeError:  # its event loop is closed, so no caller waits for the output
                self.forget(output.request_id)

    def _end_all(self, error: EngineFailure) -> list[int]:
        with self._lock:
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            try:
                stream.deliver(error)
            except RuntimeError:
                logger.debug("The event loop of request %d is closed.", stream.request_id)
        return [stream.request_id for stream in streams]


_running: weakref.WeakSet[AsyncEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all engines at exit.

    A thread inside the C++ engine would abort the process when the interpreter ends.
    """
    for engine in list(_running):
        engine.close()
