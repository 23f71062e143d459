"""Parse the metadata and tensors of GGUF files. No number in a file is trusted.

The format is versions 2 and 3, little-endian, of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import Bytes, map_file
from lmdeploy.checkpoint.files.tensor_file import (
    SUPPORTED_FORMATS,
    StoredTensor,
    check_shape,
    row_bytes,
)

_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_DIMS = 4
# Limit for all arrays together: ten times the elements of a vocabulary of 200,000. A value becomes
# a Python object with eight times its bytes in the file.
_MAX_ELEMENTS = 1 << 23
_MAX_ALIGNMENT = 1 << 20
_STRING, _ARRAY = 8, 9
# Value types that NumPy reads directly.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


# GGML's numbers of the supported formats.
FORMATS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"}
FORMATS |= {10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}
FORMATS |= {20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4", 40: "NVFP4"}
_U64 = struct.Struct("<Q")


def format_name(kind: int) -> str:
    """Return GGML's name of a tensor format, whether or not it is supported."""
    if kind in FORMATS:
        return FORMATS[kind]
    from gguf.constants import GGMLQuantizationType  # slow to import

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"number {kind}"


@dataclass(frozen=True)
class _TensorRecord:
    shape: tuple[int, ...]  # rows first, which reverses GGUF's order
    format: str
    offset: int  # from the start of the file


