"""Tests of whole models that the package compressed-tensors has compressed with its own schemes.

Ours and its reader must give the same bits. The package computes the scales, writes the tensors and
config.json, and dequantizes the matrices. test_compressed_tensors.py has other shapes of scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from tiny_models import TinyModel, make_model, save_model

from lmdeploy import _turbomind
from lmdeploy.checkpoint.convert import for_device, matrix_for_engine, scales_for_engine
from lmdeploy.checkpoint.files.tensor_file import StoredTensor
from lmdeploy.checkpoint.open import open_checkpoint

# Neither 128 nor 64 divides all sizes: blocks at the edges are smaller.
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4}
WHOLE_GROUPS = SIZES | {"hidden_size": 256, "intermediate_size": 384}
PRESETS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16")
# W8A16 with one scale per output, which is no preset of the package.
INT8_CHANNEL = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def scheme_of(name: str) -> QuantizationScheme:
    """Return a scheme of the package for all linear layers."""
    if name == "W8A16-channel":
        return QuantizationScheme(targets=["Linear"], weights=INT8_CHANNEL)
    return preset_name_to_scheme(name, ["Linear"])


def least_and_most(weight: torch.Tensor, args: QuantizationArgs) -> tuple[Any, Any]:
    """Return the smallest and the largest value that share a scale, in the shape of the scales."""
    rows, cols = weight.shape
    height, width = {
        "tensor": (rows, cols),
        "channel": (1, cols),
        "group": (1, args.group_size),
        "block": tuple(args.block_structure or ()),
    }[str(args.strategy)]
    padded = torch.full((-(-rows // height) * height, -(-cols // width) * width), torch.nan)
    padded[:rows, :cols] = weight.float()
    parts = padded.reshape(padded.shape[0] // height, height, -1, width).transpose(1, 2)
    flat = parts.flatten(2)
    least, most = flat.nan_to_num(torch.inf).amin(2), flat.nan_to_num(-torch.inf).amax(2)
    return least.to(weight.dtype), most.to(weight.dtype)


@dataclass(frozen=True)
class Compressed:
    """A folder that the package has written, and the weights that it reads from it."""

    folder: Path
    scheme: QuantizationScheme
    weights: dict[str, torch.Tensor]  # in the dtype of the model


def compress(folder: Path, name: str, dtype: torch.dtype) -> Compressed:
    """Let the package compress a tiny model."""
    sizes = WHOLE_GROUPS if name == "W8A16" else SIZES
    model = make_model(TinyModel("llama", "Llama", sizes)).to(dtype)
    scheme = scheme_of(name)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        module.weight.data[0, :2] = torch.tensor([0.0, -0.0])
        args = module.quantization_scheme.weights
        scale, _ = calculate_qparams(*least_and_most(module.weight, args), args)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.25)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    save_model(model, folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    return Compressed(folder, scheme, dict(model.state_dict()))


def bits(values: np.ndarray) -> Any:
    """Return the bits of FP32 values: zeros of both signs differ."""
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def kept_values(tensor: StoredTensor) -> np.ndarray | None:
    """Return codes times scales of a matrix that a GPU keeps in FP8, else None."""
    kind, codes = matrix_for_engine(tensor, exact=False)
    if not kind.startswith("fp8"):
        return None
    scales = scales_for_engine(tensor, kind)
    assert scales is not None
    values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    width = 128 if kind == "fp8_block" else codes.shape[1]
    return np.asarray(values * np.repeat(scales, width, axis=1)[:, : codes.shape[1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", [*PRESETS, "W8A16-channel"])
def test_values_have_the_bits_of_the_package(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = compress(tmp_path, name, dtype)
    stored = load_file(tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    tensors = {planned.name: planned.tensor for planned in checkpoint.tensors}
    on_gpu = for_device(checkpoint, _turbomind.cuda_capability(90)).tensors
    kept = {
        planned.name: kept_values(planned.tensor) for planned in on_gpu if planned.tensor.matrix
    }
    for engine_name, module in MODULES.items():
        base = f"model.layers.1.{module}."
        parts = {n.removeprefix(base): x for n, x in stored.items() if n.startswith(base)}
        own_dtype = parts["weight_scale"].dtype
        parts["weight_scale"] = parts["weight_scale"].float()  # so that its products are exact
        format_name = "pack-quantized" if "weight_packed" in parts else "naive-quantized"
        compressor = BaseCompressor.get_value_from_registry(format_name)
        theirs = compressor.decompress(parts, made.scheme)["weight"]
        assert theirs.dtype == torch.float32 and len(theirs.unique()) > 50
        _, ours = matrix_for_engine(tensors[f"layers.1.{engine_name}"], exact=True)
        np.testing.assert_array_equal(bits(ours), bits(theirs.numpy()))
        # Its own dequantized model rounds the products to the dtype of the scales.
        rounded = torch.from_numpy(ours.copy()).to(own_dtype)
        assert torch.equal(rounded, made.weights[base + "weight"].to(own_dtype))
        if name.startswith("FP8"):
            values = kept[f"layers.1.{engine_name}"]
            assert values is not None
            np.testing.assert_array_equal(bits(values), bits(theirs.numpy()))
