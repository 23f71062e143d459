"""The registry of model families. To add a model, import its FAMILY here."""

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.models import (
    cohere,
    deepseek,
    ernie4_5,
    exaone4,
    falcon_h1,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    granite_hybrid,
    granite_moe,
    hunyuan,
    internlm,
    lfm2,
    llama,
    llama4,
    minicpm3,
    minimax_m2,
    ministral,
    mistral,
    mixtral,
    nemotron_h,
    olmo,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    relu2,
    seed_oss,
    smollm3,
    starcoder2,
)
from lmdeploy.models.family import ModelFamily

FAMILIES: tuple[ModelFamily, ...] = (
    llama.FAMILY,
    llama4.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gpt_oss.FAMILY,
    mixtral.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    qwen3_next.QWEN3_5_FAMILY,
    qwen3_next.QWEN3_5_MOE_FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    smollm3.FAMILY,
    granite.FAMILY,
    granite_moe.FAMILY,
    granite_moe.SHARED_FAMILY,
    granite_hybrid.FAMILY,
    falcon_h1.FAMILY,
    nemotron_h.FAMILY,
    lfm2.FAMILY,
    lfm2.MOE_FAMILY,
    phi3.FAMILY,
    internlm.FAMILY,
    internlm.INTERNLM3_FAMILY,
    glm4.FAMILY,
    glm4.GLM4_FAMILY,
    glm4_moe.FAMILY,
    deepseek.FAMILY,
    deepseek.V3_FAMILY,
    deepseek.GLM_FAMILY,
    deepseek.GGUF_FAMILY,
    minicpm3.FAMILY,
    minimax_m2.FAMILY,
    ministral.FAMILY,
    ministral.MINISTRAL3_FAMILY,
    olmo.FAMILY,
    olmo.OLMO3_FAMILY,
    exaone4.FAMILY,
    seed_oss.FAMILY,
    ernie4_5.FAMILY,
    ernie4_5.MOE_FAMILY,
    hunyuan.FAMILY,
    cohere.FAMILY,
    cohere.COHERE2_FAMILY,
    starcoder2.FAMILY,
    relu2.ARCEE_FAMILY,
    relu2.NEMOTRON_FAMILY,
)


# Architectures whose names are close to supported ones, and what the engine lacks for them.
_INDEXER = "its attention reads the tokens that a sparse indexer selects, which is not supported"
_REFUSED = {
    "DeepseekV32ForCausalLM": _INDEXER,
    "DeepseekV4ForCausalLM": _INDEXER,
    "GlmMoeDsaForCausalLM": _INDEXER,
}


def supported_architectures() -> list[str]:
    """Return the `architectures` names of config.json that can be loaded."""
    return [name for family in FAMILIES for name in family.hf_architectures]


def family_of_hf(architecture: str, source: str) -> ModelFamily:
    """Return the family of a Hugging Face architecture name.

    Folders of embedding models name the model without a head (Qwen3Model).
    """
    name = architecture
    if name.endswith("Model"):
        name = name.removesuffix("Model") + "ForCausalLM"
    if name in _REFUSED:
        raise ModelFormatError(f"{source}: architecture is {name}: {_REFUSED[name]}.")
    for family in FAMILIES:
        if name in family.hf_architectures:
            return family
    raise ModelFormatError(
        f"{source}: architecture is {architecture[:80]!r}. It must be one of "
        f"{', '.join(supported_architectures())}."
    )


def family_of_gguf(architecture: str, source: str, *, has_experts: bool) -> ModelFamily:
    """Return the family of a GGUF `general.architecture`.

    Some names stand for two families, one dense and one with experts.
    """
    families = [family for family in FAMILIES if architecture in family.gguf_architectures]
    for family in families:
        optional = family.experts is not None and family.experts.optional
        if optional or (family.experts is not None) == has_experts:
            return family
    if families:
        raise ModelFormatError(
            f"{source}: {architecture}.expert_count is {'set' if has_experts else 'missing'}. "
            f"It must be {'missing' if has_experts else 'set'}, because {architecture!r} has "
            f"{'no ' if has_experts else ''}experts."
        )
    names = dict.fromkeys(name for family in FAMILIES for name in family.gguf_architectures)
    raise ModelFormatError(
        f"{source}: architecture is {architecture[:80]!r}. It must be one of {', '.join(names)}."
    )
