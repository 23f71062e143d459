"""Tiny random checkpoints of the families whose structure differs from Llama's."""

from __future__ import annotations

from tiny_models import VOCAB_SIZE, TinyModel

_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [2.0 + 0.3 * i for i in range(16)],
    "original_max_position_embeddings": 300,
}
_BY_TYPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
_GEMMA = {
    "num_hidden_layers": 3,
    "sliding_window": 24,
    "query_pre_attn_scalar": 50,
    "tie_word_embeddings": True,
    "layer_types": _WINDOWS,
}
_GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
    "logits_scaling": 4.0,
}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_RECURRENT = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
_MAMBA2 = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
}
_FALCON_H1 = {
    "num_hidden_layers": 3,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 1.4,
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
    "mlp_multipliers": [0.8, 1.25],
}
_NEMOTRON_H = {
    "layers_block_type": [
        "linear_attention",
        "moe",
        "linear_attention",
        "linear_attention",
        "mlp",
        "full_attention",
        "mlp",
    ],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "time_step_min": 1e-12,  # transformers limits the time steps of prompts by it
}
_LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "tie_word_embeddings": True,
}
_SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
}
# Models whose stored matrices have the rows of several tensors, in widths that every quantization
# method accepts. The rows of a head begin within the blocks and words of the methods.
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 48,
    "linear_value_head_dim": 16,
}
_HYBRID_EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
HYBRID_MOE = TinyModel(
    "qwen3-5-moe", "Qwen3_5Moe", {**_HYBRID, **_HYBRID_EXPERTS}, config="Qwen3_5MoeText"
)
HYBRID_MODELS = (
    TinyModel("qwen3-5", "Qwen3_5", _HYBRID, config="Qwen3_5Text"),
    TinyModel("qwen3-next", "Qwen3Next", {**_HYBRID, **_HYBRID_EXPERTS}),
)

_MINISTRAL3 = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 0, 1],
    "attention_chunk_size": 24,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "pad_token_id": 0,
}

