"""① Accepts connections while the process has file descriptors left.

asyncio accepts until accept() fails, and it logs every failure with a traceback. This server keeps
a reserve of descriptors. Within the reserve, a connection is served if another one can be closed
that waits for its client. Otherwise it is answered with 503, and further ones wait in the backlog
of the socket.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

import uvicorn

from lmdeploy.serve.errors import ApiError, error_response
from lmdeploy.serve.http.connections import HEAD_SECONDS, close_longest_waiting

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger("lmdeploy")

BACKLOG = 2048  # connections that wait in the system; Linux may lower it (net.core.somaxconn)
MAX_DESCRIPTORS = 1 << 16  # also with a higher limit of the system
# Descriptors that connections leave to files, other sockets and refusals.
RESERVED_DESCRIPTORS = 64
MAX_REFUSALS = 32  # at the same time
REFUSAL_SECONDS = 5.0  # for the head of a refused request, and for reading the refusal
_BATCH = 16  # connections that are accepted before others are served
_CLOSING_TURNS = 3  # of the event loop, in which it closes the descriptor of a connection
_RETRY_SECONDS = 0.1  # after accept() has failed
_LOG_SECONDS = 1.0
_READ_BYTES = 1 << 16


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files (`ulimit -n`) to the hard one, if the system allows it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # macOS does not accept its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def first_reserved_descriptor() -> int:
    """Return the lowest number of a descriptor that belongs to the reserve."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)
    return max(limit - RESERVED_DESCRIPTORS, limit // 2)


async def _next_connection(sock: socket.socket) -> socket.socket:
    return (await asyncio.get_running_loop().sock_accept(sock))[0]


class LimitedServer(uvicorn.Server):
    """uvicorn's server with acceptors instead of asyncio's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and accept connections. REQUIRES: the sockets listen."""
        await super().startup([])  # uvicorn accepts nothing without sockets

        def new_protocol() -> asyncio.Protocol:
            protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )
            return protocol

        def make_room() -> bool:
            return close_longest_waiting(self.server_state.connections)

        for sock in sockets or []:
            acceptor = Acceptor(new_protocol, make_room=make_room, ssl=self.config.ssl)
            acceptor.start(sock)
            self._acceptors.append(acceptor)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to accept connections, then stop as uvicorn does."""
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)


class Acceptor:
    """Accepts the connections of a socket in a task of the event loop."""

    def __init__(
        self,
        new_protocol: Callable[[], asyncio.Protocol],
        *,
        make_room: Callable[[], bool],
        ssl: ssl.SSLContext | None = None,
    ) -> None:
        """Set what serves the connections.

        Args:
            new_protocol: returns the protocol of a connection.
            make_room: closes a connection that another one may replace, and returns whether there
                was one.
            ssl: the TLS context. None serves plain HTTP.
        """
        self._new_protocol = new_protocol
        self._make_room = make_room
        self._ssl = ssl
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals = asyncio.Semaphore(MAX_REFUSALS)
        self._num_refused = 0  # since the last message
        self._logged_at = -_LOG_SECONDS

    def start(self, sock: socket.socket) -> None:
        """Begin to accept. REQUIRES: the socket listens."""
        sock.setblocking(False)
        self._add_task(self._accept_all(sock))

    def close(self) -> None:
        """Stop to accept, and close the connections that are not established."""
        for task in self._tasks:
            task.cancel()

    def _add_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_all(self, sock: socket.socket) -> None:
        num_accepted = 0
        while True:
            try:
                await self._accept(sock)
            except OSError as error:  # the client is gone, or the system has no descriptors left
                self._make_room()
                self._log_refusal(f"accept() failed: {error.strerror}.")
                await asyncio.sleep(_RETRY_SECONDS)
            num_accepted += 1
            if num_accepted % _BATCH == 0:  # sock_accept() alone does not yield to other tasks
                await asyncio.sleep(0)

    async def _accept(self, sock: socket.socket) -> None:
        """Accept one connection, and serve or refuse it."""
        connection = await _next_connection(sock)
        first_reserved = first_reserved_descriptor()
        # A descriptor gets the lowest free number, so the number shows how many are in use.
        connection = await _renumbered(connection, below=first_reserved)
        if connection.fileno() >= first_reserved and self._make_room():
            connection = await _renumbered(connection, below=first_reserved)
        if connection.fileno() < first_reserved:
            self._add_task(self._serve(connection))
        else:
            self._log_refusal(f"{first_reserved} file descriptors are in use (ulimit -n).")
            await self._refusals.acquire()
            self._add_task(self._refuse(connection))

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await self._connect(self._new_protocol, connection)
        except (OSError, asyncio.TimeoutError) as error:  # such as a failed TLS handshake
            logger.debug("A connection has failed: %s", error)

    async def _connect(
        self, new_protocol: Callable[[], asyncio.Protocol], connection: socket.socket
    ) -> asyncio.Transport:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            new_protocol,
            connection,
            ssl=self._ssl,
            ssl_handshake_timeout=None if self._ssl is None else HEAD_SECONDS,
        )
        return transport

    async def _refuse(self, connection: socket.socket) -> None:
        """Answer a request with 503 and close its connection."""
        try:
            await asyncio.wait_for(self._send_refusal(connection), REFUSAL_SECONDS)
        except (OSError, asyncio.TimeoutError):
            pass  # the client is too slow or gone
        finally:
            self._refusals.release()

    async def _send_refusal(self, connection: socket.socket) -> None:
        reader = asyncio.StreamReader()
        transport = await self._connect(lambda: asyncio.StreamReaderProtocol(reader), connection)
        try:
            head = await reader.read(_READ_BYTES)
            transport.write(refusal_bytes(head))
            if transport.can_write_eof():
                transport.write_eof()
            # TCP could drop the response if the connection were closed while the client sends.
            while await reader.read(_READ_BYTES):
                pass
        finally:
            transport.abort()

    def _log_refusal(self, reason: str) -> None:
        """Log that a connection is refused, at most once in `_LOG_SECONDS`."""
        self._num_refused += 1
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            logger.error("%s Refused connections: %d.", reason, self._num_refused)
            self._num_refused, self._logged_at = 0, now


async def _renumbered(connection: socket.socket, *, below: int) -> socket.socket:
    """Wait until the event loop has closed what it is closing, if that gives a descriptor `below`.

    Return the connection, with another descriptor if its own is not below the limit.
    """
    for _ in range(_CLOSING_TURNS):
        if connection.fileno() < below:
            break
        await asyncio.sleep(0)
        with connection:
            connection = connection.dup()
    return connection


def refusal_bytes(head: bytes) -> bytes:
    """Return the HTTP response of a refused request that begins with `head`."""
    target = head.split(b" ", 2)[1:2]
    path = target[0].partition(b"?")[0].decode("latin-1") if target else ""
    message = "The server has no file descriptors left for connections. Try again later."
    response = error_response(ApiError(503, message, retry_after=1), path)
    lines = [b"HTTP/1.1 503 " + HTTPStatus(503).phrase.encode(), b"connection: close"]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])
