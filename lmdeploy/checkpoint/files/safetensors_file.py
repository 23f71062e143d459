"""Read safetensors checkpoints: one file, or shards listed in an index.

The format is eight bytes of length, JSON and data. The safetensors library is not used because its
NumPy interface has no BF16 and copies the data.
"""

import math
from pathlib import Path
from typing import Any

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import (
    MAX_JSON_BYTES,
    Bytes,
    map_file,
    parse_json_object,
    read_json_object,
)
from lmdeploy.checkpoint.files.tensor_file import (
    PLAIN_FORMATS,
    SUPPORTED_FORMATS,
    StoredTensor,
    check_shape,
)

_DTYPE_BYTES = {**PLAIN_FORMATS, "U8": 1, "I8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8}


class _Shard:
    """One safetensors file, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: Bytes = map_file(path)
        size = int(self._data.size)
        header_bytes = int.from_bytes(self._data[:8].tobytes(), "little") if size >= 8 else size
        if header_bytes > min(size - 8, MAX_JSON_BYTES):
            raise ModelFormatError(
                f"{path}: The safetensors file is truncated or corrupt. Its header has "
                f"{header_bytes} bytes, but the file has {size}."
            )
        self._start = 8 + header_bytes
        header = parse_json_object(self._data[8 : self._start].tobytes(), str(path))
        header.pop("__metadata__", None)
        self.records: dict[str, Any] = header
        for name in header:
            self._span(name)

    def tensor(self, name: str, *, max_dims: int, formats: tuple[str, ...]) -> StoredTensor:
        """Return a tensor after checking that its bytes match its shape.

        A number without dimensions becomes a vector of one value.
        """
        where = f"{self.path}: tensor {name}"
        record = self.records[name]
        kind = record.get("dtype")
        wanted_kinds = [kind for kind in _DTYPE_BYTES if kind in formats]
        if kind not in wanted_kinds:
            raise ModelFormatError(
                f"{where} has dtype {str(kind)[:40]}. It must be one of {', '.join(wanted_kinds)}."
            )
        dims = record.get("shape")
        if not isinstance(dims, list) or len(dims) > max_dims:
            raise ModelFormatError(
                f"{where} has shape {str(dims)[:80]}. It must have at most {max_dims} sizes."
            )
        shape = check_shape(where, dims or [1], file_bytes=int(self._data.size))
        begin, end = self._span(name)
        wanted = _DTYPE_BYTES[kind] * math.prod(shape)
        if end - begin != wanted:
            raise ModelFormatError(
                f"{where} has {end - begin} bytes. Shape {list(shape)} of {kind} needs {wanted}."
            )
        return StoredTensor(name, kind, shape, self._data[begin:end])

    def _span(self, name: str) -> tuple[int, int]:
        record = self.records[name]
        offsets = record.get("data_offsets") if isinstance(record, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or not all(type(offset) is int for offset in offsets)
        ):
            raise ModelFormatError(f"{self.path}: tensor {name[:80]} has no valid data_offsets.")
        begin, end = self._start + offsets[0], self._start + offsets[1]
        if not self._start <= begin <= end <= self._data.size:
            raise ModelFormatError(
                f"{self.path}: tensor {name[:80]} needs bytes {begin} to {end}, but the file has "
                f"{self._data.size}. It is truncated or corrupt."
            )
        return begin, end


class SafetensorsFile:
    """The tensors of a Hugging Face folder. Immutable; any thread may use it."""

    def __init__(self, folder: Path) -> None:
        self._shard_of: dict[str, _Shard] = {}
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.is_file():
            self._open_shards(folder, index)
        elif single.is_file():
            shard = _Shard(single)
            self._shard_of = dict.fromkeys(shard.records, shard)
        else:
            raise ModelFormatError(
                f"{folder}: The folder has neither model.safetensors nor "
                "model.safetensors.index.json. Other weight files (.bin, .pt) are not supported."
            )

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors of the checkpoint."""
        return list(self._shard_of)

    def tensor(
        self, name: str, *, max_dims: int = 2, formats: tuple[str, ...] = SUPPORTED_FORMATS
    ) -> StoredTensor:
        """Return a mapped tensor. Raise ModelFormatError for another format or more dimensions."""
        return self._shard_of[name].tensor(name, max_dims=max_dims, formats=formats)

    def _open_shards(self, folder: Path, index: Path) -> None:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFormatError(f"{index}: weight_map is missing.")
        shards: dict[str, _Shard] = {}
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise ModelFormatError(
                    f"{index}: The file of {name[:80]} is {str(file_name)[:80]!r}. It must be the "
                    "name of a file in the same folder."
                )
            if file_name not in shards:
                shards[file_name] = _Shard(folder / file_name)
            if name not in shards[file_name].records:
                raise ModelFormatError(f"{index}: {file_name} has no tensor {name[:80]}.")
            self._shard_of[name] = shards[file_name]
