"""Command R and R7B: LayerNorm, attention beside the feed-forward, RoPE in pairs; R7B: windows."""

from dataclasses import replace

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import (
    GGUF_TENSORS,
    HF_TENSORS,
    ModelFamily,
    Ropes,
    configured_bias,
    patterned_windows,
    rope_in_windows,
)
from lmdeploy.models.rope import rope_from_hf
from lmdeploy.models.structure import NormSettings, Structure

_NORM = NormSettings(centered=True)
_PERIOD = 4
_windows = patterned_windows(_PERIOD)


def _structure(config: ConfigReader) -> Structure:
    scale = config.number("logit_scale", default=0.0625, low=1e-6)
    return Structure(logit_scale=scale, parallel=True, norm=_NORM)


def _ropes(config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes:
    return rope_in_windows(rope_from_hf(config, max_position), _windows(config, num_layers))


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
    gguf_defaults=lambda config: {"logit_scale": config.number("logit_scale")},  # is required
)
COHERE2_FAMILY = replace(
    FAMILY,
    name="cohere2",
    models="Command R7B, Command A",
    differs="as Command R, with windows and no RoPE in layers with full attention",
    hf_architectures=("Cohere2ForCausalLM",),
    gguf_architectures=("cohere2",),
    windows=_windows,
    ropes=_ropes,
    hf_defaults={**FAMILY.hf_defaults, "sliding_window": 4096},
)
