"""The config of the text part of a checkpoint that also reads pictures."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lmdeploy.base.errors import ModelFormatError

logger = logging.getLogger("lmdeploy")

# Architectures with pictures, and the model_type of their text part → its architecture. The first
# is the one of a text part without a model_type, as in transformers.
TEXT_ARCHITECTURES: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": "Qwen2ForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2ForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "LlavaForConditionalGeneration": {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    },
    "Cohere2VisionForConditionalGeneration": {"cohere2": "Cohere2ForCausalLM"},
    "Lfm2VlForConditionalGeneration": {"lfm2": "Lfm2ForCausalLM"},
}
# Keys of the whole model that hold for its text part unless that has its own.
_SHARED_KEYS = (
    "quantization_config",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def has_vision(architecture: str) -> bool:
    """Return whether the architecture has a text part that can be loaded."""
    return architecture in TEXT_ARCHITECTURES


def text_config(values: Mapping[str, Any], architecture: str, *, source: str) -> dict[str, Any]:
    """Return the config.json of the text part. Raise ModelFormatError for an unknown one.

    Older folders of Qwen-VL have the text keys beside the vision keys.
    """
    known = TEXT_ARCHITECTURES[architecture]
    inner = values.get("text_config")
    model_type = inner.get("model_type") if isinstance(inner, dict) else None
    if model_type is None and (isinstance(inner, dict) or len(known) == 1):
        model_type = next(iter(known))  # published folders may omit it
    if not isinstance(inner, dict):
        inner = {key: value for key, value in values.items() if key != "vision_config"}
    model_type = str(model_type)
    if model_type not in known:
        raise ModelFormatError(
            f"{source}: text_config.model_type is {model_type[:40]!r}. It must be one of "
            f"{', '.join(known)}."
        )
    shared = {key: values[key] for key in _SHARED_KEYS if key in values}
    logger.warning("%s: only the text part of %s is loaded.", source, architecture)
    return {**shared, **inner, "architectures": [known[model_type]]}
