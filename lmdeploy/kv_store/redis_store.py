"""A store in a Redis or Valkey server, by the client package `redis`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from lmdeploy.base.checks import refuse
from lmdeploy.base.installed import install_command
from lmdeploy.kv_store.store import Entry, StoreError

if TYPE_CHECKING:
    from redis import Redis

_PREFIX = "lmdeploy:kv:"
_SECONDS = 0.5  # for a connection or an answer
_PASSWORD_VARIABLE = "LMDEPLOY_KV_STORE_PASSWORD"


class RedisStore:
    """Keeps values in a server. Its `maxmemory-policy` decides what is evicted."""

    def __init__(self, url: str) -> None:
        """Prepare connections. Raises ValueError for a wrong address or a missing package."""
        try:
            from redis import Redis
            from redis.exceptions import RedisError
        except ImportError:
            raise ValueError(
                f"--kv-store redis:// needs a package that is not installed. Run: "
                f"{install_command('redis')}"
            ) from None
        self._error = RedisError
        parts = urlsplit(url)
        scheme = parts.scheme.replace("valkey", "redis")
        password = parts.password or os.environ.get(_PASSWORD_VARIABLE)
        try:
            self._redis: Redis = Redis.from_url(
                parts._replace(scheme=scheme).geturl(),
                socket_timeout=_SECONDS,
                socket_connect_timeout=_SECONDS,
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

    def get(self, name: str) -> bytes | None:
        """Return a value, or None if there is none."""
        try:
            return cast("bytes | None", self._redis.get(_PREFIX + name))
        except (self._error, OSError) as error:
            raise StoreError(str(error)) from None

    def put(self, name: str, value: bytes) -> None:
        """Store a value."""
        try:
            self._redis.set(_PREFIX + name, value)
        except (self._error, OSError) as error:
            raise StoreError(str(error)) from None

    def remove(self, name: str) -> bool:
        """Remove a value. Return whether there was one."""
        try:
            return bool(self._redis.delete(_PREFIX + name))
        except (self._error, OSError) as error:
            raise StoreError(str(error)) from None

    def entries(self) -> Iterator[Entry]:
        """Yield all values."""
        try:
            for key in self._redis.scan_iter(match=_PREFIX + "*", count=1000):
                size = self._redis.strlen(key)
                yield Entry(key.decode("ascii", "replace").removeprefix(_PREFIX), size)
        except (self._error, OSError) as error:
            raise StoreError(str(error)) from None

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
