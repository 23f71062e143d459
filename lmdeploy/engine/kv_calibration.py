"""The calibration file: the mean of K per channel and the ranges of K and V, for one model.

The file stores ranges because k_scale and v_scale depend on the KV format. Therefore one file works
for all formats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.config.kv_format_options import FormatPair

if TYPE_CHECKING:
    from lmdeploy._turbomind import ModelConfig
    from lmdeploy.checkpoint.kv_scales import KvScales

Floats = npt.NDArray[np.float32]

FORMAT_VERSION = 1
SCALED_FORMAT = "fp8"  # the format of the KV scales in checkpoints
_METADATA_KEY = "kv_calibration"
_MAX_FILE_BYTES = 1 << 26
# Calibration maps the largest group of NVFP4 to scale 256 of 448, so that the scale search can also
# try larger scales.
_NVFP4_HEADROOM = 256.0 / 448.0
_MIN_SCALE = 2.0**-60
# Far above K and V of any model, and far below the values whose sums overflow.
_MAX_VALUE = 2.0**24


@dataclass(frozen=True)
class CalibrationMetadata:
    """The model, text and options from which a calibration file was made."""

    model_hash: str
    text_hash: str
    tokens: int
    context: int
    mean: str  # all, slow, none
    percentile: float
    version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Calibration:
    """Statistics of K (after RoPE) and V for each layer of a model."""

    facts: CalibrationMetadata
    k_mean: Floats  # [layers, kv_heads, head_dim], before the rotation
    k_amax: Floats  # [layers, kv_heads], an upper bound of |K - mean|
    k_amax_rotated: Floats  # [layers, kv_heads], the range of K - mean after the rotation
    v_amax: Floats  # [layers, kv_heads]


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    heads = (model.num_layers, model.num_kv_heads)
    shapes: dict[str, tuple[int, ...]] = {"k_mean": (*heads, model.head_dim)}
    return {**shapes, **dict.fromkeys(("k_amax", "k_amax_rotated", "v_amax"), heads)}


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file. Equal calibrations give equal bytes."""
    from safetensors.numpy import save_file

    # A single metadata entry, because the library writes several in no fixed order.
    facts = json.dumps(asdict(calibration.facts), sort_keys=True)
    tensors = {
        name: np.ascontiguousarray(getattr(calibration, name), np.float32)
        for name in ("k_mean", "k_amax", "k_amax_rotated", "v_amax")
    }
    save_file(tensors, path, metadata={_METADATA_KEY: facts})


def read_calibration(path: Path, model: ModelConfig, *, model_hash: str) -> Calibration:
    """Read the calibration file of the model with the hash `model_hash`.

    Raise ModelFormatError if the file is not readable, has another version or is for another
    model.
    """
    try:
        return _read_calibration(path, model, model_hash=model_hash)
    except ModelFormatError as error:
        raise ModelFormatError(f"{error} Change --kv-calibration.") from error


def _read_calibration(path: Path, model: ModelConfig, *, model_hash: str) -> Calibration:
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file() and path.exists():
            raise ModelFormatError(f"{path}: It is not a regular file.")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelFormatError(
                f"{path}: A calibration file has at most {_MAX_FILE_BYTES} bytes."
            )
        with safe_open(path, framework="np") as file:
            facts = _read_metadata(path, file.metadata() or {}, model_hash=model_hash)
            # Check all shapes before any tensor is read.
            for name, shape in _shapes(model).items():
                if name not in file.keys():  # noqa: SIM118  the handle is not a mapping
                    raise ModelFormatError(f"{path}: The tensor {name} is missing.")
                piece = file.get_slice(name)
                if piece.get_dtype() != "F32" or tuple(piece.get_shape()) != shape:
                    raise ModelFormatError(
                        f"{path}: {name} is {piece.get_dtype()} {piece.get_shape()}. It must be "
                        f"F32 {list(shape)}."
                    )
            tensors = {name: file.get_tensor(name) for name in _shapes(model)}
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelFormatError(f"{path}: It cannot be read: {reason}.") from error
    except SafetensorError as error:
        raise ModelFormatError(f"{path}: It is not a valid safetensors file: {error}.") from error
    for name, values in tensors.items():
        min_value = -_MAX_VALUE if name == "k_mean" else 0.0
        if not ((values >= min_value) & (values <= _MAX_VALUE)).all():  # false for NaN
            raise ModelFormatError(
                f"{path}: {name} contains NaN or values outside [{min_value:g}, {_MAX_VALUE:g}]."
            )
    return Calibration(facts=facts, **tensors)


