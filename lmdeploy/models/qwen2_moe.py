"""Qwen1.5-MoE and Qwen2-MoE: routed experts and a shared one; some layers have no experts."""

from dataclasses import replace

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings
from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    GGUF_SHARED,
    GGUF_SHARED_GATE,
    HF_QWEN,
    HF_SHARED,
    HF_STACKED,
    MAX_WIDTH,
    Experts,
    sparse_experts,
)
from lmdeploy.models.family import ModelFamily, no_windows, windows_by_type


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    if not config.flag("use_sliding_window", default=False):
        return no_windows(config, num_layers)
    if not config.has("layer_types"):
        # Two published rules disagree on which layers below max_window_layers have a window.
        raise config.refuse("layer_types is missing. It is required with use_sliding_window.")
    return windows_by_type(config, num_layers, window=config.integer("sliding_window"))


def _settings(config: ConfigReader, num_layers: int) -> MoeSettings:
    shared = config.integer("shared_expert_intermediate_size", high=MAX_WIDTH)
    return replace(sparse_experts(config, num_layers), shared_intermediate_size=shared)


FAMILY = ModelFamily(
    name="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-MoE",
    differs="experts, a shared one with a gate",
    hf_architectures=("Qwen2MoeForCausalLM",),
    gguf_architectures=("qwen2moe",),
    windows=_windows,
    hf_bias=lambda config: ("q", "k", "v") if config.flag("qkv_bias", default=True) else (),
    hf_defaults={"sliding_window": 4096},
    gguf_defaults=lambda config: {
        "shared_expert_intermediate_size": config.integer("intermediate_size")
    },
    experts=Experts(
        settings=_settings,
        hf=({**HF_QWEN, **HF_SHARED}, {**HF_STACKED, **HF_SHARED}),
        gguf=({**GGUF_EXPERTS, **GGUF_SHARED, **GGUF_SHARED_GATE},),
    ),
)
