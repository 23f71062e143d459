"""The shapes of the engine's tensors, by the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lmdeploy.models.decoder_config import DecoderConfig
from lmdeploy.models.family import JOINT_HEADS


def shape_in_layer(
    kind: str, config: DecoderConfig, *, layer: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the shape of a tensor in a layer. `shapes` are those of `tensor_shapes`."""
    sizes = config.layer_sizes
    if not sizes.head_dims and not sizes.kv_heads and not sizes.intermediate_sizes:
        return shapes[kind]
    return tensor_shapes(
        replace(
            config,
            head_dim=sizes.head_dims[layer],
            num_kv_heads=sizes.kv_heads[layer],
            intermediate_size=sizes.intermediate_sizes[layer],
        )
    )[kind]


def _per_layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of per-layer inputs, if the model has any."""
    if not (size := config.structure.per_layer_size):
        return {}
    hidden, width = config.hidden_size, config.num_layers * config.structure.per_layer_size
    return {
        "per_layer_embedding": (config.vocab_size, width),
        "per_layer_projection": (width, hidden),
        "per_layer_norm": (size,),
        "per_layer_gate": (size, hidden),
        "per_layer_up": (hidden, size),
        "per_layer_output_norm": (hidden,),
    }


def _latent_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of multi-head latent attention, if the model has it."""
    if (latent := config.latent) is None:
        return {}
    hidden, rank, heads = config.hidden_size, config.head_dim, config.num_heads
    return {
        "o": (hidden, heads * latent.value_dim),
        "latent.q_a": (latent.q_rank, hidden),
        "latent.q_a_norm": (latent.q_rank,),
        "latent.q": (heads * latent.query_dim, latent.q_rank or hidden),
        "latent.kv_a": (rank + latent.rope_dim, hidden),
        "latent.kv_a_norm": (rank,),
        JOINT_HEADS: (heads * (latent.nope_dim + latent.value_dim), rank),
        "latent.k_b": (rank, latent.nope_dim),
        "latent.v_b": (latent.value_dim, rank),
    }


def _expert_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of layers with experts, if the model has any."""
    if (moe := config.moe) is None:
        return {}
    hidden, width, shared = config.hidden_size, moe.intermediate_size, moe.shared_intermediate_size
    outer = moe.latent_size or hidden
    return {
        "latent_down": (outer, hidden),
        "latent_up": (hidden, outer),
        "router": (moe.num_experts, hidden),
        "router.score_bias": (moe.num_experts,),
        "router.expert_scale": (moe.num_experts,),
        "router.norm": (hidden,),
        "expert_norm": (hidden,),
        "expert_output_norm": (hidden,),
        "dense_output_norm": (hidden,),
        "experts.gate": (width, outer),
        "experts.up": (width, outer),
        "experts.gate_up": (2 * width, outer),
        "experts.down": (outer, width),
        "shared.gate": (shared, hidden),
        "shared.up": (shared, hidden),
        "shared.down": (hidden, shared),
        "shared.router": (1, hidden),
    }


def _recurrent_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of recurrent layers, if the model has any."""
    if (recurrent := config.recurrent) is None:
        return {}
    hidden = config.hidden_size
    keys, values, heads = recurrent.key_size, recurrent.value_size, recurrent.num_value_heads
    return {
        "recurrent.q": (keys, hidden),
        "recurrent.k": (keys, hidden),
        "recurrent.v": (values, hidden),
        "recurrent.z": (values, hidden),
        "recurrent.b": (heads, hidden),
        "recurrent.a": (heads, hidden),
        "recurrent.in_gate": (values, hidden),
        "recurrent.out_gate": (values, hidden),
        "recurrent.o": (hidden, values),
        "recurrent.convolution": (2 * keys + values, recurrent.kernel),
        "recurrent.decay": (heads,),
        "recurrent.dt_bias": (heads,),
        "recurrent.skip": (heads,),
        "recurrent.norm": (recurrent.norm_size,),
    }


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every engine tensor, rows first. A bias has the rows of its matrix."""
    hidden, inter = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, hidden),
        "head": (config.vocab_size, hidden),
        "final_norm": (hidden,),
        "attention_norm": (hidden,),
        "ffn_norm": (hidden,),
        "attention_output_norm": (hidden,),
        "ffn_output_norm": (hidden,),
        "q_norm": (queries if config.structure.norm.qk_all_heads else config.head_dim,),
        "k_norm": (keys if config.structure.norm.qk_all_heads else config.head_dim,),
        "sinks": (config.num_heads,),
        "attention_gate": (queries, hidden),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "gate": (inter, hidden),
        "up": (inter, hidden),
        "down": (hidden, inter),
        "scale": (1,),
    }
    shapes |= _latent_shapes(config) | _per_layer_shapes(config)
    shapes |= _expert_shapes(config) | _recurrent_shapes(config)
    shapes |= {
        f"{name}.bias": shape[:1]
        for name, shape in shapes.items()
        if len(shape) == 2 or name.endswith("norm")
    }
    return shapes
