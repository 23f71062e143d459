"""Ministral 8B: Mistral with windows by layer type."""

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import ModelFamily, one_window, windows_by_type


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    if not config.texts("layer_types") or not config.has("sliding_window"):
        return one_window(config, num_layers)
    return windows_by_type(config, num_layers, window=config.integer("sliding_window"))


FAMILY = ModelFamily(
    name="ministral",
    models="Ministral 8B",
    differs="windows by layer",
    hf_architectures=("MinistralForCausalLM",),
    gguf_architectures=(),  # GGUF calls it llama
    windows=_windows,
)
