"""Llama 1 to 3.x and models with the same architecture (SmolLM2, TinyLlama, ...)."""

from lmdeploy.models.family import ModelFamily, configured_bias

FAMILY = ModelFamily(
    name="llama",
    models="Llama 1 to 3.x, SmolLM2, TinyLlama, Yi, DeepSeek-R1-Distill-Llama",
    hf_architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    hf_bias=configured_bias,
    gguf_interleaved_rope=True,
)
