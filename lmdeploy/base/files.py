"""Read untrusted files: JSON objects, regular files, and memory-mapped bytes and their pages."""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError

if TYPE_CHECKING:
    from lmdeploy._turbomind import MappedFile

Bytes = npt.NDArray[np.uint8]

MAX_JSON_BYTES = 100 << 20  # the limit of the safetensors library for a header


def user_cache_folder() -> Path | None:
    """Return the folder of lmdeploy's caches, or None if the user has no home folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser("~/.cache"))
    return base / "lmdeploy" if base.is_absolute() else None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Return a JSON object. Raise ModelFormatError for anything else, NaN and Infinity too."""
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(
            f"{where}: The content is not valid JSON: {str(error)[:120]}"
        ) from error
    if not isinstance(value, dict):
        raise ModelFormatError(
            f"{where}: The content must be a JSON object, but is {type(value).__name__}."
        )
    return value


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in the file `path` of at most `max_bytes`."""
    with open_regular_file(path) as (descriptor, size):
        if size > max_bytes:
            raise ModelFormatError(
                f"{path}: The file has {size} bytes. It must have at most {max_bytes}."
            )
        with os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(size)
    return parse_json_object(data, str(path))


@contextmanager
def open_regular_file(path: Path) -> Iterator[tuple[int, int]]:
    """Open a file for reading and yield (descriptor, size in bytes).

    Raise ModelFormatError for an OSError within the block, and for anything but a regular file.
    Reading a FIFO, for example, could wait forever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ModelFormatError(f"{path}: The file cannot be read: {error.strerror}.") from error
    except ValueError as error:  # the name contains NUL
        raise ModelFormatError(f"{str(path)!r}: The file cannot be read: {error}.") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ModelFormatError(
                f"{path}: The path is {_kind(facts.st_mode)}. It must be a regular file."
            )
        yield descriptor, facts.st_size
    except OSError as error:
        raise ModelFormatError(f"{path}: The file cannot be read: {error.strerror}.") from error
    finally:
        os.close(descriptor)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def map_file(path: Path) -> Bytes:
    """Map the whole file read-only. Raise ModelFormatError if that fails."""
    with open_regular_file(path) as (descriptor, size):
        if size == 0:
            raise ModelFormatError(f"{path}: The file is empty.")
        return np.frombuffer(map_descriptor(descriptor, size, path=path), dtype=np.uint8)


class _ProtectedMap(mmap.mmap):
    """A mapping whose readers get zeros if the file is truncated, instead of SIGBUS."""

    # Python destroys the attribute before it unmaps the memory.
    protection: MappedFile


def map_descriptor(descriptor: int, size: int, *, path: Path) -> mmap.mmap:
    """Map a file of at least `size` bytes. `check_mapped_file` raises if it was truncated."""
    from lmdeploy._turbomind import MappedFile

    mapped = _ProtectedMap(descriptor, size, access=mmap.ACCESS_READ)
    mapped.protection = MappedFile(mapped, str(path))
    return mapped


def release_pages(raw: Bytes) -> None:
    """Return the resident pages of mapped bytes to the system; the next access reads them again.

    Do nothing for an array that is not a view into a mapped file.
    """
    _advise(raw, mmap.MADV_DONTNEED)


def prefetch_pages(raw: Bytes) -> None:
    """Make the system read mapped bytes from the disk, without waiting for it."""
    _advise(raw, mmap.MADV_WILLNEED)


def _advise(raw: Bytes, advice: int) -> None:
    owner: Any = raw
    while isinstance(owner, np.ndarray):
        root, owner = owner, owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or not raw.size:
        return
    offset = raw.ctypes.data - root.ctypes.data
    begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
    owner.madvise(advice, begin, offset + int(raw.size) - begin)
