"""Qwen3-Next and Qwen3.5: three of four layers are recurrent (the gated delta rule).

The others have full attention with norms of q and k, partial RoPE and a gated output. Norm weights
are stored as w for a factor of 1 + w, except those of the recurrent layers.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from lmdeploy.models import qwen2_moe
from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import RecurrentSettings
from lmdeploy.models.experts import MAX_WIDTH, TensorLocation
from lmdeploy.models.family import (
    ATTENTION_MATRICES,
    GGUF_QK_NORM,
    GGUF_TENSORS,
    HF_QK_NORM,
    HF_TENSORS,
    ModelFamily,
    Recurrent,
    TensorNames,
    layers_of_types,
    stored_parts,
)
from lmdeploy.models.structure import Structure

# The engine has the same limits.
_MAX_HEADS = 1 << 16
_MAX_DIM = 256
_MAX_KERNEL = 8
_KINDS = {"linear_attention": True, "full_attention": False}
_LAYER = "model.layers.{i}.linear_attn"


def _layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return which layers are recurrent: those that `layer_types` calls linear_attention.

    Without it, every layer but the last of each `full_attention_interval` is. A GGUF file may list
    them.
    """
    if config.has("recurrent_layers"):
        listed = tuple(config.flags("recurrent_layers"))
        if len(listed) != num_layers:
            raise config.refuse(
                f"{config.name('recurrent_layers')} has {len(listed)} entries. It must have "
                f"{num_layers}."
            )
        return listed
    if config.texts("layer_types"):
        return layers_of_types(config, num_layers, kinds=_KINDS)
    interval = config.integer("full_attention_interval", default=4)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _settings(config: ConfigReader, num_layers: int) -> RecurrentSettings:
    settings = RecurrentSettings(
        layers=_layers(config, num_layers),
        num_key_heads=config.integer("linear_num_key_heads", high=_MAX_HEADS),
        num_value_heads=config.integer("linear_num_value_heads", high=_MAX_HEADS),
        key_dim=config.integer("linear_key_head_dim", high=_MAX_DIM),
        value_dim=config.integer("linear_value_head_dim", high=_MAX_DIM),
        kernel=config.integer("linear_conv_kernel_dim", low=2, high=_MAX_KERNEL),
        norm_groups=config.integer("linear_num_value_heads", high=_MAX_HEADS),
    )
    if settings.num_value_heads % settings.num_key_heads:
        raise config.refuse(
            f"{config.name('linear_num_value_heads')} is {settings.num_value_heads}. It must be a "
            f"multiple of {config.name('linear_num_key_heads')}, {settings.num_key_heads}."
        )
    for key, size in (
        ("linear_key_head_dim", settings.key_dim),
        ("linear_value_head_dim", settings.value_dim),
    ):
        if size % 16:
            raise config.refuse(f"{config.name(key)} is {size}. It must be a multiple of 16.")
    return settings


