"""Qwen3-MoE: Qwen3 with experts. The config may list layers without experts."""

from lmdeploy.models import qwen3
from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    HF_QWEN,
    HF_STACKED,
    Experts,
    sparse_experts,
)
from lmdeploy.models.family import ModelFamily, no_windows, one_window


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    used = config.flag("use_sliding_window", default=False)
    return (one_window if used else no_windows)(config, num_layers)


FAMILY = ModelFamily(
    name="qwen3_moe",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    differs="norms of q and k, experts",
    hf_architectures=("Qwen3MoeForCausalLM",),
    gguf_architectures=("qwen3moe",),
    windows=_windows,
    hf_bias=qwen3.FAMILY.hf_bias,
    hf_tensors=qwen3.FAMILY.hf_tensors,
    gguf_tensors=qwen3.FAMILY.gguf_tensors,
    hf_defaults={"sliding_window": 4096},
    experts=Experts(settings=sparse_experts, hf=(HF_QWEN, HF_STACKED), gguf=(GGUF_EXPERTS,)),
)
