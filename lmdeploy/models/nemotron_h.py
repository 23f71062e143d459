"""Nemotron-H and Nemotron 3: one branch per layer, which is Mamba-2, attention or a feed-forward.

Attention has no RoPE. Feed-forwards and experts have no gate and a squared ReLU. `time_step_min`
is a setting of the training; transformers also limits the time steps of prompts by it.
"""

from collections.abc import Mapping
from typing import Any

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import BranchSettings, MoeSettings, RecurrentSettings
from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    GGUF_SCORE_BIAS,
    GGUF_SHARED,
    MAX_EXPERTS,
    MAX_WIDTH,
    Experts,
    ExpertTensors,
    TensorLocation,
)
from lmdeploy.models.family import GGUF_TENSORS, ModelFamily, Recurrent, Ropes, without_gate
from lmdeploy.models.mamba2 import (
    GGUF_MAMBA2,
    Mamba2Keys,
    gguf_mamba2_head_dim,
    hf_mamba2,
    mamba2_bias,
    mamba2_settings,
)
from lmdeploy.models.rope import rope_from_hf
from lmdeploy.models.structure import Structure

_MAMBA, _ATTENTION, _DENSE, _EXPERTS = "M", "*", "-", "E"
_KINDS = {
    "mamba": _MAMBA,
    "linear_attention": _MAMBA,
    "attention": _ATTENTION,
    "full_attention": _ATTENTION,
    "mlp": _DENSE,
    "moe": _EXPERTS,
}
_KEYS = Mamba2Keys(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    groups="n_groups",
    state="ssm_state_size",
    kernel="conv_kernel",
)
_MIXER = "model.layers.{i}.mixer"


def _pattern(config: ConfigReader) -> str:
    """Return one letter per layer: those of `hybrid_override_pattern`."""
    if config.has("hybrid_override_pattern"):
        pattern = config.text("hybrid_override_pattern")
    elif config.name("num_key_value_heads") != "num_key_value_heads":  # a GGUF file
        pattern = _gguf_pattern(config)
    else:
        key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
        kinds = config.texts(key)
        if unknown := [kind for kind in kinds if kind not in _KINDS]:
            raise config.refuse(
                f"{key} contains {unknown[0][:40]!r}. It must be {' or '.join(_KINDS)}."
            )
        pattern = "".join(_KINDS[kind] for kind in kinds)
    if not pattern or set(pattern) - {_MAMBA, _ATTENTION, _DENSE, _EXPERTS}:
        raise config.refuse(
            f"hybrid_override_pattern is {pattern[:80]!r}. It must have the letters M, *, - and E."
        )
    return pattern


def _gguf_pattern(config: ConfigReader) -> str:
    attention = config.flags("attention_layers")
    feeds = config.flags("feed_forward_layers")
    config.integer("intermediate_size", low=0)
    for key, layers in (("num_key_value_heads", attention), ("intermediate_size", feeds)):
        if not layers:
            raise config.refuse(f"{config.name(key)} is one number. It must be one for each layer.")
    kind = _EXPERTS if config.integer("n_routed_experts", default=0, low=0) else _DENSE
    return "".join(
        _ATTENTION if attends else kind if feed else _MAMBA
        for attends, feed in zip(attention, feeds, strict=True)
    )


def _layers(config: ConfigReader, num_layers: int, *, kinds: str) -> tuple[bool, ...]:
    pattern = _pattern(config)
    if len(pattern) != num_layers:
        raise config.refuse(
            f"hybrid_override_pattern has {len(pattern)} layers. It must have {num_layers}."
        )
    return tuple(letter in kinds for letter in pattern)


def _recurrent(config: ConfigReader, num_layers: int) -> RecurrentSettings:
    return mamba2_settings(config, _layers(config, num_layers, kinds=_MAMBA), keys=_KEYS)


def _branches(config: ConfigReader, num_layers: int) -> BranchSettings:
    return BranchSettings(
        attention=_layers(config, num_layers, kinds=_ATTENTION),
        feed_forward=_layers(config, num_layers, kinds=_DENSE + _EXPERTS),
    )


