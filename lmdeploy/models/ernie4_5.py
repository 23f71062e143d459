"""ERNIE 4.5: Llama with RoPE in pairs; with experts, a bias selects them."""

from dataclasses import replace

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings
from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    GGUF_SCORE_BIAS,
    GGUF_SHARED,
    HF_QWEN,
    HF_SHARED_EXPERTS,
    HF_STACKED,
    MAX_EXPERTS,
    MAX_WIDTH,
    Experts,
    TensorLocation,
)
from lmdeploy.models.family import ATTENTION_MATRICES, FFN_MATRICES, ModelFamily

_STATICS = "moe_statics.e_score_correction_bias"


def _bias(config: ConfigReader) -> tuple[str, ...]:
    used = config.flag("use_bias", default=False)
    return ATTENTION_MATRICES + FFN_MATRICES if used else ()


def _score_bias(block: str) -> dict[str, TensorLocation]:
    return {"router.score_bias": TensorLocation(f"model.layers.{{i}}.{block}.{_STATICS}")}


def _settings(config: ConfigReader, num_layers: int) -> MoeSettings:
    first = config.integer("moe_layer_start_index", default=1, low=0)
    last = config.integer("moe_layer_end_index", default=-1, low=-1)
    step = config.integer("moe_layer_interval", default=1)
    end = num_layers if last < 0 else last + 1
    width = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    return MoeSettings(
        num_experts=config.integer("moe_num_experts", high=MAX_EXPERTS),
        top_k=config.integer("moe_k"),
        intermediate_size=width,
        shared_intermediate_size=width * config.integer("moe_num_shared_experts", default=2, low=0),
        shared_gate=False,
        layers=tuple(first <= i < end and (i + 1) % step == 0 for i in range(num_layers)),
    )


FAMILY = ModelFamily(
    name="ernie4_5",
    models="ERNIE 4.5, dense",
    differs="RoPE in pairs",
    hf_architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    gguf_architectures=("ernie4_5",),
    hf_bias=_bias,
    hf_defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    hf_interleaved_rope=True,
    gguf_interleaved_rope=True,
)
MOE_FAMILY = replace(
    FAMILY,
    name="ernie4_5_moe",
    models="ERNIE 4.5 with experts, text",
    differs="RoPE in pairs, experts by a softmax with a bias, shared ones",
    hf_architectures=("Ernie4_5_MoeForCausalLM",),
    gguf_architectures=("ernie4_5-moe",),
    hf_defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
    },
    gguf_defaults=lambda config: {"moe_layer_start_index": 0, "moe_num_shared_experts": 0},
    hf_fixed={"use_bias": False},
    hf_unused=(r"model\.mtp_.*",),  # layers that predict several tokens at once
    experts=Experts(
        settings=_settings,
        hf=(
            {**HF_QWEN, **HF_SHARED_EXPERTS, **_score_bias("mlp")},
            {**HF_STACKED, **HF_SHARED_EXPERTS, **_score_bias("mlp.gate")},
        ),
        gguf=({**GGUF_EXPERTS, **GGUF_SHARED, **GGUF_SCORE_BIAS},),
    ),
)
