"""Gemma 4, text: KV shared between layers, two head sizes, per-layer inputs, experts beside an MLP.

The last `num_kv_shared_layers` layers read K and V of the last layer before them of the same type.
Layers with full attention have another head_dim, other KV heads, and maybe one matrix for K and V.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings, RopeSettings
from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    MAX_EXPERTS,
    MAX_WIDTH,
    Experts,
    ExpertTensors,
    TensorLocation,
)
from lmdeploy.models.family import (
    GGUF_OUTPUT_NORMS,
    GGUF_QK_NORM,
    GGUF_TENSORS,
    HF_QK_NORM,
    ModelFamily,
    Ropes,
    configured_bias,
    layer_types,
    windows_by_type,
)
from lmdeploy.models.gemma2 import GEMMA_HF_TENSORS
from lmdeploy.models.layer_sizes import LayerSettings
from lmdeploy.models.rope import LEAST_THETA
from lmdeploy.models.structure import NormSettings, Structure

_PERIOD = 6
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GLOBAL_HEAD_DIM = 512
# A divisor of RoPE's frequencies so large that no position turns a pair. GGUF files have it too.
_STILL = 1e30
# The keys of `per_layer_config`, and those of config.json with the same meaning.
_OVERRIDES = ("head_dim", "num_key_value_heads")


def _is_gguf(config: ConfigReader) -> bool:
    return config.name("head_dim") != "head_dim"


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Return the layer types. As in transformers, the last layer always has full attention."""
    if _is_gguf(config):
        slides = config.flags("sliding_layers")
        if len(slides) != num_layers:
            raise config.refuse(
                f"{config.name('sliding_window_pattern')} has {len(slides)} values. It must have "
                f"one for each of the {num_layers} layers."
            )
        return [_SLIDING if slide else _FULL for slide in slides]
    kinds = layer_types(config, num_layers, period=_PERIOD)
    return [*kinds[:-1], _FULL]


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    window = config.integer("sliding_window")
    return windows_by_type(config, num_layers, window=window, kinds=_kinds(config, num_layers))


def _overrides(config: ConfigReader, num_layers: int) -> list[dict[str, int]]:
    """Return head_dim and num_key_value_heads of each layer that has its own."""
    stated = config.child("per_layer_config")
    if stated is None:
        own = {"head_dim": config.integer("global_head_dim", default=_GLOBAL_HEAD_DIM)}
        if config.flag("attention_k_eq_v", default=False) and config.has(
            "num_global_key_value_heads"
        ):
            own["num_key_value_heads"] = config.integer("num_global_key_value_heads")
        return [own if kind == _FULL else {} for kind in _kinds(config, num_layers)]
    found: list[dict[str, int]] = [{} for _ in range(num_layers)]
    for key in sorted(stated.keys()):
        layer = stated.child(key)
        if not key.isdecimal() or len(key) > 4 or int(key) >= num_layers:
            raise stated.refuse(f"{key[:40]!r} is not a layer. Keys must be 0 to {num_layers - 1}.")
        if layer is None:
            continue
        for name in layer.keys():  # noqa: SIM118  not a mapping
            if name not in _OVERRIDES:
                raise stated.refuse(
                    f"{key} has {name[:40]!r}. Layers may have {' and '.join(_OVERRIDES)}."
                )
            found[int(key)][name] = layer.integer(name, high=MAX_WIDTH)
    return found


