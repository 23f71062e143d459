"""A file of packed weights: how it is written, and how it is read without trusting it.

All numbers are little endian.

    0   magic "TMPACKED"
    8   u32 version of this format, u32 layout of the tiles (packed_layout.h)
    16  u64 bytes of the table, u64 bytes of the file
    32  32 bytes: the key, which says what was packed
    64  16 bytes: BLAKE2b of the 64 bytes above and of the table
    80  the table: JSON, spaces up to a multiple of 4096 bytes of the file
    ..  tiles, matrix after matrix, each followed by zeros up to a multiple of 64 bytes

An entry of the table is [name, format, rows, cols, offset, bytes, CRC-32 in hexadecimal digits].
The CRC covers the zeros too: every byte of the file is under a checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmdeploy.base.files import Bytes, release_pages
from lmdeploy.base.resources import usable_cores

VERSION = 1
KEY_BYTES = 32
_MAGIC = b"TMPACKED"
_HEADER = struct.Struct(f"<8sIIQQ{KEY_BYTES}s")
_DIGEST_BYTES = 16
_TABLE_OFFSET = _HEADER.size + _DIGEST_BYTES
_PAGE_BYTES = 4096
_TILE_BYTES = 64
_MAX_TABLE_BYTES = 64 << 20
# A process cannot end while a thread waits for the disk: never for more than this.
_SYNC_BYTES = 64 << 20
# Written and aligned so, a file lies in huge pages where the file system has such.
_HUGE_PAGE_BYTES = 2 << 20
_ENTRY_FIELDS = 7
_LONGEST_OFFSET = (1 << 63) - 1
_AREA = re.compile("([0-9a-f]+)-([0-9a-f]+) ")  # of /proc/self/smaps
_CRC = re.compile("[0-9a-f]{8}")


class PackedFileError(ValueError):
    """The file is not what this process would have written."""


class OtherKeyError(PackedFileError):
    """The file is sound and was packed from something else."""


@dataclass(frozen=True)
class Shape:
    """What one packed matrix must be."""

    format: str
    rows: int
    cols: int
    num_bytes: int


@dataclass(frozen=True)
class Tiles:
    """One packed matrix: its shape and a read-only view of its bytes."""

    shape: Shape
    data: Bytes


@dataclass(frozen=True)
class PackedFile:
    """The matrices of a mapped file."""

    matrices: dict[str, Tiles]
    in_huge_pages: bool  # else they are read slower than from memory of one's own


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: Shape
    offset: int
    crc: str = "0" * 8

    @property
    def padded_bytes(self) -> int:
        return _up(self.shape.num_bytes, _TILE_BYTES)

    def fields(self) -> list[Any]:
        shape = self.shape
        return [
            self.name,
            shape.format,
            shape.rows,
            shape.cols,
            self.offset,
            shape.num_bytes,
            self.crc,
        ]


def file_bytes(shapes: Mapping[str, Shape]) -> int:
    """The size of the file that `write_packed` makes of these matrices."""
    return _place(shapes)[1]


def write_packed(
    fd: int,
    matrices: Mapping[str, Tiles],
    *,
    key: bytes,
    layout: int,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Writes a whole file; its header comes last, so that no part of a file passes for one.

    Args:
        fd: open for writing, empty.
        key: KEY_BYTES bytes.
        pause: called between pieces of 2 MiB; what it raises ends the write.

    Raises OSError: no room, or a limit on file sizes.
    """
    entries, size = _place({name: tiles.shape for name, tiles in matrices.items()})
    pieces = _Pieces(fd, pause)
    pieces.add(memoryview(bytes(entries[0].offset if entries else size)))
    written = []
    for entry in entries:
        data = matrices[entry.name].data.data
        padding = memoryview(bytes(entry.padded_bytes - entry.shape.num_bytes))
        pieces.add(data)
        pieces.add(padding)
        crc = zlib.crc32(padding, zlib.crc32(data))
        written.append(_Entry(entry.name, entry.shape, entry.offset, f"{crc:08x}"))
    pieces.flush()
    text = json.dumps([entry.fields() for entry in written]).encode()
    table = text.ljust((entries[0].offset if entries else size) - _TABLE_OFFSET)
    header = _HEADER.pack(_MAGIC, VERSION, layout, len(table), size, key)
    _write_at(fd, memoryview(header + _digest(header, table) + table), offset=0)