def _read_metadata(path: Path, metadata: dict[str, str], *, model_hash: str) -> CalibrationMetadata:
    if _METADATA_KEY not in metadata:
        raise ModelFormatError(
            f"{path}: It is not a calibration file because the metadata {_METADATA_KEY} is missing."
        )
    try:
        values: Any = json.loads(metadata[_METADATA_KEY])
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: The metadata {_METADATA_KEY} is not JSON.") from error
    if not isinstance(values, dict) or values.get("version") != FORMAT_VERSION:
        got = values.get("version") if isinstance(values, dict) else None
        raise ModelFormatError(
            f"{path}: The format version is {str(got)[:20]}. It must be {FORMAT_VERSION}. Create "
            "the file again with lmdeploy lite calibrate."
        )
    if values.get("model_hash") != model_hash:
        raise ModelFormatError(
            f"{path}: The file is for another model (hash {str(values.get('model_hash'))[:12]}; "
            f"this model has {model_hash[:12]}). Create one with lmdeploy lite calibrate."
        )
    names = {field.name: field.type for field in fields(CalibrationMetadata)}
    if {name: type(value).__name__ for name, value in values.items()} != names:
        raise ModelFormatError(
            f"{path}: The fields of the metadata {_METADATA_KEY} are not those of version 1."
        )
    return CalibrationMetadata(**values)


def engine_constants(
    calibration: Calibration, layers: Sequence[FormatPair], *, rotated: bool
) -> tuple[Floats | None, Floats, Floats]:
    """Return (k_mean, k_scales, v_scales) for the engine. k_mean is None if all of it is 0.

    The scales have the shape [layers, kv_heads].
    """
    k_amax = calibration.k_amax_rotated if rotated else calibration.k_amax
    return (
        calibration.k_mean if calibration.k_mean.any() else None,
        _scales(k_amax, [pair.k for pair in layers]),
        _scales(calibration.v_amax, [pair.v for pair in layers]),
    )


def checkpoint_constants(
    scales: KvScales, layers: Sequence[FormatPair], *, heads: int
) -> tuple[Floats, Floats]:
    """Return k_scales and v_scales for the engine, [layers, heads].

    A layer's scale is that of all its heads. It is 1 for every format but FP8.
    """

    def broadcast(values: Sequence[float], formats: Sequence[str]) -> Floats:
        used = [
            value if name == SCALED_FORMAT else 1.0
            for value, name in zip(values, formats, strict=True)
        ]
        return np.repeat(np.array(used, np.float32)[:, None], heads, axis=1)

    return (
        broadcast(scales.k, [pair.k for pair in layers]),
        broadcast(scales.v, [pair.v for pair in layers]),
    )


def _largest_value(name: str) -> float:
    """Return the value that calibration maps the largest magnitude to; 0 without a global scale."""
    from lmdeploy import _turbomind

    (row,) = [row for row in _turbomind.kv_formats() if row.name == name]
    if not row.has_global_scale:
        return 0.0
    return row.max_value * (_NVFP4_HEADROOM if row.is_fp4 else 1.0)


def _scales(amax: Floats, formats: Sequence[str]) -> Floats:
    """Return the scale of each layer and head.

    It is 1 for formats without a scale and for heads whose values are all 0.
    """
    largest = np.array([_largest_value(name) for name in formats], np.float64)[:, None]
    with np.errstate(divide="ignore"):
        scales = np.where((largest > 0) & (amax > 0), amax / np.maximum(largest, 1.0), 1.0)
    return np.asarray(np.maximum(scales, _MIN_SCALE), np.float32)
