"""Read the scales of an FP8 KV cache that llm-compressor, ModelOpt and AutoFP8 put into folders.

A layer has one `k_scale` and one `v_scale`. A stored value is code · scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.tensor_file import SUPPORTED_FORMATS, StoredTensor, TensorFile
from lmdeploy.checkpoint.methods.groups import SCALE_FORMATS, float_values
from lmdeploy.models.config_reader import ConfigReader

# The layer, and k or v. ModelOpt writes the name of the projection too.
_NAME = re.compile(r"model\.layers\.([0-9]{1,4})\.self_attn\.(?:attn\.|([kv])_proj\.)?([kv])_scale")


@dataclass(frozen=True)
class KvScales:
    """The scale of K and that of V for each layer. It is 1 for a layer without attention."""

    k: tuple[float, ...]
    v: tuple[float, ...]


class _WithoutScales:
    """A TensorFile without the tensors of KV scales."""

    def __init__(self, file: TensorFile, hidden: set[str]) -> None:
        self._file = file
        self.names = [name for name in file.names if name not in hidden]

    def tensor(
        self, name: str, *, max_dims: int = 2, formats: tuple[str, ...] = SUPPORTED_FORMATS
    ) -> StoredTensor:
        """Return a tensor. Raise ModelFormatError for another format or more dimensions."""
        return self._file.tensor(name, max_dims=max_dims, formats=formats)


def take_kv_scales(
    file: TensorFile, has_attention: Sequence[bool], *, source: str
) -> tuple[TensorFile, KvScales | None]:
    """Return the file without its KV scales, and the scales, or None if it has none.

    `has_attention` has an entry for each layer. Raise ModelFormatError for a layer with attention
    but without a scale, and for scales of another shape or value.
    """
    names: dict[tuple[int, str], str] = {}
    for name in file.names:
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in (None, match[3]):
            continue
        key = (int(match[1]), match[3])
        if key in names:
            raise ModelFormatError(
                f"{source}: tensors {names[key]} and {name} exclude each other. Remove one."
            )
        names[key] = name
    if not names:
        return file, None
    sides = [
        tuple(
            _scale(file, names, key=(layer, side), source=source) if has_scale else 1.0
            for layer, has_scale in enumerate(has_attention)
        )
        for side in ("k", "v")
    ]
    layers = {layer for layer, has_scale in enumerate(has_attention) if has_scale}
    kept = {name for (layer, _), name in names.items() if layer in layers}
    return _WithoutScales(file, kept), KvScales(*sides)


def _scale(
    file: TensorFile, names: Mapping[tuple[int, str], str], *, key: tuple[int, str], source: str
) -> float:
    layer, side = key
    if key not in names:
        raise ModelFormatError(
            f"{source}: tensor model.layers.{layer}.self_attn.{side}_scale is missing, but "
            f"{min(names.values())} exists. Every layer with attention must have both KV scales."
        )
    tensor = file.tensor(names[key], max_dims=4, formats=SCALE_FORMATS)
    if tensor.shape != (1,):
        raise ModelFormatError(
            f"{source}: tensor {tensor.name} has shape {list(tensor.shape)}. A KV scale must be "
            "one number for the layer."
        )
    value = float(float_values(tensor.raw, tensor.format)[0])
    if not 0 < value < np.inf:  # false for NaN
        raise ModelFormatError(
            f"{source}: tensor {tensor.name} is {value:g}. It must be a finite number above 0."
        )
    return value


def check_kv_scheme(quantization: ConfigReader) -> None:
    """Raise ModelFormatError unless the declared KV cache is FP8 with one scale per tensor."""
    if quantization.has("kv_cache_quant_config"):
        raise quantization.refuse(
            "kv_cache_quant_config is not supported. It must be kv_cache_scheme."
        )
    algorithm = quantization.text("kv_cache_quant_algo", default="FP8")
    if algorithm != "FP8":
        raise quantization.refuse(f"kv_cache_quant_algo is {algorithm[:40]!r}. It must be FP8.")
    if quantization.any_text("kv_cache_scheme") == "static":  # of AutoFP8
        return
    scheme = quantization.child("kv_cache_scheme")
    if scheme is None:
        return
    kind, bits = scheme.text("type", default="float"), scheme.integer("num_bits", default=8)
    strategy = scheme.text("strategy", default="tensor")
    if (kind, bits, strategy) != ("float", 8, "tensor"):
        raise scheme.refuse(
            f"The KV cache has type {kind[:40]!r}, num_bits {bits} and strategy {strategy[:40]!r}. "
            "It must have float, 8 and tensor."
        )
    if not scheme.flag("symmetric", default=True):
        raise scheme.refuse("symmetric is false. It must be true.")
