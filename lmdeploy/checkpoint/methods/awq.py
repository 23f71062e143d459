"""Read AWQ's 4-bit weights.

The layout is that of AutoAWQ's version "gemm". `qweight` [inputs, outputs / 8] and `qzeros`
[inputs / group, outputs / 8] are int32. Nibble i of a word belongs to output
8 · word + NIBBLE_ORDER[i]. `scales` [inputs / group, outputs] are FP16. A weight is
(code - zero) · scale.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from lmdeploy.checkpoint.files.tensor_file import StoredTensor, TensorFile
from lmdeploy.checkpoint.methods.groups import BLOCK, Bytes, Floats, GroupMatrix, float_columns
from lmdeploy.checkpoint.methods.matrix_file import MatrixFile, Parts
from lmdeploy.models.config_reader import ConfigReader

NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORD_OUTPUTS = len(NIBBLE_ORDER)
_CODES, _ZEROS, _SCALES = "qweight", "qzeros", "scales"  # suffixes that replace "weight"


def open_awq(
    file: TensorFile, quantization: ConfigReader, *, source: str, has_sign: bool = False
) -> TensorFile:
    """Open AWQ weights in version "gemm" with 4 bits, whose scales may be negative if `has_sign`.

    Without zero points, every zero is 8. Raise ModelFormatError for every other variant.
    """
    has_zeros = quantization.flag("zero_point", default=not has_sign)
    group = _group_size(quantization)
    combine = partial(_combine, group=group, has_zeros=has_zeros, has_sign=has_sign)
    return MatrixFile(
        file, marks=(_CODES,), others=(_ZEROS, _SCALES), combine=combine, source=source
    )


def awq_matrix(
    rows: int, *, codes: Bytes, scales: Bytes, zeros: Bytes | None, has_sign: bool = False
) -> GroupMatrix:
    """Return the matrix of the bytes of the tensors. `rows` is the number of outputs."""

    def read_codes(begin: int, end: int) -> Bytes:
        return _unpack(codes, rows, begin=begin, end=end)

    def read_zeros(begin: int, end: int) -> Floats:
        assert zeros is not None
        return _unpack(zeros, rows, begin=begin, end=end).astype(np.float32)

    def read_scales(begin: int, end: int) -> Floats:
        return float_columns(scales, "F16", rows=rows, span=(begin, end))

    return GroupMatrix(
        rows=rows,
        parts=(codes, scales) if zeros is None else (codes, scales, zeros),
        codes=read_codes,
        scales=read_scales,
        zeros=None if zeros is None else read_zeros,
        row_step=WORD_OUTPUTS,
        has_sign=has_sign,
    )


def _combine(parts: Parts, *, group: int, has_zeros: bool, has_sign: bool) -> StoredTensor:
    codes = parts.tensor(_CODES, formats=("I32",))
    cols, words = codes.shape
    if cols % group:
        text = f"The first dimension must be a multiple of group_size {group}."
        raise parts.refuse(codes, text)
    rows = words * WORD_OUTPUTS
    zeros = None
    if has_zeros or parts.has(_ZEROS):
        zeros = parts.tensor(_ZEROS, formats=("I32",), shape=(cols // group, words)).raw
    if not has_zeros and zeros is not None and (zeros == 0x88).all():
        zeros = None
    scales = parts.tensor(_SCALES, formats=("F16",), shape=(cols // group, rows))
    matrix = awq_matrix(rows, codes=codes.raw, scales=scales.raw, zeros=zeros, has_sign=has_sign)
    return StoredTensor(codes.name, "AWQ", (rows, cols), codes.raw, matrix=matrix)


def awq_parts(
    codes: Bytes, *, scales: Floats, zeros: Bytes
) -> dict[str, npt.NDArray[np.int32] | npt.NDArray[np.float16]]:
    """Return the tensors of a matrix by suffix, as the arguments of `gptq_parts`."""
    return {
        _CODES: _pack(np.ascontiguousarray(codes.T)),
        _ZEROS: _pack(np.ascontiguousarray(zeros.T)),
        _SCALES: np.ascontiguousarray(scales.T.astype(np.float16)),
    }


def _pack(codes: Bytes) -> npt.NDArray[np.int32]:
    """Pack codes [n, outputs] to words [n, outputs / 8]."""
    by_word = codes.reshape(len(codes), -1, WORD_OUTPUTS)[:, :, NIBBLE_ORDER]
    pairs = by_word[:, :, 0::2] | by_word[:, :, 1::2] << np.uint8(4)
    return np.ascontiguousarray(pairs).view("<i4").astype(np.int32)[:, :, 0]


def _unpack(packed: Bytes, rows: int, *, begin: int, end: int) -> Bytes:
    """Unpack rows [begin, end) of words [n, rows / 8] to [end - begin, n]."""
    words: npt.NDArray[np.uint32] = packed.view("<u4").reshape(-1, rows // WORD_OUTPUTS)
    words = words[:, begin // WORD_OUTPUTS : end // WORD_OUTPUTS]
    out = np.empty((words.shape[1], WORD_OUTPUTS, words.shape[0]), np.uint8)
    for nibble, output in enumerate(NIBBLE_ORDER):
        out[:, output] = ((words >> np.uint32(4 * nibble)) & np.uint32(15)).T
    return out.reshape(-1, words.shape[0])


def _group_size(quantization: ConfigReader) -> int:
    bits = quantization.integer("bits", default=quantization.integer("w_bit", default=4))
    if bits != 4:
        raise quantization.refuse(f"bits is {bits}. It must be 4.")
    version = quantization.text("version", default="gemm")
    if version.lower() != "gemm":
        raise quantization.refuse(f"version is {version[:40]!r}. It must be gemm.")
    default = quantization.integer("q_group_size", default=128)
    size = quantization.integer("group_size", default=default)
    if size % BLOCK:
        raise quantization.refuse(f"group_size is {size}. It must be a multiple of {BLOCK}.")
    return size
