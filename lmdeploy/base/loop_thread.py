"""Runs coroutines for blocking code, in an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from lmdeploy.base.errors import EngineFailure

T = TypeVar("T")

_MAX_IN_FLIGHT = 256  # jobs that run at the same time


class LoopThread:
    """An event loop in a thread. Any other thread may call its methods."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="tm-loop", daemon=True)
        self._thread.start()

    def start_all(
        self, jobs: Sequence[T], run_one: Callable[[int, T], Awaitable[None]]
    ) -> Future[None]:
        """Start `run_one(slot, job)` for every job, where `slot` is the job's position.

        The first failure cancels the other jobs. Raise EngineFailure if the loop is closed.
        """
        return self._start(_run_all(jobs, run_one))

    def run_all(self, jobs: Sequence[T], run_one: Callable[[int, T], Awaitable[None]]) -> None:
        """Run `run_one(slot, job)` for every job and wait. An interrupt cancels all jobs."""
        future = self.start_all(jobs, run_one)
        try:
            self.wait(future)
        except BaseException:
            future.cancel()
            raise

    def wait(self, future: Future[None]) -> None:
        """Wait for the jobs of `start_all`. Raise EngineFailure if the loop is closed."""
        try:
            future.result()
        except CancelledError:
            raise _closed_meanwhile() from None

    def close(self) -> None:
        """Cancel the running jobs, stop the loop and join the thread. Further calls wait for it."""
        with self._lock:
            if not self._closing:
                asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            self._closing = True
        self._thread.join()
        self._loop.close()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        with self._lock:
            if not self._closing:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise _closed_meanwhile()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()


async def _run_all(jobs: Sequence[T], run_one: Callable[[int, T], Awaitable[None]]) -> None:
    """Run all jobs. If one fails or this coroutine is cancelled, cancel the others."""
    room = asyncio.Semaphore(_MAX_IN_FLIGHT)

    async def run(slot: int, job: T) -> None:
        async with room:
            await run_one(slot, job)

    tasks = [asyncio.ensure_future(run(slot, job)) for slot, job in enumerate(jobs)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _closed_meanwhile() -> EngineFailure:
    return EngineFailure("The pipeline was closed before the response was complete.")
