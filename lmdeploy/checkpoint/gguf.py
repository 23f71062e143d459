"""Open a GGUF file, whole or in parts, as a Checkpoint: map its tensor names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.gguf_factors import GgufFactors
from lmdeploy.checkpoint.files.gguf_file import GgufFile
from lmdeploy.checkpoint.files.gguf_parts import GgufParts, join_parts, part_paths
from lmdeploy.checkpoint.tensor_plan import (
    GGUF_LONGROPE_FACTORS,
    GGUF_ROPE_FACTORS,
    Checkpoint,
    TensorLayout,
    as_location,
    bias_of,
    is_in_layer,
    plan_tensors,
    stored_dtype,
)
from lmdeploy.models import family_of_gguf
from lmdeploy.models.config_reader import MetadataReader
from lmdeploy.models.decoder_config import DecoderConfig
from lmdeploy.models.experts import TensorLocation
from lmdeploy.models.family import (
    GGUF_FUSED_GATE_UP,
    GGUF_FUSED_QKV,
    REQUIRED_MATRICES,
    ModelFamily,
    TensorNames,
)
from lmdeploy.models.gguf_config import check_metadata, translate_metadata
from lmdeploy.models.read_decoder import read_decoder

_FACTORS = (GGUF_ROPE_FACTORS, *GGUF_LONGROPE_FACTORS)


def open_gguf(path: Path) -> Checkpoint:
    """Open the file, of which `path` may be any part.

    Raise ModelFormatError for anything that is not supported.
    """
    file = join_parts([GgufFile(part) for part in part_paths(path)])
    path = file.path
    metadata = MetadataReader(file.metadata, str(path))
    prefix = metadata.text("general.architecture")
    num_experts = metadata.integer(f"{prefix}.expert_count", default=0, low=0)
    family = family_of_gguf(prefix, str(path), has_experts=num_experts > 0)
    config = _config(metadata, file, family=family)
    present = set(file.names)
    names = _with_fused_matrices(family.gguf_tensors, present)
    for name, stored in family.gguf_optional_tensors.items():
        if as_location(stored).name.format(i=0) in present:
            names[name] = stored
    for alternatives in family.gguf_alternatives:
        names |= next((group for group in alternatives if _has_all(group, present)), {})
    recurrent = family.recurrent.gguf_tensors if family.recurrent else {}
    matrices = {kind: names[kind] for kind in REQUIRED_MATRICES if kind in names}
    for kind, place in {**matrices, **recurrent}.items():
        bias = bias_of(place)
        layers = (i for i in range(config.num_layers) if is_in_layer(kind, config, layer=i))
        if bias.name != as_location(place).name and bias.name.format(i=next(layers, 0)) in present:
            names[f"{kind}.bias"] = bias
    tensors = tuple(
        plan_tensors(
            GgufFactors(file, source=str(path)),
            config,
            layout=TensorLayout(
                names=names,
                experts=family.experts.gguf if family.experts else (),
                recurrent=recurrent,
                interleaved_rope=family.gguf_interleaved_rope,
                unused=tuple(
                    pattern.replace("<layers>", str(config.num_layers))
                    for pattern in family.gguf_unused
                ),
            ),
            source=str(path),
        )
    )
    return Checkpoint(path, family, config, tensors, stored_dtype(tensors), file.metadata, True)


def _config(
    metadata: MetadataReader, file: GgufFile | GgufParts, *, family: ModelFamily
) -> DecoderConfig:
    if "token_embd.weight" not in file.names:
        raise metadata.refuse("tensor token_embd.weight is missing.")
    factors = {name: _factors(file, name) for name in _FACTORS if name in file.names}
    of_tensors: dict[str, Any] = {
        "vocab_size": file.tensor("token_embd.weight").rows,
        "tie_word_embeddings": "output.weight" not in file.names,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.names,
        "attention_k_eq_v": _has_k_without_v(set(file.names)),
    }
    freq_factors = factors.pop(GGUF_ROPE_FACTORS, None)
    if freq_factors is None and len(factors) == len(GGUF_LONGROPE_FACTORS):
        of_tensors |= zip(("short_factor", "long_factor"), factors.values(), strict=True)
    config = read_decoder(translate_metadata(metadata, family, of_tensors=of_tensors), family)
    check_metadata(metadata, config)
    if config.recurrent is not None and family.recurrent is not None:
        recurrent = replace(config.recurrent, tiled=family.recurrent.gguf_tiled)
        config = replace(config, recurrent=recurrent)
    if freq_factors is None:
        return config
    if len(freq_factors) != (half := (config.rope.dim or config.head_dim) // 2):
        raise metadata.refuse(
            f"{GGUF_ROPE_FACTORS} has {len(freq_factors)} values. It must have {half}."
        )
    rope = replace(config.rope, freq_factors=tuple(freq_factors))
    return replace(config, ropes=(rope, *config.ropes[1:]))


def _with_fused_matrices(names: TensorNames, present: set[str]) -> dict[str, str | TensorLocation]:
    """Return the names, with one tensor for q, k and v, or for gate and up, if the file has that.

    Files of one architecture have either form.
    """
    found = dict(names)
    if "blk.0.attn_qkv.weight" in present and "attention_gate" not in names:
        found |= GGUF_FUSED_QKV
    if "gate" in names and not any(name.endswith(".ffn_gate.weight") for name in present):
        found |= GGUF_FUSED_GATE_UP
    return found


def _has_all(names: TensorNames, present: set[str]) -> bool:
    """Return whether layer 0 has all tensors."""
    return all(as_location(stored).name.format(i=0) in present for stored in names.values())


def _has_k_without_v(present: set[str]) -> bool:
    """Return whether a layer has a matrix of K, but none of V."""
    ends = ".attn_k.weight", ".attn_v.weight"
    return any(
        name.endswith(ends[0]) and name.removesuffix(ends[0]) + ends[1] not in present
        for name in present
    )


def _factors(file: GgufFile | GgufParts, name: str) -> list[float]:
    """Return divisors of RoPE's frequencies."""
    tensor = file.tensor(name)
    if tensor.format != "F32" or len(tensor.shape) != 1:
        raise ModelFormatError(
            f"{file.path}: {name} is {tensor.format} {list(tensor.shape)}. It must be F32 with one "
            "dimension."
        )
    factors = tensor.raw.view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFormatError(f"{file.path}: {name} must contain only finite values above 0.")
    return [float(factor) for factor in factors]
