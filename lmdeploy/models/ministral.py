"""Ministral 8B: Mistral with windows by layer type. Ministral 3: a temperature of q by position."""

from typing import Any

from lmdeploy.models.config_reader import MAX_POSITION, ConfigReader
from lmdeploy.models.family import ModelFamily, one_window, windows_by_type
from lmdeploy.models.structure import QueryTemperature, Structure


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    if not config.texts("layer_types") or not config.has("sliding_window"):
        return one_window(config, num_layers)
    return windows_by_type(config, num_layers, window=config.integer("sliding_window"))


_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _structure(config: ConfigReader) -> Structure:
    """Return the structure with the temperature, whose keys are among those of RoPE."""
    stated = config.child("rope_parameters") or config.child("rope_scaling")
    rope = stated or ConfigReader(_ROPE, config.source)
    return Structure(
        temperature=QueryTemperature(
            beta=rope.number("llama_4_scaling_beta", high=1e3),
            length=rope.integer("original_max_position_embeddings", high=MAX_POSITION),
        )
    )


FAMILY = ModelFamily(
    name="ministral",
    models="Ministral 8B",
    differs="windows by layer",
    hf_architectures=("MinistralForCausalLM",),
    gguf_architectures=(),  # GGUF calls it llama
    windows=_windows,
)
MINISTRAL3_FAMILY = ModelFamily(
    name="ministral3",
    models="Ministral 3, text",
    differs="a temperature of q by position",
    hf_architectures=("Ministral3ForCausalLM",),
    gguf_architectures=(),  # its YaRN keys (yarn_log_multiplier) are not read
    windows=one_window,
    structure=_structure,
    hf_defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144},
    hf_rope=_ROPE,
)
