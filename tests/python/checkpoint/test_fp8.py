"""Tests of FP8 checkpoints: scales per tensor, output and block, and rejected folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_runs import EngineRun
from parity import MAX_RELATIVE_ERROR, prompt, reference_logits, relative_error
from quantized_folders import (
    Stored,
    change_config,
    change_tensors,
    check_hybrid,
    save_quantized,
)
from reference.weights import read_fp8
from safetensors.torch import load_file, save_file
from tiny_families import HYBRID_MODELS, HYBRID_MOE
from tiny_latents import V3
from tiny_models import TINY_MODELS, TinyModel
from tiny_moe import QWEN3_MOE

from lmdeploy import _turbomind
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.convert import (
    engine_bytes,
    for_device,
    matrix_for_engine,
    scales_for_engine,
)
from lmdeploy.checkpoint.fingerprint import hash_model
from lmdeploy.checkpoint.methods.fp8 import E4M3_VALUES
from lmdeploy.checkpoint.open import open_checkpoint
from lmdeploy.checkpoint.tensor_plan import PlannedTensor
from lmdeploy.engine.plan import check_model_format

LLAMA = TINY_MODELS[0]
UP = "model.layers.0.mlp.up_proj."
BLOCK = (48, 40)  # divides neither 64, 128, 160 nor 256


@dataclass(frozen=True)
class Fp8:
    """One variant of FP8: its config and its scales."""

    config: dict[str, Any]
    scale_name: str = "weight_scale"
    scale_shape: str = ""  # "", "1", "1 x 1", "rows", "rows x 1" or "blocks"
    scale_dtype: torch.dtype = torch.float32
    unused: tuple[str, ...] = field(default=())
    block: tuple[int, int] = BLOCK

    def quantize(self, weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        """Quantize a matrix whose codes include 0, -0, 448 and -448."""
        weight = weight.copy()
        weight[0, :2] = 0.0, -0.0
        rows, cols = weight.shape
        whole = (rows, cols)
        height, width = {"": whole, "1": whole, "1 x 1": whole, "blocks": self.block}.get(
            self.scale_shape, (1, cols)
        )
        scales = np.empty((-(-rows // height), -(-cols // width)), np.float32)
        codes = np.empty(weight.shape, np.float32)
        for row, column in np.ndindex(scales.shape):
            place = (
                slice(row * height, (row + 1) * height),
                slice(column * width, (column + 1) * width),
            )
            scale = torch.tensor(np.abs(weight[place]).max() / 448).to(self.scale_dtype).float()
            scales[row, column] = scale
            codes[place] = np.clip(weight[place] / float(scale), -448, 448)
        shapes = {"": (), "1": (1,), "rows": (rows,)}
        stored_scales = torch.from_numpy(scales).to(self.scale_dtype)
        parts = {
            "weight": torch.from_numpy(codes).to(torch.float8_e4m3fn),
            self.scale_name: stored_scales.reshape(shapes.get(self.scale_shape, scales.shape)),
        }
        parts |= dict.fromkeys(self.unused, torch.tensor(0.5))
        parts = {name: data.clone() for name, data in parts.items()}
        return parts, self.read(parts)

    def read(self, parts: Stored) -> np.ndarray:
        """Return the values of a matrix as the independent reader sees them."""
        codes = parts["weight"].view(torch.uint8).numpy()
        block = self.block if self.scale_shape == "blocks" else None
        return read_fp8(codes, parts[self.scale_name].float().numpy(), block)


# The inputs of every matrix are a multiple of 32.
LATENTS = replace(V3, settings={**V3.settings, "q_lora_rank": 64, "moe_intermediate_size": 64})
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
VARIANTS = {
    "blocks": Fp8(BLOCKS, "weight_scale_inv", "blocks"),
    "blocks-bf16": Fp8(BLOCKS, "weight_scale_inv", "blocks", torch.bfloat16),
    "blocks-128": Fp8(
        {**BLOCKS, "weight_block_size": [128, 128]},
        "weight_scale_inv",
        "blocks",
        torch.bfloat16,
        block=(128, 128),
    ),
    "huge-block": Fp8(  # a block takes no memory beyond its matrix
        {**BLOCKS, "weight_block_size": [2**31 - 1, 2**31 - 1]}, "weight_scale_inv", "1 x 1"
    ),
    "tensor": Fp8({"quant_method": "fp8"}, unused=("input_scale",)),
    "tensor-1": Fp8({"quant_method": "fp8", "activation_scheme": "static"}, scale_shape="1"),
    "fbgemm": Fp8(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        scale_shape="rows x 1",
        unused=("input_scale_ub",),
    ),
    "rows": Fp8({"quant_method": "fbgemm_fp8"}, scale_shape="rows"),
    "modelopt": Fp8({"quant_method": "modelopt", "quant_algo": "FP8"}, unused=("input_scale",)),
}


# The formats of the matrices on a device with FP8: blocks of 40 inputs have none.
KEPT_KINDS = {"blocks": {"q8_0"}, "blocks-bf16": {"q8_0"}, "blocks-128": {"fp8", "fp8_block"}}


def save_fp8(tiny: TinyModel, folder: Path, variant: Fp8) -> Any:
    return save_quantized(tiny, folder, variant.quantize, quantization=variant.config)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    save_fp8(LLAMA, folder, VARIANTS["blocks"])
    return folder


def test_e4m3_values_equal_the_codec_of_the_engine() -> None:
    codes = np.arange(256, dtype=np.uint8)
    is_number = ~np.isnan(E4M3_VALUES)
    assert np.flatnonzero(~is_number).tolist() == [0x7F, 0xFF]
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(
        E4M3_VALUES.view(np.uint32)[is_number], theirs.view(np.uint32)[is_number]
    )
    nothing = np.empty((4, 0), np.uint8)
    got = _turbomind.decode_rows("fp8", codes.reshape(4, 64), nothing, 64, "float32")
    np.testing.assert_array_equal(got.reshape(-1)[is_number], E4M3_VALUES[is_number])


@pytest.mark.parametrize("name", VARIANTS)
def test_fp8_matrices_equal_the_independent_reader(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    save_fp8(LLAMA, tmp_path, variant)
    stored = load_file(tmp_path / "model.safetensors")
    planned = {planned.name: planned for planned in open_checkpoint(tmp_path).tensors}
    for engine_name, base in (
        ("layers.0.up", UP),
        ("layers.1.o", "model.layers.1.self_attn.o_proj."),
    ):
        parts = {n.removeprefix(base): data for n, data in stored.items() if n.startswith(base)}
        wanted = variant.read(parts)
        tensor = planned[engine_name].tensor
        np.testing.assert_array_equal(matrix_for_engine(tensor, exact=True)[1], wanted)
        kind, data = matrix_for_engine(tensor, exact=False)
        assert (kind, data.nbytes) == ("q8_0", engine_bytes(planned[engine_name], exact=False))
        got = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q8_0)
        step = np.abs(wanted).reshape(-1, 32).max(axis=1, keepdims=True) / 127
        error = np.abs(got - wanted).reshape(-1, 32)
        # FP16 has 11 bits; below 2^-14, steps of 2^-24.
        assert (error <= step / 2 * (1 + 2**-9) + 2**-25).all()
        relative = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert relative < 0.006  # 0.5 %, beside 2.65 % of FP8 itself


def kept_tensors(folder: Path) -> list[PlannedTensor]:
    """Return the matrices of a folder on a GPU."""
    tensors = for_device(open_checkpoint(folder), _turbomind.cuda_capability(90)).tensors
    return [planned for planned in tensors if planned.tensor.matrix is not None]


def kept_values(kind: str, codes: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """Return codes times scales as torch reads them."""
    rows, cols = codes.shape
    width = {"fp8": cols, "fp8_block": 128}[kind]
    assert scales is not None and scales.dtype == np.float32 and scales.flags.c_contiguous
    assert scales.shape == (rows, -(-cols // width))
    values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    return values * np.repeat(scales, width, axis=1)[:, :cols]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tiny", [LLAMA, QWEN3_MOE, *HYBRID_MODELS], ids=lambda tiny: tiny.name)
def test_a_device_with_fp8_gets_codes_and_scales(
    tiny: TinyModel, name: str, tmp_path: Path
) -> None:
    save_fp8(tiny, tmp_path, VARIANTS[name])
    kinds = set()
    for planned in kept_tensors(tmp_path):
        tensor = planned.tensor
        # Other tests compare these values with the independent reader and with transformers.
        _, wanted = matrix_for_engine(tensor, exact=True)
        kind, codes = matrix_for_engine(tensor, exact=False)
        kinds.add(kind)
        if kind != "q8_0":
            scales = scales_for_engine(tensor, kind)
            values = kept_values(kind, codes, scales)
            np.testing.assert_array_equal(values.view(np.uint32), wanted.view(np.uint32))
            assert scales is not None
            assert engine_bytes(planned, exact=False) == codes.nbytes + scales.nbytes
    assert kinds == KEPT_KINDS.get(name, {"fp8"})


def test_rows_of_rope_move_with_their_scales(tmp_path: Path) -> None:
    save_fp8(LLAMA, tmp_path, VARIANTS["fbgemm"])
    (query,) = (p.tensor for p in kept_tensors(tmp_path) if p.name == "layers.0.q")
    _, wanted = matrix_for_engine(query, exact=True, interleaved_heads=2)
    kind, codes = matrix_for_engine(query, exact=False, interleaved_heads=2)
    scales = scales_for_engine(query, kind, interleaved_heads=2)
    np.testing.assert_array_equal(kept_values(kind, codes, scales), wanted)
    assert (wanted != matrix_for_engine(query, exact=True)[1]).any()


@pytest.mark.parametrize("name", ["blocks", "tensor", "fbgemm"])
@pytest.mark.parametrize("tiny", [LLAMA, QWEN3_MOE, LATENTS], ids=lambda tiny: tiny.name)
def test_fp8_logits_equal_transformers(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    model = save_fp8(tiny, tmp_path, VARIANTS[name])
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


def test_published_folders_have_vision_and_prediction_beside_the_text(tmp_path: Path) -> None:
    variant = VARIANTS["blocks-bf16"]

    def quantize(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        if weight.shape == (8, 64):  # in_proj_a and in_proj_b
            return {"weight": torch.from_numpy(weight)}, weight
        return variant.quantize(weight)

    kept = [f"model.language_model.layers.0.linear_attn.{name}" for name in ("in_proj_a", "conv1d")]
    config = {**BLOCKS, "modules_to_not_convert": ["lm_head", "model.visual", *kept]}
    model = save_quantized(HYBRID_MOE, tmp_path, quantize, quantization=config)
    stored = {
        name.replace("model.", "model.language_model.", 1): data
        for name, data in load_file(tmp_path / "model.safetensors").items()
    }
    others, _ = variant.quantize(np.ones((48, 40), np.float32))  # 40 is no multiple of 32
    for base in ("model.visual.blocks.0.attn.qkv.", "mtp.layers.0.self_attn.q_proj."):
        stored |= {base + part: data.clone() for part, data in others.items()}
    stored["mtp.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)
    save_file(stored, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    del text["quantization_config"]
    architecture = "Qwen3_5MoeForConditionalGeneration"
    outer = {"architectures": [architecture], "text_config": text, "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    ids = prompt(80)
    with EngineRun(str(tmp_path), exact=True) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    assert error <= MAX_RELATIVE_ERROR


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    save_fp8(HYBRID_MODELS[1], folder, VARIANTS["blocks"])
    return folder


@pytest.mark.parametrize(
    ("name", "rows", "text"),
    [
        (
            "self_attn.q_proj.weight_scale_inv",
            -1,
            r"q_proj\.weight_scale_inv has shape \[10, 2\]\. It must be \[11, 2\] for blocks of 48",
        ),
        (
            "self_attn.q_proj.weight",
            -1,
            r"q_proj\.weight has shape \[511, 64\]\. By the config it must be \[512, 64\]",
        ),
        (
            "linear_attn.in_proj_qkvz.weight",
            -4,
            r"in_proj_qkvz\.weight has shape \[444, 64\]\. By the config it must be \[448, 64\]",
        ),
        (
            "linear_attn.in_proj_ba.weight",
            -1,
            r"in_proj_ba\.weight has shape \[15, 64\]\. By the config it must be \[16, 64\]",
        ),
    ],
)
def test_a_stored_matrix_with_other_rows_is_rejected(
    hybrid: Path, tmp_path: Path, name: str, rows: int, text: str
) -> None:
    layer = 0 if name.startswith("linear_attn") else 1

    def cut(stored: Stored) -> None:
        stored[f"model.layers.{layer}.{name}"] = stored[f"model.layers.{layer}.{name}"][:rows]

    with pytest.raises(ModelFormatError, match=text) as caught:
        open_checkpoint(change_tensors(hybrid, tmp_path, cut))
    assert "\n" not in str(caught.value)


def test_hash_model_covers_scales_and_blocks(blocks: Path, tmp_path: Path) -> None:
    def swap(stored: Stored) -> None:
        stored[UP + "weight_scale_inv"] = stored[UP + "weight_scale_inv"].flip(0)

    seen = {hash_model(str(blocks)), hash_model(str(change_tensors(blocks, tmp_path, swap)))}
    change_config(tmp_path, quantization_config={**BLOCKS, "weight_block_size": [50, 40]})
    seen.add(hash_model(str(tmp_path)))  # the same number of blocks in every matrix
    assert len(seen) == 3


def test_modelopt_config_in_a_file_of_its_own(tmp_path: Path) -> None:
    save_fp8(LLAMA, tmp_path, VARIANTS["modelopt"])
    wanted = hash_model(str(tmp_path))
    change_config(tmp_path, quantization_config=None)
    own = tmp_path / "hf_quant_config.json"
    own.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["x"]}}))
    assert hash_model(str(tmp_path)) == wanted
    check_model_format(tmp_path, "modelopt", model_path="m")
    own.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelFormatError, match=r"quant_algo is 'W4A8_AWQ'. It must be one of FP8"):
        open_checkpoint(tmp_path)


def replaced(part: str, data: torch.Tensor) -> Callable[[Stored], None]:
    return lambda stored: stored.update({UP + part: data})


def with_scale(value: float) -> Callable[[Stored], None]:
    return replaced("weight_scale_inv", torch.full((4, 2), value))


def with_code(code: int) -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        stored[UP + "weight"].view(torch.uint8)[3, 5] = code

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda stored: stored.pop(UP + "weight"), "up_proj.weight is missing"),
        (lambda stored: stored.pop(UP + "weight_scale_inv"), "weight has dtype F8_E4M3"),
        (replaced("weight_scale", torch.ones(1)), "exclude each other"),
        (replaced("weight_scale_inv", torch.ones(4, 3)), r"It must be \[4, 2\] for blocks of 48 x"),
        (replaced("weight_scale_inv", torch.ones(7)), r"It must be \[4, 2\] for blocks of 48 x"),
        (replaced("weight", torch.ones(160, 64)), "weight has dtype F32"),
        (replaced("weight", torch.ones(160).to(torch.float8_e4m3fn)), "must have two dimensions"),
        (replaced("weight", torch.ones(160, 40).to(torch.float8_e4m3fn)), "a multiple of 32"),
        (with_code(0x7F), r"up_proj\.weight: A code is NaN"),
        (with_code(0xFF), r"up_proj\.weight: A code is NaN"),
        (with_scale(0.0), r"up_proj\.weight: A scale is 0"),
        (with_scale(-1.0), "A scale is -1"),
        (with_scale(float("nan")), "A scale is nan"),
        (with_scale(float("inf")), "A scale is inf"),
        (with_scale(1e37), "A scale is 1e"),
        (with_scale(1e6), "beyond 65504, the limit of FP16"),
        (with_scale(1e-9), "the largest value is 4.48e-07. It must be at least 3.03e-05"),
    ],
)
def test_open_checkpoint_inconsistent_fp8_tensor_is_rejected(
    blocks: Path, tmp_path: Path, change: Callable[[Stored], None], text: str
) -> None:
    change_tensors(blocks, tmp_path, change)
    with pytest.raises(ModelFormatError, match=text):
        for planned in open_checkpoint(tmp_path).tensors:
            if len(planned.tensor.shape) == 2:
                matrix_for_engine(planned.tensor, exact=False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_code(0x7F), r"up_proj\.weight: A code is NaN"),
        (with_code(0xFF), r"up_proj\.weight: A code is NaN"),
        (with_scale(0.0), r"up_proj\.weight: A scale is 0"),
        (with_scale(-1.0), "A scale is -1"),
        (with_scale(float("nan")), "A scale is nan"),
        (with_scale(float("inf")), "A scale is inf"),
        (with_scale(1e37), "A scale is 1e"),
        (with_scale(1e6), None),  # FP16 is not needed
        (with_scale(1e-9), None),
    ],
)
def test_a_device_with_fp8_rejects_bad_codes_and_scales(
    tmp_path: Path, change: Callable[[Stored], None], text: str | None
) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    save_fp8(LLAMA, tmp_path / "good", VARIANTS["blocks-128"])

    def changed(stored: Stored) -> None:
        shape = stored[UP + "weight_scale_inv"].shape
        change(stored)
        if stored[UP + "weight_scale_inv"].shape != shape:
            scales = stored[UP + "weight_scale_inv"][: shape[0], : shape[1]]
            stored[UP + "weight_scale_inv"] = scales.contiguous()

    change_tensors(tmp_path / "good", tmp_path / "bad", changed)
    with pytest.raises(ModelFormatError, match=text) if text else nullcontext():
        for planned in kept_tensors(tmp_path / "bad"):
            kind, _ = matrix_for_engine(planned.tensor, exact=False)
            scales_for_engine(planned.tensor, kind)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"fmt": "e5m2"}, "fmt is 'e5m2'. It must be e4m3"),
        ({"weight_block_size": [48]}, r"weight_block_size is \[48\]. It must be two integers"),
        ({"weight_block_size": [48, 0]}, "must be two integers above 0"),
        ({"weight_block_size": [-1, 1]}, "list of integers from 0"),
        ({"weight_block_size": None}, r"weight_scale_inv has shape .* It must have one scale, or"),
        ({"weight_block_size": [1 << 30, 1]}, r"for blocks of 1073741824 x 1"),
    ],
)
def test_open_checkpoint_unsupported_fp8_is_rejected(
    blocks: Path, tmp_path: Path, values: dict[str, Any], text: str
) -> None:
    change_tensors(blocks, tmp_path, lambda stored: None)
    change_config(tmp_path, quantization_config={**BLOCKS, **values})
    with pytest.raises(ModelFormatError, match=text):
        open_checkpoint(tmp_path)
