"""Tests of GPTQ checkpoints: values, the two forms of zeros, order of columns, rejected folders."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from reference.weights import read_gptq
from safetensors.torch import load_file
from tiny_families import HYBRID_MODELS
from tiny_models import TINY_MODELS, TinyModel
from tiny_moe import QWEN3_MOE

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.convert import engine_bytes, matrix_for_engine
from lmdeploy.checkpoint.fingerprint import hash_model
from lmdeploy.checkpoint.open import open_checkpoint

LLAMA = TINY_MODELS[0]
QWEN2 = next(tiny for tiny in TINY_MODELS if tiny.architecture == "Qwen2")
UP = "model.layers.0.mlp.up_proj."


@dataclass(frozen=True)
class Gptq:
    """One variant of GPTQ."""

    kind: str  # what the engine makes of it
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    is_v2: bool = False
    is_shuffled: bool = False
    scale_dtype: torch.dtype = torch.float16

    @property
    def config(self) -> dict[str, Any]:
        """Return the quantization_config."""
        form = {"checkpoint_format": "gptq_v2"} if self.is_v2 else {}
        sizes = {"bits": self.bits, "group_size": self.group, "sym": self.symmetric}
        return {"quant_method": "gptq", "desc_act": self.is_shuffled, **sizes, **form}

    def quantize(self, weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        """Quantize a matrix. The second output has positive weights only, so its zeros are 0."""
        weight = weight.copy()
        weight[1] = np.abs(weight[1])
        inputs = weight.shape[1]
        group = inputs if self.group == -1 else self.group
        groups = np.arange(inputs) // group
        if self.is_shuffled:
            groups = np.random.default_rng(3).permutation(groups)
        codes, scales, zeros = quantize_groups(
            weight, groups, bits=self.bits, symmetric=self.symmetric
        )
        stored_zeros = zeros if self.is_v2 else (zeros - 1) % (1 << self.bits)
        parts = {
            "qweight": torch.from_numpy(pack_words(codes.T, self.bits, 0)),
            "qzeros": torch.from_numpy(pack_words(stored_zeros.T, self.bits, 1)),
            "scales": torch.from_numpy(scales.T.copy()).to(self.scale_dtype),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return parts, self.read(parts)

    def read(self, parts: Stored) -> np.ndarray:
        """Return the values of a matrix as the independent reader sees them."""
        arrays = {
            name: (data.float() if data.is_floating_point() else data).numpy()
            for name, data in parts.items()
        }
        return read_gptq(arrays, bits=self.bits, is_v2=self.is_v2)


VARIANTS = {
    "symmetric": Gptq("q4_0"),
    "zeros": Gptq("q4_1", symmetric=False),
    "zeros-v2": Gptq("q4_1", symmetric=False, is_v2=True),
    "symmetric-v2": Gptq("q4_0", is_v2=True),
    "one-group": Gptq("q4_0", group=-1),
    "shuffled": Gptq("q8_0", symmetric=False, is_shuffled=True),
    "8-bits": Gptq("q8_0", bits=8),
    "8-bits-shuffled": Gptq("q8_0", bits=8, is_shuffled=True),
    "bf16-scales": Gptq("q4_0", scale_dtype=torch.bfloat16),
}


def save_gptq(tiny: TinyModel, folder: Path, variant: Gptq) -> Any:
    return save_quantized(tiny, folder, variant.quantize, quantization=variant.config)


def parts_of(folder: Path, base: str) -> Stored:
    stored = load_file(folder / "model.safetensors")
    return {name.removeprefix(base): data for name, data in stored.items() if name.startswith(base)}


@pytest.fixture(scope="module")
def symmetric(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gptq")
    save_gptq(LLAMA, folder, VARIANTS["symmetric"])
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_gptq_matrices_equal_the_independent_reader(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    save_gptq(QWEN2, tmp_path, variant)
    planned = {planned.name: planned for planned in open_checkpoint(tmp_path).tensors}
    for engine_name, base in (
        ("layers.1.q", "model.layers.1.self_attn.q_proj."),
        ("layers.0.down", "model.layers.0.mlp.down_proj."),
        ("layers.0.up", UP),
    ):
        wanted = variant.read(parts_of(tmp_path, base))
        tensor = planned[engine_name].tensor
        kind, exact = matrix_for_engine(tensor, exact=True)
        assert kind == "f32"
        np.testing.assert_array_equal(exact, wanted)
        kind, data = matrix_for_engine(tensor, exact=False)
        assert kind == variant.kind
        assert data.nbytes == engine_bytes(planned[engine_name], exact=False)
        got = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])
        if variant.is_shuffled:  # rounded to a 127th of the block's largest value
            largest = np.abs(wanted).reshape(-1, 32).max(axis=1, keepdims=True)
            error = np.abs(got - wanted).reshape(-1, 32)
            assert (error <= largest / 254 * (1 + 2**-9) + 2**-24).all() and error.any()
        elif kind == "q4_1":  # the minimum is rounded to 11 bits
            assert (np.abs(got - wanted) <= np.abs(wanted - wanted.min()).max() * 2**-11).all()
        else:
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", ["symmetric", "zeros", "shuffled", "8-bits"])
@pytest.mark.parametrize("tiny", [QWEN2, QWEN3_MOE], ids=lambda tiny: tiny.name)
def test_gptq_logits_equal_transformers(tiny: TinyModel, name: str, tmp_path: Path) -> None:
    model = save_gptq(tiny, tmp_path, VARIANTS[name])
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


def test_gptq_zeros_have_another_meaning_in_the_second_version(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    save_gptq(LLAMA, tmp_path / "v1", VARIANTS["zeros"])
    (tmp_path / "v2").mkdir()
    change_tensors(tmp_path / "v1", tmp_path / "v2", lambda stored: None)
    change_config(tmp_path / "v2", quantization_config=VARIANTS["zeros-v2"].config)
    one, two = (open_checkpoint(tmp_path / name).tensors[-1].tensor for name in ("v1", "v2"))
    assert not np.array_equal(*(matrix_for_engine(x, exact=True)[1] for x in (one, two)))
    assert hash_model(str(tmp_path / "v1")) != hash_model(str(tmp_path / "v2"))


def test_hash_model_covers_every_part(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    save_gptq(LLAMA, tmp_path / "whole", VARIANTS["shuffled"])
    seen = {hash_model(str(tmp_path / "whole"))}
    for part in ("qweight", "scales", "qzeros", "g_idx"):
        (tmp_path / part).mkdir()

        def swap(stored: Stored, name: str = UP + part) -> None:
            stored[name] = stored[name].flip(0)

        seen.add(hash_model(str(change_tensors(tmp_path / "whole", tmp_path / part, swap))))
    assert len(seen) == 5


def test_shuffled_groups_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_gptq(LLAMA, tmp_path, VARIANTS["shuffled"])
    with caplog.at_level(logging.WARNING, "lmdeploy"):
        open_checkpoint(tmp_path)
    assert [record.message for record in caplog.records if "twice the memory" in record.message]
    assert len(caplog.records) == 1


def test_biases_of_zeros_are_ignored(symmetric: Path, tmp_path: Path) -> None:
    def add(value: float) -> Callable[[Stored], None]:
        return lambda stored: stored.update({UP + "bias": torch.full((160,), value)})

    open_checkpoint(change_tensors(symmetric, tmp_path, add(0.0)))
    with pytest.raises(ModelFormatError, match=r"does not use 1 of the tensors.*up_proj\.bias"):
        open_checkpoint(change_tensors(symmetric, tmp_path, add(1.0)))


def replaced(part: str, data: torch.Tensor) -> Callable[[Stored], None]:
    return lambda stored: stored.update({UP + part: data})


def scaled(part: str, factor: float, dtype: torch.dtype) -> Callable[[Stored], None]:
    return lambda stored: stored.update({UP + part: (stored[UP + part].float() * factor).to(dtype)})


ZEROS = torch.zeros((2, 20), dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda stored: stored.pop(UP + "qzeros"), "up_proj.qzeros is missing"),
        (lambda stored: stored.pop(UP + "scales"), "up_proj.scales is missing"),
        (replaced("qzeros", ZEROS[:1]), r"qzeros has shape \[1, 20\]\. It must be \[2, 20\]"),
        (replaced("scales", ZEROS), "scales has dtype I32"),
        (replaced("qweight", ZEROS), r"By 4 bits it has 16 inputs, which must be a multiple of 32"),
        (
            replaced("g_idx", torch.full((64,), 2, dtype=torch.int32)),
            "groups from 2 to 2. They must be from 0 to 1",
        ),
        (
            replaced("g_idx", torch.full((64,), -1, dtype=torch.int32)),
            "groups from -1 to -1. They must be from 0 to 1",
        ),
        (replaced("weight", torch.zeros(160, 64)), "exclude each other"),
        (scaled("scales", 0.0, torch.float16), "A scale is 0. It must be a finite number above 0"),
        (scaled("scales", -1.0, torch.float16), "A scale is -"),
        (scaled("scales", float("nan"), torch.float16), "A scale is nan"),
        (scaled("scales", float("inf"), torch.float32), "A scale is inf"),
        (scaled("scales", 1e8, torch.float32), "They must be from 6e-05 to 65504"),
        (scaled("scales", 1e-8, torch.float32), "They must be from 6e-05 to 65504"),
    ],
)
def test_open_checkpoint_inconsistent_gptq_tensor_is_rejected(
    symmetric: Path, tmp_path: Path, change: Callable[[Stored], None], text: str
) -> None:
    change_tensors(symmetric, tmp_path, change)
    with pytest.raises(ModelFormatError, match=text):
        for planned in open_checkpoint(tmp_path).tensors:
            if len(planned.tensor.shape) == 2:
                matrix_for_engine(planned.tensor, exact=False)


def test_a_group_with_a_tiny_scale_is_accepted(symmetric: Path, tmp_path: Path) -> None:
    def shrink(stored: Stored) -> None:
        scales = stored[UP + "scales"].float()
        scales[:, 3] = 1e-12
        stored[UP + "scales"] = scales

    change_tensors(symmetric, tmp_path, shrink)
    (planned,) = [p for p in open_checkpoint(tmp_path).tensors if p.name == "layers.0.up"]
    assert matrix_for_engine(planned.tensor, exact=False)[0] == "q4_0"


def test_rules_that_only_exclude_modules_are_accepted(tmp_path: Path) -> None:
    variant = VARIANTS["symmetric"]

    def quantize(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        if weight.shape in ((160, 64), (64, 160)):  # of the MLP
            return variant.quantize(weight)
        return {"weight": torch.from_numpy(weight)}, weight

    rules = {"lm_head": {}, "-:.*attn.*": {}, "-:.*visual.*": True, "-:.*mtp.*": {"bits": 8}}
    config = {**variant.config, "dynamic": rules}
    check_hybrid(HYBRID_MODELS[0], tmp_path, quantize, quantization=config)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"bits": 2}, "bits is 2. It must be 4 or 8"),
        ({"bits": 3}, "bits is 3. It must be 4 or 8"),
        ({"bits": 8}, r"must be a multiple of|qzeros has shape"),
        ({"group_size": 48}, "group_size is 48. It must be -1 or a multiple of 32"),
        ({"group_size": 0}, "group_size is 0"),
        (
            {"dynamic": {"-:.*attn.*": {"bits": 8}, "+:.*up.*": {"bits": 8}}},
            r"dynamic: The rule '\+:\.\*up\.\*' has settings for single modules",
        ),
        ({"dynamic": {"lm_head": 8}}, r"dynamic: lm_head is '8'\. It must be an object"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'. It must be gptq or"),
        ({"checkpoint_format": "bitblas"}, "checkpoint_format is 'bitblas'"),
        ({"is_marlin_format": True}, "is_marlin_format is true. It must be false"),
    ],
)
def test_open_checkpoint_unsupported_gptq_is_rejected(
    symmetric: Path, tmp_path: Path, values: dict[str, Any], text: str
) -> None:
    change_tensors(symmetric, tmp_path, lambda stored: None)
    change_config(tmp_path, quantization_config={**VARIANTS["symmetric"].config, **values})
    with pytest.raises(ModelFormatError, match=text):
        open_checkpoint(tmp_path)


def test_open_checkpoint_missing_order_is_rejected(symmetric: Path, tmp_path: Path) -> None:
    change_tensors(symmetric, tmp_path, lambda stored: stored.pop(UP + "g_idx"))
    open_checkpoint(tmp_path)
    config = {**VARIANTS["symmetric"].config, "desc_act": True}
    change_config(tmp_path, quantization_config=config)
    with pytest.raises(ModelFormatError, match=r"up_proj\.g_idx is missing"):
        open_checkpoint(tmp_path)


def test_open_checkpoint_zero_points_of_8_bits_are_rejected(tmp_path: Path) -> None:
    save_gptq(LLAMA, tmp_path, Gptq("q8_0", bits=8, symmetric=False))
    with pytest.raises(ModelFormatError, match=r"zero points of 8 bits. Every zero must be 128"):
        open_checkpoint(tmp_path)
