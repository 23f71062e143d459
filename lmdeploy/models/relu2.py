"""Arcee (AFM) and Nemotron: a feed-forward without a gate and with a squared ReLU."""

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import (
    GGUF_TENSORS,
    HF_TENSORS,
    ModelFamily,
    configured_bias,
    with_norm_biases,
    without_gate,
)
from lmdeploy.models.structure import NormSettings, Structure

_ARCEE = Structure(gated=False)
_NEMOTRON = Structure(gated=False, norm=NormSettings(centered=True))


def _bias(config: ConfigReader) -> tuple[str, ...]:
    return tuple(name for name in configured_bias(config) if name != "gate")


ARCEE_FAMILY = ModelFamily(
    name="arcee",
    models="Arcee AFM",
    differs="a feed-forward without a gate and with a squared ReLU",
    hf_architectures=("ArceeForCausalLM",),
    gguf_architectures=("arcee",),
    hf_bias=_bias,
    hf_tensors=without_gate(HF_TENSORS),
    gguf_tensors=without_gate(GGUF_TENSORS),
    gguf_interleaved_rope=True,
    hf_defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    structure=lambda config: _ARCEE,
)
NEMOTRON_FAMILY = ModelFamily(
    name="nemotron",
    models="Nemotron and Minitron",
    differs="LayerNorm with biases, squared ReLU without a gate, partial RoPE",
    hf_architectures=("NemotronForCausalLM",),
    gguf_architectures=("nemotron",),
    hf_bias=_bias,
    hf_tensors=with_norm_biases(without_gate(HF_TENSORS)),
    gguf_tensors=with_norm_biases(without_gate(GGUF_TENSORS)),
    hf_norm_eps="norm_eps",
    hf_norm_offset=1.0,
    hf_defaults={
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
    },
    structure=lambda config: _NEMOTRON,
)
