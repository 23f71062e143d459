"""Convert stored tensors to the formats that the engine packs.

Conversion goes through chunks of rows, which bounds its memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.tensor_file import (
    BLOCK_FORMATS,
    SPLIT_MXFP4,
    StoredTensor,
    row_bytes,
)
from lmdeploy.checkpoint.files.values import bf16_bits, values_of_rows
from lmdeploy.checkpoint.gguf_blocks import (
    REPACKED,
    check_e4m3_scales,
    check_range_of_q8_0,
    mxfp4_values,
    nvfp4_scales,
    values_to_q8_0,
)
from lmdeploy.checkpoint.methods.fp8 import FP8_KINDS, fp8_scales, kept_fp8, num_scales
from lmdeploy.checkpoint.tensor_plan import Checkpoint, PlannedTensor
from lmdeploy.models.experts import VectorRule

if TYPE_CHECKING:
    from lmdeploy._turbomind import DeviceCapability

# Raise it when the output of a converter changes: the weight cache then packs every model again.
# tests/python/checkpoint/test_convert.py fails until it is raised.
WEIGHT_CACHE_VERSION = 3
# The engine computes these formats as stored. Formats in REPACKED and _ROUNDED keep about as many
# bits as in the file, and the others become BF16. With `exact`, all but _RAW_FORMATS become F32.
_RAW_FORMATS = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q8_0": "q8_0"}
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
# Devices with all formats compute these as stored. They are converted for others.
_AS_STORED = (*K_QUANTS, "NVFP4")
_ROUNDED = ("Q2_K", "Q3_K", "Q5_1", "Q5_K", "Q6_K", "NVFP4")  # become Q8_0
# Formats that the engine reads from the mapped file, or as they are if rows are reordered.
MAPPED_FORMATS = {"MXFP4": "mxfp4", SPLIT_MXFP4: "mxfp4_split"}
_CHUNK_VALUES = 1 << 20


def for_device(checkpoint: Checkpoint, capability: DeviceCapability) -> Checkpoint:
    """Return the checkpoint with tensors as they are stored where the device computes them."""
    kept = _AS_STORED if capability.has_all_formats else ()

    def stored(planned: PlannedTensor) -> PlannedTensor:
        tensor = planned.tensor
        kind = tensor.format
        if kind in kept and planned.cols % BLOCK_FORMATS[kind][0] == 0:
            return replace(planned, tensor=replace(tensor, as_stored=True))
        matrix = kept_fp8(tensor.matrix) if capability.has_fp8_weights else None
        if matrix is None:
            return planned
        return replace(planned, tensor=replace(tensor, matrix=matrix))

    return replace(checkpoint, tensors=tuple(map(stored, checkpoint.tensors)))


def engine_format(tensor: StoredTensor, exact: bool) -> str:
    """Return the format that `matrix_for_engine` produces."""
    if tensor.format in _RAW_FORMATS:
        return _RAW_FORMATS[tensor.format]
    if tensor.format in MAPPED_FORMATS and not exact:
        return MAPPED_FORMATS[tensor.format]
    if exact and tensor.format != "BF16":
        return "f32"
    if tensor.as_stored:
        return tensor.format.lower()
    if tensor.format in _ROUNDED:
        return "q8_0"
    if tensor.matrix is not None:
        return tensor.matrix.kind
    return REPACKED[tensor.format][0] if tensor.format in REPACKED else "bf16"


def is_router(planned: PlannedTensor) -> bool:
    """Return whether the tensor is a router, which the engine keeps in FP32."""
    return planned.name.endswith(".router")


def engine_bytes(planned: PlannedTensor, exact: bool) -> int:
    """Return the bytes that the engine stores for the tensor, without the engine's padding."""
    tensor = planned.tensor
    values = tensor.rows * tensor.cols
    if planned.is_vector:
        return 4 * values
    if exact:
        return 4 * values  # exact compute keeps every matrix in FP32
    if is_router(planned):
        return 4 * values  # routers stay in FP32
    if tensor.format in MAPPED_FORMATS:
        return tensor.rows * row_bytes("MXFP4", tensor.cols)
    kind = engine_format(tensor, exact)
    scales = 4 * num_scales(kind, tensor.cols) if kind in FP8_KINDS else 0
    return tensor.rows * (_row_bytes(kind, tensor.cols) + scales)


def _row_bytes(kind: str, cols: int) -> int:
    """Return the bytes of a row in an engine format, without separate scales."""
    return cols if kind in FP8_KINDS else row_bytes(kind.upper(), cols)


