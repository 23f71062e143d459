"""uvicorn's server, which ends the engine's streams itself before uvicorn would cut them."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from lmdeploy.engine.async_engine import AsyncEngine

logger = logging.getLogger("lmdeploy")

_LAST_WORDS_SECONDS = 2  # for the errors that end streams to reach the clients
_LOOK_SECONDS = 0.05  # between two looks whether there was a second signal


class GracefulServer(uvicorn.Server):
    """Serves until interrupted; then closes the engine, so that no stream is left to be cut.

    Running answers may go on for `grace` seconds; then, or at a second signal, each ends with an
    error. A third signal cuts what is left.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, *, grace: int) -> None:
        config.timeout_graceful_shutdown = grace + _LAST_WORDS_SECONDS
        super().__init__(config)
        self._engine = engine
        self._grace = grace
        self._hurries = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn's signal handlers."""
        if self.should_exit and not self._hurries:
            self._hurries = True
            return
        self.force_exit = self.should_exit  # uvicorn's would count SIGINT alone
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn once it has been told to stop."""
        if self.server_state.tasks and self._grace > 0:
            logger.warning(
                "stopping: running answers may go on for %d s (--shutdown-timeout); "
                "the next signal ends them at once",
                self._grace,
            )
        closing = asyncio.create_task(self._close_engine())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_engine(self) -> None:
        end = time.monotonic() + self._grace
        while not self._hurries and time.monotonic() < end:
            await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.to_thread(self._engine.close)
