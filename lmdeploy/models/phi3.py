"""Phi-3, Phi-3.5 and Phi-4: fused matrices, partial RoPE and LongRoPE."""

from lmdeploy.models.family import (
    HF_FUSED_GATE_UP,
    HF_FUSED_QKV,
    HF_TENSORS,
    ModelFamily,
    one_window,
)

FAMILY = ModelFamily(
    name="phi3",
    models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    differs="fused matrices, LongRoPE, partial RoPE",
    hf_architectures=("Phi3ForCausalLM",),
    gguf_architectures=("phi3",),
    windows=one_window,
    hf_tensors={**HF_TENSORS, **HF_FUSED_QKV, **HF_FUSED_GATE_UP},
    hf_defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
)
