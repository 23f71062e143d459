"""Quantize the matrices of a checkpoint while it is loaded, as `weight_format` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lmdeploy.base.checks import OptionError
from lmdeploy.base.files import Bytes
from lmdeploy.checkpoint.convert import is_router
from lmdeploy.checkpoint.files.tensor_file import PLAIN_FORMATS, StoredTensor
from lmdeploy.checkpoint.files.values import values_of_rows
from lmdeploy.checkpoint.gguf_blocks import values_to_q4_1, values_to_q8_0
from lmdeploy.checkpoint.tensor_plan import Checkpoint, PlannedTensor
from lmdeploy.models.family import ATTENTION_TENSORS, RECURRENT_GATES

_BLOCK = 32
_QUANTIZERS = {"q8_0": values_to_q8_0, "q4_1": values_to_q4_1}


@dataclass(frozen=True)
class RoundedMatrix:
    """A QuantizedMatrix made from values. `tensor` is F32, F16 or BF16.

    `transposed` means that the tensor is stored as [inputs, outputs]. `scale` multiplies the
    values.
    """

    tensor: StoredTensor
    kind: str  # q8_0 or q4_1
    transposed: bool
    scale: float

    @property
    def parts(self) -> tuple[Bytes, ...]:
        """Return all bytes of the matrix in the file."""
        return tuple(self.tensor.parts)

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return rows [begin, end) as blocks of `kind`. Raise ValueError on overflow of FP16."""
        return _QUANTIZERS[self.kind](self._values(begin, end))

    def f32(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return the values of the blocks, so that `exact` has the same weights."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        blocks = self.blocks(begin, end)
        values: npt.NDArray[np.float32] = dequantize(
            blocks, GGMLQuantizationType[self.kind.upper()]
        )
        return values

    def _values(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        return self._stored_values(begin, end) * np.float32(self.scale)

    def _stored_values(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        tensor = self.tensor
        if not self.transposed:
            rows = tensor.bytes_by_row()[begin:end]
            return values_of_rows(tensor.format, rows)
        size = PLAIN_FORMATS[tensor.format]
        columns = tensor.bytes_by_row().reshape(tensor.rows, tensor.cols, size)[:, begin:end]
        raw = np.ascontiguousarray(columns.swapaxes(0, 1)).reshape(end - begin, -1)
        return values_of_rows(tensor.format, raw)


def part_of(planned: PlannedTensor) -> str | None:
    """Return the part of a matrix: attn, mlp or other.

    Vectors, routers and the gates of recurrent layers have none. They are small and need their
    bits.
    """
    if planned.is_vector or is_router(planned) or planned.name.endswith(RECURRENT_GATES):
        return None
    if planned.name in ("embedding", "head", "per_layer_embedding"):
        return "other"
    mixes = ".recurrent." in planned.name or ".latent." in planned.name
    return "attn" if mixes or planned.name.rpartition(".")[2] in ATTENTION_TENSORS else "mlp"


def with_weight_format(
    checkpoint: Checkpoint, formats: Mapping[str, str], *, text: str
) -> Checkpoint:
    """Return the checkpoint with quantized matrices. `formats` has the engine format of each part.

    `text` is the value of the option. Raise OptionError if a matrix is quantized already, or if its
    inputs do not fill blocks of 32.
    """
    tensors = []
    for planned in checkpoint.tensors:
        part = part_of(planned)
        if part is not None and planned.tensor.format not in PLAIN_FORMATS:
            raise OptionError(
                "weight_format",
                f"is {text!r}, but {checkpoint.path} is quantized already: {planned.tensor.name} "
                f"is {planned.tensor.format}. Remove --weight-format.",
            )
        kind = None if part is None else formats.get(part)
        tensors.append(planned if kind is None else _rounded(planned, kind, text=text))
    return replace(checkpoint, tensors=tuple(tensors))


def _rounded(planned: PlannedTensor, kind: str, *, text: str) -> PlannedTensor:
    tensor = planned.tensor
    if planned.cols % _BLOCK:
        raise OptionError(
            "weight_format",
            f"is {text!r}, but {tensor.name} has {planned.cols} inputs, which are no multiple of "
            f"{_BLOCK}. Leave out its part or remove --weight-format.",
        )
    matrix = RoundedMatrix(tensor, kind, planned.transposed, planned.scale)
    shape = (planned.rows, planned.cols)
    name = f"{tensor.format} AS {kind.upper()}"  # the hash of the packed weights covers it
    rounded = StoredTensor(tensor.name, name, shape, tensor.raw, matrix=matrix)
    return replace(planned, tensor=rounded, transposed=False, scale=1.0)
