"""Hunyuan, dense: Llama with norms of q and k after RoPE, and a RoPE base stretched by alpha."""

from dataclasses import replace

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import (
    ATTENTION_MATRICES,
    GGUF_QK_NORM,
    GGUF_TENSORS,
    HF_TENSORS,
    ModelFamily,
    Ropes,
)
from lmdeploy.models.rope import rope_from_hf
from lmdeploy.models.structure import NormSettings, Structure

_STRUCTURE = Structure(norm=NormSettings(qk_after_rope=True))


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    """Return the RoPE. A `dynamic` one with `alpha` has a fixed base: theta alpha^(d / (d - 2))."""
    rope = rope_from_hf(config, max_position)
    stated = config.child("rope_parameters") or config.child("rope_scaling")
    if rope.kind == "dynamic" and stated is not None and stated.has("alpha"):
        alpha = stated.number("alpha", low=1e-3)
        heads = config.integer("num_attention_heads")
        dim = config.integer("head_dim", default=config.integer("hidden_size") // heads)
        rope = replace(rope, kind="default", theta=rope.theta * alpha ** (dim / (dim - 2)))
        rope = replace(rope, factor=1.0, original_max_position=0)
    return (rope,), ()


FAMILY = ModelFamily(
    name="hunyuan",
    models="Hunyuan, dense",
    differs="norms of q and k after RoPE, a stretched RoPE base",
    hf_architectures=("HunYuanDenseV1ForCausalLM",),
    gguf_architectures=("hunyuan-dense",),
    hf_bias=lambda config: (
        ATTENTION_MATRICES if config.flag("attention_bias", default=False) else ()
    ),
    hf_tensors={
        **HF_TENSORS,
        "q_norm": "model.layers.{i}.self_attn.query_layernorm.weight",
        "k_norm": "model.layers.{i}.self_attn.key_layernorm.weight",
    },
    gguf_tensors={**GGUF_TENSORS, **GGUF_QK_NORM},
    hf_defaults={"rms_norm_eps": 1e-5},
    structure=lambda config: _STRUCTURE,
    ropes=_ropes,
)
