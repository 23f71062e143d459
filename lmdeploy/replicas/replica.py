"""One replica: an engine that generates token ids. Ray Serve runs it in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from lmdeploy.base.logs import set_log_level
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.replicas.callers import Callers, dead_jobs
from lmdeploy.replicas.transport import CALLER, Output, copy_output, make_request

# A replica that computes a long prompt sends no token, but it sends a sign of life this often.
HEARTBEAT_SECONDS = 0.5
_COALESCE_SECONDS = 0.005  # outputs within this time, except the first, travel in one message


class EngineReplica:
    """The class of the Ray Serve deployment. Its methods run in one event loop."""

    def __init__(
        self,
        model_path: str,
        config: TurbomindEngineConfig,
        *,
        log_level: str,
        release: str = "",
        find_dead_callers: Callable[[], set[str]] = dead_jobs,
    ) -> None:
        """Load the engine.

        Args:
            model_path: as in `load_engine`.
            config: options of the engine.
            log_level: log level of this process.
            release: what `describe` returns, to tell replicas with other options apart.
            find_dead_callers: returns the callers that have ended.
        """
        set_log_level(log_level)
        self._release = release
        self._callers = Callers(find_dead_callers, period_seconds=HEARTBEAT_SECONDS)
        self._engine = AsyncEngine.load(model_path, config, progress=False)
        self._grammars = self._engine.new_grammars()

    def check_health(self) -> None:
        """Raise EngineFailure if the engine has failed. Ray Serve then replaces the replica."""
        self._engine.check_healthy()

    def describe(self) -> dict[str, Any]:
        """Return the release, and the fields of the engine's memory plan as `plan`."""
        plan = self._engine.loaded.cpp_engine.memory_plan()
        fields = {name: getattr(plan, name) for name in dir(plan) if not name.startswith("_")}
        return {"release": self._release, "plan": fields}

    async def generate(self, fields: dict[str, Any]) -> AsyncIterator[list[Output]]:
        """Yield the outputs of a request, in groups. An empty group is a sign of life.

        When the caller cancels or its process ends, the request is cancelled. Raise ValueError if
        the request is wrong.
        """
        request = await asyncio.to_thread(make_request, fields, grammars=self._grammars)
        sink = _Sink()
        await self._engine.relay(request, sink)
        try:
            while not sink.has_ended and self._callers.has(fields.get(CALLER, "")):
                yield await sink.take()
        finally:
            self._engine.forget(request.id)

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()


class _Sink:
    """Receives the outputs of one request."""

    def __init__(self) -> None:
        self.request_id = 0
        self.has_ended = False
        self._has_begun = False
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def deliver(self, output: Any) -> None:
        """Queue an output, or the exception that ends the request. Another thread calls this."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, output)

    async def take(self) -> list[Output]:
        """Return the next outputs, or none after HEARTBEAT_SECONDS. Raise a queued exception."""
        try:
            first = await asyncio.wait_for(self._queue.get(), HEARTBEAT_SECONDS)
        except asyncio.TimeoutError:
            return []
        if self._has_begun:
            await asyncio.sleep(_COALESCE_SECONDS)
        self._has_begun = True
        outputs = []
        for output in itertools.chain([first], iter(self._next, None)):
            if isinstance(output, BaseException):
                raise output
            outputs.append(copy_output(output))
            self.has_ended = output.finish_reason != "none"
        return outputs

    def _next(self) -> Any:
        return None if self._queue.empty() else self._queue.get_nowait()
