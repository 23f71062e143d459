"""Qwen3-MoE: Qwen3 with experts. The config may list layers without experts."""

from lmdeploy.models import qwen3
from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    HF_QWEN,
    HF_STACKED,
    Experts,
    sparse_experts,
)
from lmdeploy.models.family import ModelFamily, optional_window

FAMILY = ModelFamily(
    name="qwen3_moe",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    differs="norms of q and k, experts",
    hf_architectures=("Qwen3MoeForCausalLM",),
    gguf_architectures=("qwen3moe",),
    windows=optional_window,
    hf_bias=qwen3.FAMILY.hf_bias,
    hf_tensors=qwen3.FAMILY.hf_tensors,
    gguf_tensors=qwen3.FAMILY.gguf_tensors,
    hf_defaults={"sliding_window": 4096},
    gguf_defaults=lambda config: {"norm_topk_prob": True},
    experts=Experts(settings=sparse_experts, hf=(HF_QWEN, HF_STACKED), gguf=(GGUF_EXPERTS,)),
)
