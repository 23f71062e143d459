"""Translate GGUF metadata into the keys of config.json, so that one set of rules reads both.

Errors name the keys of the file. Values are read as llama.cpp reads them. `check_metadata` compares
the keys that no rule reads with the result.
"""

import math
from collections.abc import Mapping
from typing import Any

from lmdeploy.models.config_reader import MAX_POSITION, ConfigReader, MetadataReader
from lmdeploy.models.decoder_config import DecoderConfig, MoeSettings
from lmdeploy.models.family import ModelFamily

# Key of GGUF after `<architecture>.` → the keys of config.json with the same meaning.
_SAME: Mapping[str, tuple[str, ...]] = {
    "attention.causal": ("is_causal",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.key_length_mla": ("qk_head_dim",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.key_length_swa": ("swa_head_dim",),
    "attention.scale": ("attention_multiplier",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.sliding_window": ("sliding_window",),
    "attention.value_length": ("value_length",),
    "attention.value_length_mla": ("v_head_dim",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "embedding_scale": ("embedding_multiplier",),
    "expert_count": ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_gating_func": ("expert_gating_func",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_used_count": ("num_experts_per_tok", "moe_k"),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "feed_forward_length": ("intermediate_size", "intermediate_size_mlp"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "full_attention_interval": ("full_attention_interval",),
    "interleave_moe_layer_step": (
        "interleave_moe_layer_step",
        "moe_layer_interval",
        "decoder_sparse_step",
    ),
    "leading_dense_block_count": (
        "first_k_dense_replace",
        "moe_layer_start_index",
        "num_dense_layers",
    ),
    "moe_latent_size": ("moe_latent_size",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "residual_scale": ("residual_multiplier",),
    "rope.dimension_count": ("rotary_dim", "qk_rope_head_dim"),
    "rope.dimension_count_swa": ("swa_rotary_dim",),
    "rope.freq_base": ("rope_theta",),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "rope.scaling.finetuned": ("rope_finetuned",),  # whether Granite's hybrids have RoPE
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "ssm.inner_size": ("linear_value_size", "mamba_d_ssm"),
    "ssm.state_size": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size"),
    "ssm.time_step_rank": ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"),
}
# Lists with one value for each layer, where 0 means that the layer lacks the branch.
_BRANCHES = {
    "attention.head_count_kv": "attention_layers",
    "feed_forward_length": "feed_forward_layers",
}
# Lists with the value of each layer, for families whose layers differ in it.
_BY_LAYER = {
    "attention.head_count_kv": "layer_kv_heads",
    "attention.sliding_window_pattern": "sliding_layers",
    "feed_forward_length": "layer_intermediate_sizes",
}
# A value of 0 means that the key is missing.
_UNSET_BY_ZERO = {
    "attention.q_lora_rank",
    "attention.scale",
    "embedding_scale",
    "expert_group_count",
    "expert_weights_scale",
    "logit_scale",
    "residual_scale",
}
# The lists of longrope, and the tensors that have them.
_LISTS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation")
# Values of expert_gating_func. It is 0 if the converter did not set it.
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3


def translate_metadata(
    metadata: MetadataReader, family: ModelFamily, *, of_tensors: Mapping[str, Any]
) -> ConfigReader:
    """Return the metadata in the keys of config.json.

    `of_tensors` are values that follow from tensors: `vocab_size`, `tie_word_embeddings`, and the
    two lists of longrope. Raise ModelFormatError for a value that is not supported.
    """
    prefix = metadata.text("general.architecture")
    values: dict[str, Any] = {}
    names: dict[str, str] = {}

    def state(ours: str, theirs: str) -> None:
        names[ours] = key = f"{prefix}.{theirs}"
        if theirs in _BRANCHES and family.recurrent is not None and metadata.is_list(key):
            value, values[_BRANCHES[theirs]] = metadata.of_branches(key)
        elif theirs in _BY_LAYER and family.gguf_by_layer and metadata.is_list(key):
            names[_BY_LAYER[theirs]] = key
            values[_BY_LAYER[theirs]] = by_layer = metadata.by_layer(key)
            value = by_layer[0]
        else:
            value = metadata.single(key)
        if value is not None and not (value == 0 and theirs in _UNSET_BY_ZERO):
            values[ours] = value

    for theirs, keys in _SAME.items():
        for key in keys:
            state(key, theirs)
    if family.gguf_by_layer:
        state("sliding_window_pattern", "attention.sliding_window_pattern")
    rms, plain = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    has_only_plain = metadata.has(f"{prefix}.{plain}") and not metadata.has(f"{prefix}.{rms}")
    state(family.hf_norm_eps, plain if has_only_plain else rms)
    if "moe_intermediate_size" not in values:
        state("moe_intermediate_size", "feed_forward_length")
    required = ["max_position_embeddings", family.hf_norm_eps, "num_hidden_layers"]
    if values.get("n_group", 1) != 1:
        required.append("topk_group")
    for key in required:
        if key not in values:
            raise metadata.refuse(f"{names[key]} is missing.")
    reader = ConfigReader(values, metadata.source, names=names)
    # Layers that predict several tokens at once follow the others. They are not used.
    layers = reader.integer("num_hidden_layers")
    layers -= metadata.integer(f"{prefix}.nextn_predict_layers", default=0, low=0, high=layers - 1)
    values["num_hidden_layers"] = layers
    values |= {key: values[key][:layers] for key in _BRANCHES.values() if key in values}
    names["recurrent_layers"] = key = f"{prefix}.attention.recurrent_layers"
    if metadata.is_list(key):
        values["recurrent_layers"] = metadata.flags(key)[:layers]
    heads = reader.integer("num_attention_heads")
    head_dim = max(reader.integer("hidden_size") // heads, 1)
    values["head_dim"] = reader.integer("head_dim", default=head_dim)
    activation = {k: family.hf_defaults[k] for k in _ACTIVATION_KEYS if k in family.hf_defaults}
    values = {
        **activation,
        **family.gguf_defaults(reader),
        **values,
        "rope_parameters": _rope_parameters(metadata, family, names=names, own=of_tensors),
        **of_tensors,
    }
    reader = ConfigReader(values, metadata.source, names=names)
    return reader.with_values(family.gguf_derived(reader))


def _rope_parameters(
    metadata: MetadataReader,
    family: ModelFamily,
    *,
    names: dict[str, str],
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the settings in `<architecture>.rope.scaling`, and add the names of its keys.

    Like llama.cpp, this function ignores yarn_attn_factor and derives the magnitude from the
    factor. Converters may copy that key from Hugging Face, and savers may write it by default.
    """
    prefix = metadata.text("general.architecture")
    scaling = f"{prefix}.rope.scaling"
    kind = metadata.text(f"{scaling}.type", default="linear")
    if kind not in ("none", "linear", "yarn"):
        raise metadata.refuse(f"{scaling}.type is {kind[:40]!r}. It must be none, linear or yarn.")
    log_key = f"{scaling}.yarn_log_multiplier"
    if family.latent is None:
        _require(metadata, log_key, wanted=0.0)
    key = f"{scaling}.yarn_ext_factor"
    if metadata.number(key, default=-1.0, low=-1e12) >= 0.0:  # a negative value means unset
        _require(metadata, key, wanted=1.0 if kind == "yarn" else 0.0)
    is_longrope = "short_factor" in own
    if kind != "yarn" and not is_longrope:
        _require(metadata, f"{scaling}.attn_factor", wanted=1.0)
    factor_key = f"{scaling}.factor"
    if not metadata.has(factor_key):
        factor_key = f"{prefix}.rope.scale_linear"  # the older key
    factor = metadata.number(factor_key, default=0.0, high=1e6) or 1.0  # 0 means 1
    original = f"{scaling}.original_context_length"
    names |= {"factor": factor_key, "original_max_position_embeddings": original, **_LISTS}
    attention = metadata.number(f"{scaling}.attn_factor", default=1.0, low=1e-3)
    rope: dict[str, Any] = {
        "factor": factor,
        "original_max_position_embeddings": metadata.integer(
            original, default=metadata.integer(f"{prefix}.context_length"), high=MAX_POSITION
        ),
    }
    if is_longrope:
        lists = {key: own[key] for key in _LISTS}
        return {
            **rope,
            **lists,
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": attention,
        }
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {**rope, "rope_type": kind}
    if family.latent is not None:
        # llama.cpp cancels the magnitude of YaRN and raises the scores instead, as DeepSeek does.
        magnitude = {
            "attention_factor": 1.0,
            "mscale_all_dim": 10.0 * metadata.number(log_key, default=0.0, high=100.0),
        }
    else:
        magnitude = {"attention_factor": attention * (1.0 + 0.1 * math.log(max(factor, 1.0)))}
    return {
        **rope,
        **magnitude,
        "rope_type": kind,
        "beta_fast": metadata.number(f"{scaling}.yarn_beta_fast", default=32.0, low=1e-3),
        "beta_slow": metadata.number(f"{scaling}.yarn_beta_slow", default=1.0, low=1e-3),
        "truncate": (family.hf_rope or {}).get("truncate", True),
    }


def check_metadata(metadata: MetadataReader, config: DecoderConfig) -> None:
    """Raise ModelFormatError if a key that no rule reads contradicts the config."""
    prefix = metadata.text("general.architecture")
    key = f"{prefix}.attention.value_length"
    value = metadata.integer(key, default=config.head_dim)
    if value != config.head_dim and config.latent is None:
        raise metadata.refuse(f"{key} is {value}. It must be the head_dim {config.head_dim}.")
    if any(config.windows) and len(config.ropes) == 1:
        _require(metadata, f"{prefix}.rope.freq_base_swa", wanted=config.rope.theta)
    check_window_pattern(metadata, prefix, windows=config.windows)
    if config.moe is not None:
        _check_experts(metadata, config.moe)


def check_window_pattern(reader: ConfigReader, prefix: str, *, windows: tuple[int, ...]) -> None:
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


def _check_experts(metadata: MetadataReader, moe: MoeSettings) -> None:
    prefix = metadata.text("general.architecture")
    key = f"{prefix}.expert_weights_norm"
    if metadata.flag(key, default=moe.normalize) != moe.normalize:
        raise metadata.refuse(f"{key} must be {str(moe.normalize).lower()}.")
    key = f"{prefix}.expert_weights_scale"
    if metadata.number(key, default=0.0) != 0.0:
        _require(metadata, key, wanted=moe.scale)
    key = f"{prefix}.expert_gating_func"
    gating = metadata.integer(key, default=0, low=0)
    known = {_SIGMOID: "sigmoid"} if moe.sigmoid else {_SOFTMAX: "softmax"}
    if moe.normalize and not moe.sigmoid:  # equals a softmax of all experts
        known[_SOFTMAX_OF_CHOSEN] = "softmax over the chosen experts"
    if gating and gating not in known:
        wanted = " or ".join(f"{value} ({name})" for value, name in known.items())
        raise metadata.refuse(f"{key} is {gating}. It must be {wanted}.")


def _require(metadata: MetadataReader, key: str, *, wanted: float) -> None:
    if (value := metadata.number(key, default=wanted, low=-1e12)) != wanted:
        raise metadata.refuse(f"{key} is {value:g}. It must be {wanted:g}.")
