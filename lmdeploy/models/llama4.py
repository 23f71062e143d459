"""Llama 4, text: attention in chunks, layers without RoPE, experts whose inputs are weighed."""

from typing import Any

from lmdeploy.models.config_reader import MAX_POSITION, ConfigReader
from lmdeploy.models.decoder_config import MoeSettings
from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    GGUF_SHARED,
    MAX_EXPERTS,
    Experts,
    ExpertTensors,
    TensorLocation,
    expert_width,
)
from lmdeploy.models.family import HF_TENSORS, ModelFamily, Ropes, configured_bias, no_windows
from lmdeploy.models.rope import rope_from_hf
from lmdeploy.models.smollm3 import layers_with_rope
from lmdeploy.models.structure import NormSettings, QueryTemperature, Structure

# In llama.cpp these are constants.
_CHUNK, _BETA = 8192, 0.1
_LARGEST_EXPERTS = 128  # the model of which llama.cpp does not normalize q and k

_BLOCK = "model.layers.{i}.feed_forward"
_HF: ExpertTensors = {
    "router": TensorLocation(f"{_BLOCK}.router.weight"),
    **{
        f"experts.{name}": TensorLocation(
            f"{_BLOCK}.experts.gate_up_proj", stacked=True, transposed=True, half=half
        )
        for half, name in enumerate(("gate", "up"))
    },
    "experts.down": TensorLocation(f"{_BLOCK}.experts.down_proj", stacked=True, transposed=True),
    **{
        f"shared.{name}": TensorLocation(f"{_BLOCK}.shared_expert.{name}_proj.weight")
        for name in ("gate", "up", "down")
    },
}


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return chunks for the layers of `layer_types`, by default those with RoPE.

    A null `attention_chunk_size` means full attention.
    """
    if not config.has("attention_chunk_size"):
        return no_windows(config, num_layers)
    kinds = config.texts("layer_types") or [
        "chunked_attention" if on else "full_attention"
        for on in layers_with_rope(config, num_layers)
    ]
    if len(kinds) != num_layers:
        raise config.refuse(f"layer_types has {len(kinds)} entries. It must have {num_layers}.")
    known = {"full_attention": 0}
    if "chunked_attention" in kinds:
        known["chunked_attention"] = -config.integer("attention_chunk_size", high=1 << 30)
    for kind in kinds:
        if kind not in known:
            raise config.refuse(
                f"layer_types contains {kind[:40]!r}. It must be full_attention or "
                "chunked_attention."
            )
    return tuple(known[kind] for kind in kinds)


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    rotates = layers_with_rope(config, num_layers)
    return (rope_from_hf(config, max_position),), tuple(0 if on else -1 for on in rotates)


def _structure(config: ConfigReader) -> Structure:
    temperature = QueryTemperature()
    if config.flag("attn_temperature_tuning", default=True):
        temperature = QueryTemperature(
            beta=config.number("attn_scale", default=_BETA, high=1e3),
            length=config.integer("floor_scale", default=_CHUNK, high=MAX_POSITION),
            offset=1,
            without_rope=True,
        )
    unit = config.flag("use_qk_norm", default=True)
    return Structure(norm=NormSettings(qk_after_rope=True, qk_unit=unit), temperature=temperature)


def _settings(config: ConfigReader, num_layers: int) -> MoeSettings:
    step = config.integer("interleave_moe_layer_step", default=1)
    sparse = set(range(step - 1, num_layers, step))
    if config.has("moe_layers"):
        sparse = set(config.integers("moe_layers"))
    if sparse - set(range(num_layers)):
        raise config.refuse(
            f"moe_layers contains {max(sparse)}. Layers must be 0 to {num_layers - 1}."
        )
    width = expert_width(config)
    return MoeSettings(
        num_experts=config.integer("num_local_experts", high=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=width,
        shared_gate=False,
        normalize=False,
        sigmoid=True,
        weigh_inputs=True,
        layers=tuple(layer in sparse for layer in range(num_layers)),
    )


def _gguf_defaults(config: ConfigReader) -> dict[str, Any]:
    """Return constants of llama.cpp. It reads a window of 0 as full attention with RoPE."""
    values: dict[str, Any] = {
        "use_qk_norm": config.integer("num_local_experts") != _LARGEST_EXPERTS,
        "attention_chunk_size": _CHUNK,
    }
    if config.integer("sliding_window", default=1, low=0) == 0:
        values["attention_chunk_size"] = None
        values["no_rope_layer_interval"] = config.integer("num_hidden_layers") + 1
    return values


FAMILY = ModelFamily(
    name="llama4",
    models="Llama 4 Scout and Maverick, text",
    differs="attention in chunks, layers without RoPE and with a temperature of q, norms of q and "
    "k without weights, experts by sigmoids that weigh their input, a shared one",
    hf_architectures=("Llama4ForCausalLM",),
    gguf_architectures=("llama4",),
    windows=_windows,
    hf_bias=configured_bias,
    hf_tensors={
        **HF_TENSORS,
        **{name: f"{_BLOCK}.{name}_proj.weight" for name in ("gate", "up", "down")},
    },
    hf_interleaved_rope=True,
    gguf_interleaved_rope=True,
    structure=_structure,
    gguf_defaults=_gguf_defaults,
    ropes=_ropes,
    hf_dense_size="intermediate_size_mlp",
    hf_defaults={
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 1,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    experts=Experts(
        settings=_settings,
        hf=(_HF,),
        gguf=({**GGUF_EXPERTS, **GGUF_SHARED},),
    ),
)
