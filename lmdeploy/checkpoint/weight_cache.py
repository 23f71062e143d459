"""Store packed weights in files, so that the next start maps them instead of packing again.

A folder holds one file per model (weight_cache_file.py). The identity in its header covers the
version of the conversion, the shapes, the config, the path, size, inode, mtime and ctime of the
weight files, and both ends of every tensor. No error of the cache stops a model from being served.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmdeploy.base.files import Bytes, map_descriptor, user_cache_folder
from lmdeploy.checkpoint.convert import WEIGHT_CACHE_VERSION
from lmdeploy.checkpoint.fingerprint import FileIdentities, hash_checkpoint, identify_files
from lmdeploy.checkpoint.open import Checkpoint
from lmdeploy.checkpoint.weight_cache_file import (
    CachedWeights,
    OtherIdentityError,
    Shape,
    WeightCacheError,
    file_bytes,
    read_weights,
    write_weights,
)
from lmdeploy.version import __version__

logger = logging.getLogger("lmdeploy")

SWITCH = "LMDEPLOY_CACHE"
FOLDER = "LMDEPLOY_CACHE_DIR"
LIMIT = "LMDEPLOY_CACHE_LIMIT"
DEFAULT_LIMIT = 20 * 10**9
_KEEP_FREE = 1 << 30
_SUFFIX = ".packed"
_UNFINISHED = ".unfinished"
# An unfinished file without writes for this long belongs to a process that was killed.
_STALE_SECONDS = 600.0
_START_SECONDS = 1.0  # from the start of the engine to the write
_EXIT_SECONDS = 5.0
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True)
class CacheOptions:
    """The folder of the cache and the limit on the bytes in it."""

    folder: Path
    limit_bytes: int = DEFAULT_LIMIT


def options_from_environment() -> CacheOptions | None:
    """Return the options in the environment. None means that the cache is off.

    Raises:
        ValueError: a variable has an unknown value.
    """
    switch = os.environ.get(SWITCH, "") or "1"
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {switch[:40]!r}. It must be 0 or 1.")
    limit = _parse_size(os.environ.get(LIMIT, ""))
    if switch == "0" or limit == 0:
        return None
    folder = os.environ.get(FOLDER, "")
    if folder:
        return CacheOptions(Path(os.path.expanduser(folder)).absolute(), limit)
    base = user_cache_folder()
    return None if base is None else CacheOptions(base / "packed", limit)


def _parse_size(text: str) -> int:
    if not text:
        return DEFAULT_LIMIT
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT]I?B|)", text.strip().upper())
    if match is None:
        raise ValueError(f"{LIMIT} is {text[:40]!r}. It must be bytes, or a size such as 20GB.")
    return int(float(match[1]) * _UNITS[match[2]])


class WeightCacheEntry:
    """The file of one model in the cache. Its methods log errors and do not raise them.

    Args:
        shapes: the shape of each packed matrix.
        files: the identities of the weight files before they were opened.
    """

    def __init__(
        self,
        options: CacheOptions,
        checkpoint: Checkpoint,
        *,
        shapes: Mapping[str, Shape],
        files: FileIdentities,
    ) -> None:
        from lmdeploy._turbomind import packed_layout_id

        self.shapes = shapes
        self._limit = options.limit_bytes
        self._model = checkpoint.path
        self._files = files
        content = hash_checkpoint(checkpoint, include=lambda planned: not planned.mapped)
        versions = [WEIGHT_CACHE_VERSION, packed_layout_id, __version__]
        layout = [(name, *dataclasses.astuple(shape)) for name, shape in shapes.items()]
        facts = json.dumps([versions, layout, files.files, content])
        self._identity = hashlib.sha256(facts.encode()).digest()
        place = hashlib.sha256(str(checkpoint.path.resolve()).encode(errors="surrogateescape"))
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", checkpoint.path.stem).lstrip(".")[:60]
        self.path = options.folder / f"{readable}-{place.hexdigest()[:16]}{_SUFFIX}"

    def load(self) -> CachedWeights | None:
        """Map and check the file. Return None if the weights must be packed."""
        try:
            _check_folder(self.path.parent)
            weights = read_weights(_map(self.path), self.shapes, identity=self._identity)
            os.utime(self.path)  # the eviction removes the file with the oldest time first
            return weights
        except FileNotFoundError:
            return None
        except OtherIdentityError as error:
            logger.info("The weights are packed again: %s: %s", self.path, error)
        except (WeightCacheError, OSError, ValueError, RuntimeError, MemoryError) as error:
            text = "The weights are packed again because of an error in %s: %s"
            logger.warning(text, self.path, _reason(error))
            with contextlib.suppress(OSError):
                _check_folder(self.path.parent)
                self.path.unlink()
        return None

    def store(
        self, matrices: Mapping[str, Bytes], *, check_stop: Callable[[], None] = lambda: None
    ) -> bool:
        """Write the file and return whether it is there. `check_stop` raises to end the write."""
        if not self._files.is_stable or self._has_changed():
            logger.info("%s has just changed, so its weights are not cached yet.", self._model)
            return False
        folder = self.path.parent
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_folder(folder)
            self._make_room(file_bytes(self.shapes))
            return self._write(matrices, check_stop)
        except (OSError, WeightCacheError) as error:
            logger.warning("The weights are not cached in %s: %s", folder, _reason(error))
            return False

    def _write(self, matrices: Mapping[str, Bytes], check_stop: Callable[[], None]) -> bool:
        unfinished = self.path.with_name(f".{self.path.name}{_UNFINISHED}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(unfinished, flags, 0o600)
        except FileExistsError:
            logger.info("Another process is writing the weight cache of %s.", self._model)
            return False
        try:
            write_weights(
                fd,
                matrices,
                shapes=self.shapes,
                identity=self._identity,
                check_stop=check_stop,
            )
            os.fsync(fd)
            if self._has_changed():
                return False
            os.replace(unfinished, self.path)
            return True
        finally:
            os.close(fd)
            unfinished.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Remove stale files, and then the least recently used ones until the limit holds."""
        if size > self._limit:
            text = f"The file has {size} bytes. It must have at most {self._limit} ({LIMIT})."
            raise WeightCacheError(text)
        folder, files = self.path.parent, []
        for path in folder.iterdir():
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if path.name.endswith(_UNFINISHED) and status.st_mtime < time.time() - _STALE_SECONDS:
                path.unlink()
            elif path.name.endswith(_SUFFIX) and path != self.path:
                files.append((status.st_mtime_ns, status.st_size, path))
        files.sort()
        total = size + sum(each for _, each, _ in files)
        removed = []
        while total > self._limit:
            _, each, path = files.pop(0)
            total -= each
            removed.append((each, path))
        free = shutil.disk_usage(folder).free + sum(each for each, _ in removed)
        if free < size + _KEEP_FREE:
            text = f"The file has {size} bytes. The disk must keep {_KEEP_FREE} free ({FOLDER})."
            raise WeightCacheError(text)
        for _, path in removed:
            path.unlink(missing_ok=True)

    def _has_changed(self) -> bool:
        return identify_files(self._model).files != self._files.files


