"""Open a store from its address."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from lmdeploy.base.checks import refuse
from lmdeploy.kv_store.file_store import FileStore
from lmdeploy.kv_store.redis_store import RedisStore
from lmdeploy.kv_store.store import BlockStore

SCHEMES = ("file", "redis", "rediss", "valkey", "valkeys")
DEFAULT_MAX_BYTES = 10 << 30
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def open_store(url: str) -> BlockStore:
    """Open a store: file:///folder?size=10GiB, redis://… or valkey://….

    Raises ValueError if the address is wrong or its client package is missing.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        wanted = "an address such as file:///var/cache/lmdeploy or redis://host:6379/0"
        raise refuse("kv_store", url, wanted=wanted, flag="--kv-store")
    if parts.scheme != "file":
        return RedisStore(url)
    folder = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not folder.is_absolute() or folder == Path("/"):
        wanted = "file:// followed by an absolute path"
        raise refuse("kv_store", url, wanted=wanted, flag="--kv-store")
    return FileStore(folder, max_bytes=_size_of(url, parts.query))


def _size_of(url: str, query: str) -> int:
    size = DEFAULT_MAX_BYTES
    for name, value in parse_qsl(query, keep_blank_values=True):
        digits = value.rstrip("KMGTiB")
        unit = _UNITS.get(value[len(digits) :])
        if name != "size" or unit is None or not digits.isdecimal() or int(digits) == 0:
            wanted = "an address without options or with ?size=, such as ?size=10GiB"
            raise refuse("kv_store", url, wanted=wanted, flag="--kv-store")
        size = int(digits) * unit
    return size