def _sources(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the layer whose K and V each layer reads."""
    kinds = _kinds(config, num_layers)
    shared = config.integer("num_kv_shared_layers", default=0, low=0, high=num_layers)
    own = num_layers - shared
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    if missing := set(kinds[own:]) - last.keys():
        raise config.refuse(
            f"{config.name('num_kv_shared_layers')} is {shared}. No earlier layer has the K and V "
            f"of layers with {min(missing)}."
        )
    return (*range(own), *(last[kind] for kind in kinds[own:]))


def _gguf_sizes(config: ConfigReader, num_layers: int) -> LayerSettings:
    """Return the sizes in a GGUF file, whose lists have one value for each layer."""

    def of_layers(key: str, name: str) -> tuple[int, ...]:
        values = config.integers(name) or [config.integer(key, high=MAX_WIDTH)] * num_layers
        if len(values) != num_layers or not all(0 < value <= MAX_WIDTH for value in values):
            raise config.refuse(f"{config.name(key)} must be 1 to {MAX_WIDTH} in every layer.")
        return tuple(values)

    kinds = _kinds(config, num_layers)
    full, sliding = config.integer("head_dim"), config.integer("swa_head_dim", high=MAX_WIDTH)
    if (turned := config.integer("swa_rotary_dim", default=sliding)) != sliding:
        raise config.refuse(f"{config.name('swa_rotary_dim')} is {turned}. It must be {sliding}.")
    k_eq_v = config.flag("attention_k_eq_v", default=False)
    return LayerSettings(
        head_dims=tuple(full if kind == _FULL else sliding for kind in kinds),
        kv_heads=of_layers("num_key_value_heads", "layer_kv_heads"),
        intermediate_sizes=of_layers("intermediate_size", "layer_intermediate_sizes"),
        kv_sources=_sources(config, num_layers),
        v_is_k=tuple(k_eq_v and kind == _FULL for kind in kinds),
    )


def _layer_sizes(config: ConfigReader, num_layers: int) -> LayerSettings:
    if _is_gguf(config):
        return _gguf_sizes(config, num_layers)
    overrides = _overrides(config, num_layers)
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    inner = config.integer("intermediate_size", high=MAX_WIDTH)
    wide = config.flag("use_double_wide_mlp", default=False)
    k_eq_v = config.flag("attention_k_eq_v", default=False)
    sources = _sources(config, num_layers)
    shares = [source != layer for layer, source in enumerate(sources)]
    return LayerSettings(
        head_dims=tuple(own.get("head_dim", head_dim) for own in overrides),
        kv_heads=tuple(own.get("num_key_value_heads", kv_heads) for own in overrides),
        intermediate_sizes=tuple(inner * 2 if wide and shared else inner for shared in shares),
        kv_sources=sources,
        v_is_k=tuple(k_eq_v and kind == _FULL for kind in _kinds(config, num_layers)),
    )


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    kinds = _kinds(config, num_layers)
    dims = _layer_sizes(config, num_layers).head_dims
    of_layers = list(zip(kinds, dims, strict=True))
    places = sorted(set(of_layers))  # full attention first, whose divisors GGUF has in a tensor
    ropes = tuple(_rope(config, kind, head_dim=dim) for kind, dim in places)
    return ropes, tuple(places.index(place) for place in of_layers)


def _rope(config: ConfigReader, kind: str, *, head_dim: int) -> RopeSettings:
    """Return the RoPE of a layer type. A proportional one turns the first pairs only."""
    if _is_gguf(config):
        key = "rope_theta" if kind == _FULL else "rope_local_base_freq"
        return RopeSettings(theta=config.number(key, low=LEAST_THETA), dim=head_dim)
    parameters = config.child("rope_parameters")
    rope = parameters.child(kind) if parameters is not None else None
    if rope is None:
        raise config.refuse(f"rope_parameters has no {kind}.")
    name = rope.text("rope_type", default="default")
    theta = rope.number("rope_theta", low=LEAST_THETA)
    if name == "default":
        return RopeSettings(theta=theta, dim=head_dim)
    if name != "proportional":
        raise rope.refuse(f"rope_type is {name[:40]!r}. It must be default or proportional.")
    share = rope.number("partial_rotary_factor", default=1.0, high=1.0)
    factor = rope.number("factor", default=1.0, low=1e-3, high=1e6)
    half = head_dim // 2
    turned = int(share * head_dim // 2)
    factors = (factor,) * turned + (_STILL,) * (half - turned)
    return RopeSettings(theta=theta, dim=head_dim, freq_factors=factors)


def _moe(config: ConfigReader, num_layers: int) -> MoeSettings | None:
    has_experts = config.flag("enable_moe_block", default=False)
    if _is_gguf(config):
        has_experts = config.integer("num_experts", default=0, low=0) > 0
    if not has_experts:
        return None
    return MoeSettings(
        num_experts=config.integer("num_experts", high=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok" if _is_gguf(config) else "top_k_experts"),
        intermediate_size=config.integer("moe_intermediate_size", high=MAX_WIDTH),
        beside_dense=True,
        layers=(True,) * num_layers,
    )


def _router_norm(stored: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the weight of the router's norm, which also divides by the root of its size."""
    return (stored * np.float32(stored.size**-0.5)).reshape(-1)


def _experts(layer: str, names: Mapping[str, str]) -> ExpertTensors:
    """Return the locations of tensors beside the experts' matrices, given their engine names."""
    return {
        kind: TensorLocation(
            f"{layer}.{name}", convert=_router_norm if kind == "router.norm" else None
        )
        for kind, name in names.items()
    }


_HF_EXPERTS: ExpertTensors = {
    **_experts(
        "model.layers.{i}",
        {
            "router": "router.proj.weight",
            "router.norm": "router.scale",
            "router.expert_scale": "router.per_expert_scale",
            "expert_norm": "pre_feedforward_layernorm_2.weight",
            "expert_output_norm": "post_feedforward_layernorm_2.weight",
            "dense_output_norm": "post_feedforward_layernorm_1.weight",
        },
    ),
    "experts.gate": TensorLocation("model.layers.{i}.experts.gate_up_proj", stacked=True, half=0),
    "experts.up": TensorLocation("model.layers.{i}.experts.gate_up_proj", stacked=True, half=1),
    "experts.down": TensorLocation("model.layers.{i}.experts.down_proj", stacked=True),
}


_GGUF_ROUTER: ExpertTensors = _experts(
    "blk.{i}",
    {
        "router": "ffn_gate_inp.weight",
        "router.norm": "ffn_gate_inp.scale",
        "router.expert_scale": "ffn_down_exps.scale",
        "expert_norm": "pre_ffw_norm_2.weight",
        "expert_output_norm": "post_ffw_norm_2.weight",
        "dense_output_norm": "post_ffw_norm_1.weight",
    },
)
_GGUF_FUSED: ExpertTensors = {
    "experts.gate": TensorLocation("blk.{i}.ffn_gate_up_exps.weight", stacked=True, half=0),
    "experts.up": TensorLocation("blk.{i}.ffn_gate_up_exps.weight", stacked=True, half=1),
    "experts.down": TensorLocation("blk.{i}.ffn_down_exps.weight", stacked=True),
}


def _structure(config: ConfigReader) -> Structure:
    direction = config.any_text("use_bidirectional_attention")
    if direction not in ("", "vision"):  # text tokens attend to earlier ones only
        raise config.refuse(
            f"use_bidirectional_attention is {direction[:40]!r}. It must be null or vision."
        )
    cap = config.has("final_logit_softcapping")
    return Structure(
        softmax_scale=1.0,
        embedding_scale=math.sqrt(config.integer("hidden_size")),
        logit_cap=config.number("final_logit_softcapping", low=1e-3) if cap else 0.0,
        norm=NormSettings(outputs=True, v_unit=True),
        per_layer_size=_per_layer_size(config),
        layer_scale=True,
    )


def _per_layer_size(config: ConfigReader) -> int:
    key = "hidden_size_per_layer_input"
    size = config.integer(key, low=0, high=MAX_WIDTH) if config.has(key) else 0
    vocab = config.integer("vocab_size")
    own = config.integer("vocab_size_per_layer_input", default=vocab)
    if size and own != vocab:
        raise config.refuse(
            f"vocab_size_per_layer_input is {own}. It must be the vocab_size {vocab}."
        )
    return size


def _extra_tensors(config: ConfigReader) -> Mapping[str, str]:
    return _HF_PER_LAYER if _per_layer_size(config) else {}


_HF_PER_LAYER = {
    "per_layer_embedding": "model.embed_tokens_per_layer.weight",
    "per_layer_projection": "model.per_layer_model_projection.weight",
    "per_layer_norm": "model.per_layer_projection_norm.weight",
    "per_layer_gate": "model.layers.{i}.per_layer_input_gate.weight",
    "per_layer_up": "model.layers.{i}.per_layer_projection.weight",
    "per_layer_output_norm": "model.layers.{i}.post_per_layer_input_norm.weight",
}
_GGUF_PER_LAYER = {
    "per_layer_embedding": "per_layer_token_embd.weight",
    "per_layer_projection": "per_layer_model_proj.weight",
    "per_layer_norm": "per_layer_proj_norm.weight",
    "per_layer_gate": "blk.{i}.inp_gate.weight",
    "per_layer_up": "blk.{i}.proj.weight",
    "per_layer_output_norm": "blk.{i}.post_norm.weight",
}
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
FAMILY = ModelFamily(
    name="gemma4",
    models="Gemma 4 (E2B to 31B), text",
    differs=(
        "KV shared between layers, other heads in layers with full attention, norms of v, "
        "per-layer inputs, experts beside a dense feed-forward"
    ),
    hf_architectures=("Gemma4ForCausalLM",),
    gguf_architectures=("gemma4",),
    windows=_windows,
    layer_sizes=_layer_sizes,
    hf_bias=configured_bias,
    hf_tensors={
        **GEMMA_HF_TENSORS,
        **HF_QK_NORM,
        "scale": "model.layers.{i}.layer_scalar",
    },
    hf_extra_tensors=_extra_tensors,
    gguf_tensors={
        **GGUF_TENSORS,
        **GGUF_OUTPUT_NORMS,
        **GGUF_QK_NORM,
        "scale": "blk.{i}.layer_output_scale.weight",
    },
    gguf_optional_tensors=_GGUF_PER_LAYER,
    gguf_by_layer=True,
    gguf_unused=(r"blk\.\d+\.attn_(k|v|k_norm)\.weight",),
    hf_defaults=_DEFAULTS,
    # K, V and their norms of layers that read those of another layer.
    hf_unused=(r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight",),
    structure=_structure,
    ropes=_ropes,
    experts=Experts(
        settings=_moe,
        hf=(_HF_EXPERTS,),
        gguf=({**GGUF_EXPERTS, **_GGUF_ROUTER}, {**_GGUF_ROUTER, **_GGUF_FUSED}),
        optional=True,
    ),
)
