"""A store in a folder. Several processes may use it at the same time."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmdeploy.kv_store.store import Entry, StoreError

_NAME = re.compile(r"[0-9a-f]{64}")
_MAX_VALUE_BYTES = 1 << 30
_KEEP = 0.9  # of the limit, after old values were removed
_SCANS_PER_LIMIT = 16  # a process looks at all files after it has written this part of the limit
_TOUCH_SECONDS = 60.0  # a value that was used more recently keeps its time of use


class FileStore:
    """Keeps each value in a file of its own, named by the block.

    Files appear whole, by renaming. If they exceed `max_bytes`, the ones unused for longest are
    removed. Each process may exceed the limit by a sixteenth until it looks at the folder again.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Open the store and create its folder. Raises ValueError if that fails."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._unseen_bytes = 0  # written since the last look at the folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._trim()
        except OSError as error:
            raise ValueError(
                f"The KV store {folder} cannot be used: {error.strerror}. Choose another folder "
                "(--kv-store)."
            ) from None

    @property
    def folder(self) -> Path | None:
        """Return the folder."""
        return self._folder

    def get(self, name: str) -> bytes | None:
        """Return a value, or None if there is none."""
        try:
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(str(error)) from None
        with os.fdopen(descriptor, "rb") as source:
            status = os.fstat(descriptor)
            if status.st_size > _MAX_VALUE_BYTES:
                return None
            if time.time() - status.st_mtime > _TOUCH_SECONDS:
                with suppress(OSError):
                    os.utime(descriptor)
            try:
                return source.read(_MAX_VALUE_BYTES)
            except OSError as error:
                raise StoreError(str(error)) from None

    def put(self, name: str, value: bytes) -> None:
        """Store a value, and remove old ones if the limit is exceeded."""
        path = self._path(name)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as out:
                    out.write(value)
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            with self._lock:
                self._unseen_bytes += len(value)
                if self._unseen_bytes > self._max_bytes / _SCANS_PER_LIMIT:
                    self._trim()
        except OSError as error:
            raise StoreError(str(error)) from None

    def remove(self, name: str) -> bool:
        """Remove a value. Return whether there was one."""
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(str(error)) from None
        return True

    def entries(self) -> Iterator[Entry]:
        """Yield all values."""
        now = time.time()
        for file in self._folder.glob("[0-9a-f][0-9a-f]/*"):
            if _NAME.fullmatch(file.name):
                with suppress(OSError):  # another process removed it
                    status = file.lstat()
                    yield Entry(file.name, status.st_size, max(now - status.st_mtime, 0.0))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"The name of a block is {name[:80]!r}. It must be 64 hex digits.")
        return self._folder / name[:2] / name

    def _trim(self) -> None:
        """Remove the values unused for longest until the rest is within the limit."""
        self._unseen_bytes = 0
        with self._only_process():
            entries = sorted(self.entries(), key=lambda entry: entry.age or 0.0)
            total = 0
            limit = self._max_bytes
            if sum(entry.num_bytes for entry in entries) > limit:
                limit = int(limit * _KEEP)
            for entry in entries:
                total += entry.num_bytes
                if total > limit:
                    self.remove(entry.name)
            self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove temporary files of processes that ended while they wrote."""
        for file in self._folder.glob("[0-9a-f][0-9a-f]/.*.tmp"):
            with suppress(OSError):
                if time.time() - file.lstat().st_mtime > 10 * _TOUCH_SECONDS:
                    file.unlink()

    @contextmanager
    def _only_process(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._folder / ".lock", flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
