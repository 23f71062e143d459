"""A store in a folder. Several processes may use it at the same time."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmdeploy.kv_store.store import Entry, StoreError, store_errors

logger = logging.getLogger("lmdeploy")

_NAME = re.compile(r"[0-9a-f]{64}")
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
        except (OSError, StoreError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(
                f"The KV store {folder} cannot be used: {reason}. Choose another folder "
                "(--kv-store)."
            ) from None

    @property
    def folder(self) -> Path | None:
        """Return the folder."""
        return self._folder

    def get(self, name: str, *, max_bytes: int) -> bytes | None:
        """Return a value of at most `max_bytes`, or None if there is none."""
        path = self._path(name)
        with store_errors():
            try:
                with _opened(path.parent) as folder:
                    descriptor = _open_regular(name, os.O_RDONLY, folder=folder)
            except FileNotFoundError:
                return None
            with os.fdopen(descriptor, "rb") as source:
                status = os.fstat(descriptor)
                if status.st_size > max_bytes:
                    raise StoreError(f"{name} has {status.st_size} bytes, more than {max_bytes}")
                if time.time() - status.st_mtime > _TOUCH_SECONDS:
                    with suppress(OSError):
                        os.utime(descriptor)
                return source.read(status.st_size)

    def put(self, name: str, value: bytes) -> None:
        """Store a value, and remove old ones if the limit is exceeded."""
        path = self._path(name)
        with store_errors():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with _opened(path.parent) as folder:
                _write(name, value, folder=folder)
            with self._lock:
                self._unseen_bytes += len(value)
                if self._unseen_bytes > self._max_bytes / _SCANS_PER_LIMIT:
                    self._trim()

    def remove(self, name: str) -> bool:
        """Remove a value. Return whether there was one."""
        path = self._path(name)
        with store_errors():
            try:
                with _opened(path.parent) as folder:
                    os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                return False
        return True

    def entries(self) -> Iterator[Entry]:
        """Yield all values."""
        now = time.time()
        with store_errors():
            for _, name, status in self._files():
                if _NAME.fullmatch(name):
                    yield Entry(name, status.st_size, max(now - status.st_mtime, 0.0))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"The name of a block is {name[:80]!r}. It must be 64 hex digits.")
        return self._folder / name[:2] / name

    def _files(self) -> Iterator[tuple[int, str, os.stat_result]]:
        """Yield the descriptor of the folder, the name and the status of every regular file."""
        for index in range(256):
            with suppress(OSError), _opened(self._folder / f"{index:02x}") as folder:
                for name in os.listdir(folder):
                    with suppress(FileNotFoundError):  # another process removed it
                        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield folder, name, status

    def _trim(self) -> None:
        """Remove the values unused for longest until the rest is within the limit.

        Do nothing while another process does that.
        """
        descriptor = _open_regular(self._folder / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._unseen_bytes = 0
            self._remove_oldest()
            self._remove_leftovers()
        except BlockingIOError:
            logger.debug("Another process removes old blocks from the KV store.")
        finally:
            os.close(descriptor)

    def _remove_oldest(self) -> None:
        entries = sorted(self.entries(), key=lambda entry: entry.age or 0.0)
        total = 0
        limit = self._max_bytes
        if sum(entry.num_bytes for entry in entries) > limit:
            limit = int(limit * _KEEP)
        for entry in entries:
            if total + entry.num_bytes <= limit:
                total += entry.num_bytes
            else:
                with suppress(StoreError):  # the others can still be removed
                    self.remove(entry.name)

    def _remove_leftovers(self) -> None:
        """Remove temporary files of processes that ended while they wrote."""
        for folder, name, status in self._files():
            is_old = time.time() - status.st_mtime > 10 * _TOUCH_SECONDS
            if is_old and name.startswith(".") and name.endswith(".tmp"):
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder, which may be no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(name: str, value: bytes, *, folder: int) -> None:
    """Write a file of a folder under another name, and rename it."""
    temporary = f".{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as out:
            out.write(value)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _open_regular(path: str | Path, flags: int, *, folder: int | None = None) -> int:
    """Open a regular file of a folder. Raise StoreError for a link, a FIFO, a device and others.

    The file is looked at before it is opened, because opening a device can have effects, and
    afterwards, because it may have been replaced.
    """
    with suppress(FileNotFoundError):
        _check_regular(path, os.stat(path, dir_fd=folder, follow_symlinks=False))
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        _check_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path} is no regular file")