# Every structure of Gemma 4: layers 4 and 5 read K and V of layers 2 and 3.
_GEMMA4 = {
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_MODELS = (
    TinyModel("gemma4", "Gemma4", _GEMMA4, config="Gemma4Text"),
    TinyModel(
        "gemma4-k-is-v",
        "Gemma4",
        {**_GEMMA4, **_K_IS_V, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        config="Gemma4Text",
    ),
    TinyModel(
        "gemma4-experts",
        "Gemma4",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
        config="Gemma4Text",
    ),
    TinyModel(
        "gemma4-dim512",
        "Gemma4",
        {
            **_GEMMA4,
            **_K_IS_V,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_attention_heads": 4,
        },
        config="Gemma4Text",
    ),
)

FAMILY_MODELS = (
    TinyModel(
        "gemma2",
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    TinyModel("gemma3", "Gemma3", {**_GEMMA, "rope_parameters": _BY_TYPE}, config="Gemma3Text"),
    *GEMMA4_MODELS,
    TinyModel(
        "smollm3",
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "pad_token_id": 0},
    ),
    TinyModel("granite", "Granite", {**_GRANITE, "attention_bias": True}),
    *(
        TinyModel(
            f"granite-hybrid-{kind}",
            "GraniteMoeHybrid",
            {
                **_GRANITE,
                "layer_types": ["full_attention"] * 2,
                "num_local_experts": 0,
                "position_embedding_type": kind,
                "shared_intermediate_size": 96,
                "mamba_n_heads": 2,
            },
        )
        for kind in ("rope", "nope")
    ),
    TinyModel("granite-moe", "GraniteMoe", {**_GRANITE, **_EXPERTS}),
    TinyModel(
        "granite-moe-shared",
        "GraniteMoeShared",
        {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 96},
    ),
    TinyModel(
        "granite-4-h",
        "GraniteMoeHybrid",
        {
            **_GRANITE,
            **_MAMBA2,
            "mamba_proj_bias": True,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
        },
    ),
    TinyModel(
        "granite-4-h-moe",
        "GraniteMoeHybrid",
        {
            **_GRANITE,
            **_MAMBA2,
            **_EXPERTS,
            "mamba_conv_bias": False,
            "intermediate_size": 48,
            "shared_intermediate_size": 96,
        },
    ),
    TinyModel("falcon-h1", "FalconH1", _FALCON_H1),
    TinyModel(
        "falcon-h1-norm", "FalconH1", {**_FALCON_H1, "mamba_rms_norm": True, "mlp_bias": True}
    ),
    TinyModel(
        "falcon-h1-gate",
        "FalconH1",
        {
            **_FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
        },
    ),
    TinyModel("nemotron-h", "NemotronH", _NEMOTRON_H),
    TinyModel("nemotron-h-latent", "NemotronH", {**_NEMOTRON_H, "moe_latent_size": 32}),
    TinyModel("lfm2", "Lfm2", {**_LFM2, "block_multiple_of": 32}),
    TinyModel("lfm2-bias", "Lfm2", {**_LFM2, "conv_bias": True, "block_auto_adjust_ff_dim": False}),
    TinyModel(
        "lfm2-moe",
        "Lfm2Moe",
        {
            **_LFM2,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
    ),
    TinyModel("phi3-window", "Phi3", {"sliding_window": 40, "pad_token_id": 0}),
    TinyModel(
        "phi3-longrope-partial",
        "Phi3",
        {
            "hidden_size": 256,
            "max_position_embeddings": 600,
            "original_max_position_embeddings": 300,
            "partial_rotary_factor": 0.5,
            "pad_token_id": 0,
        },
        rope={**_LONGROPE, "partial_rotary_factor": 0.5},
    ),
    TinyModel("glm", "Glm", {"pad_token_id": 0}),
    TinyModel("glm4", "Glm4", {"pad_token_id": 0}),
    TinyModel(
        "glm4-moe",
        "Glm4Moe",
        {
            "num_hidden_layers": 3,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    TinyModel(
        "glm4-moe-groups",
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 0,
            "pad_token_id": 0,
        },
    ),
    TinyModel(
        "minimax-m2",
        "MiniMaxM2",
        {**_EXPERTS, "rotary_dim": 32, "intermediate_size": 48},
        rope={"partial_rotary_factor": 0.5},
    ),
    TinyModel("ministral", "Ministral", {"sliding_window": 30, "head_dim": 64}),
    TinyModel("ministral3", "Ministral3", rope=_MINISTRAL3),
    TinyModel("llama4", "Llama4", _LLAMA4, config="Llama4Text"),
    TinyModel(
        "llama4-top2-no-norm",
        "Llama4",
        {
            **_LLAMA4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": False,
            "attention_chunk_size": 64,
            "attention_bias": True,
        },
        config="Llama4Text",
    ),
    TinyModel("olmo2", "Olmo2"),
    TinyModel(
        "olmo3",
        "Olmo3",
        {
            "num_hidden_layers": 3,
            "layer_types": _WINDOWS,
            "sliding_window": 24,
            "rope_parameters": _BY_TYPE,
        },
    ),
    TinyModel(
        "exaone4",
        "Exaone4",
        {
            "num_hidden_layers": 3,
            "layer_types": _WINDOWS,
            "sliding_window": 24,
            "sliding_window_pattern": "LLG",
        },
    ),
    TinyModel(
        "exaone4-full", "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    ),
    TinyModel("seed-oss", "SeedOss", {"attention_out_bias": True}),
    TinyModel("ernie4-5", "Ernie4_5", {"use_bias": True}),
    TinyModel(
        "ernie4-5-moe",
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
        },
    ),
    TinyModel("hunyuan", "HunYuanDenseV1"),
    TinyModel(
        "hunyuan-alpha",
        "HunYuanDenseV1",
        rope={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
    ),
    TinyModel("cohere", "Cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    TinyModel(
        "cohere2",
        "Cohere2",
        {
            "hidden_size": 256,
            "num_hidden_layers": 3,
            "logit_scale": 0.25,
            "layer_types": _WINDOWS,
            "sliding_window": 24,
        },
    ),
    TinyModel("starcoder2", "Starcoder2", {"sliding_window": 30, "tie_word_embeddings": True}),
    TinyModel("arcee", "Arcee", {"mlp_bias": True}),
    TinyModel("qwen3-5", "Qwen3_5", _RECURRENT, config="Qwen3_5Text"),
    TinyModel(
        "qwen3-5-bias", "Qwen3_5", {**_RECURRENT, "attention_bias": True}, config="Qwen3_5Text"
    ),
    TinyModel(
        "qwen3-5-moe",
        "Qwen3_5Moe",
        {**_RECURRENT, **_SHARED_EXPERT, "linear_num_value_heads": 6},
        config="Qwen3_5MoeText",
    ),
    TinyModel(
        "qwen3-next",
        "Qwen3Next",
        {
            **_RECURRENT,
            **_SHARED_EXPERT,
            "linear_value_head_dim": 48,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention"] * 2,
        },
    ),
    TinyModel(
        "nemotron", "Nemotron", {"attention_bias": True}, rope={"partial_rotary_factor": 0.5}
    ),
)
