"""The transpose of a stored matrix in any format, as values: it has no quantized rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmdeploy.base.files import Bytes
from lmdeploy.checkpoint.files.tensor_file import StoredTensor
from lmdeploy.checkpoint.files.values import bf16_bits, values_of_rows


@dataclass(frozen=True)
class TurnedMatrix:
    """A QuantizedMatrix in BF16: the transpose of `tensor`."""

    tensor: StoredTensor
    kind: str = "bf16"

    @property
    def parts(self) -> tuple[Bytes, ...]:
        """Return all bytes of the matrix in the file."""
        return tuple(self.tensor.parts)

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return rows [begin, end) as BF16."""
        return bf16_bits(self.f32(begin, end)).view(np.uint8).reshape(end - begin, -1)

    def f32(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return rows [begin, end) of the transpose without rounding."""
        # Not kept: a model has thousands of these matrices.
        return np.ascontiguousarray(self._values[:, begin:end].T)

    @property
    def _values(self) -> npt.NDArray[np.float32]:
        tensor = self.tensor
        if tensor.matrix is not None:
            return tensor.matrix.f32(0, tensor.rows)
        values = values_of_rows(tensor.format, tensor.bytes_by_row())
        return values * tensor.factor if tensor.factors is not None else values
