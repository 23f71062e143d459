"""SmolLM3: Llama without RoPE in every fourth layer."""

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import ModelFamily, Ropes, configured_bias, no_windows, windows_by_type
from lmdeploy.models.rope import rope_from_hf

_PERIOD = 4


def layers_with_rope(config: ConfigReader, num_layers: int) -> list[bool]:
    """Return whether each layer has RoPE. `no_rope_layers` has 1 for layers with it."""
    if flags := config.flags("no_rope_layers"):
        if len(flags) != num_layers:
            raise config.refuse(f"no_rope_layers has {len(flags)} entries, not {num_layers}.")
        return flags
    period = config.integer("no_rope_layer_interval", default=_PERIOD)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    rotates = layers_with_rope(config, num_layers)
    return (rope_from_hf(config, max_position),), tuple(0 if on else -1 for on in rotates)


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the window for layers without RoPE if `use_sliding_window` is set."""
    used = config.flag("use_sliding_window", default=False) and config.has("sliding_window")
    if not used:
        return no_windows(config, num_layers)
    window = config.integer("sliding_window")
    kinds = config.texts("layer_types") or [
        "full_attention" if on else "sliding_attention"
        for on in layers_with_rope(config, num_layers)
    ]
    return windows_by_type(config, num_layers, window=window, kinds=kinds)


FAMILY = ModelFamily(
    name="smollm3",
    models="SmolLM3",
    differs="no RoPE in every fourth layer",
    hf_architectures=("SmolLM3ForCausalLM",),
    gguf_architectures=("smollm3",),
    windows=_windows,
    hf_bias=configured_bias,
    gguf_interleaved_rope=True,
    ropes=_ropes,
    hf_defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
)
