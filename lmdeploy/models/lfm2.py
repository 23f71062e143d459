"""LFM2: most layers are a short convolution between two gates, the others have attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings, RecurrentSettings
from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    GGUF_SCORE_BIAS,
    MAX_EXPERTS,
    MAX_WIDTH,
    Experts,
    ExpertTensors,
    TensorLocation,
)
from lmdeploy.models.family import (
    GGUF_QK_NORM,
    GGUF_TENSORS,
    HF_TENSORS,
    ModelFamily,
    Recurrent,
    layers_of_types,
    stored_parts,
)

_MAX_KERNEL = 8  # the engine has the same limit
_KINDS = {"conv": True, "full_attention": False}
_PARTS = ("recurrent.in_gate", "recurrent.out_gate", "recurrent.v")
_CONV = "model.layers.{i}.conv"
_FFN = "model.layers.{i}.feed_forward"


def _recurrent(config: ConfigReader, num_layers: int) -> RecurrentSettings:
    width = config.integer("hidden_size", high=MAX_WIDTH)
    if width % 16:
        raise config.refuse(
            f"{config.name('hidden_size')} is {width}. It must be a multiple of 16."
        )
    return RecurrentSettings(
        layers=layers_of_types(config, num_layers, kinds=_KINDS),
        kernel=config.integer("conv_L_cache", default=3, low=2, high=_MAX_KERNEL),
        rule="short_convolution",
        width=width,
    )


def _bias(config: ConfigReader) -> tuple[str, ...]:
    if not config.flag("conv_bias", default=False):
        return ()
    return ("recurrent.convolution", *_PARTS, "recurrent.o")


def _derived(config: ConfigReader) -> Mapping[str, Any]:
    """Return the width of the feed-forward, and the layers that `full_attn_idxs` selects."""
    key = "block_ff_dim" if config.has("block_ff_dim") else "intermediate_size"
    width = config.integer(key, high=MAX_WIDTH)
    if config.flag("block_auto_adjust_ff_dim", default=True):
        factor = config.number("block_ffn_dim_multiplier", default=1.0, high=64.0)
        step = config.integer("block_multiple_of", default=256, high=MAX_WIDTH)
        width = -(-int(factor * int(2 * width / 3)) // step) * step
    values: dict[str, Any] = {"dense_width": width, **_tied(config)}
    if not config.has("layer_types") and config.has("full_attn_idxs"):
        full = set(config.integers("full_attn_idxs"))
        layers = range(config.integer("num_hidden_layers", high=1 << 12))
        values["layer_types"] = ["full_attention" if i in full else "conv" for i in layers]
    return values


def _tied(config: ConfigReader) -> Mapping[str, Any]:
    """Return `tie_embedding`, which precedes the usual key, under that key."""
    if not config.has("tie_embedding"):
        return {}
    return {"tie_word_embeddings": config.flag("tie_embedding", default=True)}


def _experts(config: ConfigReader, num_layers: int) -> MoeSettings:
    dense = config.integer("num_dense_layers", default=2, low=0)
    return MoeSettings(
        num_experts=config.integer("num_experts", high=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size", high=MAX_WIDTH),
        normalize=config.flag("norm_topk_prob", default=True),
        sigmoid=True,
        scale=config.number("routed_scaling_factor", default=1.0, low=1e-6),
        layers=tuple(layer >= dense for layer in range(num_layers)),
    )


_HF_EXPERTS: ExpertTensors = {
    "router": TensorLocation(f"{_FFN}.gate.weight"),
    "router.score_bias": TensorLocation(f"{_FFN}.expert_bias"),
    "experts.gate": TensorLocation(f"{_FFN}.experts.{{e}}.w1.weight"),
    "experts.up": TensorLocation(f"{_FFN}.experts.{{e}}.w3.weight"),
    "experts.down": TensorLocation(f"{_FFN}.experts.{{e}}.w2.weight"),
}

FAMILY = ModelFamily(
    name="lfm2",
    models="LFM2 and LFM2.5",
    differs="short convolutions in most layers",
    hf_architectures=("Lfm2ForCausalLM",),
    gguf_architectures=("lfm2",),
    hf_bias=_bias,
    hf_tensors={
        **HF_TENSORS,
        "final_norm": "model.embedding_norm.weight",
        "attention_norm": "model.layers.{i}.operator_norm.weight",
        "ffn_norm": "model.layers.{i}.ffn_norm.weight",
        "q_norm": "model.layers.{i}.self_attn.q_layernorm.weight",
        "k_norm": "model.layers.{i}.self_attn.k_layernorm.weight",
        "o": "model.layers.{i}.self_attn.out_proj.weight",
        "gate": f"{_FFN}.w1.weight",
        "up": f"{_FFN}.w3.weight",
        "down": f"{_FFN}.w2.weight",
    },
    gguf_tensors={**GGUF_TENSORS, **GGUF_QK_NORM, "final_norm": "token_embd_norm.weight"},
    hf_norm_eps="norm_eps",
    hf_dense_size="dense_width",
    hf_defaults={
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128000,
    },
    hf_derived=_derived,
    gguf_defaults=lambda config: {
        "dense_width": config.integer("intermediate_size", high=MAX_WIDTH)
    },
    activation="silu",
    recurrent=Recurrent(
        _recurrent,
        hf_tensors={
            **stored_parts(f"{_CONV}.in_proj.weight", _PARTS),
            "recurrent.convolution": TensorLocation(f"{_CONV}.conv.weight", convert=np.transpose),
            "recurrent.o": f"{_CONV}.out_proj.weight",
        },
        gguf_tensors={
            **stored_parts("blk.{i}.shortconv.in_proj.weight", _PARTS),
            "recurrent.convolution": TensorLocation(
                "blk.{i}.shortconv.conv.weight", convert=np.transpose
            ),
            "recurrent.o": "blk.{i}.shortconv.out_proj.weight",
        },
    ),
)
MOE_FAMILY = replace(
    FAMILY,
    name="lfm2_moe",
    models="LFM2 with experts",
    differs="short convolutions in most layers, experts",
    hf_architectures=("Lfm2MoeForCausalLM",),
    gguf_architectures=("lfm2moe",),
    hf_dense_size="intermediate_size",
    hf_derived=_tied,
    hf_fixed={"use_expert_bias": True},
    experts=Experts(
        settings=_experts, hf=(_HF_EXPERTS,), gguf=({**GGUF_EXPERTS, **GGUF_SCORE_BIAS},)
    ),
)
