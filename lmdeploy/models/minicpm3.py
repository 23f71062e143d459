"""MiniCPM3: latent attention, dense, with factors of embedding, branches and logits."""

import math
from collections.abc import Mapping
from typing import Any

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import ModelFamily
from lmdeploy.models.latents import (
    HF_LATENTS,
    cache_row,
    hf_queries,
    latent_biases,
    latents,
    softmax_scale,
)
from lmdeploy.models.structure import Structure


def _structure(config: ConfigReader) -> Structure:
    hidden, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
    depth = config.number("scale_depth", default=math.sqrt(layers), low=1e-6)
    return Structure(
        softmax_scale=softmax_scale(config),
        embedding_scale=config.number("scale_emb", default=1.0, low=1e-6),
        residual_scale=depth / math.sqrt(layers),
        logit_scale=config.integer("dim_model_base", default=hidden) / hidden,
    )


def _derived(config: ConfigReader) -> Mapping[str, Any]:
    width = config.integer("hidden_size") // config.integer("num_attention_heads")
    value = config.integer("v_head_dim", default=max(width, 1))
    return {**cache_row(config), "v_head_dim": value}


FAMILY = ModelFamily(
    name="minicpm3",
    models="MiniCPM3",
    differs="latent attention, factors of embedding, branches and logits",
    hf_architectures=("MiniCPM3ForCausalLM",),
    gguf_architectures=(),
    hf_tensors=HF_LATENTS,
    hf_extra_tensors=hf_queries,
    hf_bias=latent_biases,
    hf_defaults={"tie_word_embeddings": True},
    hf_derived=_derived,
    structure=_structure,
    latent=lambda config: latents(config, interleaved=False),
)
