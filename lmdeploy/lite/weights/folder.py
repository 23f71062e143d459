"""Write a quantized Hugging Face folder: config, tokenizer and shards of safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.base.files import read_json_object
from lmdeploy.checkpoint.files.safetensors_file import SafetensorsFile
from lmdeploy.checkpoint.files.tensor_file import PLAIN_FORMATS
from lmdeploy.checkpoint.files.values import bf16_bits
from lmdeploy.checkpoint.methods.awq import awq_parts
from lmdeploy.checkpoint.methods.gptq import gptq_parts
from lmdeploy.checkpoint.tensor_plan import Checkpoint
from lmdeploy.lite.weights.rounding import BITS, Floats, Grid, GroupCodes

MAX_SHARD_BYTES = 2 << 30
_MAX_CONFIG_BYTES = 16 << 20
_PACKERS = {"gptq": gptq_parts, "awq": awq_parts}
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")  # the tokenizer in any form
_DTYPES = {"int32": "I32", "float16": "F16"}  # the names of safetensors
_MAX_DIMS = 4


@dataclass(frozen=True)
class QuantizedLayer:
    """What replaces tensors of a layer, by the engine's names with the layer's prefix."""

    codes: Mapping[str, GroupCodes]
    vectors: Mapping[str, Floats]


def quantization_config(method: str, grid: Grid) -> dict[str, Any]:
    """Return the `quantization_config` of a folder."""
    common = {"quant_method": method, "bits": BITS, "group_size": grid.group}
    if method == "awq":
        return {**common, "zero_point": not grid.is_symmetric, "version": "gemm"}
    form = {"desc_act": False, "checkpoint_format": "gptq"}
    return {**common, "sym": grid.is_symmetric, **form}


def write_folder(
    checkpoint: Checkpoint,
    output: Path,
    *,
    layers: Iterable[QuantizedLayer],
    method: str,
    grid: Grid,
) -> None:
    """Write the checkpoint with quantized layers to a folder that exists and is empty.

    Tensors that are not replaced are copied. One shard is in memory at a time.
    """
    source = SafetensorsFile(checkpoint.path)
    shards = _ShardWriter(output)
    stored = {planned.name: planned.tensor for planned in checkpoint.tensors}
    replaced = set()
    for layer in layers:
        for name, codes in layer.codes.items():
            matrix = stored[name].name
            replaced.add(matrix)
            base = matrix.removesuffix("weight")
            parts = _PACKERS[method](codes.codes, scales=codes.scales, zeros=codes.zeros)
            for suffix, values in parts.items():
                shards.add(base + suffix, values, dtype=_DTYPES[values.dtype.name])
        for name, vector in layer.vectors.items():
            tensor = stored[name]
            replaced.add(tensor.name)
            shards.add(
                tensor.name,
                _stored_values(vector, tensor.format),
                dtype=tensor.format,
            )
    for name in source.names:
        if name not in replaced:
            tensor = source.tensor(name, max_dims=_MAX_DIMS, formats=tuple(PLAIN_FORMATS))
            shards.add(name, tensor.raw, dtype=tensor.format, shape=tensor.shape)
    shards.finish()
    for path in checkpoint.path.iterdir():
        is_config = path.name == "config.json" or path.name.endswith(".index.json")
        if path.suffix in _COPIED_SUFFIXES and not is_config:
            shutil.copy(path, output / path.name)
    config = read_json_object(checkpoint.path / "config.json", _MAX_CONFIG_BYTES)
    config["quantization_config"] = quantization_config(method, grid)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def rounded_to_stored(values: Floats, stored_format: str) -> Floats:
    """Return the values after rounding to F32, F16 or BF16."""
    stored = _stored_values(values, stored_format)
    if stored_format == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32)


def _stored_values(values: Floats, stored_format: str) -> npt.NDArray[Any]:
    if stored_format == "BF16":
        return bf16_bits(values)
    return values.astype(np.float16 if stored_format == "F16" else np.float32)


class _ShardWriter:
    """Collects tensors, and writes a shard when they exceed MAX_SHARD_BYTES."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, tuple[str, list[int], bytes]] = {}
        self._bytes = 0
        self._shards: list[list[str]] = []
        self._total = 0

    def add(
        self,
        name: str,
        values: npt.NDArray[Any],
        *,
        dtype: str,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Add a tensor. `shape` is that of the tensor if the array has its bytes."""
        data = np.ascontiguousarray(values).tobytes()
        if self._tensors and self._bytes + len(data) > MAX_SHARD_BYTES:
            self._flush()
        wanted = list(values.shape if shape is None else shape)
        self._tensors[name] = (dtype, wanted, data)
        self._bytes += len(data)
        self._total += len(data)

    def finish(self) -> None:
        """Write the last shard, and an index if there are several."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._path(number).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        path = self._folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape, data) in self._tensors.items():
            begin, end = end, end + len(data)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the data must be aligned
        with self._path(len(self._shards)).open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, _, data in self._tensors.values():
                file.write(data)
        self._shards.append(list(self._tensors))
        self._tensors, self._bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number}.safetensors"
