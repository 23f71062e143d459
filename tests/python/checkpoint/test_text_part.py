"""The config.json of a text part."""

from __future__ import annotations

from typing import Any

import pytest

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.text_part import text_config


@pytest.mark.parametrize(("name", "text"), [("Mistral3", "Mistral"), ("Llava", "Llama")])
def test_text_part_without_a_model_type_has_that_of_transformers(name: str, text: str) -> None:
    values = {"text_config": {"hidden_size": 8}, "eos_token_id": 3}
    found = text_config(values, f"{name}ForConditionalGeneration", source="x")
    assert found["architectures"] == [f"{text}ForCausalLM"]
    assert (found["hidden_size"], found["eos_token_id"]) == (8, 3)


@pytest.mark.parametrize("inner", [{"model_type": "mamba"}, None], ids=str)
def test_unknown_text_part_is_refused(inner: dict[str, Any] | None) -> None:
    values = {"text_config": inner}
    with pytest.raises(ModelFormatError, match="It must be one of llama, mistral, qwen2"):
        text_config(values, "LlavaForConditionalGeneration", source="x")
