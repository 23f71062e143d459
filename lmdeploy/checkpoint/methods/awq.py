"""Convert AWQ's 4-bit weights to rows of Q4_1.

The layout is that of AutoAWQ's version "gemm". `qweight` [inputs, outputs / 8] and `qzeros`
[inputs / group, outputs / 8] are int32. Nibble i of a word belongs to output
8 · word + NIBBLE_ORDER[i]. `scales` [inputs / group, outputs] are FP16. A weight is
(code - zero) · scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.tensor_file import SUPPORTED_FORMATS, StoredTensor, TensorFile
from lmdeploy.checkpoint.gguf_blocks import q4_1_blocks
from lmdeploy.models.config_reader import ConfigReader

NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORD_OUTPUTS = len(NIBBLE_ORDER)
_BLOCK = 32  # values of a block of Q4_1
_CODES, _ZEROS, _SCALES = "qweight", "qzeros", "scales"  # suffixes that replace "weight"

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class AwqMatrix:
    """A QuantizedMatrix [rows, cols] whose bytes are views into the mapped file."""

    kind = "q4_1"
    row_step = WORD_OUTPUTS

    rows: int  # outputs
    cols: int  # inputs
    group: int  # inputs that share a scale and a zero
    codes: Bytes
    scales: Bytes
    zeros: Bytes

    @property
    def parts(self) -> tuple[Bytes, ...]:
        """Return all bytes of the matrix in the file."""
        return self.codes, self.scales, self.zeros

    def blocks(self, begin: int, end: int) -> Bytes:
        """Return rows [begin, end), multiples of `row_step`, as Q4_1 blocks.

        Codes and scales stay the same. A block's minimum, -zero · scale, is rounded to FP16.
        Raise ValueError if the result is not finite.
        """
        codes, scales, zeros = self._rows(begin, end)
        repeats = self.group // _BLOCK
        scales, minima = (np.repeat(x, repeats, axis=1) for x in (scales, -zeros * scales))
        blocks = codes.reshape(end - begin, -1, _BLOCK)
        return q4_1_blocks(blocks, scales=scales, minima=minima)

    def f32(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return rows [begin, end), multiples of `row_step`, without rounding."""
        codes, scales, zeros = self._rows(begin, end)
        groups = codes.reshape(end - begin, -1, self.group).astype(np.float32)
        values: npt.NDArray[np.float32] = (groups - zeros[:, :, None]) * scales[:, :, None]
        return values.reshape(end - begin, self.cols)

    def _rows(
        self, begin: int, end: int
    ) -> tuple[Bytes, npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        # [rows, cols], [rows, groups], [rows, groups]
        words = slice(begin // WORD_OUTPUTS, end // WORD_OUTPUTS)
        codes, zeros = (
            _unpack(packed.view("<u4").reshape(-1, self.rows // WORD_OUTPUTS)[:, words])
            for packed in (self.codes, self.zeros)
        )
        scales = self.scales.view("<f2").reshape(-1, self.rows)[:, begin:end].T
        return codes, scales.astype(np.float32), zeros.astype(np.float32)


def _unpack(words: npt.NDArray[np.uint32]) -> Bytes:
    """Unpack the nibbles of [n, words] to [8 · words, n]."""
    out = np.empty((words.shape[1], WORD_OUTPUTS, words.shape[0]), np.uint8)
    for nibble, output in enumerate(NIBBLE_ORDER):
        out[:, output] = ((words >> np.uint32(4 * nibble)) & np.uint32(15)).T
    return out.reshape(-1, words.shape[0])


class AwqFile:
    """A TensorFile that combines the three tensors of a matrix into one with the usual name."""

    def __init__(self, file: TensorFile, *, group: int, source: str) -> None:
        self._file = file
        self._group = group
        self._source = source
        bases = [name.removesuffix(_CODES) for name in file.names if name.endswith(_CODES)]
        self._bases = {base + "weight": base for base in bases}
        parts = {base + part for base in bases for part in (_CODES, _ZEROS, _SCALES)}
        self._present = set(file.names)
        if twice := self._present & self._bases.keys():
            name = min(twice)
            raise ModelFormatError(
                f"{source}: tensors {name} and {self._bases[name]}{_CODES} exclude each other. "
                "Remove one."
            )
        self._names = [*(name for name in file.names if name not in parts), *self._bases]

    @property
    def names(self) -> list[str]:
        """Return all names. A matrix has the name that it has without AWQ."""
        return self._names

    def tensor(
        self, name: str, *, max_dims: int = 2, formats: tuple[str, ...] = SUPPORTED_FORMATS
    ) -> StoredTensor:
        """Return a tensor. Raise ModelFormatError if it or a part of it is invalid."""
        if name not in self._bases:
            return self._file.tensor(name, max_dims=max_dims, formats=formats)
        base = self._bases[name]
        codes = self._part(base + _CODES, "I32")
        if len(codes.shape) != 2 or codes.shape[0] % self._group:
            raise ModelFormatError(
                f"{self._source}: tensor {codes.name} has shape {list(codes.shape)}. It must have "
                f"two dimensions, and the first must be a multiple of group_size {self._group}."
            )
        cols, words = codes.shape
        groups, rows = cols // self._group, words * WORD_OUTPUTS
        zeros, scales = self._part(base + _ZEROS, "I32"), self._part(base + _SCALES, "F16")
        for part, shape in ((zeros, (groups, words)), (scales, (groups, rows))):
            if part.shape != shape:
                raise ModelFormatError(
                    f"{self._source}: tensor {part.name} has shape {list(part.shape)}. By {_CODES} "
                    f"and group_size {self._group} it must be {list(shape)}."
                )
        matrix = AwqMatrix(rows, cols, self._group, codes.raw, scales.raw, zeros.raw)
        return StoredTensor(codes.name, "AWQ", (rows, cols), codes.raw, matrix=matrix)

    def _part(self, name: str, kind: str) -> StoredTensor:
        if name not in self._present:
            raise ModelFormatError(f"{self._source}: tensor {name} is missing.")
        return self._file.tensor(name, formats=(kind,))


def open_awq(file: TensorFile, quantization: ConfigReader, *, source: str) -> TensorFile:
    """Open AWQ weights in version "gemm" with 4 bits and zero points.

    Raise ModelFormatError for every other variant.
    """
    return AwqFile(file, group=_group_size(quantization), source=source)


def _group_size(quantization: ConfigReader) -> int:
    bits = quantization.integer("bits", default=quantization.integer("w_bit", default=4))
    if bits != 4:
        raise quantization.refuse(f"bits is {bits}. It must be 4.")
    version = quantization.text("version", default="gemm")
    if version.lower() != "gemm":
        raise quantization.refuse(f"version is {version[:40]!r}. It must be gemm.")
    if not quantization.flag("zero_point", default=True):
        raise quantization.refuse("zero_point is false. It must be true.")
    default = quantization.integer("q_group_size", default=128)
    size = quantization.integer("group_size", default=default)
    if size % _BLOCK:
        raise quantization.refuse(f"group_size is {size}. It must be a multiple of {_BLOCK}.")
    return size
