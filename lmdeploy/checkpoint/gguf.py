"""Open a GGUF file, whole or in parts, as a Checkpoint: map its metadata and tensor names."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.gguf_factors import GgufFactors
from lmdeploy.checkpoint.files.gguf_file import GgufFile
from lmdeploy.checkpoint.files.gguf_parts import GgufParts, join_parts, part_paths
from lmdeploy.checkpoint.tensor_plan import (
    GGUF_LONGROPE_FACTORS,
    GGUF_ROPE_FACTORS,
    MAX_LAYERS,
    Checkpoint,
    TensorLayout,
    as_location,
    check_config,
    plan_tensors,
    stored_dtype,
)
from lmdeploy.models import family_of_gguf
from lmdeploy.models.config_reader import MAX_POSITION, ConfigReader, MetadataReader
from lmdeploy.models.decoder_config import DecoderConfig, RopeSettings
from lmdeploy.models.experts import MAX_WIDTH, TensorLocation, moe_from_gguf
from lmdeploy.models.family import (
    GGUF_FUSED_GATE_UP,
    GGUF_FUSED_QKV,
    REQUIRED_MATRICES,
    ModelFamily,
    TensorNames,
    gguf_one_rope,
)
from lmdeploy.models.rope import rope_from_gguf


def open_gguf(path: Path) -> Checkpoint:
    """Open the file, of which `path` may be any part.

    Raise ModelFormatError for anything that is not supported.
    """
    file = join_parts([GgufFile(part) for part in part_paths(path)])
    path = file.path
    reader = MetadataReader(file.metadata, str(path))
    prefix = reader.text("general.architecture")
    num_experts = reader.integer(f"{prefix}.expert_count", default=0, low=0)
    family = family_of_gguf(prefix, str(path), has_experts=num_experts > 0)
    config = _config_from_gguf(reader, file, family=family)
    if GGUF_ROPE_FACTORS in file.names:
        rope = replace(config.rope, freq_factors=_factors(file, config, name=GGUF_ROPE_FACTORS))
        config = replace(config, ropes=(rope, *config.ropes[1:]))
    elif set(GGUF_LONGROPE_FACTORS) <= set(file.names):
        config = replace(config, ropes=(_longrope(reader, file, config=config), *config.ropes[1:]))
    present = set(file.names)
    names = _with_fused_matrices(family.gguf_tensors, present)
    for name, stored in family.gguf_optional_tensors.items():
        if as_location(stored).name.format(i=0) in present:
            names[name] = stored
    for matrix in REQUIRED_MATRICES:
        if matrix not in names:
            continue
        place = as_location(names[matrix])
        bias = place.name.removesuffix("weight") + "bias"
        if bias.format(i=0) in present:
            names[f"{matrix}.bias"] = replace(place, name=bias)
    tensors = tuple(
        plan_tensors(
            GgufFactors(file, source=str(path)),
            config,
            layout=TensorLayout(
                names=names,
                experts=family.experts.gguf if family.experts else (),
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
    key = f"{prefix}.attention.value_length"
    if (value := reader.integer(key, default=head_dim)) != head_dim:
        raise reader.refuse(f"{key} is {value}. It must be the head_dim {head_dim}.")
    key = f"{prefix}.rope.dimension_count"
    rotated = reader.integer(key, default=head_dim, high=head_dim)
    if rotated % 2:
        raise reader.refuse(f"{key} is {rotated}. It must be even.")
    if not reader.flag(f"{prefix}.attention.causal", default=True):
        raise reader.refuse(f"{prefix}.attention.causal is false. It must be true.")
    max_position = reader.integer(f"{prefix}.context_length", high=MAX_POSITION)
    layers = reader.integer(f"{prefix}.block_count", high=MAX_LAYERS)
    # Layers that predict several tokens at once follow the others. They are not used.
    layers -= reader.integer(f"{prefix}.nextn_predict_layers", default=0, low=0, high=layers - 1)
    windows = family.gguf_windows(reader, prefix)[:layers]
    one_rope = family.gguf_ropes is gguf_one_rope
    rope = rope_from_gguf(
        reader,
        prefix,
        max_position=max_position,
        has_windows=one_rope and any(windows),
        is_longrope=set(GGUF_LONGROPE_FACTORS) <= set(file.names),
    )
    rope = replace(
        rope, truncate=family.gguf_yarn_truncate, dim=0 if rotated == head_dim else rotated
    )
    ropes, layer_ropes = family.gguf_ropes(reader, prefix=prefix, rope=rope)
    _check_window_pattern(reader, prefix, windows=windows)
    moe = None
    if family.experts is not None:
        moe = moe_from_gguf(reader, prefix, experts=family.experts, num_layers=layers)
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
            norm_eps=reader.number(_norm_eps_key(reader, prefix), high=1.0),
            windows=windows,
            tied_head="output.weight" not in file.names,
            activation=family.activation or family.gguf_activation,
            ropes=ropes,
            layer_ropes=layer_ropes,
            moe=moe,
            structure=family.gguf_structure(reader, prefix),
        ),
    )


def _norm_eps_key(reader: ConfigReader, prefix: str) -> str:
    rms = f"{prefix}.attention.layer_norm_rms_epsilon"
    plain = f"{prefix}.attention.layer_norm_epsilon"  # of LayerNorm
    return plain if reader.has(plain) and not reader.has(rms) else rms


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
    if slides != [window != 0 for window in windows]:
        wanted = ", ".join(str(window != 0).lower() for window in windows[:4])
        raise reader.refuse(
            f"{key} has other windows. They must be {wanted}, ... for {len(windows)} layers."
        )


def _with_fused_matrices(names: TensorNames, present: set[str]) -> dict[str, str | TensorLocation]:
    """Return the names, with one tensor for q, k and v, or for gate and up, if the file has that.

    Files of one architecture have either form.
    """
    found = dict(names)
    if "blk.0.attn_qkv.weight" in present:
        found |= GGUF_FUSED_QKV
    if "gate" in names and not any(name.endswith(".ffn_gate.weight") for name in present):
        found |= GGUF_FUSED_GATE_UP
    return found


def _longrope(
    reader: ConfigReader, file: GgufFile | GgufParts, *, config: DecoderConfig
) -> RopeSettings:
    prefix = reader.text("general.architecture")
    short, long = (_factors(file, config, name=name) for name in GGUF_LONGROPE_FACTORS)
    scaling = f"{prefix}.rope.scaling"
    return replace(
        config.rope,
        kind="longrope",
        factor=1.0,
        original_max_position=reader.integer(
            f"{scaling}.original_context_length", default=config.max_position, high=MAX_POSITION
        ),
        attention_factor=reader.number(f"{scaling}.attn_factor", default=1.0, low=1e-3),
        freq_factors=short,
        long_factors=long,
    )


def _factors(file: GgufFile | GgufParts, config: DecoderConfig, *, name: str) -> tuple[float, ...]:
    tensor = file.tensor(name)
    half = (config.rope.dim or config.head_dim) // 2
    if tensor.format != "F32" or tensor.shape != (half,):
        raise ModelFormatError(
            f"{file.path}: {name} is {tensor.format} {list(tensor.shape)}. It must be F32 [{half}]."
        )
    factors = tensor.raw.view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFormatError(f"{file.path}: {name} must contain only finite values above 0.")
    return tuple(float(factor) for factor in factors)
