"""Qwen3 (dense): RMSNorm of every query and key head, head_dim independent of hidden_size."""

from lmdeploy.models.family import (
    ATTENTION_MATRICES,
    GGUF_QK_NORM,
    GGUF_TENSORS,
    HF_QK_NORM,
    HF_TENSORS,
    ModelFamily,
    layered_windows,
)

FAMILY = ModelFamily(
    name="qwen3",
    models="Qwen3",
    differs="norms of q and k",
    hf_architectures=("Qwen3ForCausalLM",),
    gguf_architectures=("qwen3",),
    windows=layered_windows,
    hf_bias=lambda config: (
        ATTENTION_MATRICES if config.flag("attention_bias", default=False) else ()
    ),
    hf_tensors={**HF_TENSORS, **HF_QK_NORM},
    gguf_tensors={**GGUF_TENSORS, **GGUF_QK_NORM},
    hf_defaults={"sliding_window": 4096, "head_dim": 128},
)
