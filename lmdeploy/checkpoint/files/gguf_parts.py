"""Open the parts of a GGUF file as one file, with the names and keys of llama.cpp's gguf-split.

Part 2 of 3 of model.gguf is model-00002-of-00003.gguf. The first part has the metadata. Every part
has `split.no`, which starts at 0, `split.count` and `split.tensors.count`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.gguf_file import GgufFile
from lmdeploy.checkpoint.files.tensor_file import SUPPORTED_FORMATS, StoredTensor
from lmdeploy.models.config_reader import ConfigReader

_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?i:\.gguf)")
_SHOWN_NAMES = 5
_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"


def part_names(name: str) -> tuple[str, ...]:
    """Return the names of all parts of the file to which `name` belongs, in order.

    A name that is not that of a part is the only one.
    """
    match = _PART.fullmatch(name)
    count = int(match["count"]) if match else 1
    if match is None or not 1 <= int(match["number"]) <= count:
        return (name,)
    suffix = name[match.end("count") :]
    return tuple(f"{match['stem']}-{i:05}-of-{count:05}{suffix}" for i in range(1, count + 1))


def part_paths(path: Path) -> tuple[Path, ...]:
    """Return the paths of all parts of the file. Raise ModelFormatError if one does not exist."""
    names = part_names(path.name)
    if len(names) == 1:
        return (path,)
    present = {file.name for file in path.parent.iterdir()}
    if missing := [name for name in names if name not in present]:
        shown = ", ".join(missing[:_SHOWN_NAMES]) + (", ..." if missing[_SHOWN_NAMES:] else "")
        raise ModelFormatError(
            f"{path.parent}: {len(missing)} of {len(names)} parts of the GGUF file are missing: "
            f"{shown}. Put all parts into one folder."
        )
    return tuple(path.with_name(name) for name in names)


class GgufParts:
    """The tensors of several parts, and the metadata of the first. Any thread may use it."""

    def __init__(self, files: Sequence[GgufFile]) -> None:
        self.path = files[0].path
        self.metadata: dict[str, Any] = files[0].metadata
        self._file_of: dict[str, GgufFile] = {}
        for number, file in enumerate(files):
            self._check_part(file, number=number, count=len(files))
            if twice := self._file_of.keys() & set(file.names):
                name = min(twice)
                raise ModelFormatError(
                    f"{file.path}: tensor {name} is also in {self._file_of[name].path.name}. The "
                    "parts must belong to one model."
                )
            self._file_of |= dict.fromkeys(file.names, file)
        total = _reader(files[0]).integer(_TENSORS, default=len(self._file_of), low=0)
        if total != len(self._file_of):
            raise ModelFormatError(
                f"{self.path}: The {len(files)} parts have {len(self._file_of)} tensors. By "
                f"{_TENSORS} they must have {total}."
            )

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors in the order of the parts."""
        return list(self._file_of)

    def tensor(
        self, name: str, *, max_dims: int = 2, formats: tuple[str, ...] = SUPPORTED_FORMATS
    ) -> StoredTensor:
        """Return a mapped tensor. Raise ModelFormatError for another format or more dimensions."""
        return self._file_of[name].tensor(name, max_dims=max_dims, formats=formats)

    def _check_part(self, file: GgufFile, *, number: int, count: int) -> None:
        """Raise ModelFormatError if the part's keys differ from its name or from the first part."""
        reader = _reader(file)
        wanted = {_COUNT: count, _NUMBER: number}
        if _TENSORS in self.metadata:
            wanted[_TENSORS] = ConfigReader(self.metadata, str(self.path)).integer(_TENSORS, low=0)
        for key, value in wanted.items():
            found = reader.integer(key, low=0)
            if found != value:
                reason = "the first part" if key == _TENSORS else "the name of the file"
                raise reader.refuse(f"{key} is {found}. By {reason} it must be {value}.")


def join_parts(files: Sequence[GgufFile]) -> GgufFile | GgufParts:
    """Return one file, or the parts as one. Raise ModelFormatError if they do not fit together."""
    if len(files) > 1:
        return GgufParts(files)
    count = _reader(files[0]).integer(_COUNT, default=1, low=0)
    if count > 1:
        raise ModelFormatError(
            f"{files[0].path}: {_COUNT} is {count}, so the name must end in -00001-of-{count:05}"
            ".gguf. Give each part its name, or merge them with llama-gguf-split --merge."
        )
    return files[0]


def _reader(file: GgufFile) -> ConfigReader:
    return ConfigReader(file.metadata, str(file.path))
