"""The factors of NVFP4 matrices in a GGUF file.

llama.cpp keeps the FP32 factor of `NAME.weight` in `NAME.scale`, one for the matrix or one for each
expert. `NAME.input_scale` is for rounded activations and is not used here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.tensor_file import SUPPORTED_FORMATS, StoredTensor, TensorFile
from lmdeploy.checkpoint.gguf_blocks import check_factors

_WEIGHT, _FACTOR, _UNUSED = ".weight", ".scale", ".input_scale"
_MAX_DIMS: Final = 4


class GgufFactors:
    """A TensorFile whose NVFP4 matrices have their factors."""

    def __init__(self, file: TensorFile, *, source: str) -> None:
        self._file = file
        self._source = source
        present = set(file.names)
        bases = {
            name.removesuffix(suffix)
            for name in present
            for suffix in (_FACTOR, _UNUSED)
            if name.endswith(suffix) and name.removesuffix(suffix) + _WEIGHT in present
        }
        self._bases = {
            base
            for base in bases
            if file.tensor(base + _WEIGHT, max_dims=_MAX_DIMS).format == "NVFP4"
        }
        parts = {base + suffix for base in self._bases for suffix in (_FACTOR, _UNUSED)}
        self._factors = parts & present
        self._names = [name for name in file.names if name not in parts]

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors but the factors."""
        return self._names

    def tensor(
        self, name: str, *, max_dims: int = 2, formats: tuple[str, ...] = SUPPORTED_FORMATS
    ) -> StoredTensor:
        """Return a tensor. Raise ModelFormatError if it or its factor is invalid."""
        tensor = self._file.tensor(name, max_dims=max_dims, formats=formats)
        factor = name.removesuffix(_WEIGHT) + _FACTOR
        if not name.endswith(_WEIGHT) or factor not in self._factors:
            return tensor
        stored = self._file.tensor(factor)
        wanted = tensor.shape[0] if len(tensor.shape) == 3 else 1
        if stored.format != "F32" or stored.shape not in ((1,), (wanted,)):
            raise ModelFormatError(
                f"{self._source}: tensor {factor} is {stored.format} {list(stored.shape)}. It must "
                f"be F32 [{wanted}]."
            )
        factors = stored.raw.view("<f4")
        check_factors(factors, f"{self._source}: tensor {factor}")
        return replace(tensor, scales=stored.raw, factors=factors)
