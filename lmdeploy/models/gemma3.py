"""Gemma 3, text: Gemma 2 with norms of q and k, and another RoPE in layers with a window."""

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import (
    GGUF_OUTPUT_NORMS,
    GGUF_QK_NORM,
    GGUF_TENSORS,
    HF_QK_NORM,
    ModelFamily,
    Ropes,
    configured_bias,
    patterned_types,
    patterned_windows,
)
from lmdeploy.models.gemma2 import (
    GEMMA_FIXED,
    GEMMA_HF_TENSORS,
    gemma_structure,
    gguf_gemma_scalar,
)
from lmdeploy.models.rope import ropes_by_layer_type

_PERIOD = 6


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    kinds = patterned_types(config, num_layers, period=_PERIOD)
    return ropes_by_layer_type(
        config, max_position, kinds=kinds, local_theta="rope_local_base_freq"
    )


FAMILY = ModelFamily(
    name="gemma3",
    models="Gemma 3 (270M to 27B), text",
    differs="as Gemma 2 without caps; norms of q and k, another RoPE in layers with a window",
    hf_architectures=("Gemma3ForCausalLM", "Gemma3TextForCausalLM"),
    gguf_architectures=("gemma3",),
    windows=patterned_windows(_PERIOD),
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
    gguf_defaults=lambda config: gguf_gemma_scalar(config, wide_layers=62),
    ropes=_ropes,
    hf_norm_offset=1.0,
)
