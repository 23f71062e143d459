"""Tests of compressed-tensors folders, with the package's own writer and reader beside ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from engine_runs import EngineRun
from parity import MAX_RELATIVE_ERROR, prompt, reference_logits, relative_error
from quantized_folders import (
    Stored,
    change_config,
    change_tensors,
    check_hybrid,
    quantize_groups,
    save_quantized,
)
from reference.weights import read_fp8, read_int8, read_packed
from safetensors.torch import load_file
from tiny_families import HYBRID_MODELS
from tiny_models import TINY_MODELS, TinyModel
from tiny_moe import QWEN3_MOE

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.convert import engine_bytes, matrix_for_engine
from lmdeploy.checkpoint.fingerprint import hash_model
from lmdeploy.checkpoint.open import open_checkpoint

LLAMA = TINY_MODELS[0]
UP = "model.layers.0.mlp.up_proj."
BLOCK = [48, 40]


@dataclass(frozen=True)
class Packed:
    """One variant: the format, the arguments of the weights and what the engine makes of it."""

    kind: str
    format: str
    args: dict[str, Any] = field(default_factory=dict)
    is_shuffled: bool = False

    @property
    def scheme(self) -> QuantizationScheme:
        """Return the package's description of the matrix."""
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**self.args))

    @property
    def config(self) -> dict[str, Any]:
        """Return the quantization_config."""
        order = {"actorder": "group"} if self.is_shuffled else {}
        group = {"targets": ["Linear"], "weights": {**self.args, **order}}
        group |= {"input_activations": None, "output_activations": None}
        config = {"config_groups": {"group_0": group}, "format": self.format, "ignore": ["lm_head"]}
        return {"quant_method": "compressed-tensors", "quantization_status": "compressed", **config}

    def quantize(self, weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        """Quantize a matrix and let the package compress it."""
        scales, zeros, groups = self._scales(weight)
        state: Stored = {"weight": torch.from_numpy(weight), "weight_scale": scales}
        if zeros is not None:
            state["weight_zero_point"] = zeros
        if groups is not None:  # the package has removed this form: permute around it
            columns = np.argsort(groups, kind="stable")
            state["weight"] = torch.from_numpy(np.ascontiguousarray(weight[:, columns]))
        parts = BaseCompressor.get_value_from_registry(self.format).compress(state, self.scheme)
        if groups is not None:
            parts |= self._unpermuted(parts, columns)
            parts["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return parts, self.read(parts)

    def _scales(self, weight: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        rows, cols = weight.shape
        if self.args["type"] == "float":
            height, width = {"tensor": (rows, cols), "channel": (1, cols)}.get(
                self.args["strategy"], BLOCK
            )
            shape = (-(-rows // height), -(-cols // width))
            scales = np.empty(shape, np.float32)
            for row, column in np.ndindex(shape):
                part = weight[row * height :, column * width :][:height, :width]
                scales[row, column] = np.abs(part).max() / 448
            is_one = self.args["strategy"] == "tensor"
            return torch.from_numpy(scales.reshape(1) if is_one else scales), None, None
        bits, symmetric = self.args["num_bits"], self.args["symmetric"]
        size = self.args.get("group_size") or cols
        groups = np.arange(cols) // size
        if self.is_shuffled:
            groups = np.random.default_rng(3).permutation(groups)
        _, fp16, zeros = quantize_groups(weight, groups, bits=bits, symmetric=symmetric)
        scales = fp16.astype(np.float32)
        if self.args["strategy"] == "tensor":
            scales = scales.max(keepdims=True).reshape(1)
        offset = 1 << (bits - 1)
        stored = None if symmetric else torch.from_numpy((zeros - offset).astype(np.int8))
        return torch.from_numpy(scales), stored, groups if self.is_shuffled else None

    def _unpermuted(self, parts: Stored, columns: np.ndarray) -> Stored:
        from compressed_tensors.compressors import pack_to_int32, unpack_from_int32

        bits, shape = self.args["num_bits"], torch.Size(parts["weight_shape"].tolist())
        codes = unpack_from_int32(parts["weight_packed"], bits, shape)
        ordered = torch.empty_like(codes)
        ordered[:, torch.from_numpy(columns)] = codes
        return {"weight_packed": pack_to_int32(ordered, bits)}

    def read(self, parts: Stored) -> np.ndarray:
        """Return the values of a matrix as the independent reader sees them."""
        if self.args["type"] == "float":
            block = (BLOCK[0], BLOCK[1]) if self.args["strategy"] == "block" else None
            codes = parts["weight"].view(torch.uint8).numpy()
            return read_fp8(codes, parts["weight_scale"].numpy(), block)
        arrays = {name: data.numpy() for name, data in parts.items()}
        if self.format == "pack-quantized":
            return read_packed(arrays, self.args["num_bits"])
        return read_int8(arrays)


def ints(bits: int, strategy: str = "group", *, symmetric: bool = True) -> dict[str, Any]:
    size = {"group_size": 32} if strategy == "group" else {}
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        **size,
    }


def floats(strategy: str) -> dict[str, Any]:
    block = {"block_structure": BLOCK} if strategy == "block" else {}
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **block}


PACKED, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
VARIANTS = {
    "packed-4": Packed("q4_0", PACKED, ints(4)),
    "packed-4-zeros": Packed("q4_1", PACKED, ints(4, symmetric=False)),
    "packed-4-channel": Packed("q4_0", PACKED, ints(4, "channel")),
    "packed-8": Packed("q8_0", PACKED, ints(8)),
    "packed-shuffled": Packed("q8_0", PACKED, ints(4), is_shuffled=True),
    "int": Packed("q8_0", INT, ints(8, "channel")),
    "int-tensor": Packed("q8_0", INT, ints(8, "tensor")),
    "naive-int": Packed("q8_0", NAIVE, ints(8, "channel")),
    "float": Packed("q8_0", FLOAT, floats("channel")),
    "float-tensor": Packed("q8_0", FLOAT, floats("tensor")),
    "float-block": Packed("q8_0", FLOAT, floats("block")),
    "naive-float": Packed("q8_0", NAIVE, floats("channel")),
}


def save_packed(tiny: TinyModel, folder: Path, variant: Packed) -> Any:
    return save_quantized(tiny, folder, variant.quantize, quantization=variant.config)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed")
    save_packed(LLAMA, folder, VARIANTS["packed-4"])
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_matrices_equal_the_package_and_the_independent_reader(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    save_packed(LLAMA, tmp_path, variant)
    stored = load_file(tmp_path / "model.safetensors")
    parts = {n.removeprefix(UP): data for n, data in stored.items() if n.startswith(UP)}
    wanted = variant.read(parts)
    if not variant.is_shuffled:
        compressor = BaseCompressor.get_value_from_registry(variant.format)
        theirs = compressor.decompress(parts, variant.scheme)["weight"]
        np.testing.assert_array_equal(theirs.numpy(), wanted)
    (planned,) = [p for p in open_checkpoint(tmp_path).tensors if p.name == "layers.0.up"]
    np.testing.assert_array_equal(matrix_for_engine(planned.tensor, exact=True)[1], wanted)
    kind, data = matrix_for_engine(planned.tensor, exact=False)
    assert (kind, data.nbytes) == (variant.kind, engine_bytes(planned, exact=False))
    got = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])
    is_rounded = variant.is_shuffled or variant.args["type"] == "float"
    if kind == "q4_1":
        assert (np.abs(got - wanted) <= np.abs(wanted - wanted.min()).max() * 2**-11).all()
    elif is_rounded:
        largest = np.abs(wanted).reshape(-1, 32).max(axis=1, keepdims=True)
        error = np.abs(got - wanted).reshape(-1, 32)
        assert (error <= largest / 254 * (1 + 2**-9) + 2**-25).all()
    else:
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", ["packed-4-zeros", "packed-shuffled", "int"])
@pytest.mark.parametrize("tiny", [LLAMA, QWEN3_MOE], ids=lambda tiny: tiny.name)
def test_logits_equal_transformers(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    model = save_packed(tiny, tmp_path, VARIANTS[name])
    ids = prompt(80)
    with EngineRun(str(tmp_path), exact=True) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    print(f"{tiny.name} {name}: relative error {error:.2e}")
    assert error <= MAX_RELATIVE_ERROR


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tiny", HYBRID_MODELS, ids=lambda tiny: tiny.name)
def test_hybrid_logits_equal_transformers(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    check_hybrid(tiny, tmp_path, variant.quantize, quantization=variant.config)


def test_several_groups_and_ignored_modules(tmp_path: Path) -> None:
    four, eight = VARIANTS["packed-4"], VARIANTS["int"]

    def quantize(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        if weight.shape == (160, 64):  # gate and up
            return four.quantize(weight)
        if weight.shape == (64, 160):  # down
            return eight.quantize(weight)
        return {"weight": torch.from_numpy(weight)}, weight

    groups = {
        "group_0": {**four.config["config_groups"]["group_0"], "format": PACKED},
        "group_1": {**eight.config["config_groups"]["group_0"], "format": INT},
    }
    config = {**four.config, "format": "mixed-precision", "config_groups": groups}
    model = save_quantized(LLAMA, tmp_path, quantize, quantization=config)
    ids = prompt(80)
    with EngineRun(str(tmp_path), exact=True) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    assert error <= MAX_RELATIVE_ERROR


def test_hash_model_covers_every_part(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    save_packed(LLAMA, tmp_path / "whole", VARIANTS["packed-4-zeros"])
    seen = {hash_model(str(tmp_path / "whole"))}
    for part in ("weight_packed", "weight_scale", "weight_zero_point"):
        (tmp_path / part).mkdir()

        def swap(stored: Stored, name: str = UP + part) -> None:
            stored[name] = stored[name].flip(0)

        seen.add(hash_model(str(change_tensors(tmp_path / "whole", tmp_path / part, swap))))
    assert len(seen) == 4


def replaced(part: str, data: torch.Tensor) -> Callable[[Stored], None]:
    return lambda stored: stored.update({UP + part: data})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda stored: stored.pop(UP + "weight_shape"), "up_proj.weight_shape is missing"),
        (lambda stored: stored.pop(UP + "weight_scale"), "up_proj.weight_scale is missing"),
        (lambda stored: stored.pop(UP + "weight_packed"), "up_proj.weight is missing"),
        (replaced("weight_shape", torch.tensor([160, 63])), r"is \[160, 63\], but .* 4 or 8 bits"),
        (replaced("weight_shape", torch.tensor([160, 0])), r"is \[160, 0\], but"),
        (replaced("weight_shape", torch.tensor([-1, -64])), r"is \[-1, -64\], but"),
        (replaced("weight_shape", torch.tensor([[160, 64]])), r"weight_shape has shape \[1, 2\]"),
        (replaced("weight_scale", torch.ones(160, 3)), r"It must be \[160, groups\]"),
        (replaced("weight_scale", torch.ones(160, 4)), r"must have a multiple of 32 of the 64"),
        (replaced("weight_scale", torch.ones(159)), r"It must be \[160, groups\]"),
        (replaced("weight_scale", torch.zeros(160, 2)), "A scale is 0"),
        (replaced("weight_zero_point", torch.zeros(160, 2, dtype=torch.int8)), "dtype I8"),
        (
            replaced("weight_zero_point", torch.zeros(19, 2, dtype=torch.int32)),
            r"shape \[19, 2\]\. It must be \[20, 2\]",
        ),
        (
            replaced("weight_g_idx", torch.full((64,), 7, dtype=torch.int32)),
            "groups from 7 to 7. They must be from 0 to 1",
        ),
        (replaced("weight", torch.zeros(160, 64)), "exclude each other"),
    ],
)
def test_open_checkpoint_inconsistent_tensor_is_rejected(
    packed: Path, tmp_path: Path, change: Callable[[Stored], None], text: str
) -> None:
    change_tensors(packed, tmp_path, change)
    with pytest.raises(ModelFormatError, match=text):
        for planned in open_checkpoint(tmp_path).tensors:
            if len(planned.tensor.shape) == 2:
                matrix_for_engine(planned.tensor, exact=False)


def test_open_checkpoint_zero_points_of_8_bits_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save_packed(LLAMA, tmp_path / "a", VARIANTS["int"])

    def add(value: int) -> Callable[[Stored], None]:
        return replaced("weight_zero_point", torch.full((160, 1), value, dtype=torch.int8))

    open_checkpoint(change_tensors(tmp_path / "a", tmp_path, add(0)))
    change_tensors(tmp_path / "a", tmp_path, add(1))
    with pytest.raises(ModelFormatError, match=r"zero points of 8 bits. Every zero must be 0"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"format": "mxfp8-quantized"}, "format is 'mxfp8-quantized'. It must be one of"),
        ({"format": "marlin-24"}, "format is 'marlin-24'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'. It must be d"),
        (
            {"config_groups": {"g": {"weights": ints(2)}}},
            "num_bits is 2 for type int. It must be 4",
        ),
        (
            {"config_groups": {"g": {"weights": {**floats("tensor"), "num_bits": 4}}}},
            "for floats of 4",
        ),
        ({"config_groups": {"g": {"weights": {**ints(4), "type": "x"}}}}, "type is 'x'"),
        (
            {"config_groups": {"g": {"weights": {**ints(4), "strategy": "token"}}}},
            "strategy is 'token' for type int",
        ),
        (
            {"config_groups": {"g": {"weights": ints(8, symmetric=False)}}},
            "symmetric is false for 8 bits. It must be true",
        ),
        (
            {"config_groups": {"g": {"weights": {**floats("block"), "block_structure": [1]}}}},
            r"block_structure is \[1\]",
        ),
        (
            {"config_groups": {"g": {"weights": {**ints(4), "actorder": "group"}}}},
            "weight_g_idx is missing",
        ),
        ({"config_groups": [1]}, "must be an object"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_open_checkpoint_unsupported_config_is_rejected(
    packed: Path, tmp_path: Path, values: dict[str, Any], text: str
) -> None:
    change_tensors(packed, tmp_path, lambda stored: None)
    change_config(tmp_path, quantization_config={**VARIANTS["packed-4"].config, **values})
    with pytest.raises(ModelFormatError, match=text):
        open_checkpoint(tmp_path)
