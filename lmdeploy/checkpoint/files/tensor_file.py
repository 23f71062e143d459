"""Tensors as they lie in a memory-mapped file, before any conversion."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError

Bytes = npt.NDArray[np.uint8]

# Bytes of one element, for the formats that are not made of blocks.
PLAIN_FORMATS = {"F32": 4, "F16": 2, "BF16": 2}
# (values, bytes) of one block, as GGUF lays it out.
BLOCK_FORMATS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}
SUPPORTED_FORMATS = (*PLAIN_FORMATS, *BLOCK_FORMATS)
# MXFP4 as Hugging Face stores it: codes, and E8M0 scales in a tensor of their own.
SPLIT_MXFP4 = "MXFP4_SPLIT"
# 4-bit codes, and scales and zeros of groups of inputs, in three tensors (awq.py).
AWQ = "AWQ"


def row_bytes(tensor_format: str, cols: int) -> int:
    """Bytes of one row of `cols` values; ValueError when they do not fill whole blocks."""
    if tensor_format in PLAIN_FORMATS:
        return cols * PLAIN_FORMATS[tensor_format]
    values, size = BLOCK_FORMATS[tensor_format]
    if cols % values:
        raise ValueError(f"{cols} columns are not a multiple of the {values} values of a block")
    return cols // values * size


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file: its place was checked against the file's size."""

    name: str
    format: str  # one of SUPPORTED_FORMATS, SPLIT_MXFP4, AWQ, or U8 or I32 for a part of those
    shape: tuple[int, ...]  # rows first
    raw: Bytes  # the bytes of the tensor, a view into the mapped file
    scales: Bytes | None = None  # of SPLIT_MXFP4 and AWQ, views too
    zeros: Bytes | None = None  # of AWQ

    @property
    def rows(self) -> int:
        """Outputs of a matrix; 1 for a vector."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        """Inputs of a matrix, or the length of a vector."""
        return self.shape[-1]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return sum(int(part.size) for part in self.parts)

    @property
    def parts(self) -> list[Bytes]:
        """All of its bytes in the file."""
        return [part for part in (self.raw, self.scales, self.zeros) if part is not None]

    def item(self, index: int) -> StoredTensor:
        """Entry `index` of the first dimension, of a tensor with at least two."""
        size = self.raw.size // self.shape[0]
        raw = self.raw[index * size : (index + 1) * size]
        return replace(self, name=f"{self.name}[{index}]", shape=self.shape[1:], raw=raw)

    def half(self, index: int) -> StoredTensor:
        """The first (0) or second (1) half of the rows."""
        size = self.raw.size // 2
        raw = self.raw[index * size : (index + 1) * size]
        return replace(self, shape=(self.shape[0] // 2, *self.shape[1:]), raw=raw)


class TensorFile(Protocol):
    """Named tensors of a checkpoint, whatever its container."""

    @property
    def names(self) -> list[str]:
        """Every tensor of the checkpoint."""

    def tensor(
        self, name: str, *, max_dims: int = 2, formats: tuple[str, ...] = SUPPORTED_FORMATS
    ) -> StoredTensor:
        """The tensor of that name; ModelFormatError when its format or rank is another."""


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


def check_shape(where: str, dims: list[Any], *, file_bytes: int) -> tuple[int, ...]:
    """`dims` as a shape whose element count the file could hold at all."""
    count = 1
    for dim in dims:
        if isinstance(dim, bool) or not isinstance(dim, int) or dim <= 0:
            raise ModelFormatError(f"{where}: shape: got {str(dims)[:80]}, wanted sizes above 0")
        count *= dim
        # The densest format, Q2_K, has 256 values in 84 bytes.
        if count > 4 * file_bytes:
            raise ModelFormatError(
                f"{where}: shape {str(dims)[:80]} is beyond the file of {file_bytes} bytes"
            )
    return tuple(dims)
