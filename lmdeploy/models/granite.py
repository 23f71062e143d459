"""Granite 3 and 4, dense: Llama with factors of embedding, branches, attention and logits."""

from collections.abc import Mapping
from dataclasses import replace

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.experts import TensorLocation
from lmdeploy.models.family import (
    HF_TENSORS,
    ModelFamily,
    Ropes,
    configured_bias,
    no_windows,
)
from lmdeploy.models.rope import rope_from_hf
from lmdeploy.models.structure import Structure


def granite_structure(config: ConfigReader) -> Structure:
    """Return the factors of config.json. `logits_scaling` divides."""

    def factor(key: str) -> float:
        return config.number(key, default=1.0, low=1e-6)

    return Structure(
        softmax_scale=factor("attention_multiplier"),
        embedding_scale=factor("embedding_multiplier"),
        residual_scale=factor("residual_multiplier"),
        logit_scale=1.0 / factor("logits_scaling"),
    )


def gguf_granite_defaults(config: ConfigReader) -> Mapping[str, float]:
    """Return the usual factor of attention scores: a file without the key means that."""
    return {"attention_multiplier": config.integer("head_dim") ** -0.5}


def _hybrid_windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return full attention for every layer. A layer without attention is an error."""
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers or not set(kinds) <= {"attention", "full_attention"}:
        raise config.refuse(
            f"layer_types must be {num_layers} times attention. Layers of Mamba are not built."
        )
    return no_windows(config, num_layers)


def _hybrid_ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    """Return RoPE for every layer if `position_embedding_type` is rope, else for none."""
    kind = config.text("position_embedding_type", default="nope")
    if kind not in ("rope", "nope"):
        raise config.refuse(
            f"position_embedding_type is {kind[:40]!r}. It must be rope, nope or null."
        )
    return (rope_from_hf(config, max_position),), (0 if kind == "rope" else -1,) * num_layers


FAMILY = ModelFamily(
    name="granite",
    models="Granite 3, dense, and Granite 4, dense, as GGUF",
    differs="factors of embedding, branches, attention and logits",
    hf_architectures=("GraniteForCausalLM",),
    gguf_architectures=("granite",),
    hf_bias=configured_bias,
    gguf_interleaved_rope=True,
    structure=granite_structure,
    gguf_defaults=gguf_granite_defaults,
)
# Granite 4's dense models have the architecture of its hybrids. In GGUF they are called granite.
HYBRID_FAMILY = replace(
    FAMILY,
    name="granite_hybrid",
    models="Granite 4, dense",
    differs="as Granite, fused gate and up",
    hf_architectures=("GraniteMoeHybridForCausalLM",),
    gguf_architectures=(),
    windows=_hybrid_windows,
    ropes=_hybrid_ropes,
    hf_tensors={
        **HF_TENSORS,
        "gate": TensorLocation("model.layers.{i}.shared_mlp.input_linear.weight", half=0),
        "up": TensorLocation("model.layers.{i}.shared_mlp.input_linear.weight", half=1),
        "down": TensorLocation("model.layers.{i}.shared_mlp.output_linear.weight"),
    },
    hf_dense_size="shared_intermediate_size",
    hf_defaults={"num_local_experts": 8, "shared_intermediate_size": 1024},
    hf_fixed={"num_local_experts": 0},
)