class _Cursor:
    """Reads the header and checks every read against the end of the file."""

    def __init__(self, data: Bytes, path: Path) -> None:
        self._view: memoryview = data.data
        self._path = path
        self._elements_left = _MAX_ELEMENTS
        self.position = 0

    def take(self, size: int, what: str) -> memoryview:
        end = self.position + size
        if end > len(self._view):
            raise ModelFormatError(
                f"{self._path}: The GGUF file is truncated or corrupt. {what} needs {end} bytes, "
                f"but the file has {len(self._view)}."
            )
        piece = self._view[self.position : end]
        self.position = end
        return piece

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def string(self, what: str) -> str:
        size = self.u64(what)
        return str(self.take(size, what), "utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self._array(key)
        scalar = self._scalar(kind, key)
        return np.frombuffer(self.take(scalar.itemsize, key), scalar)[0].item()

    def _array(self, key: str) -> list[Any]:
        kind, count = self.u32(key), self.u64(key)
        if kind == _STRING:
            # A string has at least the 8 bytes of its length.
            if count * 8 > len(self._view) - self.position:
                self.take(count * 8, key)
            self._count(count, key)
            return self._strings(count, key)
        scalar = self._scalar(kind, key)
        data = self.take(count * scalar.itemsize, key)
        self._count(count, key)
        values: list[Any] = np.frombuffer(data, scalar).tolist()
        return values

    def _count(self, count: int, key: str) -> None:
        self._elements_left -= count
        if self._elements_left < 0:
            raise ModelFormatError(
                f"{self._path}: {key[:80]} is an array of {count} values. All arrays together must "
                f"have at most {_MAX_ELEMENTS}."
            )

    def _strings(self, count: int, key: str) -> list[str]:
        """Read `count` strings, like `string` but fast enough for a vocabulary."""
        view, position, end = self._view, self.position, len(self._view)
        read_size = _U64.unpack_from
        strings = []
        for _ in range(count):
            after = position + 8
            if after > end:
                break
            start, position = after, after + read_size(view, position)[0]
            if position > end:
                position = start - 8
                break
            strings.append(str(view[start:position], "utf-8", "replace"))
        self.position = position
        if len(strings) < count:
            self.string(key)  # raises the error for a truncated file
        return strings

    def _scalar(self, kind: int, key: str) -> np.dtype[Any]:
        scalar: np.dtype[Any] | None = _SCALARS.get(kind)
        if scalar is None:
            raise ModelFormatError(
                f"{self._path}: The GGUF file is corrupt. {key} has unknown type {kind}."
            )
        return scalar


class GgufFile:
    """Metadata and tensors of one GGUF file. Immutable; any thread may use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        cursor = _Cursor(self._data, path)
        self._read_magic(cursor)
        num_tensors, num_keys = cursor.u64("the header"), cursor.u64("the header")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise ModelFormatError(
                f"{path}: The GGUF file has {num_tensors} tensors and {num_keys} keys. It must "
                f"have at most {_MAX_TENSORS} and {_MAX_KEYS}."
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                raise ModelFormatError(
                    f"{path}: The GGUF file is corrupt. Key {key[:80]!r} appears twice."
                )
            self.metadata[key] = cursor.value(cursor.u32(key), key)
        self._records = self._read_records(cursor, num_tensors)

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors in the order of the file."""
        return list(self._records)

    def tensor(
        self, name: str, *, max_dims: int = 2, formats: tuple[str, ...] = SUPPORTED_FORMATS
    ) -> StoredTensor:
        """Return a mapped tensor. Raise ModelFormatError for another format or more dimensions."""
        record = self._records[name]
        where = f"{self.path}: tensor {name}"
        if record.format not in formats:
            raise ModelFormatError(
                f"{where} has format {record.format}. It must be one of {', '.join(formats)}."
            )
        if len(record.shape) > max_dims:
            raise ModelFormatError(
                f"{where} has {len(record.shape)} dimensions. It must have at most {max_dims}."
            )
        try:
            size = row_bytes(record.format, record.shape[-1])
        except ValueError as error:
            raise ModelFormatError(f"{where}: {error}") from error
        size *= math.prod(record.shape[:-1])
        end = record.offset + size
        if end > self._data.size:
            raise ModelFormatError(
                f"{where} needs bytes {record.offset} to {end}, but the file has "
                f"{self._data.size}. It is truncated or corrupt."
            )
        return StoredTensor(name, record.format, record.shape, self._data[record.offset : end])

    def _read_magic(self, cursor: _Cursor) -> None:
        magic = bytes(cursor.take(4, "the magic"))
        if magic != b"GGUF":
            raise ModelFormatError(
                f"{self.path}: This is not a GGUF file. It starts with {magic!r}."
            )
        version = cursor.u32("the version")
        if version not in (2, 3):
            raise ModelFormatError(
                f"{self.path}: The GGUF version is {version}. It must be 2 or 3, little-endian."
            )

    def _read_records(self, cursor: _Cursor, num_tensors: int) -> dict[str, _TensorRecord]:
        raw: list[tuple[str, tuple[int, ...], str, int]] = []
        for _ in range(num_tensors):
            name = cursor.string("a tensor name")
            where = f"{self.path}: tensor {name[:80]}"
            num_dims = cursor.u32(name)
            if not 1 <= num_dims <= _MAX_DIMS:
                raise ModelFormatError(
                    f"{where} has {num_dims} dimensions. It must have 1 to {_MAX_DIMS}."
                )
            dims = [cursor.u64(name) for _ in range(num_dims)]
            shape = check_shape(where, dims[::-1], file_bytes=int(self._data.size))
            kind, offset = cursor.u32(name), cursor.u64(name)
            raw.append((name, shape, format_name(kind), offset))
        alignment = self.metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or not 8 <= alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise ModelFormatError(
                f"{self.path}: general.alignment is {alignment!r}. It must be a power of two."
            )
        start = -(-cursor.position // alignment) * alignment
        records: dict[str, _TensorRecord] = {}
        for name, shape, tensor_format, offset in raw:
            if name in records:
                raise ModelFormatError(
                    f"{self.path}: The GGUF file is corrupt. Tensor {name} appears twice."
                )
            if offset % alignment:
                raise ModelFormatError(
                    f"{self.path}: The GGUF file is corrupt. The offset {offset} of tensor {name} "
                    f"is not aligned to {alignment}."
                )
            if start + offset > self._data.size:
                raise ModelFormatError(
                    f"{self.path}: tensor {name} begins at byte {start + offset}, but the file "
                    f"has {self._data.size} bytes. It is truncated or corrupt."
                )
            records[name] = _TensorRecord(shape, tensor_format, start + offset)
        return records
