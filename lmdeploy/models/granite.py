"""Granite 3 and 4, dense: Llama with factors of embedding, branches, attention and logits."""

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


def gguf_granite_structure(config: ConfigReader, prefix: str) -> Structure:
    """Return the factors of GGUF's keys. A missing or zero key means that there is none."""

    def factor(key: str) -> float:
        return config.number(f"{prefix}.{key}", default=0.0) or 1.0

    return Structure(
        softmax_scale=config.number(f"{prefix}.attention.scale", default=0.0),
        embedding_scale=factor("embedding_scale"),
        residual_scale=factor("residual_scale"),
        logit_scale=1.0 / factor("logit_scale"),
    )


FAMILY = ModelFamily(
    name="granite",
    models="Granite 3 and 4, dense",
    differs="factors of embedding, branches, attention and logits",
    hf_architectures=("GraniteForCausalLM",),
    gguf_architectures=("granite",),
    hf_bias=configured_bias,
    gguf_interleaved_rope=True,
    structure=granite_structure,
    gguf_structure=gguf_granite_structure,
)
