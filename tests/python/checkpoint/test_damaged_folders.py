"""Tests of 4,000 damaged quantized folders: each is an error of the format or a model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_folders import Stored, pack_words, quantize_groups, save_quantized
from tiny_families import HYBRID_MODELS

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.convert import (
    check_exponents,
    engine_bytes,
    matrix_for_engine,
    scales_for_engine,
    vector_for_engine,
)
from lmdeploy.checkpoint.methods.awq import awq_parts
from lmdeploy.checkpoint.open import open_checkpoint

TINY = replace(
    HYBRID_MODELS[0],
    settings={**HYBRID_MODELS[0].settings, "intermediate_size": 64, "head_dim": 16},
)
FOLDERS_PER_METHOD = 500
GROUP = 32


def codes_of(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    groups = np.arange(weight.shape[1]) // GROUP
    return quantize_groups(weight, groups, bits=4, symmetric=False)


def gptq(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
    codes, scales, zeros = codes_of(weight)
    parts = {
        "qweight": torch.from_numpy(pack_words(codes.T, 4, 0)),
        "qzeros": torch.from_numpy(pack_words((zeros.T - 1) % 16, 4, 1)),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return parts, weight


def awq(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
    codes, scales, zeros = codes_of(weight)
    parts = awq_parts(codes.astype(np.uint8), scales=scales, zeros=zeros.astype(np.uint8))
    return {name: torch.from_numpy(data) for name, data in parts.items()}, weight


def packed(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
    codes, scales, zeros = codes_of(weight)
    parts = {
        "weight_packed": torch.from_numpy(pack_words(codes, 4, 1)),
        "weight_scale": torch.from_numpy(scales),
        "weight_zero_point": torch.from_numpy(pack_words(zeros, 4, 0)),
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, weight


def fp8(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
    codes = torch.from_numpy(weight).to(torch.float8_e4m3fn)
    scales = torch.ones(-(-weight.shape[0] // 32), -(-weight.shape[1] // 32))
    return {"weight": codes, "weight_scale_inv": scales}, weight


def nvfp4(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
    rows, cols = weight.shape
    scales = torch.full((rows, cols // 16), 0.5)
    parts = {
        "weight_packed": torch.arange(rows * cols // 2).reshape(rows, -1).to(torch.uint8),
        "weight_scale": scales.to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([100.0]),
    }
    return parts, weight


def mxfp4(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
    parts, _ = nvfp4(weight)
    scales = torch.full((weight.shape[0], weight.shape[1] // 32), 120, dtype=torch.uint8)
    return {"weight_packed": parts["weight_packed"], "weight_scale": scales}, weight


def modelopt(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
    parts, _ = nvfp4(weight)
    names = ("weight", "weight_scale", "weight_scale_2")
    return dict(zip(names, parts.values(), strict=True)), weight


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "auto-round": (
        gptq,
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": False,
            "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
        },
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "compressed-tensors": (
        packed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {**WEIGHTS, "symmetric": False}}},
        },
    ),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "nvfp4": (
        nvfp4,
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": {**FP4, "strategy": "tensor_group"}}},
        },
    ),
    "mxfp4": (
        mxfp4,
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": {**FP4, "strategy": "group"}}},
        },
    ),
    "modelopt": (
        modelopt,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    ),
}
SCALES = {
    f"model.layers.1.self_attn.{side}_scale": torch.full((1,), 0.5, dtype=torch.float32)
    for side in "kv"
}
STRANGE = (None, True, -1, 0, 3, 1 << 40, 0.5, "x", "gptq_v2", [], [0], {}, {"a": 1})


def damage_header(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(end)] = rng.choice(b"0123456789[]{},:_FIUabcwsq\x00\xff")
    path.write_bytes(data)


def damage_data(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    begin = rng.randrange(end, len(data))
    count = min(rng.choice((1, 4, 400)), len(data) - begin)
    data[begin : begin + count] = bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * count
    path.write_bytes(data)


def damage_length(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def damage_config(folder: Path, rng: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    place = config["quantization_config"]
    while True:
        key = rng.choice([*place, "kv_cache_scheme", "dynamic", "checkpoint_format"])
        if isinstance(place.get(key), dict) and rng.random() < 0.7:
            place = place[key]
            continue
        place[key] = rng.choice(STRANGE)
        break
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path) -> None:
    """Open the folder and convert all of it, as served and in FP32."""
    for planned in open_checkpoint(folder).tensors:
        tensor = planned.tensor
        if planned.is_vector:
            assert vector_for_engine(tensor, convert=planned.convert).size == tensor.raw.size // 4
            continue
        assert matrix_for_engine(tensor, exact=True)[1].shape[0] == tensor.rows
        check_exponents(tensor)
        kind, data = matrix_for_engine(tensor, exact=False)
        scales = scales_for_engine(tensor, kind)
        size = data.nbytes + (0 if scales is None else scales.nbytes)
        assert size == engine_bytes(planned, exact=False)
        if tensor.format == "NVFP4":
            kept = replace(tensor, as_stored=True)
            size = tensor.rows * tensor.cols * 9 // 16
            assert matrix_for_engine(kept, exact=False)[1].nbytes == size


@pytest.mark.parametrize("method", METHODS)
def test_damaged_folders_are_an_error_or_a_model(method: str, tmp_path: Path) -> None:
    quantize, config = METHODS[method]
    good = tmp_path / "good"
    save_quantized(TINY, good, quantize, quantization=config, extra=SCALES)
    load(good)
    files = {name: (good / name).read_bytes() for name in ("config.json", "model.safetensors")}
    folder = tmp_path / "bad"
    folder.mkdir()
    damages = (damage_header, damage_data, damage_length, damage_config)
    outcomes = {"error": 0, "model": 0}
    for seed in range(FOLDERS_PER_METHOD):
        for name, data in files.items():
            (folder / name).write_bytes(data)
        rng = random.Random(seed)
        rng.choice(damages)(folder, rng)
        try:
            load(folder)
            outcomes["model"] += 1
        except ModelFormatError as error:
            assert 0 < len(str(error)) < 1000
            outcomes["error"] += 1
    assert min(outcomes.values()) > FOLDERS_PER_METHOD // 20
