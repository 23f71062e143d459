"""④⑨ Sends the outputs of all requests of one client in one message per step."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

from lmdeploy.replicas.transport import Fields

# A replica that computes a long prompt sends no token, but it sends a heartbeat this often.
HEARTBEAT_SECONDS = 0.5
_COALESCE_SECONDS = 0.005  # outputs within this time travel in one message
# Ray does not end the calls of a client that was killed. A call that reads ends after this time
# by itself, and a client that lives calls again.
_READ_SECONDS = 2.0
_TIMEOUT_SECONDS = 5.0  # without a reader, after which the client counts as lost


class OutputStream:
    """The outputs of all requests that one client has on this replica. One event loop uses it.

    Invariants:
        1. At most one call reads the stream, and each output is sent once, in order.
        2. If a call breaks or no client reads for _TIMEOUT_SECONDS, the stream closes permanently,
           because outputs may be lost. Its requests end, and the client resumes them elsewhere.
    """

    def __init__(self) -> None:
        """Begin with the time to wait for a reader."""
        loop = asyncio.get_running_loop()
        self.name = secrets.token_hex(8)
        self.closed: asyncio.Future[None] = loop.create_future()
        self._outputs: list[Fields] = []
        self._has_outputs = asyncio.Event()
        self._is_read = False
        self._timer = loop.call_later(_TIMEOUT_SECONDS, self._close)

    def renew(self) -> None:
        """Restart the time after which the stream closes."""
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_TIMEOUT_SECONDS, self._close)

    def put(self, output: Fields) -> None:
        """Add an output."""
        self._outputs.append(output)
        self._has_outputs.set()

    async def read(self) -> AsyncIterator[list[Fields]]:
        """Yield the next outputs for about _READ_SECONDS. An empty list is the heartbeat.

        Raise LookupError if the stream is closed or another call reads it.
        """
        if self.closed.done() or self._is_read:
            raise LookupError(f"The output stream {self.name} is not open.")
        self._is_read = True
        loop = asyncio.get_running_loop()
        end = loop.time() + _READ_SECONDS
        try:
            while loop.time() < end:
                self.renew()
                yield await self._next()
        except BaseException:
            self._close()
            raise
        self._is_read = False

    async def _next(self) -> list[Fields]:
        try:
            await asyncio.wait_for(self._has_outputs.wait(), HEARTBEAT_SECONDS)
        except asyncio.TimeoutError:
            return []
        await asyncio.sleep(_COALESCE_SECONDS)
        outputs, self._outputs = self._outputs, []
        self._has_outputs.clear()
        return outputs

    def _close(self) -> None:
        self._timer.cancel()
        if not self.closed.done():
            self.closed.set_result(None)
