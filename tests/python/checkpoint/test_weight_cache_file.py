"""Files of packed weights: nothing but what was written is ever read."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmdeploy.checkpoint import weight_cache_file
from lmdeploy.checkpoint.weight_cache_file import (
    OtherKeyError,
    PackedFile,
    PackedFileError,
    Shape,
    Tiles,
    read_packed,
    write_packed,
)

KEY = bytes(range(32))
LAYOUT = 7
HEADER = struct.Struct("<8sIIQQ32s")


def random_matrices() -> dict[str, Tiles]:
    rng = np.random.default_rng(3)
    sizes = {"embedding": 5000, "layers.0.q": 64, "layers.0.k": 1, "head": 2_100_000}
    return {
        name: Tiles(Shape("q4_0", size, 32, size), rng.integers(0, 256, size, dtype=np.uint8))
        for name, size in sizes.items()
    }


MATRICES = random_matrices()
SHAPES = {name: tiles.shape for name, tiles in MATRICES.items()}


def write(path: Path, **options: Any) -> bytes:
    with path.open("wb") as file:
        write_packed(file.fileno(), MATRICES, key=KEY, layout=LAYOUT, **options)
    return path.read_bytes()


def read(data: bytes, *, key: bytes = KEY, layout: int = LAYOUT) -> PackedFile:
    """`data` as if it were a file: an anonymous mapping holds it."""
    mapped = mmap.mmap(-1, max(len(data), 1))
    mapped.write(data)
    return read_packed(mapped, SHAPES, key=key, layout=layout)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("packed") / "file")


def test_what_was_written_is_read(good: bytes) -> None:
    found = read(good).matrices
    assert list(found) == list(MATRICES)
    for name, tiles in found.items():
        assert tiles.shape == SHAPES[name]
        np.testing.assert_array_equal(tiles.data, MATRICES[name].data)
        # Views start where the kernels want them, and nobody can change them.
        assert (tiles.data.ctypes.data - found["embedding"].data.ctypes.data) % 64 == 0
    assert len(good) == weight_cache_file.file_bytes(SHAPES)


def test_a_mapped_file_is_read_only(tmp_path: Path) -> None:
    write(tmp_path / "file")
    with (tmp_path / "file").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    found = read_packed(mapped, SHAPES, key=KEY, layout=LAYOUT)
    for name, tiles in found.matrices.items():
        np.testing.assert_array_equal(tiles.data, MATRICES[name].data)
        assert not tiles.data.flags.writeable


def test_every_flipped_bit_is_found(good: bytes) -> None:
    rng = np.random.default_rng(11)
    table_end = good.index(b"]]") + 40
    borders = [4095, 4096, len(good) - 1, len(good) - 64]
    places = [*range(80), *rng.integers(80, table_end, 30), *borders]
    places += rng.integers(4096, len(good), 20).tolist()
    for place in places:
        data = bytearray(good)
        data[place] ^= 1 << int(rng.integers(8))
        with pytest.raises(PackedFileError):
            read(bytes(data))


def test_every_cut_is_found(good: bytes) -> None:
    lengths = [0, 1, 8, 79, 80, 81, 200, 4095, 4096, 4097, len(good) // 2, len(good) - 1]
    for length in lengths:
        with pytest.raises(PackedFileError):
            read(good[:length])
    with pytest.raises(PackedFileError):
        read(good + b"\0")


@pytest.mark.parametrize("length", [4096, 100_000, 2 << 20, (2 << 20) + 5000])
def test_an_unfinished_file_is_found(good: bytes, length: int) -> None:
    # A crash without fsync may leave any part of a file zero.
    for data in (good[:length].ljust(len(good), b"\0"), bytes(length) + good[length:]):
        with pytest.raises(PackedFileError):
            read(data)


def test_key_version_and_layout(good: bytes) -> None:
    with pytest.raises(OtherKeyError):
        read(good, key=bytes(32))
    with pytest.raises(PackedFileError, match="layout is 7; wanted 8"):
        read(good, layout=8)
    other_version = good[:8] + struct.pack("<I", weight_cache_file.VERSION + 1) + good[12:]
    with pytest.raises(PackedFileError, match="version is 2; wanted 1"):
        read(other_version)


def forge(good: bytes, table: bytes) -> bytes:
    """The file with another table under a right checksum."""
    magic, version, layout, table_bytes, size, key = HEADER.unpack_from(good)
    table = table.ljust(table_bytes)
    header = HEADER.pack(magic, version, layout, len(table), size, key)
    digest = hashlib.blake2b(header + table, digest_size=16).digest()
    return (header + digest + table + good[80 + len(table) :])[: len(good)]


def entries_of(good: bytes) -> list[list[Any]]:
    table_bytes = HEADER.unpack_from(good)[3]
    rows: list[list[Any]] = json.loads(good[80 : 80 + table_bytes])
    return rows


def test_forging_is_possible(good: bytes) -> None:
    """Else the next tests would only see the checksum of the table."""
    assert len(read(forge(good, json.dumps(entries_of(good)).encode())).matrices) == 4


@pytest.mark.parametrize("field", range(7))
@pytest.mark.parametrize(
    "value", [-1, 0, 2**31, 2**63, 2**64 - 1, 10**400, 1.5, None, True, "x", "ffffffff", [], {}]
)
def test_hostile_entries(good: bytes, field: int, value: Any) -> None:
    rows = entries_of(good)
    rows[1][field] = value
    with pytest.raises(PackedFileError):
        read(forge(good, json.dumps(rows).encode()))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [],
        lambda rows: {},
        lambda rows: rows[:-1],
        lambda rows: [*rows, rows[0]],
        lambda rows: [rows[1], rows[0], *rows[2:]],
        lambda rows: [rows[0][:-1], *rows[1:]],
        lambda rows: [[*rows[0], 1], *rows[1:]],
        lambda rows: [rows[0], [rows[1][0], *rows[0][1:]], *rows[2:]],
        lambda rows: [[*rows[0][:4], rows[0][4] + 64, *rows[0][5:]], *rows[1:]],
    ],
)
def test_hostile_tables(good: bytes, change: Callable[[list[Any]], Any]) -> None:
    with pytest.raises(PackedFileError):
        read(forge(good, json.dumps(change(entries_of(good))).encode()))


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"NaN", b"[" * 3900, b"[1e999]", b'["a"]'])
def test_tables_that_are_none(good: bytes, text: bytes) -> None:
    with pytest.raises(PackedFileError):
        read(forge(good, text))


@pytest.mark.parametrize("size", [0, 1, 4015, 4017, 1 << 40, (1 << 64) - 1])
def test_hostile_size_of_the_table(good: bytes, size: int) -> None:
    header = HEADER.unpack_from(good)
    packed = HEADER.pack(*header[:3], size, *header[4:])
    table = good[80 : 80 + min(size, len(good))]
    digest = hashlib.blake2b(packed + table, digest_size=16).digest()
    with pytest.raises(PackedFileError):
        read(packed + digest + good[80:])


def test_an_interrupted_write_has_no_header(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    calls = []

    def pause() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        write(tmp_path / "file", pause=pause)
    data = (tmp_path / "file").read_bytes()
    assert len(data) == 2 << 20
    with pytest.raises(PackedFileError, match="magic"):
        read(data)


def test_a_limit_on_file_sizes_is_an_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError):
            write(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.path.getsize(tmp_path / "file") <= 1 << 20
