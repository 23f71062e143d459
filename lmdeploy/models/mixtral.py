"""Mixtral: Mistral with experts in every layer. In GGUF it is llama with an expert_count."""

from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    HF_MIXTRAL,
    HF_STACKED,
    Experts,
    local_experts,
)
from lmdeploy.models.family import ModelFamily, one_window

FAMILY = ModelFamily(
    name="mixtral",
    models="Mixtral",
    differs="experts",
    hf_architectures=("MixtralForCausalLM",),
    gguf_architectures=("llama",),
    windows=one_window,
    hf_defaults={"rope_theta": 1e6, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    gguf_interleaved_rope=True,
    experts=Experts(settings=local_experts, hf=(HF_MIXTRAL, HF_STACKED), gguf=(GGUF_EXPERTS,)),
)
