"""Tests of AutoRound checkpoints: both layouts, scales with a sign, modules, rejected folders."""

from __future__ import annotations

from dataclasses import dataclass
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
    pack_words,
    quantize_groups,
    save_quantized,
)
from reference.weights import AWQ_ORDER, read_awq, read_gptq
from tiny_families import HYBRID_MODELS
from tiny_models import TINY_MODELS, TinyModel
from tiny_moe import QWEN3_MOE

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.convert import matrix_for_engine
from lmdeploy.checkpoint.open import open_checkpoint

QWEN2 = next(tiny for tiny in TINY_MODELS if tiny.architecture == "Qwen2")
DOWN = "model.layers.1.mlp.down_proj."


def full_range(weight: np.ndarray, group: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales [outputs, groups] that map the largest weight of a group to 0."""
    groups = weight.reshape(len(weight), -1, group)
    place = np.abs(groups).argmax(axis=2)[..., None]
    largest = np.take_along_axis(groups, place, axis=2)[..., 0]
    scales = (-largest / (1 << (bits - 1))).astype(np.float16)
    middle = 1 << (bits - 1)
    codes = np.rint(groups / scales.astype(np.float32)[..., None]) + middle
    return np.clip(codes, 0, 2 * middle - 1).reshape(weight.shape).astype(np.int64), scales


@dataclass(frozen=True)
class AutoRound:
    """One variant of AutoRound."""

    kind: str  # what the engine makes of it
    packing: str = "auto_round:auto_gptq"
    bits: int = 4
    symmetric: bool = True
    group: int = 32

    @property
    def config(self) -> dict[str, Any]:
        """Return the quantization_config."""
        sizes = {"bits": self.bits, "group_size": self.group, "sym": self.symmetric}
        form = {"packing_format": self.packing, "data_type": "int", "iters": 200}
        return {"quant_method": "auto-round", "autoround_version": "0.9.0", **sizes, **form}

    def quantize(self, weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        """Quantize a matrix. Return its tensors, and the values of an independent reader."""
        if self.symmetric:
            codes, scales = full_range(weight, self.group, self.bits)
            assert (scales < 0).any() and (scales > 0).any()
            zeros = np.full(scales.shape, 1 << (self.bits - 1))
        else:
            groups = np.arange(weight.shape[1]) // self.group
            codes, scales, zeros = quantize_groups(weight, groups, bits=self.bits, symmetric=False)
        arrays = {"scales": np.ascontiguousarray(scales.T)}
        if self.packing.endswith("awq"):
            arrays |= {"qweight": pack_awq(codes.T), "qzeros": pack_awq(zeros.T)}
            values = read_awq(arrays)
        else:
            stored = (zeros - 1) % (1 << self.bits)
            arrays["qweight"] = pack_words(codes.T, self.bits, 0)
            arrays["qzeros"] = pack_words(stored.T, self.bits, 1)
            values = read_gptq(arrays, bits=self.bits)
        return {name: torch.from_numpy(data) for name, data in arrays.items()}, values


def pack_awq(codes: np.ndarray) -> np.ndarray:
    ordered = codes.reshape(len(codes), -1, 8)[:, :, list(AWQ_ORDER)]
    return pack_words(ordered.reshape(codes.shape), 4, 1)


VARIANTS = {
    "gptq": AutoRound("q4_0"),
    "gptq-zeros": AutoRound("q4_1", symmetric=False),
    "gptq-8-bits": AutoRound("q8_0", bits=8),
    "awq": AutoRound("q4_0", "auto_round:auto_awq"),
    "awq-zeros": AutoRound("q4_1", "auto_round:awq", symmetric=False),
}


def save_auto_round(tiny: TinyModel, folder: Path, variant: AutoRound, **config: Any) -> Any:
    return save_quantized(tiny, folder, variant.quantize, quantization={**variant.config, **config})


@pytest.fixture(scope="module")
def symmetric(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto_round")
    save_auto_round(QWEN2, folder, VARIANTS["gptq"])
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_auto_round_matrices_equal_the_independent_reader(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    model = save_auto_round(QWEN2, tmp_path, variant)
    wanted = model.state_dict()[DOWN + "weight"].numpy()
    (planned,) = [p for p in open_checkpoint(tmp_path).tensors if p.name == "layers.1.down"]
    kind, exact = matrix_for_engine(planned.tensor, exact=True)
    assert kind == "f32"
    np.testing.assert_array_equal(exact, wanted)
    kind, data = matrix_for_engine(planned.tensor, exact=False)
    assert kind == variant.kind
    got = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])
    if variant.symmetric:
        np.testing.assert_array_equal(got, wanted)
    else:  # the minimum is rounded to 11 bits
        assert (np.abs(got - wanted) <= np.abs(wanted - wanted.min()).max() * 2**-11).all()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tiny", [QWEN2, QWEN3_MOE], ids=lambda tiny: tiny.name)
def test_auto_round_logits_equal_transformers(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    model = save_auto_round(tiny, tmp_path, VARIANTS[name])
    ids = prompt(80)
    with EngineRun(str(tmp_path), exact=True) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    print(f"{tiny.name} {name}: relative error {error:.2e}")
    assert error <= MAX_RELATIVE_ERROR


@pytest.mark.parametrize("name", VARIANTS)
def test_hybrid_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    check_hybrid(HYBRID_MODELS[0], tmp_path, variant.quantize, quantization=variant.config)


@pytest.mark.parametrize("name", ["gptq", "gptq-8-bits"])
def test_kernels_compute_scales_with_a_sign(name: str, tmp_path: Path) -> None:
    model = save_auto_round(QWEN2, tmp_path, VARIANTS[name])
    ids = prompt(80)
    with EngineRun(str(tmp_path), exact=False) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    print(f"{name}: relative error {error:.2e}")
    assert (
        error <= 0.02
    )  # as GPTQ (0.009), because some values are 16-bit; absolute scales give 1.5


def test_modules_that_are_not_quantized_are_accepted(tmp_path: Path) -> None:
    variant = VARIANTS["gptq"]

    def quantize(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        if weight.shape in ((160, 64), (64, 160)):  # of the MLP
            return variant.quantize(weight)
        return {"weight": torch.from_numpy(weight)}, weight

    modules = {
        "lm_head": {"bits": 16, "data_type": "float"},
        "model.language_model.layers.0.linear_attn.norm": {"bits": 16, "data_type": "float"},
        ".*attn.*": {"bits": 16},
        "model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 32, "sym": True},
        "model.layers.1.mlp.up_proj": {},
    }
    config = {**variant.config, "extra_config": modules}
    check_hybrid(HYBRID_MODELS[0], tmp_path, quantize, quantization=config)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"bits": 2}, "bits is 2. It must be 4 or 8"),
        ({"bits": 3}, "bits is 3. It must be 4 or 8"),
        ({"packing_format": "auto_round:gptqmodel"}, "packing_format is 'auto_round:gptqmodel'"),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "bits is 8. It must be 4"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp'. It must be int"),
        ({"act_bits": 8}, "act_bits is 8. It must be 16 or more"),
        ({"sym": "yes"}, "sym is 'yes'"),
        ({"group_size": 48}, "group_size is 48"),
        ({"extra_config": {"lm_head": 8}}, "extra_config: lm_head is '8'. It must be an object"),
        ({"extra_config": {"x": {"bits": 8}}}, "extra_config: x: bits is '8'. It must be 4"),
        (
            {"extra_config": {"x": {"group_size": 64}}},
            "extra_config: x: group_size is '64'. It must be 32",
        ),
        ({"extra_config": {"x": {"sym": False}}}, "x: sym is 'False'. It must be true"),
        ({"extra_config": {"x": {"bits": -1}}}, "x: bits is '-1'"),
    ],
)
def test_open_checkpoint_unsupported_auto_round_is_rejected(
    symmetric: Path, tmp_path: Path, values: dict[str, Any], text: str
) -> None:
    change_tensors(symmetric, tmp_path, lambda stored: None)
    change_config(tmp_path, quantization_config={**VARIANTS["gptq"].config, **values})
    with pytest.raises(ModelFormatError, match=text):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("value", "symmetric_config", "text"),
    [
        (0.0, True, "A scale is 0"),
        (float("nan"), True, "A scale is nan"),
        (-float("inf"), True, "A scale is inf"),
        (-0.01, False, "A scale is -0.01"),
    ],
)
def test_open_checkpoint_wrong_scale_is_rejected(
    value: float, symmetric_config: bool, text: str, tmp_path: Path
) -> None:
    (tmp_path / "changed").mkdir()
    variant = VARIANTS["gptq" if symmetric_config else "gptq-zeros"]
    save_auto_round(QWEN2, tmp_path, variant)

    def change(stored: Stored) -> None:
        stored[DOWN + "scales"][0, 0] = value

    change_tensors(tmp_path, tmp_path / "changed", change)
    opened = open_checkpoint(tmp_path / "changed").tensors
    (planned,) = [p for p in opened if p.name == "layers.1.down"]
    for exact in (True, False):
        with pytest.raises(ModelFormatError, match=text):
            matrix_for_engine(planned.tensor, exact=exact)
