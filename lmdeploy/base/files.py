"""Read files of any origin: JSON objects, regular files, memory-mapped bytes and their pages."""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError

Bytes = npt.NDArray[np.uint8]

MAX_JSON_BYTES = 100 << 20  # the limit of the safetensors library for a header


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object; ModelFormatError for anything else (NaN and Infinity included)."""
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{where}: not valid JSON: {str(error)[:120]}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{where}: wanted a JSON object, got {type(value).__name__}")
    return value


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in `path`, of at most `max_bytes`."""
    with open_regular_file(path) as (descriptor, size):
        if size > max_bytes:
            raise ModelFormatError(f"{path}: got {size} bytes, wanted at most {max_bytes}")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(size)
    return parse_json_object(data, str(path))


@contextmanager
def open_regular_file(path: Path) -> Iterator[tuple[int, int]]:
    """(descriptor, bytes) of a file to read; ModelFormatError for what is none, such as a FIFO,
    which would be waited for, and for an OSError of the block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in its name
        raise ModelFormatError(f"{str(path)!r}: cannot be read: {error}") from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ModelFormatError(f"{path}: got {_kind(facts.st_mode)}, wanted a regular file")
        yield descriptor, facts.st_size
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def map_file(path: Path) -> Bytes:
    """The whole file, mapped read-only; ModelFormatError when it cannot be."""
    with open_regular_file(path) as (descriptor, size):
        if size == 0:
            raise ModelFormatError(f"{path}: the file is empty")
        mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, dtype=np.uint8)


def release_pages(raw: Bytes) -> None:
    """Gives the resident pages of mapped bytes back to the system; touched again, they are read
    again. Does nothing for an array that is not a view into a mapped file.
    """
    _advise(raw, mmap.MADV_DONTNEED)


def prefetch_pages(raw: Bytes) -> None:
    """Has the system read mapped bytes from the disk, without waiting for it."""
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
