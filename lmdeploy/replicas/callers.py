"""Finds callers whose processes were killed. Ray does not end their calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

logger = logging.getLogger("lmdeploy")


def dead_jobs() -> set[str]:
    """Return the ids of the Ray jobs whose processes have ended."""
    from ray._private import state  # the public function needs Ray's dashboard

    return {job["JobID"] for job in state.jobs() if job["IsDead"]}


class Callers:
    """Answers whether a caller still runs. Only one event loop may use it."""

    def __init__(self, find_dead: Callable[[], set[str]], *, period_seconds: float) -> None:
        self._find_dead = find_dead
        self._period_seconds = period_seconds
        self._dead: set[str] = set()
        self._next_time = 0.0
        self._check: asyncio.Task[None] | None = None

    def has(self, caller: str) -> bool:
        """Return whether a caller ran at the last check. Begin another one if it is time.

        An empty caller always runs.
        """
        now = time.monotonic()
        if caller and now >= self._next_time:
            self._next_time = now + self._period_seconds
            self._check = asyncio.create_task(self._find())
        return caller not in self._dead

    async def _find(self) -> None:
        try:
            self._dead = await asyncio.to_thread(self._find_dead)
        except Exception as error:  # Ray's head node does not answer, so no caller is given up
            logger.warning("The callers cannot be checked: %s", error)
