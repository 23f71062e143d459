"""Tiny random checkpoints of the families with multi-head latent attention."""

from __future__ import annotations

from tiny_models import TinyModel

_LATENTS = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}
_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
V2 = TinyModel(
    "deepseek-v2-groups",
    "DeepseekV2",
    {
        **_LATENTS,
        **_EXPERTS,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    rope={**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
)
V3 = TinyModel(
    "deepseek-v3",
    "DeepseekV3",
    {**_LATENTS, **_EXPERTS, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    rope={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
)
GLM = TinyModel(
    "glm-4.7-flash",
    "Glm4MoeLite",
    {
        **_LATENTS,
        **_EXPERTS,
        "hidden_size": 80,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "rms_norm_eps": 1e-5,
    },
)
MINICPM3 = TinyModel(
    "minicpm3",
    "MiniCPM3",
    {**_LATENTS, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32, "v_head_dim": None},
)
TINY_LATENTS = (
    V2,
    TinyModel(
        "deepseek-v2-lite",
        "DeepseekV2",
        {
            **_LATENTS,
            **_EXPERTS,
            "q_lora_rank": None,
            "num_attention_heads": 20,
            "hidden_size": 80,
            "num_key_value_heads": 20,
        },
    ),
    V3,
    TinyModel(
        "deepseek-v3-halves-bias",
        "DeepseekV3",
        {
            **_LATENTS,
            **_EXPERTS,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
        rope={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},  # cos and sin keep a magnitude
    ),
    GLM,
    MINICPM3,
)
