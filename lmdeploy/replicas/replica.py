"""One replica: an engine that generates token ids. Ray Serve runs it in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from lmdeploy.base.logs import set_log_level
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.replicas.callers import Callers, dead_jobs
from lmdeploy.replicas.mailbox import HEARTBEAT_SECONDS, Mailbox, Mailboxes
from lmdeploy.replicas.transport import (
    CALLER,
    CORE,
    GRAMMAR,
    MAILBOX,
    TICKET,
    First,
    Letter,
    Output,
    copy_output,
    make_request,
)


def serve_replica_id() -> str:
    """Return the id that Ray Serve has given to this process."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


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
        find_id: Callable[[], str] = serve_replica_id,
    ) -> None:
        """Load the engine.

        Args:
            model_path: as in `load_engine`.
            config: options of the engine.
            log_level: log level of this process.
            release: what `describe` returns, to tell replicas with other options apart.
            find_dead_callers: returns the callers that have ended.
            find_id: returns the id by which the router knows this replica.
        """
        set_log_level(log_level)
        self._release = release
        self._id = find_id()
        self._callers = Callers(find_dead_callers, period_seconds=HEARTBEAT_SECONDS)
        self._mailboxes = Mailboxes()
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

    async def generate(self, fields: dict[str, Any]) -> AsyncIterator[First | None]:
        """Yield None as a sign of life until the first output, then that, and end with the request.

        All other outputs go to the mailbox that the first one names. When the caller cancels or its
        process ends, the request is cancelled. Raise ValueError if the request is wrong.
        """
        if fields[GRAMMAR] is None:
            request = make_request(fields, grammars=self._grammars)
        else:
            request = await asyncio.to_thread(make_request, fields, grammars=self._grammars)
        mailbox = self._mailboxes.enter(fields[CORE])
        sink = _Sink(mailbox, fields[TICKET])
        try:
            await self._engine.relay(request, sink)
            caller = fields.get(CALLER, "")
            while (output := await sink.first()) is None:
                if not self._callers.has(caller):
                    return
                yield None
            yield First(output, self._id, mailbox.name)
            while self._callers.has(caller) and not await sink.wait_end():
                pass
        finally:
            self._engine.forget(request.id)
            sink.close()
            self._mailboxes.leave(mailbox)

    async def read(self, fields: dict[str, Any]) -> AsyncIterator[list[Letter]]:
        """Yield the outputs in a mailbox while the caller runs, as `Mailboxes.read` does."""
        letters = self._mailboxes.read(fields[MAILBOX])
        try:
            async for group in letters:
                if not self._callers.has(fields.get(CALLER, "")):
                    return
                yield group
        finally:
            await letters.aclose()  # type: ignore[attr-defined]

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()


class _Sink:
    """Receives the outputs of one request. All but the first go to the mailbox."""

    def __init__(self, mailbox: Mailbox, ticket: int) -> None:
        self.request_id = 0
        self._mailbox = mailbox
        self._ticket = ticket
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[Output] = self._loop.create_future()
        self._has_ended = asyncio.Event()

    def deliver(self, output: Any) -> None:
        """Take an output, or the exception that ends the request. Another thread calls this."""
        self._loop.call_soon_threadsafe(self._take, output)

    async def first(self) -> Output | None:
        """Return the first output, or None after HEARTBEAT_SECONDS."""
        await asyncio.wait([self._first], timeout=HEARTBEAT_SECONDS)
        return self._first.result() if self._first.done() else None

    async def wait_end(self) -> bool:
        """Wait up to HEARTBEAT_SECONDS for the last output. Return whether it has come."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._has_ended.wait(), HEARTBEAT_SECONDS)
        return self._has_ended.is_set()

    def close(self) -> None:
        """Tell a reader of the mailbox that no output follows."""
        if not self._has_ended.is_set():
            self._put(Output(self._ticket, finish_reason="cancelled"))

    def _take(self, output: Any) -> None:
        if isinstance(output, BaseException):
            self._put(Output(self._ticket, finish_reason="error", error=str(output)))
        else:
            self._put(copy_output(output))

    def _put(self, output: Output) -> None:
        if self._has_ended.is_set():
            return
        if output.finish_reason != "none":
            self._has_ended.set()
        if self._first.done():
            self._mailbox.put(self._ticket, output)
        else:
            self._first.set_result(output)
