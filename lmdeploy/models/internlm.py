"""InternLM 2 and 2.5 (q, k and v interleaved in one matrix) and InternLM 3 (Llama with biases)."""

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.experts import TensorLocation
from lmdeploy.models.family import (
    ATTENTION_MATRICES,
    FFN_MATRICES,
    GGUF_TENSORS,
    QKV,
    ModelFamily,
)

_LAYER = "model.layers.{i}"


def _bias2(config: ConfigReader) -> tuple[str, ...]:
    return ATTENTION_MATRICES if config.flag("bias", default=False) else ()


def _bias3(config: ConfigReader) -> tuple[str, ...]:
    names = ("q", "k", "v") if config.flag("qkv_bias", default=False) else ()
    return (*names, "o", *FFN_MATRICES) if config.flag("bias", default=False) else names


FAMILY = ModelFamily(
    name="internlm2",
    models="InternLM 2, 2.5",
    differs="q, k and v packed by KV head",
    hf_architectures=("InternLM2ForCausalLM",),
    gguf_architectures=("internlm2",),
    hf_bias=_bias2,
    hf_tensors={
        "embedding": "model.tok_embeddings.weight",
        "final_norm": "model.norm.weight",
        "head": "output.weight",
        "attention_norm": f"{_LAYER}.attention_norm.weight",
        "ffn_norm": f"{_LAYER}.ffn_norm.weight",
        **{
            name: TensorLocation(
                f"{_LAYER}.attention.wqkv.weight", part=name, fused=QKV, heads="kv_heads"
            )
            for name in QKV
        },
        "o": f"{_LAYER}.attention.wo.weight",
        "gate": f"{_LAYER}.feed_forward.w1.weight",
        "up": f"{_LAYER}.feed_forward.w3.weight",
        "down": f"{_LAYER}.feed_forward.w2.weight",
    },
    gguf_tensors=GGUF_TENSORS,
    gguf_interleaved_rope=True,
)
INTERNLM3_FAMILY = ModelFamily(
    name="internlm3",
    models="InternLM 3",
    differs="biases, dynamic RoPE",
    hf_architectures=("InternLM3ForCausalLM",),
    gguf_architectures=(),  # GGUF calls it llama
    hf_bias=_bias3,
)
