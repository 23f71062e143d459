"""StarCoder 2: LayerNorm and biases everywhere, and a feed-forward without a gate."""

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import (
    ATTENTION_MATRICES,
    GGUF_TENSORS,
    HF_TENSORS,
    ModelFamily,
    one_window,
    with_norm_biases,
    without_gate,
)
from lmdeploy.models.structure import NormSettings, Structure

_STRUCTURE = Structure(gated=False, norm=NormSettings(centered=True))


def _bias(config: ConfigReader) -> tuple[str, ...]:
    return (*ATTENTION_MATRICES, "up", "down") if config.flag("use_bias", default=True) else ()


FAMILY = ModelFamily(
    name="starcoder2",
    models="StarCoder 2",
    differs="LayerNorm with biases, a feed-forward without a gate",
    hf_architectures=("Starcoder2ForCausalLM",),
    gguf_architectures=("starcoder2",),
    windows=one_window,
    hf_bias=_bias,
    hf_tensors={
        **with_norm_biases(without_gate(HF_TENSORS)),
        "up": "model.layers.{i}.mlp.c_fc.weight",
        "down": "model.layers.{i}.mlp.c_proj.weight",
    },
    gguf_tensors=with_norm_biases(without_gate(GGUF_TENSORS)),
    hf_norm_eps="norm_epsilon",
    hf_defaults={
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    structure=lambda config: _STRUCTURE,
)
