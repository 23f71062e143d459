"""Read matrices of E2M1 codes: NVFP4 with an E4M3 scale for 16 inputs, MXFP4 with E8M0 for 32.

A byte of the codes [outputs, inputs / 2] has two inputs, the first in the low nibble. NVFP4 also
has an FP32 number for the whole matrix. Scales of activations are not used, because activations
keep 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.tensor_file import SPLIT_MXFP4, StoredTensor
from lmdeploy.checkpoint.gguf_blocks import (
    check_e4m3_scales,
    check_factors,
    e2m1_pairs,
    nvfp4_blocks,
)
from lmdeploy.checkpoint.methods.fp8 import E4M3, E4M3_VALUES
from lmdeploy.checkpoint.methods.groups import BLOCK, Bytes, Floats
from lmdeploy.checkpoint.methods.matrix_file import Parts

CODES = "U8"  # the element type of the codes, and of E8M0 scales
SCALE = "weight_scale"
_NV_GROUP = 16


@dataclass(frozen=True)
class Nvfp4Matrix:
    """A QuantizedMatrix of NVFP4. A value is code · (scale · number), or code · (scale / number).

    Args:
        cols: number of inputs.
        codes: bytes of two codes.
        scales: E4M3 bytes, one for 16 inputs.
        number: the FP32 number of the matrix, as stored.
        divides: scales are divided by the number.
    """

    cols: int
    codes: Bytes
    scales: Bytes
    number: Bytes
    divides: bool

    kind = "nvfp4"

    @property
    def parts(self) -> tuple[Bytes, ...]:
        """Return all bytes of the matrix in the file."""
        return self.codes, self.scales, self.number

    @property
    def factors(self) -> Floats:
        """Return the number as a factor of the values, which is rounded if scales are divided."""
        number = self.number.view("<f4")
        return np.asarray(1 / number if self.divides else number, np.float32)

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return rows [begin, end) as GGUF blocks with the same codes and scales.

        Raise ValueError for a scale that is NaN or negative.
        """
        codes = self.codes.reshape(-1, self.cols // 2)[begin:end]
        return nvfp4_blocks(codes, scales=self._scales(begin, end))

    def f32(self, begin: int, end: int) -> Floats:
        """Return rows [begin, end). Raise ValueError as `blocks` does."""
        codes = self.codes.reshape(-1, self.cols // 2)[begin:end]
        number = self.number.view("<f4")
        scales = E4M3_VALUES[self._scales(begin, end)]
        scales = scales / number if self.divides else scales * number
        values = e2m1_pairs(codes).reshape(*scales.shape, _NV_GROUP)
        values *= scales[:, :, None]
        return values.reshape(end - begin, self.cols)

    def _scales(self, begin: int, end: int) -> Bytes:
        scales = self.scales.reshape(-1, self.cols // _NV_GROUP)[begin:end]
        check_e4m3_scales(scales)
        return scales


def nvfp4_tensor(parts: Parts, codes: str, *, number: str, divides: bool) -> StoredTensor:
    """Return the matrix of the codes with the suffix `codes` and of the FP32 number `number`.

    Raise ModelFormatError if the tensors do not fit each other, or for a number of another range.
    """
    stored, (rows, cols) = _codes(parts, codes)
    scales = parts.tensor(SCALE, formats=(E4M3,), shape=(rows, cols // _NV_GROUP))
    one = parts.any_shape(number, formats=("F32",))
    if one.raw.size != 4:
        raise parts.refuse(one, "It must have one number.")
    matrix = Nvfp4Matrix(cols, stored.raw, scales.raw, one.raw, divides)
    with np.errstate(all="ignore"):
        check_factors(one.raw.view("<f4"), f"{parts.source}: tensor {one.name}")
        check_factors(matrix.factors, f"{parts.source}: the factor from tensor {one.name}")
    return StoredTensor(
        stored.name, "NVFP4", (rows, cols), stored.raw, matrix=matrix, factors=matrix.factors
    )


def mxfp4_tensor(parts: Parts, codes: str) -> StoredTensor:
    """Return the matrix of the codes with the suffix `codes` and of E8M0 scales.

    Raise ModelFormatError if the tensors do not fit each other.
    """
    stored, (rows, cols) = _codes(parts, codes)
    scales = parts.tensor(SCALE, formats=(CODES,), shape=(rows, cols // BLOCK))
    return StoredTensor(stored.name, SPLIT_MXFP4, (rows, cols), stored.raw, scales.raw)


def _codes(parts: Parts, suffix: str) -> tuple[StoredTensor, tuple[int, int]]:
    """Return the codes, and the outputs and inputs of the matrix."""
    codes = parts.tensor(suffix, formats=(CODES,))
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    if cols % BLOCK:
        raise parts.refuse(codes, f"The {cols} inputs must be a multiple of {BLOCK}.")
    return codes, (rows, cols)


def refuse_part(parts: Parts, suffix: str, *, kind: str) -> None:
    """Raise ModelFormatError if the matrix has a part that `kind` does not have."""
    if parts.has(suffix):
        raise ModelFormatError(
            f"{parts.source}: tensor {parts.base}{suffix} exists, but {kind} has no such tensor. "
            "Remove it."
        )