def read_packed(
    mapped: mmap.mmap, wanted: Mapping[str, Shape], *, key: bytes, layout: int
) -> PackedFile:
    """A mapped file, every byte of which has been checked.

    Its pages are resident afterwards if they are huge, and given back otherwise.

    Args:
        wanted: what the file must hold: these names and shapes, no others.

    Raises:
        OtherKeyError: the file is sound but has another key.
        PackedFileError: anything else that differs from what `write_packed` makes.
    """
    data: Bytes = np.frombuffer(mapped, dtype=np.uint8)
    entries = _read_entries(data, wanted, key=key, layout=layout)
    in_huge_pages = _is_in_huge_pages(mapped, data)

    def is_sound(entry: _Entry) -> bool:
        tiles = data[entry.offset : entry.offset + entry.padded_bytes]
        sound = f"{zlib.crc32(tiles.data):08x}" == entry.crc
        if not in_huge_pages:
            release_pages(tiles)
        return sound

    with ThreadPoolExecutor(usable_cores()) as pool:
        for entry, sound in zip(entries, pool.map(is_sound, entries), strict=True):
            if not sound:
                raise PackedFileError(f"the tiles of {entry.name} do not have their checksum")
    matrices = {
        entry.name: Tiles(entry.shape, data[entry.offset : entry.offset + entry.shape.num_bytes])
        for entry in entries
    }
    return PackedFile(matrices, in_huge_pages)


def check_packed(
    mapped: mmap.mmap, wanted: Mapping[str, Shape], *, key: bytes, layout: int
) -> None:
    """Raises what `read_packed` would, but for tiles that are damaged: those are not read."""
    _read_entries(np.frombuffer(mapped, dtype=np.uint8), wanted, key=key, layout=layout)


def _read_entries(
    data: Bytes, wanted: Mapping[str, Shape], *, key: bytes, layout: int
) -> list[_Entry]:
    entries, table_end = _read_table(data, key=key, layout=layout)
    _check_entries(entries, wanted, table_end=table_end, size=int(data.size))
    return entries


def _read_table(data: Bytes, *, key: bytes, layout: int) -> tuple[list[_Entry], int]:
    """The entries, and where the table ends."""
    head = data[:_TABLE_OFFSET].tobytes()
    if len(head) < _TABLE_OFFSET:
        raise PackedFileError(f"{len(head)} bytes; a header has {_TABLE_OFFSET}")
    magic, version, file_layout, table_bytes, size, file_key = _HEADER.unpack_from(head)
    for what, got, want in (
        ("magic", magic, _MAGIC),
        ("version", version, VERSION),
        ("layout", file_layout, layout),
        ("size", size, int(data.size)),
    ):
        if got != want:
            raise PackedFileError(f"{what} is {got!r}; wanted {want!r}")
    if table_bytes > min(_MAX_TABLE_BYTES, size - _TABLE_OFFSET):
        raise PackedFileError(f"a table of {table_bytes} bytes in a file of {size}")
    table = data[_TABLE_OFFSET : _TABLE_OFFSET + table_bytes].tobytes()
    if _digest(head[: _HEADER.size], table) != head[_HEADER.size :]:
        raise PackedFileError("the header does not have its checksum")
    if file_key != key:
        raise OtherKeyError("packed from other files, or by another build")
    return _parse_table(table), _TABLE_OFFSET + table_bytes


