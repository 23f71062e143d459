"""GLM-4 (9B) and GLM-4-0414: a fused gate and up, and RoPE of half a head in pairs."""

from dataclasses import replace

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import (
    GGUF_OUTPUT_NORMS,
    GGUF_TENSORS,
    HF_FUSED_GATE_UP,
    HF_TENSORS,
    ModelFamily,
)
from lmdeploy.models.structure import NormSettings, Structure

_STRUCTURE = Structure(norm=NormSettings(outputs=True))


def _bias(config: ConfigReader) -> tuple[str, ...]:
    return ("q", "k", "v") if config.flag("attention_bias", default=True) else ()


FAMILY = ModelFamily(
    name="glm",
    models="GLM-4 9B (-hf)",
    differs="RoPE in pairs of half a head, fused gate and up, biases of q, k and v",
    hf_architectures=("GlmForCausalLM",),
    gguf_architectures=("chatglm",),
    hf_bias=_bias,
    hf_tensors={**HF_TENSORS, **HF_FUSED_GATE_UP},
    hf_defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131072,
    },
    hf_interleaved_rope=True,
    gguf_interleaved_rope=True,
)
GLM4_FAMILY = replace(
    FAMILY,
    name="glm4",
    models="GLM-4-0414, GLM-Z1",
    differs="as GLM-4, with norms before and after each branch",
    hf_architectures=("Glm4ForCausalLM",),
    gguf_architectures=("glm4",),
    hf_tensors={
        **FAMILY.hf_tensors,
        "attention_output_norm": "model.layers.{i}.post_self_attn_layernorm.weight",
        "ffn_output_norm": "model.layers.{i}.post_mlp_layernorm.weight",
    },
    gguf_tensors={**GGUF_TENSORS, **GGUF_OUTPUT_NORMS},
    structure=lambda config: _STRUCTURE,
)
