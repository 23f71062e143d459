"""EXAONE 4: norms after each branch and of each head, and no RoPE in layers with full attention."""

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import (
    GGUF_OUTPUT_NORMS,
    GGUF_QK_NORM,
    GGUF_TENSORS,
    HF_QK_NORM,
    HF_TENSORS,
    ModelFamily,
    Ropes,
    layer_types,
    no_windows,
    rope_in_windows,
    windows_by_type,
    without_input_norms,
)
from lmdeploy.models.rope import rope_from_hf
from lmdeploy.models.structure import NormSettings, Structure

_STRUCTURE = Structure(norm=NormSettings(inputs=False, outputs=True))
_PERIOD = 4
_HF = {
    **HF_TENSORS,
    **HF_QK_NORM,
    "attention_output_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "ffn_output_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}
_GGUF = {**GGUF_TENSORS, **GGUF_QK_NORM, **GGUF_OUTPUT_NORMS}


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Return the layer types. A pattern of text, such as LLLG, has its length as period."""
    try:
        period = len(config.text("sliding_window_pattern"))
    except ValueError:
        period = config.integer("sliding_window_pattern", default=_PERIOD, low=0)
    return layer_types(config, num_layers, period=period)


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    if not config.has("sliding_window"):
        return no_windows(config, num_layers)
    window = config.integer("sliding_window")
    return windows_by_type(config, num_layers, window=window, kinds=_kinds(config, num_layers))


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    rope = rope_from_hf(config, max_position)
    windows = _windows(config, num_layers)
    return rope_in_windows(rope, windows) if any(windows) else ((rope,), ())


FAMILY = ModelFamily(
    name="exaone4",
    models="EXAONE 4",
    differs="norms only after each branch, norms of q and k, no RoPE in layers with full attention",
    hf_architectures=("Exaone4ForCausalLM",),
    gguf_architectures=("exaone4",),
    windows=_windows,
    hf_tensors=without_input_norms(_HF),
    gguf_tensors=without_input_norms(_GGUF),
    hf_defaults={"rms_norm_eps": 1e-5},
    structure=lambda config: _STRUCTURE,
    ropes=_ropes,
)
