"""Granite 4: attention or Mamba-2 in each layer, with experts or dense.

Its dense models without Mamba-2 have the same architecture. In GGUF they are called granite.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings, RecurrentSettings
from lmdeploy.models.experts import MAX_WIDTH, Experts, TensorLocation
from lmdeploy.models.family import (
    HF_TENSORS,
    Recurrent,
    Ropes,
    configured_bias,
    layers_of_types,
)
from lmdeploy.models.granite import FAMILY as GRANITE
from lmdeploy.models.granite import gguf_granite_defaults
from lmdeploy.models.granite_moe import FAMILY as GRANITE_MOE
from lmdeploy.models.granite_moe import SHARED_FAMILY, shared_experts
from lmdeploy.models.mamba2 import (
    GGUF_MAMBA2,
    gguf_mamba2_head_dim,
    hf_mamba2,
    mamba2_bias,
    mamba2_head_dim,
    mamba2_settings,
)
from lmdeploy.models.rope import rope_from_hf

_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


def _recurrent(config: ConfigReader, num_layers: int) -> RecurrentSettings | None:
    layers = layers_of_types(config, num_layers, kinds=_KINDS)
    return mamba2_settings(config, layers) if any(layers) else None


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    """Return RoPE for every layer if `position_embedding_type` is rope, else for none."""
    kind = config.text("position_embedding_type", default="nope")
    if kind not in ("rope", "nope"):
        raise config.refuse(
            f"position_embedding_type is {kind[:40]!r}. It must be rope, nope or null."
        )
    return (rope_from_hf(config, max_position),), (0 if kind == "rope" else -1,) * num_layers


def _bias(config: ConfigReader) -> tuple[str, ...]:
    bias = configured_bias(config)
    if not any(config.texts("layer_types").count(kind) for kind in ("mamba", "linear_attention")):
        return bias
    proj = "mamba_proj_bias"
    return bias + mamba2_bias(config, convolution="mamba_conv_bias", inputs=proj, outputs=proj)


def _derived(config: ConfigReader) -> Mapping[str, Any]:
    """Return the head_dim of Mamba-2 if config.json says "auto"."""
    if not config.has("mamba_n_heads") or config.any_text("mamba_d_head") not in ("", "auto"):
        return {}
    expand = config.integer("mamba_expand", default=2, high=64)
    return mamba2_head_dim(config, size=expand * config.integer("hidden_size", high=MAX_WIDTH))


def _gguf_defaults(config: ConfigReader) -> Mapping[str, Any]:
    has_rope = config.flag("rope_finetuned", default=False)
    return {
        **gguf_granite_defaults(config),
        **gguf_mamba2_head_dim(config),
        "position_embedding_type": "rope" if has_rope else "nope",
        "shared_intermediate_size": config.integer("intermediate_size", high=MAX_WIDTH),
    }


def _experts(config: ConfigReader, num_layers: int) -> MoeSettings | None:
    if config.integer("num_local_experts", default=0, low=0) == 0:
        return None
    return shared_experts(config, num_layers)


assert SHARED_FAMILY.experts is not None and GRANITE_MOE.experts is not None
FAMILY = replace(
    GRANITE,
    name="granite_hybrid",
    models="Granite 4 and 4-H",
    differs="as Granite, Mamba-2 in most layers, experts or a fused gate and up",
    hf_architectures=("GraniteMoeHybridForCausalLM",),
    gguf_architectures=("granitehybrid",),
    hf_bias=_bias,
    ropes=_ropes,
    gguf_defaults=_gguf_defaults,
    hf_tensors={
        **HF_TENSORS,
        "gate": TensorLocation("model.layers.{i}.shared_mlp.input_linear.weight", half=0),
        "up": TensorLocation("model.layers.{i}.shared_mlp.input_linear.weight", half=1),
        "down": TensorLocation("model.layers.{i}.shared_mlp.output_linear.weight"),
    },
    hf_dense_size="shared_intermediate_size",
    hf_defaults={
        "num_local_experts": 8,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_d_state": 256,
        "hidden_act": "silu",
    },
    hf_fixed={"hidden_act": "silu"},
    hf_derived=_derived,
    experts=Experts(
        settings=_experts,
        hf=SHARED_FAMILY.experts.hf,
        gguf=GRANITE_MOE.experts.gguf,
        optional=True,
    ),
    recurrent=Recurrent(
        _recurrent, hf_tensors=hf_mamba2("model.layers.{i}.mamba"), gguf_tensors=GGUF_MAMBA2
    ),
)
