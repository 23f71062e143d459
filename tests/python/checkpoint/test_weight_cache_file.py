"""Tests of weight cache files: a reader accepts only what the writer wrote."""

from __future__ import annotations

import mmap
import os
import resource
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmdeploy.checkpoint.weight_cache_file import (
    CachedWeights,
    OtherIdentityError,
    Shape,
    WeightCacheError,
    file_bytes,
    read_weights,
    write_weights,
)

IDENTITY = bytes(range(32))
SIZES = {"embedding": 5000, "layers.0.q": 64, "layers.0.k": 1, "head": 2_100_000}
SHAPES = {name: Shape("q4_0", size, 32, size) for name, size in SIZES.items()}
RNG = np.random.default_rng(3)
MATRICES = {name: RNG.integers(0, 256, size, dtype=np.uint8) for name, size in SIZES.items()}
HEADER_BYTES = 48 + 4 * len(SIZES) + 4


def write(path: Path, **options: Any) -> bytes:
    with path.open("wb") as file:
        write_weights(file.fileno(), MATRICES, shapes=SHAPES, identity=IDENTITY, **options)
    return path.read_bytes()


def read(data: bytes, *, shapes: dict[str, Shape] = SHAPES) -> CachedWeights:
    """Read `data` from an anonymous mapping."""
    mapped = mmap.mmap(-1, max(len(data), 1))
    mapped.write(data)
    return read_weights(mapped, shapes, identity=IDENTITY)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("cache") / "file")


def test_read_weights_returns_what_was_written(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(good)
    with (tmp_path / "file").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    found = read_weights(mapped, SHAPES, identity=IDENTITY).matrices
    assert list(found) == list(MATRICES)
    for name, data in found.items():
        np.testing.assert_array_equal(data, MATRICES[name])
        assert (data.ctypes.data - found["embedding"].ctypes.data) % 64 == 0
        assert not data.flags.writeable
    assert len(good) == file_bytes(SHAPES)


def test_read_weights_flipped_bit_is_rejected(good: bytes) -> None:
    places = [*range(HEADER_BYTES), 4096, len(good) - 1, len(good) - 64]
    places += RNG.integers(4096, len(good), 20).tolist()
    for place in places:
        data = bytearray(good)
        data[place] ^= 1 << int(RNG.integers(8))
        with pytest.raises(WeightCacheError):
            read(bytes(data))


def test_read_weights_truncated_file_is_rejected(good: bytes) -> None:
    for length in (0, 1, 8, 47, 48, 49, HEADER_BYTES, 4095, 4096, 4097, len(good) - 1):
        with pytest.raises(WeightCacheError):
            read(good[:length])
    with pytest.raises(WeightCacheError):
        read(good + b"\0")


@pytest.mark.parametrize("length", [4096, 100_000, 2 << 20, (2 << 20) + 5000])
def test_read_weights_unfinished_file_is_rejected(good: bytes, length: int) -> None:
    # After a crash before fsync, any part of the file may be zero.
    for data in (good[:length].ljust(len(good), b"\0"), bytes(length) + good[length:]):
        with pytest.raises(WeightCacheError):
            read(data)


def test_read_weights_other_identity_is_rejected(good: bytes) -> None:
    data = good[:8] + bytes(32) + good[40:]
    with pytest.raises(OtherIdentityError):
        read(data)


@pytest.mark.parametrize("size", [0, 1, 47, 4096, 1 << 40, (1 << 64) - 1])
def test_read_weights_forged_size_is_rejected(good: bytes, size: int) -> None:
    header = good[:40] + struct.pack("<Q", size) + good[48 : HEADER_BYTES - 4]
    forged = header + struct.pack("<I", zlib.crc32(header)) + good[HEADER_BYTES:]
    for data in (forged, forged[: min(size, len(good))]):
        with pytest.raises(WeightCacheError):
            read(data)


@pytest.mark.parametrize("change", ["more", "fewer", "larger", "smaller"])
def test_read_weights_other_shapes_are_rejected(good: bytes, change: str) -> None:
    # The identity covers the shapes. A forged identity must not cause reads beyond the file.
    shapes = dict(SHAPES)
    if change == "more":
        shapes["extra"] = Shape("q4_0", 64, 32, 64)
    elif change == "fewer":
        del shapes["layers.0.k"]
    else:
        shapes["head"] = Shape("q4_0", 1, 1, 10**9 if change == "larger" else 1)
    with pytest.raises(WeightCacheError):
        read(good, shapes=shapes)


def test_write_weights_interrupted_leaves_no_header(tmp_path: Path) -> None:
    calls: list[int] = []

    def check_stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write(tmp_path / "file", check_stop=check_stop)
    data = (tmp_path / "file").read_bytes()
    assert len(data) == 2 << 20
    with pytest.raises(WeightCacheError, match="not a complete"):
        read(data)


def test_write_weights_file_size_limit_raises_os_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError):
            write(tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.path.getsize(tmp_path / "file") <= 1 << 20
