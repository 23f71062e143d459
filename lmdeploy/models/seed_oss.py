"""Seed-OSS: Llama with biases on q, k and v."""

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.family import FFN_MATRICES, GGUF_TENSORS, ModelFamily


def _bias(config: ConfigReader) -> tuple[str, ...]:
    names: tuple[str, ...] = ()
    if config.flag("attention_bias", default=True):
        names += ("q", "k", "v")
    if config.flag("attention_out_bias", default=False):
        names += ("o",)
    if config.flag("mlp_bias", default=False):
        names += FFN_MATRICES
    return names


FAMILY = ModelFamily(
    name="seed_oss",
    models="Seed-OSS",
    differs="biases of q, k and v",
    hf_architectures=("SeedOssForCausalLM",),
    gguf_architectures=("seed_oss",),
    hf_bias=_bias,
    gguf_tensors={**GGUF_TENSORS, "ffn_norm": "blk.{i}.post_attention_norm.weight"},
    hf_defaults={"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524288},
)
