"""Gemma 3, text: Gemma 2 with norms of q and k, and another RoPE in layers with a window."""

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import RopeSettings
from lmdeploy.models.family import (
    GGUF_OUTPUT_NORMS,
    GGUF_QK_NORM,
    GGUF_TENSORS,
    HF_QK_NORM,
    ModelFamily,
    Ropes,
    configured_bias,
    gguf_periodic_windows,
    patterned_types,
    patterned_windows,
)
from lmdeploy.models.gemma2 import (
    GEMMA_FIXED,
    GEMMA_HF_TENSORS,
    gemma_structure,
    gguf_gemma_structure,
)
from lmdeploy.models.rope import LEAST_THETA, ropes_by_layer_type
from lmdeploy.models.structure import Structure

_PERIOD = 6


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    kinds = patterned_types(config, num_layers, period=_PERIOD)
    return ropes_by_layer_type(
        config, max_position, kinds=kinds, local_theta="rope_local_base_freq"
    )


def _gguf_ropes(config: ConfigReader, *, prefix: str, rope: RopeSettings) -> Ropes:
    local = RopeSettings(
        theta=config.number(f"{prefix}.rope.freq_base_swa", default=10000.0, low=LEAST_THETA),
        dim=rope.dim,
    )
    layers = range(config.integer(f"{prefix}.block_count"))
    return (rope, local), tuple(int((layer + 1) % _PERIOD != 0) for layer in layers)


def _gguf_structure(config: ConfigReader, prefix: str) -> Structure:
    return gguf_gemma_structure(config, prefix, wide_layers=62)


FAMILY = ModelFamily(
    name="gemma3",
    models="Gemma 3 (270M to 27B), text",
    differs="as Gemma 2 without caps; norms of q and k, another RoPE in layers with a window",
    hf_architectures=("Gemma3ForCausalLM", "Gemma3TextForCausalLM"),
    gguf_architectures=("gemma3",),
    windows=patterned_windows(_PERIOD),
    gguf_windows=gguf_periodic_windows(_PERIOD),
    hf_bias=configured_bias,
    hf_tensors={**GEMMA_HF_TENSORS, **HF_QK_NORM},
    gguf_tensors={**GGUF_TENSORS, **GGUF_OUTPUT_NORMS, **GGUF_QK_NORM},
    hf_defaults={
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    hf_fixed=GEMMA_FIXED,
    structure=gemma_structure,
    gguf_structure=_gguf_structure,
    ropes=_ropes,
    gguf_ropes=_gguf_ropes,
    hf_norm_offset=1.0,
    gguf_activation="gelu_tanh",
)
