"""Open a GGUF file, whole or in parts, as a Checkpoint: map its metadata and tensor names."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.gguf_file import GgufFile
from lmdeploy.checkpoint.files.gguf_parts import GgufParts, join_parts, part_paths
from lmdeploy.checkpoint.tensor_plan import (
    GGUF_ROPE_FACTORS,
    MAX_LAYERS,
    Checkpoint,
    check_config,
    plan_tensors,
    stored_dtype,
)
from lmdeploy.models import family_of_gguf
from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import DecoderConfig
from lmdeploy.models.experts import MAX_WIDTH, moe_from_gguf
from lmdeploy.models.family import REQUIRED_MATRICES, ModelFamily
from lmdeploy.models.rope import rope_from_gguf


def open_gguf(path: Path) -> Checkpoint:
    """Open the file, of which `path` may be any part.

    Raise ModelFormatError for anything that is not supported.
    """
    file = join_parts([GgufFile(part) for part in part_paths(path)])
    path = file.path
    reader = ConfigReader(file.metadata, str(path))
    prefix = reader.text("general.architecture")
    num_experts = reader.integer(f"{prefix}.expert_count", default=0, low=0)
    family = family_of_gguf(prefix, str(path), has_experts=num_experts > 0)
    config = _config_from_gguf(reader, file, family=family)
    if GGUF_ROPE_FACTORS in file.names:
        config = replace(config, rope=replace(config.rope, freq_factors=_factors(file, config)))
    names = dict(family.gguf_tensors)
    present = set(file.names)
    for matrix in REQUIRED_MATRICES:
        bias = family.gguf_tensors[matrix].removesuffix("weight") + "bias"
        if bias.format(i=0) in present:
            names[f"{matrix}.bias"] = bias
    tensors = tuple(
        plan_tensors(
            file,
            config,
            names=names,
            experts=family.experts.gguf if family.experts else (),
            interleaved=family.gguf_interleaved_rope,
            source=str(path),
        )
    )
    return Checkpoint(path, family, config, tensors, stored_dtype(tensors), file.metadata, True)


def _config_from_gguf(
    reader: ConfigReader, file: GgufFile | GgufParts, *, family: ModelFamily
) -> DecoderConfig:
    prefix = reader.text("general.architecture")
    if "token_embd.weight" not in file.names:
        raise reader.refuse("tensor token_embd.weight is missing.")
    hidden = reader.integer(f"{prefix}.embedding_length", high=MAX_WIDTH)
    heads = reader.integer(f"{prefix}.attention.head_count", high=MAX_WIDTH)
    head_dim = reader.integer(
        f"{prefix}.attention.key_length", default=max(hidden // heads, 1), high=MAX_WIDTH
    )
    for key in (f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"):
        if (value := reader.integer(key, default=head_dim)) != head_dim:
            raise reader.refuse(f"{key} is {value}. It must be the head_dim {head_dim}.")
    if not reader.flag(f"{prefix}.attention.causal", default=True):
        raise reader.refuse(f"{prefix}.attention.causal is false. It must be true.")
    max_position = reader.integer(f"{prefix}.context_length")
    layers = reader.integer(f"{prefix}.block_count", high=MAX_LAYERS)
    windows = family.gguf_windows(reader, prefix)
    rope = rope_from_gguf(reader, prefix, max_position=max_position, has_windows=any(windows))
    _check_window_pattern(reader, prefix, windows=windows)
    moe = moe_from_gguf(reader, prefix, experts=family.experts) if family.experts else None
    return check_config(
        reader,
        DecoderConfig(
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=reader.integer(f"{prefix}.feed_forward_length", high=MAX_WIDTH),
            num_heads=heads,
            num_kv_heads=reader.integer(
                f"{prefix}.attention.head_count_kv", default=heads, high=MAX_WIDTH
            ),
            head_dim=head_dim,
            vocab_size=file.tensor("token_embd.weight").rows,
            max_position=max_position,
            norm_eps=reader.number(f"{prefix}.attention.layer_norm_rms_epsilon", high=1.0),
            windows=windows,
            tied_head="output.weight" not in file.names,
            activation=family.activation or "silu",
            rope=replace(rope, truncate=family.gguf_yarn_truncate),
            moe=moe,
        ),
    )


def _check_window_pattern(reader: ConfigReader, prefix: str, *, windows: tuple[int, ...]) -> None:
    """Raise ModelFormatError if the file's window pattern differs from the family's rule.

    The pattern has the meaning of llama.cpp. It is one flag per layer, or a period; the last layer
    of each period has no window.
    """
    key = f"{prefix}.attention.sliding_window_pattern"
    if not reader.has(key) or not any(windows):
        return
    if reader.is_list(key):
        slides = reader.flags(key)
    else:
        period = reader.integer(key, low=0)
        slides = [period == 0 or layer % period < period - 1 for layer in range(len(windows))]
    if slides != [window > 0 for window in windows]:
        wanted = ", ".join(str(window > 0).lower() for window in windows[:4])
        raise reader.refuse(
            f"{key} has other windows. They must be {wanted}, ... for {len(windows)} layers."
        )


def _factors(file: GgufFile | GgufParts, config: DecoderConfig) -> tuple[float, ...]:
    tensor = file.tensor(GGUF_ROPE_FACTORS)
    if tensor.format != "F32" or tensor.shape != (config.head_dim // 2,):
        raise ModelFormatError(
            f"{file.path}: {GGUF_ROPE_FACTORS} is {tensor.format} {list(tensor.shape)}. It must be "
            f"F32 [{config.head_dim // 2}]."
        )
    factors = tensor.raw.view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFormatError(
            f"{file.path}: {GGUF_ROPE_FACTORS} must contain only finite values above 0."
        )
    return tuple(float(factor) for factor in factors)
