"""Open a Hugging Face folder (config.json and safetensors files) as a Checkpoint."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import read_json_object
from lmdeploy.checkpoint.files.safetensors_file import SafetensorsFile
from lmdeploy.checkpoint.files.tensor_file import TensorFile
from lmdeploy.checkpoint.files.text_part import has_vision, text_config
from lmdeploy.checkpoint.files.usual_names import UsualNames
from lmdeploy.checkpoint.kv_scales import check_kv_scheme, take_kv_scales
from lmdeploy.checkpoint.methods import METHODS
from lmdeploy.checkpoint.tensor_plan import (
    KV_SCALES_ADVICE,
    Checkpoint,
    TensorLayout,
    as_location,
    bias_of,
    plan_tensors,
    resolve_tied_head,
    stored_dtype,
)
from lmdeploy.models import family_of_hf
from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import ModelFamily
from lmdeploy.models.read_decoder import read_decoder

logger = logging.getLogger("lmdeploy")

_MAX_CONFIG_BYTES = 16 << 20
_MODELOPT_FILE = "hf_quant_config.json"
_MODELOPT_KEYS = ("quant_algo", "kv_cache_quant_algo", "group_size", "quantized_layers")
_KV_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_config")
# Methods that may leave the weights unquantized.
_KV_METHODS = ("quark",)


def method_of(folder: Path) -> str | None:
    """Return the quantization method that the config names, or None if it is not in METHODS."""
    values = _read_config(folder)
    quantization = values.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return method if isinstance(method, str) and method in METHODS else None


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the values of config.json, with those of ModelOpt's own file if there are any."""
    values = read_json_object(folder / "config.json", _MAX_CONFIG_BYTES)
    own = folder / _MODELOPT_FILE
    if values.get("quantization_config") is None and own.is_file():
        own_values = read_json_object(own, _MAX_CONFIG_BYTES)
        reader = ConfigReader(own_values, str(own))
        if reader.child("quantization") is not None:
            own_values = own_values["quantization"]
            found = {key: own_values[key] for key in _MODELOPT_KEYS if key in own_values}
            values["quantization_config"] = {"quant_method": "modelopt", **found}
    return values


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of config.json with `overrides`, which are merged into its objects."""
    result = dict(values)
    for key, value in overrides.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merged(old, value)
        result[key] = value
    return result


def open_folder(folder: Path, overrides: Mapping[str, Any] = MappingProxyType({})) -> Checkpoint:
    """Open the folder. `overrides` replace values of config.json.

    Raise ModelFormatError for anything that is not supported.
    """
    source = str(folder / "config.json") + (" with hf_overrides" if overrides else "")
    values = _read_config(folder)
    for key in overrides.keys() - values.keys():
        logger.warning("%s: hf_overrides set %r, which config.json does not have.", folder, key)
    values = merged(values, overrides)
    reader = ConfigReader(values, source)
    architectures = reader.texts("architectures")
    if not architectures:
        raise reader.refuse("architectures is missing.")
    vision = has_vision(architectures[0])
    if vision:
        values = text_config(values, architectures[0], source=source)
        reader = ConfigReader(values, source)
        architectures = reader.texts("architectures")
    family = family_of_hf(architectures[0], source)
    quantization = _method_config(reader, family)
    reader = family.completed(reader)
    reader.require(family.hf_fixed)
    config = read_decoder(reader, family)
    usual = {kind: as_location(name).name for kind, name in family.hf_tensors.items()}
    file: TensorFile = UsualNames(
        SafetensorsFile(folder), usual, has_vision=vision, source=str(folder)
    )
    kv_scales = None
    if quantization is not None:
        file = METHODS[quantization.text("quant_method")](file, quantization, source=str(folder))
        attention = [config.owns_kv(layer) for layer in range(config.num_layers)]
        file, kv_scales = take_kv_scales(file, attention, source=str(folder))
    names = {**family.hf_tensors, **family.hf_extra_tensors(reader)}
    config = resolve_tied_head(file, config, names=names, source=source)
    recurrent = family.recurrent.hf_tensors if family.recurrent else {}
    for matrix in family.hf_bias(reader):
        names[f"{matrix}.bias"] = bias_of({**names, **recurrent}[matrix])
    tensors = tuple(
        plan_tensors(
            file,
            config,
            layout=TensorLayout(
                names=names,
                experts=family.experts.hf if family.experts else (),
                recurrent=recurrent,
                interleaved_rope=family.hf_interleaved_rope,
                norm_offset=family.hf_norm_offset,
                scales=family.hf_scales(reader),
                unused=tuple(
                    pattern.replace("<layers>", str(config.num_layers))
                    for pattern in family.hf_unused
                ),
            ),
            source=str(folder),
        )
    )
    return Checkpoint(
        folder, family, config, tensors, stored_dtype(tensors), values, False, kv_scales
    )


def _method_config(reader: ConfigReader, family: ModelFamily) -> ConfigReader | None:
    """Return `quantization_config` if METHODS has its method, or None if weights need no method.

    Raise ModelFormatError for a method that is not supported.
    """
    quantization = reader.child("quantization_config")
    if quantization is None:
        return None
    method = quantization.text("quant_method", default="unknown")
    is_known = method in family.hf_quant_methods
    if method in METHODS:
        check_kv_scheme(quantization)
        # `modules_to_not_convert` is not needed: the tensors show which modules were converted.
        return quantization
    kv_keys = [key for key in _KV_KEYS if quantization.has(key)]
    if kv_keys and (is_known or not _has_quantized_weights(quantization, method)):
        raise quantization.refuse(
            f"{kv_keys[0]} declares KV scales, which are not supported. {KV_SCALES_ADVICE} Remove "
            f"{kv_keys[0] if is_known else 'quantization_config'} and the tensors k_scale, v_scale "
            "and kv_scale."
        )
    if is_known:
        return None
    known = "".join(f"{name}, " for name in (*family.hf_quant_methods, *METHODS))
    raise ModelFormatError(
        f"{reader.source}: quantization_config.quant_method is {method[:40]!r}. "
        f"Use {known}F32, F16 or BF16 weights, which --weight-format can quantize, or a GGUF file."
        + (f" KV scales are not supported either. {KV_SCALES_ADVICE}" if kv_keys else "")
    )


def _has_quantized_weights(quantization: ConfigReader, method: str) -> bool:
    parts = [quantization.child(key) for key in ("config_groups", "global_quant_config")]
    return method not in _KV_METHODS or quantization.has("quant_algo") or any(parts)
