"""Write tiny checkpoints in the forms of quantization methods."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_runs import EngineRun
from parity import MAX_RELATIVE_ERROR, prompt, reference_logits, relative_error
from safetensors.torch import load_file, save_file
from tiny_models import TinyModel, make_model, save_model

from lmdeploy.checkpoint.convert import matrix_for_engine, scales_for_engine
from lmdeploy.checkpoint.files.tensor_file import SomeRows, StoredTensor
from lmdeploy.checkpoint.open import open_checkpoint

Stored = dict[str, torch.Tensor]
# Returns the tensors of a matrix by suffix, and the values that they represent.
Quantize = Callable[[np.ndarray], tuple[Stored, np.ndarray]]
_QUANTIZED = re.compile(r".*\.layers\..*proj(_[a-z]+)?\.weight")
# An error of a wrong order of rows is far above MAX_RELATIVE_ERROR.
MIN_ERROR_OF_FAULT = 0.01


def save_quantized(
    tiny: TinyModel,
    folder: Path,
    quantize: Quantize,
    *,
    quantization: dict[str, Any],
    extra: Stored | None = None,
) -> Any:
    """Write a checkpoint and return the transformers model with the dequantized values.

    `extra` are more tensors of the folder.
    """
    model = make_model(tiny)
    save_model(model, folder)
    path = folder / "model.safetensors"
    stored = {name: data.clone() for name, data in load_file(path).items()}  # written again below
    values: Stored = {}
    for name in filter(_QUANTIZED.fullmatch, list(stored)):
        parts, dequantized = quantize(stored.pop(name).numpy())
        values[name] = torch.from_numpy(np.ascontiguousarray(dequantized, np.float32))
        base = name.removesuffix("weight")
        stored |= {base + part: data.contiguous() for part, data in parts.items()}
    save_file({**stored, **(extra or {})}, path)
    change_config(folder, quantization_config=quantization)
    _fill(model, values)
    return model


def check_hybrid(
    tiny: TinyModel, folder: Path, quantize: Quantize, *, quantization: dict[str, Any]
) -> None:
    """Check the logits of a hybrid model, and that they differ if q and its gate are swapped.

    The rows that the engine packs are also those of the whole matrix.
    """
    model, ids = save_quantized(tiny, folder, quantize, quantization=quantization), prompt(80)
    with EngineRun(str(folder), exact=True) as run:
        logits = run.logits(ids)
    tensors = open_checkpoint(folder).tensors
    total = sum(planned.tensor.num_bytes for planned in tensors)
    assert 0.7 < total / (folder / "model.safetensors").stat().st_size < 1
    for planned in tensors:
        if planned.name.endswith("attention_gate"):
            _check_rows(planned.tensor, model.config.num_attention_heads)
    error = relative_error(logits, reference_logits(model, ids))
    print(f"{tiny.name}: relative error {error:.2e}")
    assert error <= MAX_RELATIVE_ERROR
    with torch.no_grad():
        for name, matrix in model.named_parameters():
            if name.endswith("q_proj.weight"):
                halves = matrix.reshape(model.config.num_attention_heads, 2, -1)
                matrix.copy_(halves.flip(1).reshape(matrix.shape))
    assert relative_error(logits, reference_logits(model, ids)) > MIN_ERROR_OF_FAULT


def _check_rows(gate: StoredTensor, heads: int) -> None:
    matrix = gate.matrix.whole if isinstance(gate.matrix, SomeRows) else None
    assert (matrix is None) == (gate.runs is not None)
    whole = replace(gate, shape=(2 * gate.rows, gate.cols), matrix=matrix, runs=None)
    for exact in (True, False):
        kind, part = matrix_for_engine(gate, exact=exact)
        sides = [(part, matrix_for_engine(whole, exact=exact)[1])]
        if kind == "mxfp4_split":
            sides.append((scales_for_engine(gate, kind), scales_for_engine(whole, kind)))
        for got, stored in sides:
            rows = stored.reshape(heads, 2, len(got) // heads, -1)[:, 1]
            np.testing.assert_array_equal(got, rows.reshape(got.shape))


def change_config(folder: Path, **values: Any) -> None:
    """Set values of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def change_tensors(folder: Path, target: Path, change: Callable[[Stored], Any]) -> Path:
    """Copy a folder to `target` with changed tensors, and return `target`."""
    stored = {n: data.clone() for n, data in load_file(folder / "model.safetensors").items()}
    change(stored)
    save_file(
        {name: data.contiguous() for name, data in stored.items()}, target / "model.safetensors"
    )
    for path in folder.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    return target


def _fill(model: Any, values: Stored) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in values:
                parameter.copy_(values.pop(name))
            elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                _fill_experts(parameter, name, values)
    assert not values


def _fill_experts(parameter: Any, name: str, values: Stored) -> None:
    """Copy the experts of a layer from one tensor per expert into transformers' single tensor."""
    base = name.rsplit(".", 1)[0]
    kinds = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    for expert in range(parameter.shape[0]):
        parts = [values.pop(f"{base}.{expert}.{kind}.weight") for kind in kinds]
        parameter[expert].copy_(torch.cat(parts))


def pack_words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Pack codes along an axis into int32 words, lowest bits first. Pad with zeros."""
    codes = np.moveaxis(codes.astype(np.uint32), axis, -1)
    per_word = 32 // bits
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_word)), np.uint32)
    for place in range(codes.shape[-1]):
        words[..., place // per_word] |= codes[..., place] << np.uint32(bits * (place % per_word))
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def quantize_groups(
    weight: np.ndarray, groups: np.ndarray, *, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize [outputs, inputs] by the group of each input.

    Return codes [outputs, inputs], scales in FP16 and zeros, both [outputs, groups].
    """
    top, count = (1 << bits) - 1, int(groups.max()) + 1
    scales = np.empty((len(weight), count), np.float16)
    zeros = np.full(scales.shape, 1 << (bits - 1))
    codes = np.empty(weight.shape, np.int64)
    for group in range(count):
        columns = groups == group
        low, high = weight[:, columns].min(axis=1), weight[:, columns].max(axis=1)
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        span = 2 * np.maximum(-low, high) if symmetric else high - low
        scales[:, group] = np.maximum(span / top, 1e-4)
        wide = scales[:, group].astype(np.float32)
        if not symmetric:
            zeros[:, group] = np.clip(np.rint(-low / wide), 0, top)
        shifted = np.rint(weight[:, columns] / wide[:, None]) + zeros[:, group, None]
        codes[:, columns] = np.clip(shifted, 0, top)
    return codes, scales, zeros
