"""Gemma 2: norms before and after each branch, soft caps, and a window in every other layer."""

import math
from typing import Any

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import (
    GGUF_OUTPUT_NORMS,
    GGUF_TENSORS,
    HF_TENSORS,
    ModelFamily,
    configured_bias,
    layer_types,
    windows_by_type,
)
from lmdeploy.models.structure import NormSettings, Structure

NORMS = NormSettings(outputs=True)
GEMMA_HF_TENSORS = {
    **HF_TENSORS,
    "attention_output_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "ffn_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "ffn_output_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}
GEMMA_FIXED = {"use_bidirectional_attention": False}


def gemma_structure(config: ConfigReader) -> Structure:
    """Return the structure of Gemma 2 and 3 from config.json."""
    return Structure(
        softmax_scale=config.number("query_pre_attn_scalar", default=256.0, low=1.0) ** -0.5,
        attention_cap=_optional(config, "attn_logit_softcapping"),
        embedding_scale=math.sqrt(config.integer("hidden_size")),
        logit_cap=_optional(config, "final_logit_softcapping"),
        norm=NORMS,
    )


def gguf_gemma_scalar(config: ConfigReader, *, wide_layers: int) -> dict[str, Any]:
    """Return `query_pre_attn_scalar`, which GGUF does not have.

    As in llama.cpp, the model with `wide_layers` layers (27B) uses hidden_size / num_heads, and the
    others head_dim.
    """
    scalar: float = config.integer("head_dim")
    if config.integer("num_hidden_layers") == wide_layers:
        scalar = config.integer("hidden_size") / config.integer("num_attention_heads")
    return {"query_pre_attn_scalar": scalar}


def _optional(config: ConfigReader, key: str) -> float:
    return config.number(key, low=1e-3) if config.has(key) else 0.0


def _gguf_defaults(config: ConfigReader) -> dict[str, Any]:
    """Return the scalar, and the window and caps that the first converters did not write."""
    absent = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    stated = {key: _DEFAULTS[key] for key in absent}
    return {**stated, **gguf_gemma_scalar(config, wide_layers=46)}


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    kinds = layer_types(config, num_layers, period=2)
    return windows_by_type(config, num_layers, window=config.integer("sliding_window"), kinds=kinds)


_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
FAMILY = ModelFamily(
    name="gemma2",
    models="Gemma 2",
    differs="norms before and after each branch, soft caps, alternating windows, scaled embedding",
    hf_architectures=("Gemma2ForCausalLM",),
    gguf_architectures=("gemma2",),
    windows=_windows,
    hf_bias=configured_bias,
    hf_tensors=GEMMA_HF_TENSORS,
    gguf_tensors={**GGUF_TENSORS, **GGUF_OUTPUT_NORMS},
    hf_defaults=_DEFAULTS,
    hf_fixed=GEMMA_FIXED,
    structure=gemma_structure,
    gguf_defaults=_gguf_defaults,
    hf_norm_offset=1.0,
)