def matrix_for_engine(
    tensor: StoredTensor,
    *,
    exact: bool,
    interleaved_heads: int = 0,
    interleaved_rows: int = 0,
    transposed: bool = False,
    scale: float = 1.0,
) -> tuple[str, npt.NDArray[Any]]:
    """Return (format, C-contiguous array [rows, ...]) for WeightsBuilder.add_matrix.

    `scales_for_engine` returns its scales.

    `interleaved_heads` > 0 undoes the row order of interleaved RoPE in q and k: in the first
    `interleaved_rows` of each head, or in all for 0. Whole rows move, so this works for quantized
    tensors too. `transposed` transposes the tensor, and `scale` multiplies its values. For them it
    must be F32, F16 or BF16.
    """
    kind = engine_format(tensor, exact)

    def ordered(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(
            _separate_halves(rows, interleaved_heads, rotated=interleaved_rows)
        )

    is_stored = tensor.as_stored or tensor.format in MAPPED_FORMATS
    if tensor.format in _RAW_FORMATS or (is_stored and kind != "f32" and tensor.matrix is None):
        stored = tensor.bytes_by_row()
        if kind == "nvfp4":
            _check_nvfp4(tensor, stored)
        return kind, ordered(stored)
    if tensor.format == "BF16" and scale == 1.0:
        halves = tensor.bytes_by_row().view("<u2")
        if transposed:
            return kind, np.ascontiguousarray(halves.T)
        return kind, ordered(halves)
    width = _row_bytes(kind, tensor.cols)
    out = np.empty((tensor.rows, width), np.uint8)
    step = max(1, _CHUNK_VALUES // tensor.cols)
    try:
        for start in range(0, tensor.rows, step):
            span = slice(start, min(start + step, tensor.rows))
            chunk = _convert_rows(tensor, kind, span=span, scale=scale)
            out[start : start + step] = chunk.view(np.uint8).reshape(-1, width)
    except ValueError as error:
        raise ModelFormatError(f"tensor {tensor.name}: {error}") from error
    values = out.view({"f32": np.float32, "bf16": np.uint16}.get(kind, np.uint8))
    if transposed:
        return kind, np.ascontiguousarray(values.T)
    return kind, ordered(values)


def scales_for_engine(
    tensor: StoredTensor, kind: str, *, interleaved_heads: int = 0, interleaved_rows: int = 0
) -> npt.NDArray[Any] | None:
    """Return the scales for WeightsBuilder.add_matrix, or None if `kind` has none of its own.

    The other arguments are those of `matrix_for_engine`.
    """
    if kind == "nvfp4":
        return np.array([tensor.factor], np.float32)
    scales: npt.NDArray[Any] | None = tensor.scales_by_row()
    if kind in FP8_KINDS:
        try:
            scales = fp8_scales(tensor.matrix, (0, tensor.rows))
        except ValueError as error:
            raise ModelFormatError(f"tensor {tensor.name}: {error}") from error
    elif kind != "mxfp4_split" or scales is None:
        return None
    return np.ascontiguousarray(
        _separate_halves(scales, interleaved_heads, rotated=interleaved_rows)
    )


def check_exponents(tensor: StoredTensor) -> None:
    """Raise ModelFormatError if a scale of SPLIT_MXFP4 is NaN."""
    if tensor.format == SPLIT_MXFP4 and tensor.scales is not None and (tensor.scales == 255).any():
        raise ModelFormatError(
            f"tensor {tensor.name}: A scale is 255, which is NaN. It must be 0 to 254."
        )


def _check_nvfp4(tensor: StoredTensor, rows: npt.NDArray[np.uint8]) -> None:
    try:
        check_e4m3_scales(nvfp4_scales(rows))
    except ValueError as error:
        raise ModelFormatError(f"tensor {tensor.name}: {error}") from error


def _convert_rows(
    tensor: StoredTensor, kind: str, *, span: slice, scale: float
) -> npt.NDArray[Any]:
    stored_format = tensor.format
    if tensor.matrix is not None and kind == tensor.matrix.kind:
        return tensor.matrix.blocks(span.start, span.stop)
    if tensor.matrix is not None:
        values = tensor.matrix.f32(span.start, span.stop)
    elif (exponents := tensor.scales_by_row()) is not None:
        values = mxfp4_values(tensor.bytes_by_row()[span], exponents=exponents[span])
    else:
        rows = tensor.bytes_by_row()[span]
        if kind not in ("f32", "bf16") and stored_format in REPACKED:
            return REPACKED[stored_format][1](rows)
        if stored_format == "NVFP4":
            check_e4m3_scales(nvfp4_scales(rows))
        values = values_of_rows(stored_format, rows)
        if tensor.factors is not None:
            values = values * tensor.factor
        if scale != 1.0:
            values = values * np.float32(scale)
    if kind == "f32":
        return np.ascontiguousarray(values)
    if stored_format == "NVFP4":
        check_range_of_q8_0(values)
    return values_to_q8_0(values) if kind == "q8_0" else bf16_bits(values)


def vector_for_engine(
    tensor: StoredTensor,
    *,
    interleaved_heads: int = 0,
    interleaved_rows: int = 0,
    offset: float = 0.0,
    convert: VectorRule | None = None,
    scale: float = 1.0,
) -> npt.NDArray[np.float32]:
    """Return the FP32 values of a vector times `scale` plus `offset`.

    A bias of q or k has the row order of its matrix, which `interleaved_heads` undoes. `convert`
    gets the values in the shape of the tensor.
    """
    values = values_of_rows(tensor.format, tensor.bytes_by_row())
    if convert is not None:
        values = convert(values.reshape(tensor.shape))
    values = values.reshape(-1, 1)
    if scale != 1.0:
        values = values * np.float32(scale)
    if offset:
        values = values + np.float32(offset)
    ordered = _separate_halves(values, interleaved_heads, rotated=interleaved_rows)
    return np.ascontiguousarray(ordered.reshape(-1))


def _separate_halves(rows: npt.NDArray[Any], num_heads: int, *, rotated: int) -> npt.NDArray[Any]:
    """Reorder the first d rows (0, d/2, 1, d/2 + 1, ...) of every head to (0, 1, ..., d - 1).

    d is `rotated`, or the number of rows of a head if that is 0.
    """
    if not num_heads:
        return rows
    width = rows.shape[1]
    heads = rows.reshape(num_heads, -1, width)
    rotated = rotated or heads.shape[1]
    pairs = heads[:, :rotated].reshape(num_heads, rotated // 2, 2, width)
    halves = pairs.swapaxes(1, 2).reshape(num_heads, rotated, width)
    return np.concatenate([halves, heads[:, rotated:]], axis=1).reshape(rows.shape)
