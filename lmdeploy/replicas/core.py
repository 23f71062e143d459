"""④⑨ Replicas in the place of the C++ engine. A request survives the death of its replica."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from lmdeploy._turbomind import EngineStats, MemoryPlan, Request, RequestOutput
from lmdeploy.kv_store.traffic import NoPrefixCache
from lmdeploy.replicas.transport import (
    Fields,
    Progress,
    StreamAddress,
    Submission,
    request_fields,
)

logger = logging.getLogger("lmdeploy")

_PAUSE_SECONDS = 0.1  # before a request is sent again
_MAX_LOST = 1024  # lost output streams that are remembered
_MAX_DOUBLINGS = 2  # of the time to wait for a replica that may only be busy
_GRACE_SECONDS = 0.1  # in which a loop that was late can take what has arrived

Item = TypeVar("Item", covariant=True)


class Call(Protocol, Generic[Item]):
    """A call of a replica that sends items."""

    def __aiter__(self) -> AsyncIterator[Item]: ...

    def cancel(self) -> None:
        """End the call, also on the replica."""
        ...


class ReplicaLost(Exception):
    """A replica has died, failed, or sends no heartbeat."""


class ReplicaSilent(ReplicaLost):
    """A replica has not answered a call. It hangs or is busy."""


@dataclass
class _Reader:
    """The task that reads an output stream, and the attempts that wait for outputs."""

    task: asyncio.Task[None]
    attempts: set[int] = field(default_factory=set)


class ReplicatedCore(NoPrefixCache):
    """An EngineCore whose requests run on replicas. Thread-safe.

    One call per replica reads the outputs of all requests on it. If the replica dies, fails or
    sends no heartbeat, another one generates the rest of each request: the prompt and the tokens
    so far become its prompt. Sampling depends only on the seed and the position, so the response
    is the same.

    Invariants:
        1. A request takes outputs only from its current attempt, in order and without a gap: an
           output stream that was lost once is never read again.
        2. Each request gets exactly one output with a finish reason, as its last one.
    """

    healthy = True
    failure = ""

    def __init__(
        self,
        generate: Callable[[Submission], Call[StreamAddress]],
        *,
        read: Callable[[StreamAddress], Call[list[Fields]]],
        plan: Fields,
        heartbeat_timeout: float = 2.5,
        resume_timeout: float = 120.0,
    ) -> None:
        """Start the thread that receives the outputs.

        Args:
            generate: calls `EngineReplica.generate` of any replica.
            read: calls `EngineReplica.read` of the replica in the address.
            plan: the fields of the memory plan of one replica.
            heartbeat_timeout: seconds without a heartbeat after which a replica counts as lost.
            resume_timeout: seconds after which a request fails that no replica continues.
        """
        self._generate = generate
        self._read = read
        self._name = secrets.token_hex(8)
        self._plan = MemoryPlan.from_dict(plan)
        self._heartbeat_timeout = heartbeat_timeout
        self._resume_timeout = resume_timeout
        self._outputs: queue.SimpleQueue[RequestOutput | None] = queue.SimpleQueue()
        self._prompt_tokens = 0
        self._generated_tokens = 0
        # Only the loop's thread uses these.
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by request
        self._attempts = itertools.count()
        self._received: dict[int, asyncio.Queue[RequestOutput | ReplicaLost]] = {}  # by attempt
        self._readers: dict[StreamAddress, _Reader] = {}
        self._lost: deque[StreamAddress] = deque(maxlen=_MAX_LOST)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="replicas", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Start a request."""
        self._loop.call_soon_threadsafe(self._start, request.id, request_fields(request))

    def cancel(self, request_id: int) -> None:
        """Cancel a request, which still gets a last output. An unknown id has no effect."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel, request_id)

    def wait_outputs(self, timeout_ms: int) -> list[RequestOutput]:
        """Return all outputs that have arrived. Wait up to `timeout_ms` if there are none."""
        outputs: list[RequestOutput] = []
        try:
            item = self._outputs.get(timeout=timeout_ms / 1000)
            while item is not None:
                outputs.append(item)
                item = self._outputs.get_nowait()
        except queue.Empty:
            pass
        return outputs

    def stats(self) -> EngineStats:
        """Return the counters of requests. Those of blocks stay with the replicas."""
        stats = EngineStats()
        stats.num_running = len(self._tasks)
        stats.prompt_tokens = self._prompt_tokens
        stats.generated_tokens = self._generated_tokens
        return stats

    def memory_plan(self) -> MemoryPlan:
        """Return the memory plan of one replica."""
        return self._plan

    def close(self) -> None:
        """Cancel all requests and stop. Idempotent."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._outputs.put(None)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, request_id: int, fields: Fields) -> None:
        self._prompt_tokens += len(fields["prompt"])
        self._tasks[request_id] = self._loop.create_task(self._run(request_id, fields))

    def _cancel(self, request_id: int) -> None:
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    async def _run(self, request_id: int, fields: Fields) -> None:
        """Pass on the outputs of a request. Send the last one whatever happens."""
        last = RequestOutput.from_dict({"request_id": request_id, "finish_reason": "cancelled"})
        try:
            last = await self._complete(request_id, Progress(fields))
        except Exception as error:
            last.finish_reason, last.error = "error", f"No replica answered: {error}"
        finally:  # also when the task is cancelled
            del self._tasks[request_id]
            self._outputs.put(last)

    async def _complete(self, request_id: int, progress: Progress) -> RequestOutput:
        """Run a request on one replica after another. Return the last output."""
        deadline = time.monotonic() + self._resume_timeout
        silences = 0  # since the last output
        while True:
            try:
                attempt = self._attempt(request_id, progress.rest(), silences=silences)
                async with aclosing(attempt) as outputs:
                    async for output in outputs:
                        deadline, silences = time.monotonic() + self._resume_timeout, 0
                        output.request_id = request_id
                        output = progress.take(output)
                        self._generated_tokens += len(output.tokens)
                        if output.finish_reason != "none":
                            return output
                        self._outputs.put(output)
            except Exception as error:  # Ray raises many kinds for a replica that died
                if time.monotonic() > deadline or not progress.can_resume:
                    raise
                logger.warning("A request continues on another replica: %s", _describe(error))
                silences += isinstance(error, ReplicaSilent)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _attempt(
        self, request_id: int, fields: Fields, *, silences: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs that a replica generates. Raise an exception if it is lost.

        After silences it waits longer, so that many requests do not keep busy replicas busy.
        """
        attempt = next(self._attempts)
        received = self._received[attempt] = asyncio.Queue()
        call = self._generate(Submission(self._name, request_id, attempt, fields))
        reader = None
        try:
            items = aiter(call)  # as long as this lives, the call does
            timeout = self._heartbeat_timeout * 2 ** min(silences, _MAX_DOUBLINGS)
            reader = self._reader_of(await _next(items, timeout))
            reader.attempts.add(attempt)
            while True:
                item = await received.get()
                if isinstance(item, ReplicaLost):
                    raise item
                if item.finish_reason in ("cancelled", "error") and not item.is_request_fault:
                    raise ReplicaLost(item.error or "The replica stopped.")
                yield item
        finally:
            del self._received[attempt]
            if reader is not None:
                reader.attempts.discard(attempt)
            call.cancel()

    def _reader_of(self, address: StreamAddress) -> _Reader:
        """Return the reader of a stream. Start it if there is none."""
        if address in self._lost:
            raise ReplicaLost("The output stream broke before.")
        if address not in self._readers:
            self._readers[address] = _Reader(self._loop.create_task(self._read_stream(address)))
        return self._readers[address]

    async def _read_stream(self, address: StreamAddress) -> None:
        """Hand the outputs of a stream to its attempts until there are none or it is lost."""
        failure: ReplicaLost | None = ReplicaLost("The core is closed.")
        try:
            while self._readers[address].attempts:
                await self._read_once(address)
            failure = None
        except Exception as error:  # Ray raises many kinds for a replica that died
            failure = ReplicaLost(_describe(error))
        finally:
            attempts = self._readers.pop(address).attempts
            if failure is not None:
                self._lost.append(address)
                for attempt in attempts:
                    self._received[attempt].put_nowait(failure)

    async def _read_once(self, address: StreamAddress) -> None:
        """Hand on the outputs that one call reads. The replica ends it after a while."""
        call = self._read(address)
        items = aiter(call)
        timeout = 2 * self._heartbeat_timeout  # of the first item, before which calls may queue
        try:
            while True:
                outputs = await _next(items, timeout)
                timeout = self._heartbeat_timeout
                for fields in outputs:
                    received = self._received.get(fields["request_id"])
                    if received is not None:  # else its attempt has ended
                        received.put_nowait(RequestOutput.from_dict(fields))
        except StopAsyncIteration:
            return
        finally:
            with suppress(Exception):
                call.cancel()


async def _next(items: AsyncIterator[Item], timeout: float) -> Item:
    """Return the next item. Raise StopAsyncIteration, or ReplicaLost after `timeout` seconds."""
    task = asyncio.ensure_future(anext(items))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # else it is logged
    try:
        for seconds in (timeout, _GRACE_SECONDS):
            if not task.done():
                await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise ReplicaSilent("The replica sends no heartbeat.")
        if task.cancelled():  # by Ray: this must not look as if the request was cancelled
            raise ReplicaLost("The call was cancelled.")
        return task.result()
    finally:
        task.cancel()


def _describe(error: BaseException) -> str:
    """Return one line about an error."""
    line = next(iter(str(error).strip().splitlines()), "")[:200]
    return line if isinstance(error, ReplicaLost) else f"{type(error).__name__}: {line}"
