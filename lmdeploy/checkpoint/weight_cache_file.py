"""Write and read the files of the weight cache. Reading does not trust the file.

All numbers are little-endian.

    0   magic "TMWEIGHT"
    8   32 bytes: the identity of the weights (weight_cache.py)
    40  u64 size of the file
    48  CRC-32 of each matrix and of the zeros after it, then CRC-32 of all bytes before
    ..  zeros up to a multiple of 4096 bytes
    ..  packed matrices in the order of the model, each followed by zeros up to 64 bytes

Names, shapes and positions are not stored: they follow from the model. The identity covers them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from lmdeploy.base.files import Bytes, release_pages
from lmdeploy.base.resources import usable_cores

IDENTITY_BYTES = 32
_MAGIC = b"TMWEIGHT"
_HEADER = struct.Struct(f"<8s{IDENTITY_BYTES}sQ")
_PAGE_BYTES = 4096
_MATRIX_ALIGNMENT = 64
# Aligned writes of this size let the file system use huge pages where it has them.
_HUGE_PAGE_BYTES = 2 << 20
# A process that waits for the disk cannot exit. This bounds the wait.
_SYNC_BYTES = 64 << 20
_MAPPED_AREA = re.compile("([0-9a-f]+)-([0-9a-f]+) ")  # a line of /proc/self/smaps


class WeightCacheError(ValueError):
    """The file is damaged."""


class OtherIdentityError(WeightCacheError):
    """The file is undamaged and holds other weights."""


@dataclass(frozen=True)
class Shape:
    """The shape of one packed matrix."""

    format: str
    rows: int
    cols: int
    num_bytes: int


@dataclass(frozen=True)
class CachedWeights:
    """Read-only views of the matrices in a mapped file."""

    matrices: dict[str, Bytes]
    in_huge_pages: bool  # the engine reads small pages of a file more slowly than its own memory


def file_bytes(shapes: Mapping[str, Shape]) -> int:
    """Return the size of a file with these matrices."""
    return _positions(shapes)[-1]


def write_weights(
    fd: int,
    matrices: Mapping[str, Bytes],
    *,
    shapes: Mapping[str, Shape],
    identity: bytes,
    check_stop: Callable[[], None] = lambda: None,
) -> None:
    """Write a whole file. The header comes last, so that an incomplete file is never valid.

    Args:
        fd: open for writing, empty.
        check_stop: called before each write of 2 MiB. An exception that it raises ends the write.

    Raises:
        OSError: the disk is full, or a limit was reached.
    """
    positions = _positions(shapes)
    checksums: list[int] = []

    def contents() -> Iterator[memoryview]:
        yield memoryview(bytes(positions[0]))
        for name, shape in shapes.items():
            data = matrices[name].data
            padding = memoryview(bytes(-shape.num_bytes % _MATRIX_ALIGNMENT))
            checksums.append(zlib.crc32(padding, zlib.crc32(data)))
            yield from (data, padding)

    offset = 0
    for piece in _in_pieces(contents()):
        check_stop()
        _write_at(fd, piece, offset=offset)
        offset += len(piece)
        if offset % _SYNC_BYTES == 0:
            os.fdatasync(fd)
    header = _HEADER.pack(_MAGIC, identity, positions[-1])
    header += np.array(checksums, "<u4").tobytes()
    _write_at(fd, memoryview(header + struct.pack("<I", zlib.crc32(header))), offset=0)


def read_weights(
    mapped: mmap.mmap, shapes: Mapping[str, Shape], *, identity: bytes
) -> CachedWeights:
    """Return the matrices of a mapped file after checking every byte.

    The pages stay resident if they are huge, and are released otherwise.

    Raises:
        OtherIdentityError: the file holds other weights.
        WeightCacheError: the file is damaged.
    """
    data: Bytes = np.frombuffer(mapped, dtype=np.uint8)
    checksums = _read_header(data, shapes, identity=identity)
    positions = _positions(shapes)
    in_huge_pages = _is_in_huge_pages(mapped, data)

    def has_checksum(index: int) -> bool:
        padded = data[positions[index] : positions[index + 1]]
        equal = zlib.crc32(padded.data) == checksums[index]
        if not in_huge_pages:
            release_pages(padded)
        return equal

    with ThreadPoolExecutor(usable_cores()) as pool:
        for name, equal in zip(shapes, pool.map(has_checksum, range(len(shapes))), strict=True):
            if not equal:
                raise WeightCacheError(f"The checksum of {name} is wrong.")
    matrices = {
        name: data[position : position + shape.num_bytes]
        for (name, shape), position in zip(shapes.items(), positions, strict=False)
    }
    return CachedWeights(matrices, in_huge_pages)


def _read_header(data: Bytes, shapes: Mapping[str, Shape], *, identity: bytes) -> list[int]:
    """Return the checksums of the matrices."""
    end = _header_bytes(len(shapes))
    if data.size < _HEADER.size:
        raise WeightCacheError(
            f"The file has {data.size} bytes, but its header has {_HEADER.size}."
        )
    magic, found, size = _HEADER.unpack(data[: _HEADER.size].tobytes())
    if magic != _MAGIC:
        raise WeightCacheError("The file is not a complete weight cache.")
    if found != identity:
        raise OtherIdentityError("The file holds other weights, or another version wrote it.")
    if size != data.size or size != file_bytes(shapes):
        raise WeightCacheError(
            f"The file has {data.size} bytes. It must have {file_bytes(shapes)}."
        )
    header = data[: end - 4].tobytes()
    if struct.pack("<I", zlib.crc32(header)) != data[end - 4 : end].tobytes():
        raise WeightCacheError("The checksum of the header is wrong.")
    checksums: list[int] = np.frombuffer(header[_HEADER.size :], "<u4").tolist()
    return checksums


def _header_bytes(num_matrices: int) -> int:
    return _HEADER.size + 4 * num_matrices + 4


def _positions(shapes: Mapping[str, Shape]) -> list[int]:
    """Return the offset of each matrix, and then the size of the file."""
    offset = _round_up(_header_bytes(len(shapes)), _PAGE_BYTES)
    positions = [offset]
    for shape in shapes.values():
        offset += _round_up(shape.num_bytes, _MATRIX_ALIGNMENT)
        positions.append(offset)
    return positions


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _in_pieces(contents: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the contents in pieces of one huge page each. Each piece reuses the same memory."""
    buffer, filled = memoryview(bytearray(_HUGE_PAGE_BYTES)), 0
    for data in contents:
        while len(data):
            count = min(len(data), _HUGE_PAGE_BYTES - filled)
            buffer[filled : filled + count] = data[:count]
            data, filled = data[count:], filled + count
            if filled == _HUGE_PAGE_BYTES:
                yield buffer
                filled = 0
    yield buffer[:filled]


def _write_at(fd: int, data: memoryview, *, offset: int) -> None:
    while len(data):
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _is_in_huge_pages(mapped: mmap.mmap, data: Bytes) -> bool:
    """Return whether the kernel maps at least half of the file in huge pages."""
    with contextlib.suppress(OSError):  # only a hint
        mapped.madvise(mmap.MADV_HUGEPAGE)
    data[::_HUGE_PAGE_BYTES].sum()  # the kernel maps a page when it is read
    first, huge_bytes, inside = data.ctypes.data, 0, False
    try:
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if (area := _MAPPED_AREA.match(line)) is not None:
                    begin, end = int(area[1], 16), int(area[2], 16)
                    inside = begin < first + data.size and end > first
                elif inside and line.startswith("FilePmdMapped:"):
                    huge_bytes += int(line.split()[1]) * 1024
    except OSError:
        return False
    return 2 * huge_bytes >= data.size
