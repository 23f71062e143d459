"""uvicorn's server, which ends the engine's streams itself before uvicorn would cut them."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from lmdeploy.turbomind.engine import AsyncEngine

_LAST_WORDS_SECONDS = 2  # for the errors that end streams to reach the clients


class GracefulServer(uvicorn.Server):
    """Serves until interrupted; then closes the engine, so that no stream is left to be cut.

    Running answers may go on for `grace` seconds; then each ends with an error.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, *, grace: int) -> None:
        config.timeout_graceful_shutdown = grace + _LAST_WORDS_SECONDS
        super().__init__(config)
        self._engine = engine
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn once it has been told to stop."""
        closing = asyncio.create_task(self._close_engine())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_engine(self) -> None:
        await asyncio.sleep(self._grace)
        await asyncio.to_thread(self._engine.close)
