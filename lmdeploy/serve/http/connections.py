"""① Closes connections that keep the server waiting for a request.

uvicorn limits the time between requests (`timeout_keep_alive`) and the size of a head, but not the
time until a head is complete.
"""

from __future__ import annotations

import asyncio
import logging
import time

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmdeploy.serve.errors import ApiError, error_body, json_bytes

HEAD_SECONDS = 10
# A client that receives an error may still be sending the body. Without this time for the rest, TCP
# could drop the error before the client reads it.
REST_SECONDS = 5
# Connections without a complete head. Above the limit, the oldest one is closed if it has waited
# for CROWDED_SECONDS, so that many clients can connect at the same moment.
MAX_WAITING = 256
CROWDED_SECONDS = 1.0


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 connection with deadlines for heads and for the rest of refused bodies."""

    _timer: asyncio.TimerHandle | None = None
    _awaited: str | None = None  # "head", "rest" or None
    waits_since: float | None = None  # the time at which it began to wait for a head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await("head")
        self._close_oldest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await("head")
        else:
            self._watch_rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_rest()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP. If the response to the request has begun, only close."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # the handler must not send a response any more
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json_bytes(error_body(ApiError(400, msg)))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_rest(self) -> None:
        """Set a deadline if the response is complete but the body of the request is not."""
        is_done = self.cycle is not None and self.cycle.response_complete
        self._await("rest" if is_done and self.conn.their_state is h11.SEND_BODY else None)

    def _await(self, part: str | None) -> None:
        """Start the deadline for a part of a request. It continues if the part is the same."""
        if part == self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._awaited, self._timer = part, None
        self.waits_since = time.monotonic() if part == "head" else None
        if part is not None:
            seconds = HEAD_SECONDS if part == "head" else REST_SECONDS
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _close_oldest(self) -> None:
        if len(self.connections) <= MAX_WAITING:
            return
        waiting = [
            (other.waits_since, other)
            for other in self.connections
            if isinstance(other, LimitedProtocol) and other.waits_since is not None
        ]
        if len(waiting) > MAX_WAITING:
            since, oldest = min(waiting, key=lambda item: item[0])
            if time.monotonic() - since >= CROWDED_SECONDS:
                oldest.transport.abort()


def without_query(record: logging.LogRecord) -> bool:
    """Remove the query from a line of uvicorn's access log, because it may contain a key."""
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, *rest = record.args
        record.args = (client, method, str(path).partition("?")[0], *rest)
    return True
