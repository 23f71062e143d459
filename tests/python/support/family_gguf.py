"""Write GGUF files of tiny models of many families, under the names of the gguf package."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from latent_gguf import LATENT_KEYS, head_matrices
from recurrent_gguf import recurrent_tensors, with_falcon_factors
from tiny_families import FAMILY_MODELS
from tiny_gguf import finish_gguf, interleave, write_tokenizer
from tiny_latents import TINY_LATENTS, V2, V3
from tiny_models import TinyModel

_WINDOW = {"attention.sliding_window": 24}
_GRANITE = {
    "attention.scale": 0.05,
    "embedding_scale": 6.0,
    "residual_scale": 0.22,
    "logit_scale": 4.0,
}
_FAMILIES = {tiny.name: tiny for tiny in FAMILY_MODELS}
_EXPERT_KEYS = {"expert_count": 6, "expert_used_count": 2}
_SHARED_EXPERT = {
    **_EXPERT_KEYS,
    "expert_feed_forward_length": 48,
    "expert_shared_feed_forward_length": 64,
}
_RECURRENT = {
    "rope.dimension_count": 16,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.inner_size": 256,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 4,
}
_SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}
_MAMBA2 = {
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.inner_size": 512,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 16,
}
# The sizes of these models are those that llama.cpp and its converter accept.
_GRANITE_H = {**_GRANITE, **_MAMBA2, "attention.head_count_kv": [0, 2, 0, 0]}
_GRANITE_SIZES = {
    "hidden_size": 256,
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
_NEMOTRON_MOE: dict[str, Any] = {
    **_MAMBA2,
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 8,
    "attention.head_count_kv": [0, 0, 0, 0, 2, 0],
    "feed_forward_length": [0, 48, 0, 0, 0, 48],
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_feed_forward_length": 48,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 80,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
}
_LFM2 = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 0, 2, 0]}
# End of a name in transformers → names in GGUF of the parts of its rows.
_EXPERT_NAMES = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.up_proj": ("ffn_up_exps.weight",),
    "experts.down_proj": ("ffn_down_exps.weight",),
    "e_score_correction_bias": ("exp_probs_b.bias",),
    "expert_bias": ("exp_probs_b.bias",),
    "shared_experts.gate_proj.weight": ("ffn_gate_shexp.weight",),
    "shared_experts.up_proj.weight": ("ffn_up_shexp.weight",),
    "shared_experts.down_proj.weight": ("ffn_down_shexp.weight",),
    "shared_mlp.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "shared_mlp.output_linear.weight": ("ffn_down_shexp.weight",),
    "shared_expert.gate_proj.weight": ("ffn_gate_shexp.weight",),
    "shared_expert.up_proj.weight": ("ffn_up_shexp.weight",),
    "shared_expert.down_proj.weight": ("ffn_down_shexp.weight",),
    "feed_forward.router.weight": ("ffn_gate_inp.weight",),
    "mlp.gate.weight": ("ffn_gate_inp.weight",),
    "mixer.gate.weight": ("ffn_gate_inp.weight",),
    "fc1_latent_proj.weight": ("ffn_latent_down.weight",),
    "fc2_latent_proj.weight": ("ffn_latent_up.weight",),
    "feed_forward.gate.weight": ("ffn_gate_inp.weight",),
    "block_sparse_moe.gate.weight": ("ffn_gate_inp.weight",),
    "block_sparse_moe.router.weight": ("ffn_gate_inp.weight",),
}
# The same for a dense model of a family with a shared expert.
_DENSE_NAMES = {
    "shared_mlp.input_linear.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "shared_mlp.output_linear.weight": ("ffn_down.weight",),
}


@dataclass(frozen=True)
class GgufModel:
    """A tiny model, its GGUF architecture, and the keys that a converter writes for it."""

    tiny: TinyModel
    arch: str
    keys: dict[str, Any] = field(default_factory=dict)
    permuted: bool = False  # the converter stores q and k in pairs
    norm_offset: float = 0.0  # the converter adds it
    unused_layers: int = 0  # that predict several tokens at once


def resized(tiny: TinyModel, settings: dict[str, Any], *, name: str = "") -> TinyModel:
    """Return the model with other settings, and maybe another name."""
    return replace(tiny, name=name or tiny.name, settings={**tiny.settings, **settings})


def _tiny(name: str, architecture: str, settings: dict[str, Any], **options: Any) -> TinyModel:
    return TinyModel(name, architecture, {"pad_token_id": 0, **settings}, **options)


_GEMMA = {"sliding_window": 24, "query_pre_attn_scalar": 64, "tie_word_embeddings": True}
# llama.cpp takes the width of some families' heads from the width of the model.
_WIDE = {"hidden_size": 256}
_SHORT = [1.0 + 0.05 * i for i in range(32)]
_LONG = [2.0 + 0.1 * i for i in range(32)]
GGUF_MODELS: tuple[GgufModel, ...] = (
    GgufModel(
        _tiny("gemma2", "Gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0}),
        "gemma2",
        {**_WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
        norm_offset=1.0,
    ),
    GgufModel(
        _tiny(
            "gemma3",
            "Gemma3",
            {
                **_GEMMA,
                "num_hidden_layers": 7,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            config="Gemma3Text",
        ),
        "gemma3",
        {
            **_WINDOW,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        norm_offset=1.0,
    ),
    GgufModel(_tiny("smollm3", "SmolLM3", {"num_hidden_layers": 4}), "smollm3", permuted=True),
    GgufModel(
        _tiny(
            "granite",
            "Granite",
            {
                "embedding_multiplier": 6.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.05,
                "logits_scaling": 4.0,
            },
        ),
        "granite",
        _GRANITE,
        permuted=True,
    ),
    GgufModel(_tiny("phi3", "Phi3", {**_WIDE, "sliding_window": None}), "phi3"),
    GgufModel(
        _tiny(
            "phi3-longrope",
            "Phi3",
            {**_WIDE, "max_position_embeddings": 600},
            rope={
                "rope_type": "longrope",
                "short_factor": _SHORT,
                "long_factor": _LONG,
                "original_max_position_embeddings": 300,
                "attention_factor": 1.1,
            },
        ),
        "phi3",
        {"rope.scaling.original_context_length": 300, "rope.scaling.attn_factor": 1.1},
    ),
    GgufModel(_tiny("glm", "Glm", _WIDE), "chatglm", {"rope.dimension_count": 32}),
    GgufModel(_tiny("glm4", "Glm4", {}), "glm4", {"rope.dimension_count": 32}),
    GgufModel(_tiny("olmo2", "Olmo2", _WIDE), "olmo2"),
    GgufModel(
        _tiny(
            "exaone4",
            "Exaone4",
            {
                **_WIDE,
                "num_hidden_layers": 4,
                "sliding_window": 24,
                "sliding_window_pattern": 4,
            },
        ),
        "exaone4",
        _WINDOW,
    ),
    GgufModel(_tiny("seed-oss", "SeedOss", {}), "seed_oss"),
    GgufModel(_tiny("ernie4-5", "Ernie4_5", {}), "ernie4_5"),
    GgufModel(_tiny("hunyuan", "HunYuanDenseV1", {}), "hunyuan-dense"),
    GgufModel(
        _tiny("cohere", "Cohere", {**_WIDE, "logit_scale": 0.25, "tie_word_embeddings": True}),
        "command-r",
        {"logit_scale": 0.25},
    ),
    GgufModel(
        _tiny(
            "cohere2",
            "Cohere2",
            {
                **_WIDE,
                "num_hidden_layers": 4,
                "logit_scale": 0.25,
                "sliding_window": 24,
                "tie_word_embeddings": True,
            },
        ),
        "cohere2",
        {**_WINDOW, "logit_scale": 0.25},
    ),
    GgufModel(
        _tiny("starcoder2", "Starcoder2", {**_WIDE, "tie_word_embeddings": True}), "starcoder2"
    ),
    GgufModel(_tiny("arcee", "Arcee", {}), "arcee", permuted=True),
    GgufModel(
        _tiny("nemotron", "Nemotron", _WIDE, rope={"partial_rotary_factor": 0.5}),
        "nemotron",
        {"rope.dimension_count": 32},
        norm_offset=1.0,
    ),
    GgufModel(
        _FAMILIES["glm4-moe"],
        "glm4moe",
        {
            **_EXPERT_KEYS,
            "expert_feed_forward_length": 48,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "leading_dense_block_count": 1,
            "rope.dimension_count": 32,
        },
        unused_layers=1,
    ),
    GgufModel(
        _FAMILIES["glm4-moe-groups"],
        "glm4moe",
        {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_feed_forward_length": 48,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "leading_dense_block_count": 0,
            "rope.dimension_count": 32,
        },
    ),
    GgufModel(
        _FAMILIES["minimax-m2"],
        "minimax-m2",
        {
            **_EXPERT_KEYS,
            "expert_feed_forward_length": 48,
            "expert_gating_func": 2,
            "rope.dimension_count": 32,
        },
    ),
    GgufModel(
        _FAMILIES["ernie4-5-moe"],
        "ernie4_5-moe",
        {
            **_EXPERT_KEYS,
            "expert_feed_forward_length": 48,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 96,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
        },
    ),
    GgufModel(
        _tiny(
            "llama4",
            "Llama4",
            {
                "num_hidden_layers": 4,
                "intermediate_size": 48,
                "intermediate_size_mlp": 96,
                "num_local_experts": 6,
                "num_experts_per_tok": 2,
                "interleave_moe_layer_step": 2,
            },
            config="Llama4Text",
        ),
        "llama4",
        {
            **_EXPERT_KEYS,
            "feed_forward_length": 96,
            "expert_feed_forward_length": 48,
            "interleave_moe_layer_step": 2,
        },
    ),
    GgufModel(_FAMILIES["granite-moe"], "granitemoe", {**_GRANITE, **_EXPERT_KEYS}, permuted=True),
    GgufModel(
        _FAMILIES["granite-moe-shared"],
        "granitemoe",
        {**_GRANITE, **_EXPERT_KEYS, "expert_shared_feed_forward_length": 96},
        permuted=True,
    ),
    GgufModel(_FAMILIES["qwen3-5"], "qwen35", {**_RECURRENT, **_SECTIONS}, norm_offset=1.0),
    GgufModel(
        _FAMILIES["qwen3-5-moe"],
        "qwen35moe",
        {
            **_RECURRENT,
            **_SECTIONS,
            **_SHARED_EXPERT,
            "ssm.time_step_rank": 6,
            "ssm.inner_size": 384,
        },
        norm_offset=1.0,
    ),
    GgufModel(
        _FAMILIES["qwen3-next"],
        "qwen3next",
        {
            **_RECURRENT,
            **_SHARED_EXPERT,
            "attention.recurrent_layers": [False, True, False, True, False],
            "ssm.conv_kernel": 3,
            "ssm.inner_size": 192,
        },
        norm_offset=1.0,
        unused_layers=1,
    ),
)


HYBRID_MODELS = (
    GgufModel(
        resized(
            _FAMILIES["granite-4-h"],
            {**_GRANITE_SIZES, "intermediate_size": 96, "num_experts_per_tok": 0},
        ),
        "granitehybrid",
        {**_GRANITE_H, "rope.scaling.finetuned": False},
        permuted=True,
    ),
    GgufModel(
        resized(_FAMILIES["granite-4-h-moe"], _GRANITE_SIZES),
        "granitehybrid",
        {
            **_GRANITE_H,
            **_EXPERT_KEYS,
            "expert_shared_feed_forward_length": 96,
            "rope.scaling.finetuned": False,
        },
        permuted=True,
    ),
    *(
        GgufModel(
            resized(_FAMILIES[name], settings),
            "falcon-h1",
            {**_MAMBA2, "ssm.inner_size": 96, "ssm.time_step_rank": 6},
        )
        for name, settings in (
            ("falcon-h1", {}),
            (
                "falcon-h1-gate",
                {"mamba_proj_bias": False, "projectors_bias": False, "attention_bias": False},
            ),
        )
    ),
    GgufModel(
        resized(
            _FAMILIES["nemotron-h"],
            {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
            name="nemotron-h-dense",
        ),
        "nemotron_h",
        {
            **_MAMBA2,
            "ssm.inner_size": 128,
            "ssm.time_step_rank": 8,
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 160, 0, 160],
        },
    ),
    *(
        GgufModel(
            resized(
                _FAMILIES[name],
                {
                    "layers_block_type": [
                        "linear_attention",
                        "moe",
                        "linear_attention",
                        "linear_attention",
                        "full_attention",
                        "moe",
                    ]
                },
            ),
            "nemotron_h_moe",
            {**_NEMOTRON_MOE, **keys},
        )
        for name, keys in (("nemotron-h", {}), ("nemotron-h-latent", {"moe_latent_size": 32}))
    ),
    GgufModel(resized(_FAMILIES["lfm2"], _WIDE), "lfm2", {**_LFM2, "feed_forward_length": 128}),
    GgufModel(
        resized(_FAMILIES["lfm2-moe"], _WIDE),
        "lfm2moe",
        {
            **_LFM2,
            **_EXPERT_KEYS,
            "expert_feed_forward_length": 48,
            "expert_gating_func": 2,
            "leading_dense_block_count": 1,
        },
    ),
)
GGUF_MODELS += HYBRID_MODELS
# With the matrices of heads apart, and in the older form with one matrix.
LATENT_MODELS = (
    GgufModel(V2, "deepseek2", LATENT_KEYS[V2.name]),
    GgufModel(TINY_LATENTS[1], "deepseek2", LATENT_KEYS[TINY_LATENTS[1].name]),
    GgufModel(V3, "deepseek2", LATENT_KEYS[V3.name]),
)
GGUF_MODELS += LATENT_MODELS
_GEMMA4 = {
    **_WINDOW,
    "attention.sliding_window_pattern": [True, False] * 3,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "rope.dimension_count": 64,
    "rope.dimension_count_swa": 32,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "final_logit_softcapping": 3.0,
}
_GEMMA4_SHARED = {
    **_GEMMA4,
    "attention.shared_kv_layers": 2,
    "feed_forward_length": [160] * 4 + [320] * 2,
    "embedding_length_per_layer_input": 32,
}
GGUF_MODELS += (
    GgufModel(_FAMILIES["gemma4"], "gemma4", _GEMMA4_SHARED),
    GgufModel(
        _FAMILIES["gemma4-k-is-v"],
        "gemma4",
        {
            **_GEMMA4,
            "attention.head_count_kv": [2, 1] * 3,
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
        },
    ),
    GgufModel(
        _FAMILIES["gemma4-experts"],
        "gemma4",
        {**_GEMMA4_SHARED, **_EXPERT_KEYS, "expert_feed_forward_length": 48},
    ),
)
# Names of Gemma 4 that the package does not know, or that the parts of a tensor share.
_GEMMA4_NAMES = {
    "layer_scalar": ("layer_output_scale.weight",),
    "router.scale": ("ffn_gate_inp.scale",),
    "router.per_expert_scale": ("ffn_down_exps.scale",),
    "router.proj.weight": ("ffn_gate_inp.weight",),
    "experts.gate_up_proj": ("ffn_gate_up_exps.weight",),
    "experts.down_proj": ("ffn_down_exps.weight",),
}


def write_family_gguf(made: GgufModel, model: Any, path: Path) -> None:
    """Write the model's tensors in FP32, in the order and under the names of llama.cpp."""
    import gguf

    config = model.config
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's heads differ by layer
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == made.arch)
    writer = gguf.GGUFWriter(path, made.arch)
    layers = config.num_hidden_layers
    writer.add_block_count(layers + made.unused_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if "feed_forward_length" not in made.keys:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if "attention.head_count_kv" not in made.keys:
        writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if "attention.key_length" not in made.keys:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if made.arch.startswith("lfm2"):
        writer.add_layer_norm_rms_eps(config.norm_eps)
    elif hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
        writer.add_layer_norm_eps(next(getattr(config, n) for n in names if hasattr(config, n)))
    if "rope.freq_base" not in made.keys and getattr(config, "rope_parameters", None):
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in made.keys.items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            bool: writer.add_bool,
            int: writer.add_uint32,
            list: writer.add_array,
        }
        add[type(value)](f"{made.arch}.{key}", value)
    write_tokenizer(writer)
    for stored, factors in _rope_factors(made):
        writer.add_tensor(stored, np.array(factors, np.float32))
    if made.unused_layers:
        writer.add_uint32(f"{made.arch}.nextn_predict_layers", made.unused_layers)
        writer.add_tensor(
            f"blk.{layers}.nextn.enorm.weight", np.ones(config.hidden_size, np.float32)
        )
    tensor_names = gguf.get_tensor_name_map(arch, layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.state_dict().items():
        values = parameter.detach().numpy()
        if made.arch == "falcon-h1":
            values = with_falcon_factors(name, values, config)
        is_dense = getattr(config, "num_local_experts", 1) == 0
        if parts := _parts(name, _part_names(made.arch, is_dense=is_dense)):
            if made.arch == "llama4" and values.ndim == 3:  # [experts, inputs, outputs]
                values = values.swapaxes(-1, -2)
            for stored, part in zip(parts, _split(values, len(parts)), strict=True):
                writer.add_tensor(stored, np.ascontiguousarray(part))
            continue
        if name.endswith("kv_b_proj.weight") and "attention.key_length_mla" in made.keys:
            for stored, part in head_matrices(name, values, config):
                writer.add_tensor(stored, part)
            continue
        if found := recurrent_tensors(made.arch, name, values, config):
            for stored, part in found:
                writer.add_tensor(stored, part)
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if made.arch.startswith("nemotron_h"):
            name = name.replace("model.", "backbone.", 1)  # the name in folders
        stored = tensor_names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if name.endswith("norm.weight"):
            values = values + np.float32(made.norm_offset)
        num_heads = heads.get(name.split(".")[-2], 0) if made.permuted else 0
        writer.add_tensor(stored, interleave(values, num_heads) if num_heads else values)
    finish_gguf(writer)


def _rope_factors(made: GgufModel) -> list[tuple[str, list[float]]]:
    """Return the tensors of factors of the angles."""
    if "longrope" in made.tiny.name:
        return [("rope_factors_short.weight", _SHORT), ("rope_factors_long.weight", _LONG)]
    if made.arch == "gemma4":  # a quarter of the pairs of full attention turns
        return [("rope_freqs.weight", [1.0] * 8 + [1e30] * 24)]
    return []


def _part_names(arch: str, *, is_dense: bool) -> dict[str, tuple[str, ...]]:
    """Return the names of parts that the gguf package does not know."""
    if arch == "gemma4":
        return _GEMMA4_NAMES
    return {**_EXPERT_NAMES, **(_DENSE_NAMES if is_dense else {})}


def _parts(name: str, names: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the names in GGUF of the parts of a tensor, or nothing if `names` has none."""
    for end, parts in names.items():
        if name.endswith(end):
            return [f"blk.{name.split('.')[2]}.{part}" for part in parts]
    return []


def _split(values: np.ndarray, count: int) -> list[np.ndarray]:
    """Return equal groups of the rows of a matrix or of a stack of matrices."""
    return np.split(values, count, axis=-2) if count > 1 else [values]