def _experts(config: ConfigReader, num_layers: int) -> MoeSettings | None:
    layers = _layers(config, num_layers, kinds=_EXPERTS)
    if not any(layers):
        return None
    latent = 0
    if config.has("moe_latent_size"):
        latent = config.integer("moe_latent_size", high=MAX_WIDTH)
    return MoeSettings(
        num_experts=config.integer("n_routed_experts", high=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size", high=MAX_WIDTH),
        shared_intermediate_size=config.integer(
            "moe_shared_expert_intermediate_size", default=0, low=0, high=MAX_WIDTH
        ),
        latent_size=latent,
        normalize=config.flag("norm_topk_prob", default=True),
        sigmoid=True,
        shared_gate=False,
        scale=config.number("routed_scaling_factor", default=1.0, low=1e-6),
        layers=layers,
    )


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    return (rope_from_hf(config, max_position),), (-1,) * num_layers


def _bias(config: ConfigReader) -> tuple[str, ...]:
    return mamba2_bias(config, convolution="use_conv_bias", inputs="use_bias", outputs="use_bias")


def _derived(config: ConfigReader) -> Mapping[str, Any]:
    """Return the number of layers, which transformers 5 does not store."""
    return {} if config.has("num_hidden_layers") else {"num_hidden_layers": len(_pattern(config))}


def _gguf_defaults(config: ConfigReader) -> Mapping[str, Any]:
    return {"mamba_head_dim": gguf_mamba2_head_dim(config)["mamba_d_head"]}


_HF_EXPERTS: ExpertTensors = {
    "router": TensorLocation(f"{_MIXER}.gate.weight"),
    "router.score_bias": TensorLocation(f"{_MIXER}.gate.e_score_correction_bias"),
    "experts.up": TensorLocation(f"{_MIXER}.experts.{{e}}.up_proj.weight"),
    "experts.down": TensorLocation(f"{_MIXER}.experts.{{e}}.down_proj.weight"),
    "shared.up": TensorLocation(f"{_MIXER}.shared_experts.up_proj.weight"),
    "shared.down": TensorLocation(f"{_MIXER}.shared_experts.down_proj.weight"),
}
_GGUF_EXPERTS: ExpertTensors = {
    kind: place
    for kind, place in {**GGUF_EXPERTS, **GGUF_SCORE_BIAS, **GGUF_SHARED}.items()
    if not kind.endswith(".gate")
}
# Nemotron 3 Super and Ultra
_HF_LATENT: ExpertTensors = {
    "latent_down": TensorLocation(f"{_MIXER}.fc1_latent_proj.weight"),
    "latent_up": TensorLocation(f"{_MIXER}.fc2_latent_proj.weight"),
}
_GGUF_LATENT: ExpertTensors = {
    "latent_down": TensorLocation("blk.{i}.ffn_latent_down.weight"),
    "latent_up": TensorLocation("blk.{i}.ffn_latent_up.weight"),
}
_STRUCTURE = Structure(gated=False)

FAMILY = ModelFamily(
    name="nemotron_h",
    models="Nemotron-H, Nemotron Nano 2 and Nemotron 3",
    differs="one branch per layer: Mamba-2, attention, or a feed-forward without a gate",
    hf_architectures=("NemotronHForCausalLM",),
    gguf_architectures=("nemotron_h", "nemotron_h_moe"),
    hf_bias=_bias,
    hf_tensors={
        "embedding": "model.embeddings.weight",
        "final_norm": "model.norm_f.weight",
        "head": "lm_head.weight",
        "attention_norm": "model.layers.{i}.norm.weight",
        "ffn_norm": "model.layers.{i}.norm.weight",
        **{part: f"{_MIXER}.{part}_proj.weight" for part in ("q", "k", "v", "o", "up", "down")},
    },
    gguf_tensors={**without_gate(GGUF_TENSORS), "ffn_norm": GGUF_TENSORS["attention_norm"]},
    hf_norm_eps="layer_norm_epsilon",
    hf_defaults={
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "head_dim": 128,
        "hidden_act": "relu2",
        "mlp_hidden_act": "relu2",
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
    },
    hf_fixed={
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mlp_bias": False,
        "attention_bias": False,
        "sliding_window": None,
    },
    hf_derived=_derived,
    hf_unused=(r"mtp\..*", r"model\.mtp\..*"),
    gguf_defaults=_gguf_defaults,
    gguf_unused=(r"blk\.<layers>\..*",),  # they predict several tokens at once
    structure=lambda config: _STRUCTURE,
    activation="relu2",
    ropes=_ropes,
    experts=Experts(
        settings=_experts,
        hf=(_HF_EXPERTS, {**_HF_EXPERTS, **_HF_LATENT}),
        gguf=(_GGUF_EXPERTS, {**_GGUF_EXPERTS, **_GGUF_LATENT}),
        optional=True,
    ),
    recurrent=Recurrent(_recurrent, hf_tensors=hf_mamba2(_MIXER), gguf_tensors=GGUF_MAMBA2),
    branches=_branches,
)
