"""① Closes connections that keep the server waiting, and writes the parts of streamed bodies.

uvicorn limits the time between requests (`timeout_keep_alive`) and the size of a head, but not the
time until a head is complete, nor the time until a response is read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Literal

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmdeploy.serve.errors import ApiError, error_body, json_bytes

logger = logging.getLogger("lmdeploy")

HEAD_SECONDS = 10
# A client that receives an error may still be sending the body. Without this time for the rest, TCP
# could drop the error before the client reads it.
REST_SECONDS = 5
# A connection is closed if its client has read nothing for this time although more waits for it.
UNREAD_SECONDS = 60
# The system takes bytes of a response while it has fewer than this number that are not sent. It
# would take several MB for a client that does not read.
_UNSENT_BYTES = 1 << 16
# Connections without a complete head. Above the limit, the oldest one is closed if it has waited
# for CROWDED_SECONDS, so that many clients can connect at the same moment.
MAX_WAITING = 256
CROWDED_SECONDS = 1.0

# What a client has to send next: the rest of a head, of a body, of a refused body, or a request on
# an idle connection.
Part = Literal["head", "body", "rest", "idle"]


class PartWriter:
    """Writes the parts of a streamed body directly to a connection.

    A part would otherwise pass every middleware and the state machine of h11. REQUIRES: the head of
    a response without Content-Length was sent, and the end of the body is sent as usual.
    """

    def __init__(
        self, transport: asyncio.Transport, *, flow: FlowControl, conn: h11.Connection
    ) -> None:
        self._transport, self._flow, self._conn = transport, flow, conn

    async def write(self, part: bytes) -> None:
        """Write a part, which is not empty. Wait as long as the client is too slow."""
        if self._flow.write_paused:
            await self._flow.drain()
        if self._transport.is_closing():
            return
        if (self._conn.their_http_version or b"") >= b"1.1":
            part = b"%x\r\n%b\r\n" % (len(part), part)  # RFC 9112, section 7.1
        self._transport.write(part)


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 connection with deadlines.

    They are for heads, for the rest of refused bodies, and for reading responses. The state of a
    request has the PartWriter of its connection as `parts`.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    awaited: Part | None = None
    waits_since = 0.0  # the time at which it began to wait for `awaited`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        parts = PartWriter(transport, flow=self.flow, conn=self.conn)
        self.app_state = {**self.app_state, "parts": parts}
        _limit_unsent(transport)
        self._await("head")
        self._close_oldest()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_waiting()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()

    def _watch_reading(self, num_bytes: int) -> None:
        """Close the connection unless fewer than `num_bytes` wait when the time is over."""

        def check() -> None:
            waiting = self.transport.get_write_buffer_size()
            if waiting < num_bytes:
                self._watch_reading(waiting)
                return
            logger.warning(
                "A client has read nothing for %d s. Its connection is closed, and its requests "
                "are cancelled.",
                UNREAD_SECONDS,
            )
            self.transport.abort()

        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, check)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

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


def _limit_unsent(transport: asyncio.Transport) -> None:
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    sock = transport.get_extra_info("socket")
    if option is not None and sock is not None and sock.family != socket.AF_UNIX:
        with suppress(OSError):  # a system without the option
            sock.setsockopt(socket.IPPROTO_TCP, option, _UNSENT_BYTES)


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