def _parse_table(table: bytes) -> list[_Entry]:
    # Its checksum is no signature: whoever wrote the table may have meant harm.
    try:
        rows = json.loads(table)
    except (ValueError, RecursionError) as error:
        raise PackedFileError(f"the table is not JSON: {str(error)[:80]}") from error
    if not isinstance(rows, list):
        raise PackedFileError("the table is not a list")
    entries = []
    for row in rows:
        if not isinstance(row, list) or len(row) != _ENTRY_FIELDS:
            raise PackedFileError(f"bad entry {str(row)[:80]}")
        name, kind, *numbers, crc = row
        texts = [value for value in (name, kind, crc) if type(value) is str]
        if len(texts) != 3 or not all(type(number) is int for number in numbers):
            raise PackedFileError(f"bad entry {str(row)[:80]}")
        if not _CRC.fullmatch(crc):
            raise PackedFileError(f"bad checksum of {name[:80]}")
        num_rows, cols, offset, num_bytes = numbers
        entries.append(_Entry(name, Shape(kind, num_rows, cols, num_bytes), offset, crc))
    return entries


def _check_entries(
    entries: list[_Entry], wanted: Mapping[str, Shape], *, table_end: int, size: int
) -> None:
    shapes = {entry.name: entry.shape for entry in entries}
    if len(shapes) != len(entries) or shapes != dict(wanted):
        raise PackedFileError("its matrices are not those of the model")
    placed, expected_size = _place(shapes)
    offsets = [entry.offset for entry in placed]
    if [entry.offset for entry in entries] != offsets or offsets[:1] != [table_end]:
        raise PackedFileError("its matrices are not where they should be")
    if expected_size != size:
        raise PackedFileError(f"{size} bytes; its matrices fill {expected_size}")


def _is_in_huge_pages(mapped: mmap.mmap, data: Bytes) -> bool:
    """Whether the system maps most of the file so; which file systems can differs by kernel."""
    with contextlib.suppress(OSError):  # a hint
        mapped.madvise(mmap.MADV_HUGEPAGE)
    data[::_HUGE_PAGE_BYTES].sum()  # a page is mapped when it is touched
    first = data.ctypes.data
    huge, inside = 0, False
    try:
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if (area := _AREA.match(line)) is not None:
                    begin, end = int(area[1], 16), int(area[2], 16)
                    inside = begin < first + data.size and end > first
                elif inside and line.startswith("FilePmdMapped:"):
                    huge += int(line.split()[1]) * 1024
    except OSError:
        return False
    return 2 * huge >= data.size


def _place(shapes: Mapping[str, Shape]) -> tuple[list[_Entry], int]:
    """Where each matrix lies, and the size of the file."""
    # The table's length must not depend on the offsets: they are counted as the longest ones.
    unplaced = [_Entry(name, shape, _LONGEST_OFFSET) for name, shape in shapes.items()]
    text = json.dumps([entry.fields() for entry in unplaced])
    offset = _up(_TABLE_OFFSET + len(text), _PAGE_BYTES)
    entries = []
    for entry in unplaced:
        entries.append(_Entry(entry.name, entry.shape, offset))
        offset += entry.padded_bytes
    return entries, offset


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _digest(header: bytes, table: bytes) -> bytes:
    return hashlib.blake2b(header + table, digest_size=_DIGEST_BYTES).digest()


class _Pieces:
    """A file from its beginning, written in pieces of a huge page whatever is added."""

    def __init__(self, fd: int, pause: Callable[[], None]) -> None:
        self._fd = fd
        self._pause = pause
        self._buffer = memoryview(bytearray(_HUGE_PAGE_BYTES))
        self._filled = 0
        self._written = 0

    def add(self, data: memoryview) -> None:
        while len(data):
            count = min(len(data), _HUGE_PAGE_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == _HUGE_PAGE_BYTES:
                self.flush()

    def flush(self) -> None:
        self._pause()
        _write_at(self._fd, self._buffer[: self._filled], offset=self._written)
        self._written += self._filled
        self._filled = 0
        if self._written % _SYNC_BYTES == 0:
            os.fdatasync(self._fd)


def _write_at(fd: int, data: memoryview, *, offset: int) -> None:
    while len(data):
        count = os.pwrite(fd, data, offset)
        data = data[count:]
        offset += count
