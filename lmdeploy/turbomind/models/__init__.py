"""The registry of model families: import one more FAMILY here to add a model."""

from lmdeploy.turbomind.model_errors import ModelFormatError
from lmdeploy.turbomind.models import llama, mistral, qwen2, qwen3
from lmdeploy.turbomind.models.family import ModelFamily

FAMILIES: tuple[ModelFamily, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
)


def supported_architectures() -> list[str]:
    """The `architectures` names of config.json that can be loaded."""
    return [name for family in FAMILIES for name in family.hf_architectures]


def family_of_hf(architecture: str, source: str) -> ModelFamily:
    """The family of a Hugging Face architecture name."""
    for family in FAMILIES:
        if architecture in family.hf_architectures:
            return family
    raise ModelFormatError(
        f"{source}: architecture {architecture[:80]!r} is not supported; supported: "
        f"{', '.join(supported_architectures())}"
    )


def family_of_gguf(architecture: str, source: str) -> ModelFamily:
    """The family of a GGUF `general.architecture`."""
    for family in FAMILIES:
        if architecture in family.gguf_architectures:
            return family
    names = [name for family in FAMILIES for name in family.gguf_architectures]
    raise ModelFormatError(
        f"{source}: architecture {architecture[:80]!r} is not supported; supported: "
        f"{', '.join(names)}"
    )
