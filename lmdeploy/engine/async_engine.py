"""④⑨ The asynchronous engine: takes token ids and streams chunks of text, one stream per request.

One thread waits for the outputs of the C++ engine and passes those of a step to the event loops of
their requests, in one call per loop. A loop turns the tokens into text.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Collection, Iterable
from typing import TYPE_CHECKING, Protocol

from lmdeploy.base.errors import EngineFailure
from lmdeploy.chat.formats.base import AnswerStart
from lmdeploy.chat.grammar import Grammars
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.engine.core import RunningCore
from lmdeploy.engine.load import TextModel, TextOptions, load_engine
from lmdeploy.engine.prefix_store import PrefixRecorder
from lmdeploy.engine.request import RequestMaker, RequestParts, check_prompt, set_sampling
from lmdeploy.engine.stream import RequestStream
from lmdeploy.response import Response

if TYPE_CHECKING:
    from lmdeploy._turbomind import EngineStats, MemoryPlan, Request, RequestOutput
    from lmdeploy.config.chat_template import ChatTemplateConfig

logger = logging.getLogger("lmdeploy")

_WAIT_MS = 200
_ABORT_SECONDS = 10  # that aborted requests have to end before the engine sleeps
SLEEPING_PARTS = frozenset({"weights", "kv_cache"})


class OutputSink(Protocol):
    """Receives the outputs of one request in its event loop."""

    loop: asyncio.AbstractEventLoop

    def deliver(self, output: RequestOutput | Exception) -> None:
        """Take an output, or the exception that ends the request. It raises nothing."""
        ...


class AsyncEngine:
    """Owns the core and the texts of one model.

    Any event loop may call `submit` and `generate`. Any thread may call `close`.
    """

    def __init__(self, text: TextModel, running: RunningCore) -> None:
        self.text = text
        self.running = running
        self._ids = itertools.count(1)
        self._streams: dict[int, OutputSink] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._failure = ""  # why the drain thread failed
        self._has_warned = False  # the drain thread has warned of clipped values
        self._closing = threading.Event()
        self._closed = False
        self._asleep: frozenset[str] = frozenset()  # the parts that `sleep` has freed
        self._close_lock = threading.RLock()
        traffic = running.traffic
        self._recorder = None if traffic is None else PrefixRecorder(traffic)
        self._start_draining()
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
        options = TextOptions(chat_template_config, reasoning_parser, tool_call_parser)
        return cls(*load_engine(model_path, config, options=options, progress=progress))

    @property
    def max_request_tokens(self) -> int:
        """Return the largest prompt plus response that session_len and the cache allow."""
        return self.memory_plan().max_sequence_tokens

    @property
    def healthy(self) -> bool:
        """Return whether the engine has not failed, is open and belongs to this process."""
        if self.in_other_process or self._closing.is_set() or self._failure:
            return False
        return self.running.core.healthy

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
        return self._failure or self.running.core.failure

    @property
    def is_sleeping(self) -> bool:
        """Return whether `sleep` has freed the weights and the KV cache."""
        return bool(self._asleep)

    @property
    def in_other_process(self) -> bool:
        """Return whether this process is a fork of the process that created the engine."""
        return os.getpid() != self._pid

    def cache_line(self) -> str:
        """Return one line that describes the KV cache."""
        from lmdeploy.engine.kv_quality import cache_line

        return cache_line(self.running.kv, self.memory_plan(), session_len=self.text.session_len)

    def start_lines(self) -> list[str]:
        """Return the lines about the device and the KV cache that a command prints at its start."""
        from lmdeploy.engine.kv_quality import state_line

        running = self.running
        lines = (
            running.device_line,
            running.tuner_line,
            self.cache_line(),
            state_line(self.memory_plan()),
        )
        return [line for line in lines if line]

    def stats(self) -> EngineStats:
        """Return the counters of the core."""
        return self.running.core.stats()

    def memory_plan(self) -> MemoryPlan:
        """Return what memory the core has reserved and uses."""
        return self.running.core.memory_plan()

    def check_prompt(
        self, prompt_ids: list[int], *, num_new: int = 1, name: str = "prompt"
    ) -> None:
        """Raise OptionError if the engine can never serve a prompt.

        Args:
            num_new: tokens that must fit after the prompt: 0 if max_new_tokens is 0, else 1.
            name: the field that the error names.
        """
        check_prompt(
            self.text,
            prompt_ids,
            num_new=num_new,
            max_tokens=self.max_request_tokens,
            name=name,
        )

    def new_grammars(self) -> Grammars:
        """Return a new cache of compiled grammars, which all requests of one call share."""
        return Grammars(lambda: self.text.tokenizer.grammar_tokenizer(self.text.vocab_size))

    async def submit(
        self,
        prompt_ids: list[int],
        config: GenerationConfig | None = None,
        *,
        index: int = 0,
        start: AnswerStart | None = None,
        grammars: Grammars | None = None,
    ) -> RequestStream:
        """Submit one request and return the stream of its response.

        Args:
            prompt_ids: token ids of the prompt. The stream keeps this list without a copy.
            config: options of the request. None takes the defaults.
            index: added to the random seed, so that the n choices of a prompt differ.
            start: the state in which the answer of a conversation begins. The chat format then
                splits the response into reasoning, content (the text) and tool calls. None means a
                plain prompt, whose text the response continues.
            grammars: the compiled grammars of the call. None compiles this request's grammar alone.

        Raises:
            OptionError: if the request is wrong.
            EngineFailure: if the engine has failed, is closed, or belongs to another process.
        """
        config = config or GenerationConfig()
        self.check_healthy()
        parts = await asyncio.to_thread(
            self._make_request,
            prompt_ids,
            config,
            index=index,
            start=start,
            grammars=grammars or self.new_grammars(),
        )
        request = parts.request
        stream = RequestStream(
            request.id,
            parts.prompt_ids,
            config=config,
            answer=parts.answer,
            decoder=parts.decoder,
            forget=self.forget,
        )
        await self._enter(request, stream)
        return stream

    async def relay(self, request: Request, sink: OutputSink) -> None:
        """Submit a request that another process made. Its outputs go to `sink` as they are.

        Raise ValueError if the request is wrong, and EngineFailure as `submit`.
        """
        self.check_healthy()
        request.id = next(self._ids)
        await self._enter(request, sink)

    async def _enter(self, request: Request, sink: OutputSink) -> None:
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.begin, request, self.running.core)
        with self._lock:
            self._streams[request.id] = sink
        try:
            self.running.core.submit(request)
        except BaseException:
            with self._lock:
                self._streams.pop(request.id, None)
            if self._recorder is not None:
                self._recorder.drop(request.id)
            self.check_healthy()
            raise
        try:
            self.check_healthy()
        except EngineFailure:
            self.forget(request.id)
            raise

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
            self.running.core.cancel(request_id)

    def abort_all(self) -> int:
        """End all running and waiting requests with finish_reason `abort`. Return their number.

        The responses keep the tokens generated so far. Call it in the event loop that submits: a
        request that another loop is just submitting continues.
        """
        with self._lock:
            ids = list(self._streams)
        return self.abort(ids)

    def abort(self, request_ids: Iterable[int]) -> int:
        """End requests as `abort_all` does. Return how many of them had not ended."""
        with self._lock:
            ids = [request_id for request_id in request_ids if request_id in self._streams]
        for request_id in ids:
            self.running.core.cancel(request_id)
        return len(ids)

    def sleep(self) -> None:
        """End all requests as `abort_all` does, and free the weights and the KV cache.

        Until `wake`, `submit` raises EngineFailure.
        """
        with self._close_lock:
            self.check_healthy(may_sleep=True)
            if self.is_sleeping:
                return
            self._asleep = SLEEPING_PARTS
            self.abort_all()
            deadline = time.monotonic() + _ABORT_SECONDS
            while self._streams and time.monotonic() < deadline:
                time.sleep(0.01)
            self._stop_core()

    def wake(self, parts: Collection[str] = SLEEPING_PARTS) -> None:
        """Load the weights and reserve the KV cache again, once both have been asked for.

        Raise ValueError if the files of the model have changed, and MemoryError if memory is short.
        The engine then still sleeps.
        """
        with self._close_lock:
            self.check_healthy(may_sleep=True)
            left = self._asleep - frozenset(parts)
            if self.is_sleeping and not left:
                started = self.running.restart()
                self.running.core, self.running.on_close = started.core, started.on_close
                self._start_draining()
            self._asleep = left

    def close(self) -> None:
        """Stop the engine. Streams that still run raise EngineFailure.

        A second caller waits for the first. If an interrupt ends `close`, it can be called again.
        """
        if self.in_other_process:
            return
        with self._close_lock:
            if not self._closed:
                self._closing.set()
                self.text.tokenizer.close()
                if self._recorder is not None:
                    self._recorder.traffic.close()
                if not self.is_sleeping:
                    self._stop_core()
                if self.running.events is not None:
                    self.running.events.close()
                self._closed = True

    def _start_draining(self) -> None:
        self._draining = threading.Event()
        self._draining.set()
        self._drain_thread = threading.Thread(target=self._drain, name="tm-drain", daemon=True)
        self._drain_thread.start()

    def _stop_core(self) -> None:
        self._draining.clear()
        self.running.on_close()
        self._drain_thread.join()
        self.running.core.close()

    def check_healthy(self, *, may_sleep: bool = False) -> None:
        """Raise EngineFailure if the engine cannot serve requests, or only sleep and wake."""
        self.check_process()
        if self._closing.is_set():
            raise EngineFailure(self.failure)
        if not self.healthy:
            raise EngineFailure(f"The engine has failed: {self.failure}")
        if self.is_sleeping and not may_sleep:
            raise EngineFailure("The engine sleeps. Wake it with POST /wakeup.")

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
        grammars: Grammars,
    ) -> RequestParts:
        """Build a request. It runs in a worker thread, because compiling a grammar takes time."""
        maker = RequestMaker(self.text, config, start=start)
        parts = maker.make(prompt_ids, grammars=grammars, max_tokens=self.max_request_tokens)
        parts.request.id = next(self._ids)
        set_sampling(parts.request, config, index=index)
        return parts

    def _drain(self) -> None:
        core, watch = self.running.core, StepWatch(self.running.step_limit_s)
        reason = "The engine was closed."
        try:
            while self._draining.is_set():
                outputs = core.wait_outputs(_WAIT_MS)
                if self._recorder is not None:
                    for output in outputs:
                        self._recorder.output(output, core)
                has_ended = self._deliver_all(outputs)
                if has_ended and not self._has_warned:
                    self._warn_of_clipping()
                if not outputs and not core.healthy:
                    reason = f"The engine has failed: {core.failure}"
                    break
                if not outputs and watch.has_stalled(core.stats()):
                    self._failure = f"A step has not ended for {watch.limit_s:.0f} s."
                    reason = f"The engine has failed: {self._failure}"
                    break
        except BaseException as error:  # without this thread no request would ever end
            logger.exception("The outputs of the engine could not be delivered.")
            self._failure = str(error) or repr(error)
            reason = f"The engine has failed: {self._failure}"
        ended = self._end_all(EngineFailure(reason))
        if self._failure:  # no thread would read the outputs
            for request_id in ended:
                core.cancel(request_id)

    def _warn_of_clipping(self) -> None:
        """Log one warning if values of K or V were clipped to the range of their KV format."""
        num_values = sum(count for _, count in self.stats().clipped)
        if num_values == 0:
            return
        self._has_warned = True
        logger.warning(
            "%d values of K or V exceeded the range of their KV format and were clipped. Use "
            "--kv-quality best with a calibration file, or another KV format. The metric "
            "lmdeploy:kv_clipped_values_total counts them.",
            num_values,
        )

    def _deliver_all(self, outputs: list[RequestOutput]) -> bool:
        """Pass outputs to their event loops. Return whether a request has ended."""
        by_loop: dict[asyncio.AbstractEventLoop, _Delivery] = {}
        has_ended = False
        with self._lock:
            for output in outputs:
                if output.finish_reason == "none":
                    sink = self._streams.get(output.request_id)
                else:
                    has_ended = True
                    sink = self._streams.pop(output.request_id, None)
                if sink is not None:
                    by_loop.setdefault(sink.loop, []).append((sink, output))
        for loop, delivery in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_out, delivery)
            except RuntimeError:  # the event loop is closed, so no caller waits for the outputs
                for _, output in delivery:
                    self.forget(output.request_id)
        return has_ended

    def _end_all(self, error: EngineFailure) -> list[int]:
        with self._lock:
            streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            try:
                stream.loop.call_soon_threadsafe(stream.deliver, error)
            except RuntimeError:
                logger.debug("The event loop of request %d is closed.", request_id)
        return list(streams)


class StepWatch:
    """Finds out that a step does not end. It sees the statistics again and again."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._num_steps, self._begin = -1, 0.0

    def has_stalled(self, stats: EngineStats) -> bool:
        """Return whether sequences have been running for `limit_s` without the end of a step."""
        now = time.monotonic()
        if stats.num_running == 0 or stats.num_steps != self._num_steps:
            self._num_steps, self._begin = stats.num_steps, now
        return now - self._begin > self.limit_s


_Delivery = list[tuple[OutputSink, "RequestOutput"]]


def _hand_out(delivery: _Delivery) -> None:
    for sink, output in delivery:
        sink.deliver(output)


_running: weakref.WeakSet[AsyncEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all engines at exit.

    A thread inside the C++ engine would abort the process when the interpreter ends.
    """
    for engine in list(_running):
        engine.close()
