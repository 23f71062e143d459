"""Published sizes, as their config.json says them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]


def _gpt_oss(layers: int, experts: int) -> Config:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }


def _llama_like(architecture: str, model_type: str, **sizes: Any) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **sizes,
    }


NAMED_CONFIGS: dict[str, Config] = {
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "mixtral-8x7b": _llama_like(
        "MixtralForCausalLM",
        "mixtral",
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=32768,
        num_attention_heads=32,
        num_experts_per_tok=2,
        num_hidden_layers=32,
        num_key_value_heads=8,
        num_local_experts=8,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        sliding_window=None,
        vocab_size=32000,
    ),
    "qwen1.5-moe-a2.7b": _llama_like(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        decoder_sparse_step=1,
        hidden_size=2048,
        intermediate_size=5632,
        max_position_embeddings=8192,
        mlp_only_layers=[],
        moe_intermediate_size=1408,
        norm_topk_prob=False,
        num_attention_heads=16,
        num_experts=60,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_key_value_heads=16,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        shared_expert_intermediate_size=5632,
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "qwen3-30b-a3b": _llama_like(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        attention_bias=False,
        decoder_sparse_step=1,
        head_dim=128,
        hidden_size=2048,
        intermediate_size=6144,
        max_position_embeddings=40960,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "qwen3-8b": _llama_like(
        "Qwen3ForCausalLM",
        "qwen3",
        attention_bias=False,
        head_dim=128,
        hidden_size=4096,
        intermediate_size=12288,
        max_position_embeddings=40960,
        num_attention_heads=32,
        num_hidden_layers=36,
        num_key_value_heads=8,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "llama-3-8b": _llama_like(
        "LlamaForCausalLM",
        "llama",
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=8192,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-05,
        rope_theta=500000.0,
        vocab_size=128256,
    ),
    "llama-3.2-1b": {
        **_llama_like(
            "LlamaForCausalLM",
            "llama",
            head_dim=64,
            hidden_size=2048,
            intermediate_size=8192,
            max_position_embeddings=131072,
            num_attention_heads=32,
            num_hidden_layers=16,
            num_key_value_heads=8,
            rms_norm_eps=1e-05,
            rope_scaling={
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            rope_theta=500000.0,
            vocab_size=128256,
        ),
        "tie_word_embeddings": True,
    },
}


def read_config(name: str, layers: int | None) -> Config:
    """A named config or that of a file, cut to its first `layers` layers.

    Raises:
        ValueError: for an unknown name, a file that is no JSON object, or too many layers.
    """
    config = copy.deepcopy(NAMED_CONFIGS[name]) if name in NAMED_CONFIGS else _from_file(name)
    own = config.get("num_hidden_layers")
    if layers is None:
        return config
    if type(own) is not int or not 1 <= layers <= own:
        raise ValueError(f"--layers: got {layers}, wanted 1 to num_hidden_layers {own!r}")
    config["num_hidden_layers"] = layers
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:layers]
    return config


def _from_file(name: str) -> Config:
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"config: got {name!r}, wanted a config.json or one of {', '.join(NAMED_CONFIGS)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"config: {path} holds {type(config).__name__}, wanted an object")
    return config
