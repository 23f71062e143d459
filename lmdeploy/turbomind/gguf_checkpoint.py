"""A GGUF file → Checkpoint: its metadata keys and tensor names."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lmdeploy.turbomind.gguf_file import GgufFile
from lmdeploy.turbomind.model_errors import ModelFormatError
from lmdeploy.turbomind.models import family_of_gguf
from lmdeploy.turbomind.models.config_reader import ConfigReader
from lmdeploy.turbomind.models.decoder_config import DecoderConfig
from lmdeploy.turbomind.models.family import REQUIRED_MATRICES
from lmdeploy.turbomind.models.rope import rope_from_gguf
from lmdeploy.turbomind.tensor_plan import (
    GGUF_ROPE_FACTORS,
    MAX_LAYERS,
    MAX_WIDTH,
    Checkpoint,
    check_heads,
    plan_tensors,
    stored_dtype,
)


def open_gguf(path: Path) -> Checkpoint:
    """Opens the file; ModelFormatError for everything that does not fit."""
    file = GgufFile(path)
    reader = ConfigReader(file.metadata, str(path))
    family = family_of_gguf(reader.text("general.architecture"), str(path))
    prefix = reader.text("general.architecture")
    for key in ("split.count", f"{prefix}.expert_count"):
        count = reader.integer(key, default=0, low=0)
        if count > 1:
            raise reader.refuse(f"{key} is {count}: split files and experts are not supported")
    config = _config_from_gguf(reader, file, prefix=prefix)
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
            file, config, names=names, interleaved=family.gguf_interleaved_rope, source=str(path)
        )
    )
    return Checkpoint(path, family, config, tensors, stored_dtype(tensors), file.metadata, True)


def _config_from_gguf(reader: ConfigReader, file: GgufFile, *, prefix: str) -> DecoderConfig:
    if "token_embd.weight" not in file.names:
        raise reader.refuse("tensor token_embd.weight is missing")
    hidden = reader.integer(f"{prefix}.embedding_length", high=MAX_WIDTH)
    heads = reader.integer(f"{prefix}.attention.head_count", high=MAX_WIDTH)
    head_dim = reader.integer(
        f"{prefix}.attention.key_length", default=max(hidden // heads, 1), high=MAX_WIDTH
    )
    for key in (f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"):
        if reader.integer(key, default=head_dim) != head_dim:
            raise reader.refuse(f"{key} is not the head_dim {head_dim}: not supported")
    max_position = reader.integer(f"{prefix}.context_length")
    layers = reader.integer(f"{prefix}.block_count", high=MAX_LAYERS)
    window_key = f"{prefix}.attention.sliding_window"
    window = reader.integer(window_key, low=0) if reader.has(window_key) else 0
    return check_heads(
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
            windows=(window,) * layers,
            tied_head="output.weight" not in file.names,
            rope=rope_from_gguf(reader, prefix, max_position=max_position),
        ),
    )


def _factors(file: GgufFile, config: DecoderConfig) -> tuple[float, ...]:
    tensor = file.tensor(GGUF_ROPE_FACTORS)
    if tensor.format != "F32" or tensor.shape != (config.head_dim // 2,):
        raise ModelFormatError(
            f"{file.path}: {GGUF_ROPE_FACTORS} is {tensor.format} {list(tensor.shape)}; wanted "
            f"F32 [{config.head_dim // 2}]"
        )
    factors = tensor.raw.view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFormatError(f"{file.path}: {GGUF_ROPE_FACTORS} holds values that are not > 0")
    return tuple(float(factor) for factor in factors)
