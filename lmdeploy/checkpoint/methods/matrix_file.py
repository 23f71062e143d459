"""A checkpoint in which several tensors form one matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.tensor_file import SUPPORTED_FORMATS, StoredTensor, TensorFile

_NAME = "weight"  # the suffix of a matrix without a method


@dataclass(frozen=True)
class Parts:
    """The tensors of one matrix, by suffix."""

    base: str  # the name of the matrix without its suffix, with a dot at the end
    source: str
    _file: TensorFile
    _present: frozenset[str]

    def has(self, suffix: str) -> bool:
        """Return whether the matrix has this tensor."""
        return self.base + suffix in self._present

    def tensor(
        self, suffix: str, *, formats: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> StoredTensor:
        """Return a tensor, which must have `shape`. None accepts all shapes of two dimensions.

        Raise ModelFormatError if the tensor is missing or different.
        """
        tensor = self.any_shape(suffix, formats=formats)
        if shape is None and len(tensor.shape) != 2:
            raise self.refuse(tensor, "It must have two dimensions.")
        if shape is not None and tensor.shape != shape:
            raise self.refuse(tensor, f"It must be {list(shape)}, because of the other tensors.")
        return tensor

    def any_shape(self, suffix: str, *, formats: tuple[str, ...]) -> StoredTensor:
        """Return a tensor of one or two dimensions. Raise ModelFormatError as `tensor` does."""
        name = self.base + suffix
        if not self.has(suffix):
            raise ModelFormatError(f"{self.source}: tensor {name} is missing.")
        return self._file.tensor(name, formats=formats)

    def refuse(self, tensor: StoredTensor, text: str) -> ModelFormatError:
        """Return an error about the shape of a tensor, for the caller to raise."""
        return ModelFormatError(
            f"{self.source}: tensor {tensor.name} has shape {list(tensor.shape)}. {text}"
        )


class MatrixFile:
    """A TensorFile that combines the tensors of a matrix into one with the usual name.

    Args:
        marks: suffixes of tensors of which each matrix has at least one.
        others: suffixes of the other tensors of a matrix.
        combine: returns the combined tensor.
        source: names the file in errors.
    """

    def __init__(
        self,
        file: TensorFile,
        *,
        marks: tuple[str, ...],
        others: tuple[str, ...],
        combine: Callable[[Parts], StoredTensor],
        source: str,
    ) -> None:
        self._file = file
        self._combine = combine
        self._source = source
        self._present = frozenset(file.names)
        bases = {
            name[: -len(mark)]: mark for name in file.names for mark in marks if _ends(name, mark)
        }
        self._bases = {base + _NAME: base for base in bases}
        suffixes = (*marks, *others)
        parts = {base + suffix for base in bases for suffix in suffixes}
        if _NAME not in suffixes and (twice := self._present & self._bases.keys()):
            name = min(twice)
            raise ModelFormatError(
                f"{source}: tensors {name} and {name[: -len(_NAME)]}{bases[self._bases[name]]} "
                "exclude each other. Remove one."
            )
        self._names = [*(name for name in file.names if name not in parts), *self._bases]

    @property
    def names(self) -> list[str]:
        """Return all names. A matrix has the name that it has without the method."""
        return self._names

    def tensor(
        self, name: str, *, max_dims: int = 2, formats: tuple[str, ...] = SUPPORTED_FORMATS
    ) -> StoredTensor:
        """Return a tensor. Raise ModelFormatError if it or a part of it is invalid."""
        if name not in self._bases:
            return self._file.tensor(name, max_dims=max_dims, formats=formats)
        return self._combine(Parts(self._bases[name], self._source, self._file, self._present))


def _ends(name: str, mark: str) -> bool:
    return name.endswith("." + mark)
