"""Mistral 7B and its relatives: Llama with one sliding window. GGUF calls it llama."""

from lmdeploy.models.family import ModelFamily, one_window

FAMILY = ModelFamily(
    name="mistral",
    models="Mistral 7B, Mistral Small (text), Devstral",
    differs="one window",
    hf_architectures=("MistralForCausalLM",),
    gguf_architectures=(),
    windows=one_window,
    hf_defaults={"sliding_window": 4096},
)
