"""Qwen2 and Qwen2.5: q, k and v have a bias. Windows in upper layers are off by default."""

from lmdeploy.models.family import ModelFamily, layered_windows, qkv_bias

FAMILY = ModelFamily(
    name="qwen2",
    models="Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen",
    differs="biases of q, k and v",
    hf_architectures=("Qwen2ForCausalLM",),
    gguf_architectures=("qwen2",),
    windows=layered_windows,
    hf_bias=qkv_bias,
    hf_defaults={"sliding_window": 4096},
)
