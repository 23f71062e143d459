"""Read compressed-tensors folders: integers of 4 and 8 bits, FP8, NVFP4 and MXFP4.

`weight_packed` [outputs, inputs · bits / 32] is int32. A word holds consecutive inputs, lowest
bits first, and a code is stored plus half of its range. `weight_zero_point` is packed in the same
way along the outputs, [outputs · bits / 32, groups]. Codes of 8 bits may be a plain int8 or FP8
`weight`. The tensors decide how a matrix is read, so the targets of `config_groups` are not needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.tensor_file import StoredTensor, TensorFile
from lmdeploy.checkpoint.methods.fp4 import CODES, mxfp4_tensor, nvfp4_tensor, refuse_part
from lmdeploy.checkpoint.methods.fp8 import E4M3, fp8_tensor
from lmdeploy.checkpoint.methods.groups import (
    BLOCK,
    SCALE_FORMATS,
    Bytes,
    Floats,
    GroupMatrix,
    OrderWarning,
    PerGroup,
    float_values,
    is_shuffled,
    unpack_words,
)
from lmdeploy.checkpoint.methods.matrix_file import MatrixFile, Parts
from lmdeploy.models.config_reader import ConfigReader

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
# A folder whose groups have formats of their own, and one without quantized weights.
_OUTER_FORMATS = (*FORMATS, "mixed-precision", "dense")
_PACKED, _PLAIN, _SCALE = "weight_packed", "weight", "weight_scale"
_SHAPE, _ZEROS, _GROUPS = "weight_shape", "weight_zero_point", "weight_g_idx"
_NUMBER = "weight_global_scale"
_UNUSED = ("input_scale", "input_zero_point", "input_global_scale")
_STRATEGIES = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel", "block")}
_FP4_GROUPS = {"tensor_group": 16, "group": 32}  # NVFP4 and MXFP4
_SHUFFLED_ORDERS = ("group", "dynamic", "True")  # values of actorder that write weight_g_idx


@dataclass(frozen=True)
class _Reader:
    block: tuple[int, int] | None  # of FP8 scales
    must_have_order: bool
    warn_of_order: OrderWarning

    def combine(self, parts: Parts) -> StoredTensor:
        """Return the matrix of the parts."""
        if not parts.has(_PACKED):
            return self._plain(parts)
        if parts.has(_PLAIN):
            raise ModelFormatError(
                f"{parts.source}: tensors {parts.base}{_PLAIN} and {parts.base}{_PACKED} exclude "
                "each other. Remove one."
            )
        return self._packed(parts)

    def _plain(self, parts: Parts) -> StoredTensor:
        refuse_part(parts, _NUMBER, kind="a plain weight")
        codes = parts.tensor(_PLAIN, formats=("I8", E4M3))
        if parts.has(_ZEROS):
            zeros = parts.any_shape(_ZEROS, formats=("I8", E4M3, "I32"))
            if zeros.raw.any():
                raise _refuse_zeros(parts, zeros)
        if codes.format == E4M3:
            return fp8_tensor(parts, _SCALE, block=self.block)
        rows, cols = codes.shape
        scales, groups = _scales(parts, codes, shape=(rows, cols))

        def read_codes(begin: int, end: int) -> Bytes:
            return codes.raw.reshape(rows, cols)[begin:end] ^ np.uint8(0x80)

        matrix = GroupMatrix(
            rows=rows,
            parts=(codes.raw, scales.raw),
            codes=read_codes,
            scales=_scale_reader(scales, rows=rows, groups=groups),
            zeros=None,
            bits=8,
        )
        return StoredTensor(codes.name, "INT8", (rows, cols), codes.raw, matrix=matrix)

    def _packed(self, parts: Parts) -> StoredTensor:
        codes = parts.tensor(_PACKED, formats=("I32", CODES))
        if codes.format == CODES:
            return _fp4(parts)
        refuse_part(parts, _NUMBER, kind="a matrix of packed integers")
        rows, words = codes.shape
        cols = _inputs(parts, codes)
        bits = 32 * words // cols
        scales, groups = _scales(parts, codes, shape=(rows, cols))
        zeros = None
        if parts.has(_ZEROS):
            shape = (-(-rows * bits // 32), groups)
            zeros = parts.tensor(_ZEROS, formats=("I32",), shape=shape)
            if bits == 8:
                raise _refuse_zeros(parts, zeros)
        order = self._order(parts, cols, groups=groups)

        def read_codes(begin: int, end: int) -> Bytes:
            return unpack_words(codes.raw.view("<u4").reshape(rows, words)[begin:end], bits)

        stored = (codes, scales, zeros, order)
        matrix = GroupMatrix(
            rows=rows,
            parts=tuple(part.raw for part in stored if part is not None),
            codes=read_codes,
            scales=_scale_reader(scales, rows=rows, groups=groups),
            zeros=None if zeros is None else _zero_reader(zeros, bits),
            bits=bits,
            row_step=1 if zeros is None else 32 // bits,
            group_of=None if order is None else order.raw.view("<i4").astype(np.int32),
        )
        return StoredTensor(codes.name, "PACKED", (rows, cols), codes.raw, matrix=matrix)

    def _order(self, parts: Parts, cols: int, *, groups: int) -> StoredTensor | None:
        """Return weight_g_idx, or None if it follows from the order of the inputs."""
        is_needed = self.must_have_order and groups > 1
        if not is_needed and not parts.has(_GROUPS):
            return None
        stored = parts.tensor(_GROUPS, formats=("I32",), shape=(cols,))
        if not is_shuffled(stored, parts.source, groups=groups):
            return None
        self.warn_of_order(stored.name)
        return stored


def _fp4(parts: Parts) -> StoredTensor:
    """Return a matrix of NVFP4 or MXFP4, as the type of its scales says."""
    for suffix in (_ZEROS, _GROUPS):
        refuse_part(parts, suffix, kind="a matrix of FP4")
    if parts.any_shape(_SCALE, formats=(E4M3, CODES)).format == E4M3:
        return nvfp4_tensor(parts, _PACKED, number=_NUMBER, divides=True)
    refuse_part(parts, _NUMBER, kind="MXFP4")
    return mxfp4_tensor(parts, _PACKED)


def open_compressed_tensors(
    file: TensorFile, quantization: ConfigReader, *, source: str
) -> TensorFile:
    """Open a folder of compressed-tensors.

    Raise ModelFormatError for a variant that is not supported.
    """
    _check_format(quantization, _OUTER_FORMATS)
    sparsity = quantization.child("sparsity_config")
    if sparsity is not None and (kind := sparsity.text("format", default="dense")) != "dense":
        raise sparsity.refuse(f"format is {kind[:40]!r}. It must be dense.")
    blocks: set[tuple[int, int]] = set()
    must_have_order = False
    groups = quantization.child("config_groups")
    for key in groups.keys() if groups is not None else ():
        group = None if groups is None or groups.is_list(key) else groups.child(key)
        weights = None if group is None else group.child("weights")
        if group is None or weights is None:  # a list of targets, or a group of activations
            continue
        _check_format(group, FORMATS)
        _check_weights(weights)
        if weights.text("strategy", default="") == "block":
            blocks.add(_block_of(weights))
        must_have_order |= weights.any_text("actorder") in _SHUFFLED_ORDERS
    if len(blocks) > 1:
        raise quantization.refuse("config_groups have different sizes in block_structure.")
    reader = _Reader(blocks.pop() if blocks else None, must_have_order, OrderWarning(source))
    return MatrixFile(
        file,
        marks=(_PACKED, _SCALE),
        others=(_PLAIN, _SHAPE, _ZEROS, _GROUPS, _NUMBER, *_UNUSED),
        combine=reader.combine,
        source=source,
    )


def _check_format(reader: ConfigReader, accepted: tuple[str, ...]) -> None:
    if not reader.has("format"):
        return
    name = reader.text("format")
    if name not in accepted:
        raise reader.refuse(f"format is {name[:40]!r}. It must be one of {', '.join(accepted)}.")


def _check_weights(weights: ConfigReader) -> None:
    """Raise ModelFormatError for weights of another type, size or strategy."""
    kind = weights.text("type", default="int")
    if kind not in _STRATEGIES:
        raise weights.refuse(f"type is {kind[:40]!r}. It must be int or float.")
    bits = weights.integer("num_bits", default=8)
    if bits not in (4, 8):
        raise weights.refuse(f"num_bits is {bits} for type {kind}. It must be 4 or 8.")
    if kind == "float" and bits == 4:
        return _check_fp4(weights)
    strategy = weights.text("strategy", default="tensor")
    if strategy not in _STRATEGIES[kind]:
        wanted = ", ".join(_STRATEGIES[kind])
        raise weights.refuse(
            f"strategy is {strategy[:40]!r} for type {kind}. It must be one of {wanted}."
        )
    if bits == 8 and not weights.flag("symmetric", default=True):
        raise weights.refuse("symmetric is false for 8 bits. It must be true.")


def _check_fp4(weights: ConfigReader) -> None:
    strategy = weights.text("strategy", default="group")
    size = weights.integer("group_size", default=_FP4_GROUPS.get(strategy, 0), low=0)
    if strategy not in _FP4_GROUPS or size != _FP4_GROUPS[strategy]:
        raise weights.refuse(
            f"strategy is {strategy[:40]!r} and group_size is {size} for floats of 4 bits. They "
            "must be tensor_group and 16 (NVFP4), or group and 32 (MXFP4)."
        )
    if not weights.flag("symmetric", default=True):
        raise weights.refuse("symmetric is false for floats of 4 bits. It must be true.")


def _block_of(weights: ConfigReader) -> tuple[int, int]:
    sizes = weights.integers("block_structure")
    if len(sizes) != 2 or 0 in sizes:
        raise weights.refuse(
            f"block_structure is {str(sizes)[:40]}. It must be two integers above 0."
        )
    return sizes[0], sizes[1]


def _inputs(parts: Parts, codes: StoredTensor) -> int:
    """Return the inputs of a packed matrix by its weight_shape."""
    stored = parts.tensor(_SHAPE, formats=("I64", "I32"), shape=(2,))
    rows, cols = (int(size) for size in stored.raw.view("<i8" if stored.format == "I64" else "<i4"))
    if rows != codes.shape[0] or cols <= 0 or codes.shape[1] * 32 not in (4 * cols, 8 * cols):
        raise ModelFormatError(
            f"{parts.source}: tensor {stored.name} is [{rows}, {cols}], but {codes.name} has shape "
            f"{list(codes.shape)}. The codes must have 4 or 8 bits."
        )
    return cols


def _scales(
    parts: Parts, codes: StoredTensor, *, shape: tuple[int, int]
) -> tuple[StoredTensor, int]:
    """Return the scales, one for all or [rows, groups], and the number of groups."""
    rows, cols = shape
    if cols % BLOCK:
        raise parts.refuse(codes, f"The {cols} inputs must be a multiple of {BLOCK}.")
    scales = parts.any_shape(_SCALE, formats=SCALE_FORMATS)
    count = math.prod(scales.shape)
    if count == 1:
        return scales, 1
    groups = count // rows
    if scales.shape[0] != rows or count != rows * groups or cols % (groups * BLOCK):
        raise parts.refuse(
            scales,
            f"It must be [{rows}, groups], and each group must have a multiple of {BLOCK} of the "
            f"{cols} inputs.",
        )
    return scales, groups


def _scale_reader(scales: StoredTensor, *, rows: int, groups: int) -> PerGroup:
    if math.prod(scales.shape) == 1:
        value = float_values(scales.raw, scales.format).reshape(1, 1)
        return lambda begin, end: np.repeat(value, end - begin, axis=0)
    by_row = scales.raw.reshape(rows, -1)

    def read(begin: int, end: int) -> Floats:
        return float_values(by_row[begin:end].reshape(-1), scales.format).reshape(-1, groups)

    return read


def _zero_reader(zeros: StoredTensor, bits: int) -> PerGroup:
    per_word = 32 // bits

    def read(begin: int, end: int) -> Floats:
        words = zeros.raw.view("<u4").reshape(zeros.shape)
        words = words[begin // per_word : -(-end // per_word)]
        return unpack_words(words.T, bits).T[: end - begin].astype(np.float32)

    return read


def _refuse_zeros(parts: Parts, zeros: StoredTensor) -> ModelFormatError:
    return ModelFormatError(
        f"{parts.source}: tensor {zeros.name} has zero points of 8 bits. Every zero must be 0."
    )