def _gguf_defaults(config: ConfigReader) -> dict[str, Any]:
    heads = config.integer("linear_num_value_heads", high=_MAX_HEADS)
    size = config.integer("linear_value_size", high=MAX_WIDTH)
    if size % heads:
        raise config.refuse(
            f"{config.name('linear_value_size')} is {size}. It must be a multiple of "
            f"{config.name('linear_num_value_heads')}, {heads}."
        )
    return {"linear_value_head_dim": size // heads, "norm_topk_prob": True}


_QKV = ("recurrent.q", "recurrent.k", "recurrent.v")
_GATES = ("recurrent.b", "recurrent.a")
_Q_AND_GATE = ("q", "attention_gate")  # of each head
_HF_MIXER: TensorNames = {
    "recurrent.convolution": TensorLocation(f"{_LAYER}.conv1d.weight", convert=np.transpose),
    "recurrent.decay": TensorLocation(f"{_LAYER}.A_log", convert=np.exp),
    "recurrent.dt_bias": f"{_LAYER}.dt_bias",
    "recurrent.norm": f"{_LAYER}.norm.weight",
    "recurrent.o": f"{_LAYER}.out_proj.weight",
}
# Qwen3-Next stores the rows of a key head, and of the value heads that read it, together.
_HF_NEXT: TensorNames = {
    **_HF_MIXER,
    **stored_parts(f"{_LAYER}.in_proj_qkvz.weight", (*_QKV, "recurrent.z"), heads="key_heads"),
    **stored_parts(f"{_LAYER}.in_proj_ba.weight", _GATES, heads="key_heads"),
}
_HF_3_5: TensorNames = {
    **_HF_MIXER,
    **stored_parts(f"{_LAYER}.in_proj_qkv.weight", _QKV),
    "recurrent.z": f"{_LAYER}.in_proj_z.weight",
    "recurrent.b": f"{_LAYER}.in_proj_b.weight",
    "recurrent.a": f"{_LAYER}.in_proj_a.weight",
}
_GGUF_MIXER: TensorNames = {
    **stored_parts("blk.{i}.attn_qkv.weight", _QKV),
    "recurrent.z": "blk.{i}.attn_gate.weight",
    "recurrent.convolution": TensorLocation("blk.{i}.ssm_conv1d.weight", convert=np.transpose),
    "recurrent.decay": TensorLocation("blk.{i}.ssm_a", convert=np.negative),
    "recurrent.dt_bias": "blk.{i}.ssm_dt.bias",
    "recurrent.norm": "blk.{i}.ssm_norm.weight",
    "recurrent.o": "blk.{i}.ssm_out.weight",
}
_GGUF_NEXT: TensorNames = {
    **_GGUF_MIXER,
    **stored_parts("blk.{i}.ssm_ba.weight", _GATES, heads="key_heads"),
}
_GGUF_3_5: TensorNames = {
    **_GGUF_MIXER,
    "recurrent.b": "blk.{i}.ssm_beta.weight",
    "recurrent.a": "blk.{i}.ssm_alpha.weight",
}
_HF_ATTENTION: TensorNames = {
    **HF_TENSORS,
    **HF_QK_NORM,
    **stored_parts("model.layers.{i}.self_attn.q_proj.weight", _Q_AND_GATE, heads="heads"),
}
_GGUF_ATTENTION: TensorNames = {
    **GGUF_TENSORS,
    **GGUF_QK_NORM,
    **stored_parts("blk.{i}.attn_q.weight", _Q_AND_GATE, heads="heads"),
    "ffn_norm": "blk.{i}.post_attention_norm.weight",
}
_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

FAMILY = ModelFamily(
    name="qwen3_next",
    models="Qwen3-Next",
    differs="recurrent layers, gated attention, experts with a shared one",
    hf_architectures=("Qwen3NextForCausalLM",),
    gguf_architectures=("qwen3next",),
    hf_bias=lambda config: (
        (*ATTENTION_MATRICES, "attention_gate")
        if config.flag("attention_bias", default=False)
        else ()
    ),
    hf_tensors=_HF_ATTENTION,
    gguf_tensors=_GGUF_ATTENTION,
    gguf_defaults=_gguf_defaults,
    gguf_unused=(r"blk\.<layers>\..*",),  # they predict several tokens at once
    hf_defaults={**_DEFAULTS, "norm_topk_prob": True},
    hf_norm_offset=1.0,
    hf_unused=("mtp.*",),
    structure=lambda config: Structure(attention_gate=True),
    experts=qwen2_moe.FAMILY.experts,
    recurrent=Recurrent(_settings, hf_tensors=_HF_NEXT, gguf_tensors=_GGUF_NEXT),
)
QWEN3_5_FAMILY = replace(
    FAMILY,
    name="qwen3_5",
    models="Qwen3.5, 3.6 and 3.8, dense, text",
    differs="recurrent layers, gated attention",
    hf_architectures=("Qwen3_5ForCausalLM",),
    gguf_architectures=("qwen35",),
    hf_defaults=_DEFAULTS,
    experts=None,
    recurrent=Recurrent(_settings, hf_tensors=_HF_3_5, gguf_tensors=_GGUF_3_5, gguf_tiled=True),
)
QWEN3_5_MOE_FAMILY = replace(
    QWEN3_5_FAMILY,
    name="qwen3_5_moe",
    models="Qwen3.5 and 3.6 with experts, text",
    differs="recurrent layers, gated attention, experts with a shared one",
    hf_architectures=("Qwen3_5MoeForCausalLM",),
    gguf_architectures=("qwen35moe",),
    hf_defaults={**_DEFAULTS, "norm_topk_prob": True},
    hf_dense_size="moe_intermediate_size",  # no layer is dense
    experts=qwen2_moe.FAMILY.experts,
)
