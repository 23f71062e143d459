"""Granite 3 and 4, dense: Llama with factors of embedding, branches, attention and logits."""

from collections.abc import Mapping

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import ModelFamily, configured_bias
from lmdeploy.models.structure import Structure


def granite_structure(config: ConfigReader) -> Structure:
    """Return the factors of config.json. `logits_scaling` divides."""

    def factor(key: str) -> float:
        return config.number(key, default=1.0, low=1e-6)

    return Structure(
        softmax_scale=factor("attention_multiplier"),
        embedding_scale=factor("embedding_multiplier"),
        residual_scale=factor("residual_multiplier"),
        logit_scale=1.0 / factor("logits_scaling"),
    )


def gguf_granite_defaults(config: ConfigReader) -> Mapping[str, float]:
    """Return the usual factor of attention scores: a file without the key means that."""
    return {"attention_multiplier": config.integer("head_dim") ** -0.5}


FAMILY = ModelFamily(
    name="granite",
    models="Granite 3, dense, and Granite 4, dense, as GGUF",
    differs="factors of embedding, branches, attention and logits",
    hf_architectures=("GraniteForCausalLM",),
    gguf_architectures=("granite",),
    hf_bias=configured_bias,
    gguf_interleaved_rope=True,
    structure=granite_structure,
    gguf_defaults=gguf_granite_defaults,
)
