"""OLMo 2 and 3: norms after each branch only, and norms of q and k over all heads."""

from dataclasses import replace

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import (
    GGUF_OUTPUT_NORMS,
    GGUF_QK_NORM,
    GGUF_TENSORS,
    HF_QK_NORM,
    HF_TENSORS,
    ModelFamily,
    Ropes,
    configured_bias,
    layer_types,
    windows_by_type,
    without_input_norms,
)
from lmdeploy.models.rope import ropes_by_layer_type
from lmdeploy.models.structure import NormSettings, Structure

_STRUCTURE = Structure(norm=NormSettings(inputs=False, outputs=True, qk_all_heads=True))


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    kinds = layer_types(config, num_layers, period=4)
    return windows_by_type(config, num_layers, window=config.integer("sliding_window"), kinds=kinds)


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    kinds = layer_types(config, num_layers, period=4)
    return ropes_by_layer_type(config, max_position, kinds=kinds, local_theta="rope_theta")


FAMILY = ModelFamily(
    name="olmo2",
    models="OLMo 2",
    differs="norms only after each branch, norms of q and k over all heads",
    hf_architectures=("Olmo2ForCausalLM",),
    gguf_architectures=("olmo2",),
    hf_bias=configured_bias,
    hf_tensors=without_input_norms(
        {
            **HF_TENSORS,
            **HF_QK_NORM,
            "attention_output_norm": "model.layers.{i}.post_attention_layernorm.weight",
            "ffn_output_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
        }
    ),
    gguf_tensors=without_input_norms({**GGUF_TENSORS, **GGUF_QK_NORM, **GGUF_OUTPUT_NORMS}),
    hf_defaults={"rms_norm_eps": 1e-5},
    structure=lambda config: _STRUCTURE,
)
OLMO3_FAMILY = replace(
    FAMILY,
    name="olmo3",
    models="OLMo 3",
    differs="as OLMo 2, with windows and another RoPE in layers with a window",
    hf_architectures=("Olmo3ForCausalLM",),
    gguf_architectures=(),
    windows=_windows,
    ropes=_ropes,
    hf_defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0},
)
