"""① Closes connections that keep the server waiting for a request.

uvicorn limits the time between requests (`timeout_keep_alive`) and the size of a head, but not the
time until a head is complete.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any, Literal

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

# What a client has to send next: the rest of a head, of a body, of a refused body, or a request on
# an idle connection.
Part = Literal["head", "body", "rest", "idle"]


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 connection with deadlines for heads and for the rest of refused bodies."""

    _timer: asyncio.TimerHandle | None = None
    awaited: Part | None = None
    waits_since = 0.0  # the time at which it began to wait for `awaited`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await("head")
        self._close_oldest()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch("head")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch("head" if self.conn.trailing_data[0] else "idle")

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

    def stop_waiting(self) -> None:
        """End the deadline for the part that the client has to send."""
        self._await(None)

    def _watch(self, between: Part) -> None:
        """Set the deadline for what the client has to send. `between`: that between requests."""
        state = self.conn.their_state
        if state is h11.IDLE:
            self._await(between)
        elif state is h11.SEND_BODY:
            is_done = self.cycle is not None and self.cycle.response_complete
            self._await("rest" if is_done else "body")
        else:
            self._await(None)

    def _await(self, part: Part | None) -> None:
        """Start the deadline for a part of a request. It continues if the part is the same."""
        if part == self.awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.awaited, self._timer = part, None
        self.waits_since = time.monotonic()
        if part in ("head", "rest"):  # uvicorn ends idle connections, and BodyReader ends bodies
            seconds = HEAD_SECONDS if part == "head" else REST_SECONDS
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _close_oldest(self) -> None:
        if len(self.connections) <= MAX_WAITING:
            return
        waiting = [
            other for other in waiting_connections(self.connections) if other.awaited == "head"
        ]
        if len(waiting) > MAX_WAITING:
            close_longest_waiting(waiting)


def waiting_connections(connections: Collection[Any]) -> list[LimitedProtocol]:
    """Return the connections that wait for their clients."""
    return [
        other
        for other in connections
        if isinstance(other, LimitedProtocol) and other.awaited is not None
    ]


def close_longest_waiting(connections: Collection[Any]) -> bool:
    """Close the connection that waits longest for its client. Return whether there is one.

    Idle connections come first. Those that wait for less than CROWDED_SECONDS are kept.
    """
    latest = time.monotonic() - CROWDED_SECONDS
    old = [other for other in waiting_connections(connections) if other.waits_since <= latest]
    if not old:
        return False
    oldest = min(old, key=lambda other: (other.awaited != "idle", other.waits_since))
    oldest.stop_waiting()  # so that it is not found again before it is closed
    oldest.transport.abort()
    return True


def without_query(record: logging.LogRecord) -> bool:
    """Remove the query from a line of uvicorn's access log, because it may contain a key."""
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, *rest = record.args
        record.args = (client, method, str(path).partition("?")[0], *rest)
    return True
