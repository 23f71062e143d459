"""Llama 1 to 3.x and models with the same architecture (SmolLM2, TinyLlama, ...)."""

from lmdeploy.models.family import ModelFamily, configured_bias, optional_window

FAMILY = ModelFamily(
    name="llama",
    models="Llama 1 to 3.x, SmolLM2, TinyLlama, Yi, DeepSeek-R1-Distill-Llama",
    hf_architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    windows=optional_window,
    hf_bias=configured_bias,
    # GGUF calls Mistral llama, too. A file with a window is one.
    gguf_defaults=lambda config: {"use_sliding_window": config.has("sliding_window")},
    gguf_interleaved_rope=True,
)