class WeightCacheWriter:
    """Stores packed weights in a background thread once the engine is ready."""

    def __init__(self, entry: WeightCacheEntry, matrices: Mapping[str, Bytes]) -> None:
        self._entry = entry
        self._matrices: Mapping[str, Bytes] | None = matrices
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tm-cache", daemon=True)
        self.stored = False

    def start(self) -> None:
        """Start the thread. Call it once."""
        atexit.register(self._stop_at_exit)
        self._thread.start()

    def stop(self) -> None:
        """End the write soon, without waiting for it."""
        self._stopped.set()

    def join(self, timeout: float) -> bool:
        """Wait for the thread and return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _stop_at_exit(self) -> None:
        self.stop()
        self.join(_EXIT_SECONDS)

    def _run(self) -> None:
        matrices, self._matrices = self._matrices, None
        assert matrices is not None
        try:
            if not self._stopped.wait(_START_SECONDS):
                self.stored = self._entry.store(matrices, check_stop=self._check_stop)
        except _StoppedError:
            logger.debug("The weights are not cached because the engine was closed.")
        except Exception as error:  # an error of the cache must not reach the engine
            logger.warning("The weights are not cached: %s", _reason(error))
        finally:
            atexit.unregister(self._stop_at_exit)

    def _check_stop(self) -> None:
        if self._stopped.is_set():
            raise _StoppedError


class _StoppedError(Exception):
    pass


def _map(path: Path) -> mmap.mmap:
    # O_NONBLOCK: opening a FIFO must not wait.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not _is_private(status):
            raise WeightCacheError("The path must be a file that only this user can change.")
        if status.st_size == 0:
            raise WeightCacheError("The file is empty.")
        return map_descriptor(fd, status.st_size, path=path)
    finally:
        os.close(fd)


def _is_private(status: os.stat_result) -> bool:
    """Return whether no other user (except root) may change the file."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _check_folder(folder: Path) -> None:
    """Raise an OSError for a folder that another user controls."""
    link = folder.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            errno.EACCES, f"The folder is a link of another user. Change {FOLDER}."
        )
    if not _is_private(folder.stat()):
        raise PermissionError(
            errno.EACCES, f"The folder is not private to this user. Change {FOLDER}."
        )


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0][:200]
