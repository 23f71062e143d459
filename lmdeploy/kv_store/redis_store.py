"""A store in a Redis or Valkey server, by the client package `redis`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lmdeploy.base.checks import refuse
from lmdeploy.base.installed import install_command
from lmdeploy.kv_store.store import Entry, StoreError, store_errors

if TYPE_CHECKING:
    from redis import Connection, Redis

_PREFIX = "lmdeploy:kv:"
_SECONDS = 0.5  # for a connection, for sending, and until the next bytes of an answer
_ANSWER_SECONDS = 1.0  # for all bytes of an answer
_ANSWER_BYTES = 256 << 20
_PASSWORD_VARIABLE = "LMDEPLOY_KV_STORE_PASSWORD"


class RedisStore:
    """Keeps values in a server. Its `maxmemory-policy` decides what is evicted."""

    def __init__(self, url: str) -> None:
        """Prepare connections. Raises ValueError for a wrong address or a missing package."""
        try:
            from redis import Connection, Redis, SSLConnection
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise ValueError(
                f"--kv-store redis:// needs a package that is not installed. Run: "
                f"{install_command('redis')}"
            ) from None
        parts = urlsplit(url)
        scheme = parts.scheme.replace("valkey", "redis")
        password = parts.password or os.environ.get(_PASSWORD_VARIABLE)
        try:
            self._redis: Redis = Redis.from_url(
                parts._replace(scheme=scheme).geturl(),
                socket_timeout=_SECONDS,
                socket_connect_timeout=_SECONDS,
                connection_class=_bounded(SSLConnection if scheme == "rediss" else Connection),
                retry=Retry(NoBackoff(), 1),  # the server may have closed an idle connection
                **({} if password is None else {"password": password}),
            )
        except ValueError:
            shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
            wanted = "an address such as redis://host:6379/0"
            raise refuse("kv_store", shown, wanted=wanted, flag="--kv-store") from None

    @property
    def folder(self) -> Path | None:
        """Return None: the store is in the network."""
        return None

    def get(self, name: str, *, max_bytes: int) -> bytes | None:
        """Return a value of at most `max_bytes`, or None if there is none."""
        with store_errors():
            value = self._redis.getrange(_PREFIX + name, 0, max_bytes)  # the end is inclusive
            if not isinstance(value, bytes):
                raise StoreError(f"The answer to GETRANGE is of type {type(value).__name__}")
            if len(value) > max_bytes:
                raise StoreError(f"The value of {name} has more than {max_bytes} bytes")
            return value or None

    def put(self, name: str, value: bytes) -> None:
        """Store a value."""
        with store_errors():
            self._redis.set(_PREFIX + name, value)

    def remove(self, name: str) -> bool:
        """Remove a value. Return whether there was one."""
        with store_errors():
            return bool(self._redis.delete(_PREFIX + name))

    def entries(self) -> Iterator[Entry]:
        """Yield all values."""
        with store_errors():
            for key in self._redis.scan_iter(match=_PREFIX + "*", count=1000):
                size = self._redis.strlen(key)
                yield Entry(key.decode("ascii", "replace").removeprefix(_PREFIX), int(size))

    def close(self) -> None:
        """Close the connections."""
        with store_errors():
            self._redis.close()


class _BoundedSocket:
    """A socket whose peer may send a limited number of bytes, in a limited time, per command.

    The client package waits for as many bytes as an answer announces, and each byte may take as
    long as the timeout of the socket.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._expect_answer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, data: bytes) -> None:
        """Send a part of a command. The limits of its answer begin again."""
        self._sock.sendall(data)
        self._expect_answer()

    def recv(self, size: int) -> bytes:
        """Receive bytes. Raise OSError when a limit of the answer is exceeded."""
        data: bytes = self._sock.recv(size)
        self._received(len(data))
        return data

    def recv_into(self, buffer: Any, *args: int) -> int:
        """Receive bytes into a buffer, as `recv`."""
        count: int = self._sock.recv_into(buffer, *args)
        self._received(count)
        return count

    def _expect_answer(self) -> None:
        self._end = time.monotonic() + _ANSWER_SECONDS
        self._bytes_left = _ANSWER_BYTES

    def _received(self, count: int) -> None:
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise OSError(f"The answer has more than {_ANSWER_BYTES} bytes")
        if time.monotonic() > self._end:
            raise OSError(f"The answer takes more than {_ANSWER_SECONDS:.0f} s")


def _bounded(kind: type[Connection]) -> type[Connection]:
    """Return a kind of connection that uses a _BoundedSocket."""

    untyped: Any = kind

    def connect(self: Any) -> _BoundedSocket:
        return _BoundedSocket(untyped._connect(self))

    return type(f"Bounded{kind.__name__}", (kind,), {"_connect": connect})
