"""The calibration file: K's mean per channel and the ranges of K and V, tied to one model.

Ranges are stored, not the factors `g` made of them: those depend on the format, so that one file
serves all formats.
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
from lmdeploy.config.kv_formats import FormatPair

if TYPE_CHECKING:
    from lmdeploy._turbomind import ModelConfig

Floats = npt.NDArray[np.float32]

FORMAT_VERSION = 1
_METADATA_KEY = "kv_calibration"
_MAX_FILE_BYTES = 1 << 26
# The largest code of a format times the largest scale that calibration may use. NVFP4: 256 of 448,
# so that the search has room above the largest group.
_LARGEST = {"nvfp4": 6.0 * 256.0, "fp8": 448.0, "fp8_e5m2": 57344.0}
_MIN_FACTOR = 2.0**-60
# Far above K and V of any model, far below where sums of them overflow.
_MAX_VALUE = 2.0**24


@dataclass(frozen=True)
class CalibrationMetadata:
    """What a calibration file was made of."""

    model_hash: str
    text_hash: str
    tokens: int
    context: int
    mean: str  # all, slow, none
    percentile: float
    version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Calibration:
    """Constants of one model's cache, K after RoPE, by model layer."""

    facts: CalibrationMetadata
    k_mean: Floats  # [layers, kv_heads, head_dim], before the rotation
    k_amax: Floats  # [layers, kv_heads], of K - mean: at least the largest value
    k_amax_rotated: Floats  # [layers, kv_heads], of K - mean after the rotation
    v_amax: Floats  # [layers, kv_heads]


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    heads = (model.num_layers, model.num_kv_heads)
    shapes: dict[str, tuple[int, ...]] = {"k_mean": (*heads, model.head_dim)}
    return {**shapes, **dict.fromkeys(("k_amax", "k_amax_rotated", "v_amax"), heads)}


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes the file; equal calibrations give equal bytes."""
    from safetensors.numpy import save_file

    # One entry: the library writes several in no fixed order.
    facts = json.dumps(asdict(calibration.facts), sort_keys=True)
    tensors = {
        name: np.ascontiguousarray(getattr(calibration, name), np.float32)
        for name in ("k_mean", "k_amax", "k_amax_rotated", "v_amax")
    }
    save_file(tensors, path, metadata={_METADATA_KEY: facts})


def read_calibration(path: Path, model: ModelConfig, *, model_hash: str) -> Calibration:
    """The calibration in `path` for the model with this hash.

    Raises ModelFormatError when it cannot be read, is of another version or for another model.
    """
    try:
        return _read_calibration(path, model, model_hash=model_hash)
    except ModelFormatError as error:
        raise ModelFormatError(f"kv_calibration: {error}; change --kv-calibration") from error


def _read_calibration(path: Path, model: ModelConfig, *, model_hash: str) -> Calibration:
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file() and path.exists():
            raise ModelFormatError(f"{path}: cannot be read: wanted a regular file")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelFormatError(f"{path}: more than {_MAX_FILE_BYTES} bytes: no calibration")
        with safe_open(path, framework="np") as file:
            facts = _read_metadata(path, file.metadata() or {}, model_hash=model_hash)
            # The sizes first: nothing of a wrong shape is read.
            for name, shape in _shapes(model).items():
                if name not in file.keys():  # noqa: SIM118  the handle is not a mapping
                    raise ModelFormatError(f"{path}: tensor {name} is missing")
                piece = file.get_slice(name)
                if piece.get_dtype() != "F32" or tuple(piece.get_shape()) != shape:
                    raise ModelFormatError(
                        f"{path}: {name} is {piece.get_dtype()} {piece.get_shape()}, wanted F32 "
                        f"{list(shape)}"
                    )
            tensors = {name: file.get_tensor(name) for name in _shapes(model)}
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelFormatError(f"{path}: cannot be read: {reason}") from error
    except SafetensorError as error:
        raise ModelFormatError(f"{path}: truncated or corrupt safetensors: {error}") from error
    for name, values in tensors.items():
        min_value = -_MAX_VALUE if name == "k_mean" else 0.0
        if not ((values >= min_value) & (values <= _MAX_VALUE)).all():  # a NaN is not
            raise ModelFormatError(
                f"{path}: {name} holds values beyond [{min_value:g}, {_MAX_VALUE:g}] or NaN"
            )
    return Calibration(facts=facts, **tensors)


def _read_metadata(path: Path, metadata: dict[str, str], *, model_hash: str) -> CalibrationMetadata:
    if _METADATA_KEY not in metadata:
        raise ModelFormatError(
            f"{path}: no file of lmdeploy lite calibrate: {_METADATA_KEY} is missing"
        )
    try:
        values: Any = json.loads(metadata[_METADATA_KEY])
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: {_METADATA_KEY} is not JSON") from error
    if not isinstance(values, dict) or values.get("version") != FORMAT_VERSION:
        got = values.get("version") if isinstance(values, dict) else None
        raise ModelFormatError(
            f"{path}: calibration format version {str(got)[:20]}, wanted {FORMAT_VERSION}; make it "
            "again with lmdeploy lite calibrate"
        )
    if values.get("model_hash") != model_hash:
        raise ModelFormatError(
            f"{path}: made for another model (hash {str(values.get('model_hash'))[:12]}, this "
            f"model has {model_hash[:12]}); make one with lmdeploy lite calibrate"
        )
    names = {field.name: field.type for field in fields(CalibrationMetadata)}
    if {name: type(value).__name__ for name, value in values.items()} != names:
        raise ModelFormatError(f"{path}: {_METADATA_KEY} has other fields than version 1")
    return CalibrationMetadata(**values)


def engine_constants(
    calibration: Calibration, layers: Sequence[FormatPair], *, rotated: bool
) -> tuple[Floats | None, Floats, Floats]:
    """(k_mean, k_scales, v_scales) for the engine; k_mean None where all of it is 0."""
    k_amax = calibration.k_amax_rotated if rotated else calibration.k_amax
    return (
        calibration.k_mean if calibration.k_mean.any() else None,
        _factors(k_amax, [pair.k for pair in layers]),
        _factors(calibration.v_amax, [pair.v for pair in layers]),
    )


def _factors(amax: Floats, formats: Sequence[str]) -> Floats:
    """`g` by layer and head: 1 for formats without a factor and for heads that are all zeros."""
    largest = np.array([_LARGEST.get(name, 0.0) for name in formats], np.float64)[:, None]
    with np.errstate(divide="ignore"):
        factors = np.where((largest > 0) & (amax > 0), amax / np.maximum(largest, 1.0), 1.0)
    return np.asarray(np.maximum(factors, _MIN_FACTOR), np.float32)
