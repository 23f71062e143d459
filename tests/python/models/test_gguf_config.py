"""Tests of translated GGUF metadata: hostile values of every key, and keys that no rule reads."""

from typing import Any

import pytest

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.models import FAMILIES
from lmdeploy.models.config_reader import MetadataReader
from lmdeploy.models.decoder_config import DecoderConfig
from lmdeploy.models.family import ModelFamily
from lmdeploy.models.gguf_config import check_metadata, translate_metadata
from lmdeploy.models.read_decoder import read_decoder

METADATA = {
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 24,
    "block_count": 4,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "logit_scale": 0.5,
}
EXPERTS = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_group_count": 2,
    "expert_group_used_count": 1,
}
RECURRENT = {
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
}
LATENTS = {
    "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
}
ATTENTION_LAYERS = {"attention.head_count_kv": [0, 1, 0, 1]}
# The keys of families whose layers differ in their branches.
OF_FAMILY: dict[str, dict[str, Any]] = {
    "granite_hybrid": {**RECURRENT, **ATTENTION_LAYERS},
    "nemotron_h": {
        **RECURRENT,
        "attention.head_count_kv": [0, 0, 1, 0],
        "feed_forward_length": [0, 96, 0, 0],
    },
    "lfm2": {"shortconv.l_cache": 3, **ATTENTION_LAYERS},
    "lfm2_moe": {"shortconv.l_cache": 3, **ATTENTION_LAYERS},
}
# Keys with a default, which the shapes of tensors check, or that not every family needs.
OPTIONAL = {
    "attention.head_count_kv",
    "attention.sliding_window",
    "logit_scale",
    "shortconv.l_cache",
    "ssm.conv_kernel",
    "ssm.group_count",
}
# Keys of single families, and those that change every one.
OTHER_KEYS = (
    "attention.causal",
    "attention.key_length",
    "attention.recurrent_layers",
    "attention.scale",
    "attention.value_length",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_feed_forward_length",
    "expert_gating_func",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_weights_norm",
    "expert_weights_scale",
    "final_logit_softcapping",
    "full_attention_interval",
    "interleave_moe_layer_step",
    "leading_dense_block_count",
    "nextn_predict_layers",
    "residual_scale",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
)
HOSTILE: tuple[Any, ...] = (
    -1, 0, 7, 1 << 40, float("nan"), float("inf"), -0.5, 1e-30, True, "x", "", [], [1, 2], ["x"],
    [None] * 4, {"a": 1},
)  # fmt: skip
WITH_GGUF = [family for family in FAMILIES if family.gguf_architectures]


BY_LAYER: dict[str, Any] = {
    "attention.sliding_window_pattern": [True, True, True, False],
    "attention.key_length_swa": 16,
    "attention.shared_kv_layers": 0,
    "rope.dimension_count_swa": 16,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "embedding_length_per_layer_input": 16,
}


def own_keys(family: ModelFamily) -> dict[str, Any]:
    """Return the keys of a family that not every family has."""
    shared = {"expert_shared_feed_forward_length": 32} if family.recurrent else {}
    return {
        **({**EXPERTS, **shared} if family.experts else {}),
        **(BY_LAYER if family.gguf_by_layer else {}),
        **(OF_FAMILY.get(family.name, RECURRENT) if family.recurrent else {}),
        **(LATENTS if family.latent else {}),
    }


def config_of(family: ModelFamily, **changes: Any) -> DecoderConfig:
    """Return the config of a tiny file with `changes`. A value of None removes a key."""
    values = {**METADATA, **own_keys(family), **changes}
    found = {f"m.{key}": value for key, value in values.items() if value is not None}
    metadata = MetadataReader({"general.architecture": "m", **found}, "x.gguf")
    of_tensors = {"vocab_size": 8, "tie_word_embeddings": True}
    config = read_decoder(translate_metadata(metadata, family, of_tensors=of_tensors), family)
    check_metadata(metadata, config)
    return config


@pytest.mark.parametrize("family", WITH_GGUF, ids=lambda family: family.name)
def test_translate_metadata_errors_name_keys_of_the_file(family: ModelFamily) -> None:
    config_of(family)
    keys = (*METADATA, *own_keys(family), *OTHER_KEYS)
    for key in keys:
        for value in HOSTILE:
            try:
                config_of(family, **{key: value})
            except ModelFormatError as error:
                sentence = str(error).removeprefix("x.gguf: ")
                # Sentences about several sizes name none of them.
                is_of_sizes = sentence.startswith(("The ", "head_dim is ", "Each token uses "))
                assert is_of_sizes or sentence.startswith("m."), f"{key}={value!r}: {error}"


@pytest.mark.parametrize("family", WITH_GGUF, ids=lambda family: family.name)
def test_translate_metadata_requires_sizes(family: ModelFamily) -> None:
    recurrent = OF_FAMILY.get(family.name, RECURRENT) if family.recurrent else {}
    for key in {**METADATA, **recurrent}.keys() - OPTIONAL:
        with pytest.raises(ModelFormatError, match=rf"^x\.gguf: m\.{key} is missing"):
            config_of(family, **{key: None})


def family_named(name: str) -> ModelFamily:
    return next(family for family in FAMILIES if family.name == name)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("cohere", {"logit_scale": None}, r"m\.logit_scale is missing"),
        ("gemma3", {"attention.sliding_window": None}, r"m\.attention\.sliding_window is missing"),
        ("mixtral", {"expert_weights_norm": False}, r"m\.expert_weights_norm must be true"),
        ("glm4_moe", {"expert_gating_func": 1}, r"expert_gating_func is 1\. It must be 2 \(sigm"),
        ("mixtral", {"expert_weights_scale": 2.0}, r"expert_weights_scale is 2\. It must be 1"),
        ("cohere2", {"rope.freq_base_swa": 5e5}, r"freq_base_swa is 500000\. It must be 10000"),
        ("llama", {"attention.value_length": 16}, r"value_length is 16\. It must be the head_dim"),
        ("deepseek2", {"attention.kv_lora_rank": None}, r"m\.attention\.kv_lora_rank is missing"),
        ("deepseek2", {"attention.key_length_mla": 16}, r"key_length_mla is 16\. It must exceed"),
        ("llama", {"rope.scaling.yarn_log_multiplier": 0.1}, r"yarn_log_multiplier is 0\.1"),
    ],
)
def test_check_metadata_keys_that_contradict_the_family_are_rejected(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        config_of(family_named(name), **changes)


def test_translate_metadata_defaults_are_those_of_llama_cpp() -> None:
    gemma = config_of(family_named("gemma2"), **{"attention.sliding_window": None})
    assert gemma.windows == (4096, 0, 4096, 0)
    assert (gemma.structure.attention_cap, gemma.structure.logit_cap) == (50.0, 30.0)
    granite = config_of(family_named("granite"), logit_scale=0.0, embedding_scale=0.0)
    assert granite.structure.softmax_scale == 32**-0.5
    assert (granite.structure.logit_scale, granite.structure.embedding_scale) == (1.0, 1.0)
    llama4 = family_named("llama4")
    chunked, full = config_of(llama4), config_of(llama4, **{"attention.sliding_window": 0})
    assert (chunked.windows, chunked.layer_ropes) == ((-8192, -8192, -8192, 0), (0, 0, 0, -1))
    assert (full.windows, full.layer_ropes) == ((0,) * 4, (0,) * 4)
    assert config_of(family_named("llama")).windows == (24,) * 4
    assert config_of(family_named("qwen2")).windows == (0,) * 4  # llama.cpp does not read the key
