"""Command R and R7B: LayerNorm, attention beside the feed-forward, RoPE in pairs; R7B: windows."""

from dataclasses import replace

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import RopeSettings
from lmdeploy.models.family import (
    GGUF_TENSORS,
    HF_TENSORS,
    ModelFamily,
    Ropes,
    configured_bias,
    gguf_periodic_windows,
    layer_types,
    windows_by_type,
)
from lmdeploy.models.rope import rope_from_hf
from lmdeploy.models.structure import NormSettings, Structure

_NORM = NormSettings(centered=True)
_PERIOD = 4


def _structure(config: ConfigReader) -> Structure:
    scale = config.number("logit_scale", default=0.0625, low=1e-6)
    return Structure(logit_scale=scale, parallel=True, norm=_NORM)


def _gguf_structure(config: ConfigReader, prefix: str) -> Structure:
    scale = config.number(f"{prefix}.logit_scale", low=1e-6)
    return Structure(logit_scale=scale, parallel=True, norm=_NORM)


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    period = config.integer("sliding_window_pattern", default=_PERIOD)
    return layer_types(config, num_layers, period=period)


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    window = config.integer("sliding_window")
    return windows_by_type(config, num_layers, window=window, kinds=_kinds(config, num_layers))


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    windows = _windows(config, num_layers)
    rope = rope_from_hf(config, max_position)
    return (rope,), tuple(0 if window else -1 for window in windows)


def _gguf_ropes(config: ConfigReader, *, prefix: str, rope: RopeSettings) -> Ropes:
    windows = gguf_periodic_windows(_PERIOD)(config, prefix)
    return (rope,), tuple(0 if window else -1 for window in windows)


def _without_ffn_norm(names: dict[str, str]) -> dict[str, str]:
    return {kind: name for kind, name in names.items() if kind != "ffn_norm"}


FAMILY = ModelFamily(
    name="cohere",
    models="Command R",
    differs="LayerNorm, parallel branches, RoPE in pairs, scaled logits",
    hf_architectures=("CohereForCausalLM",),
    gguf_architectures=("command-r",),
    hf_bias=configured_bias,
    hf_tensors=_without_ffn_norm({**HF_TENSORS}),
    gguf_tensors=_without_ffn_norm({**GGUF_TENSORS}),
    hf_norm_eps="layer_norm_eps",
    hf_defaults={
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    hf_fixed={"use_qk_norm": False},
    hf_interleaved_rope=True,
    gguf_interleaved_rope=True,
    structure=_structure,
    gguf_structure=_gguf_structure,
)
COHERE2_FAMILY = replace(
    FAMILY,
    name="cohere2",
    models="Command R7B, Command A",
    differs="as Command R, with windows and no RoPE in layers with full attention",
    hf_architectures=("Cohere2ForCausalLM",),
    gguf_architectures=("cohere2",),
    windows=_windows,
    gguf_windows=gguf_periodic_windows(_PERIOD),
    ropes=_ropes,
    gguf_ropes=_gguf_ropes,
    hf_defaults={**FAMILY.hf_defaults, "sliding_window": 4096},
)
