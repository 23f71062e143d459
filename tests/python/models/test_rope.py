"""Tests of RoPE settings in config.json and GGUF: every spelling, and rejected values."""

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import write_gguf
from tiny_models import TINY_MODELS, make_model

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.open import open_checkpoint
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.engine.plan import engine_config_of, longest_position
from lmdeploy.models.config_reader import ConfigReader, MetadataReader
from lmdeploy.models.decoder_config import RopeSettings
from lmdeploy.models.gguf_config import check_metadata, translate_metadata
from lmdeploy.models.gpt_oss import FAMILY as GPT_OSS
from lmdeploy.models.llama import FAMILY as LLAMA
from lmdeploy.models.read_decoder import read_decoder
from lmdeploy.models.rope import rope_from_hf

MAX_POSITION = 512
METADATA = {
    "general.architecture": "m",
    "m.attention.head_count": 1,
    "m.attention.layer_norm_rms_epsilon": 1e-5,
    "m.block_count": 1,
    "m.context_length": MAX_POSITION,
    "m.embedding_length": 64,
    "m.feed_forward_length": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def from_hf(default: dict[str, Any] | None = None, **values: Any) -> RopeSettings:
    return rope_from_hf(ConfigReader(values, "x"), MAX_POSITION, default=default)


def from_gguf(**values: Any) -> RopeSettings:
    """Read keys given without `<architecture>.rope.`; two underscores replace a period."""
    return of_metadata({f"m.rope.{key.replace('__', '.')}": value for key, value in values.items()})


def of_metadata(values: dict[str, Any]) -> RopeSettings:
    metadata = MetadataReader({**METADATA, **values}, "x")
    of_tensors = {"vocab_size": 8, "tie_word_embeddings": True}
    config = read_decoder(translate_metadata(metadata, LLAMA, of_tensors=of_tensors), LLAMA)
    check_metadata(metadata, config)
    return config.rope


def test_rope_from_hf_old_and_new_spelling_agree() -> None:
    scaling = {"factor": 8.0, "original_max_position_embeddings": 64, "high_freq_factor": 5.0}
    new = from_hf(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    for key in ("rope_type", "type"):
        assert from_hf(rope_theta=5e5, rope_scaling={key: "llama3", **scaling}) == new


def test_rope_from_hf_both_spellings_must_agree() -> None:
    linear = {"type": "linear", "factor": 2.0}
    assert from_hf(
        rope_theta=5e5,
        rope_scaling=linear,
        rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2},
    ) == from_hf(rope_theta=5e5, rope_scaling=linear)
    for parameters in (
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    ):
        with pytest.raises(ModelFormatError, match=r"rope_parameters and rope_scaling disagree"):
            from_hf(rope_scaling=linear, rope_parameters=parameters)


def test_rope_from_hf_default_applies_only_without_settings() -> None:
    # transformers uses GPT-OSS's default if both keys are missing, null or empty.
    assert GPT_OSS.hf_rope is not None
    for values in ({}, {"rope_scaling": None}, {"rope_parameters": None, "rope_scaling": {}}):
        rope = from_hf(dict(GPT_OSS.hf_rope), **values)
        assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 32.0, 4096)
        assert not rope.truncate
    for key in ("rope_scaling", "rope_parameters"):
        rope = from_hf(dict(GPT_OSS.hf_rope), **{key: {"rope_type": "linear", "factor": 2.0}})
        assert (rope.kind, rope.factor) == ("linear", 2.0)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_rope_from_hf_outer_original_length_takes_precedence(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    inner = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    inner |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    inner["original_max_position_embeddings"] = 32
    values = {"original_max_position_embeddings": 64, "rope_parameters": inner}
    theirs = LlamaConfig(max_position_embeddings=MAX_POSITION, **copy.deepcopy(values))
    LlamaRotaryEmbedding(theirs)  # transformers resolves the length here
    assert theirs.rope_parameters["original_max_position_embeddings"] == 64
    assert from_hf(**values).original_max_position == 64
    del values["original_max_position_embeddings"]
    assert from_hf(**values).original_max_position == 32


@pytest.mark.parametrize(
    "values",
    [
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
    ids=str,
)
def test_rope_from_hf_partial_rotation_counts_the_values_of_a_head(values: dict[str, Any]) -> None:
    heads = {"num_attention_heads": 4, "hidden_size": 256}
    assert from_hf(**values, **heads).dim == 32
    assert from_hf(**values, **heads, head_dim=128).dim == 64
    with pytest.raises(ModelFormatError, match="rotates 31 of 62 values"):
        from_hf(**values, **heads, head_dim=62)
    assert from_hf(partial_rotary_factor=1.0) == RopeSettings()
    inner = {"rope_type": "default", "partial_rotary_factor": 1.0}
    assert from_hf(partial_rotary_factor=0.5, rope_parameters=inner) == RopeSettings()


def test_rope_from_hf_yarn_attention_factor_follows_mscale() -> None:
    def factor(**values: float) -> float:
        return from_hf(rope_parameters={**YARN, **values}).attention_factor

    plain = 0.1 * np.log(4.0) + 1.0
    assert factor() == pytest.approx(plain)
    assert factor(attention_factor=1.5) == 1.5
    assert factor(mscale=1.0, mscale_all_dim=1.0) == pytest.approx(1.0)


def test_rope_from_gguf_linear_scaling_needs_no_type() -> None:
    # As in llama.cpp: the type defaults to linear, the factor to an older key, and 0 means 1.
    wanted = RopeSettings(kind="linear", factor=4.0, original_max_position=MAX_POSITION)
    assert from_gguf(scaling__factor=4.0) == wanted
    assert from_gguf(scale_linear=4.0) == wanted
    assert from_gguf(scaling__type="linear", scale_linear=4.0) == wanted
    assert from_gguf(scaling__factor=4.0, scale_linear=8.0) == wanted
    for values in (
        {},
        {"scaling__factor": 0.0},
        {"scaling__factor": 1.0},
        {"scaling__factor": 0.0, "scale_linear": 4.0},
        {"scaling__type": "none", "scaling__factor": 4.0},
    ):
        assert from_gguf(**values) == RopeSettings()
    with pytest.raises(ModelFormatError, match=r"rope\.scale_linear is '-2\.0'"):
        from_gguf(scale_linear=-2.0)


def test_rope_from_gguf_yarn_attention_factor_is_computed() -> None:
    def factor(**values: float) -> float:
        return from_gguf(scaling__type="yarn", scaling__factor=4.0, **values).attention_factor

    plain = 0.1 * np.log(4.0) + 1.0
    assert factor() == pytest.approx(plain)
    assert factor(scaling__attn_factor=2.0) == pytest.approx(2.0 * plain)
    # llama.cpp does not read this key. Its saver writes 1; its converter writes a value that
    # Hugging Face ignores.
    assert factor(scaling__yarn_attn_factor=1.0) == pytest.approx(plain)


BAD_KEYS: list[tuple[dict[str, Any], str]] = [
    (
        {"scaling__type": "yarn", "scaling__yarn_ext_factor": 0.5},
        "yarn_ext_factor is 0.5. It must be ",
    ),
    (
        {"scaling__type": "yarn", "scaling__yarn_ext_factor": 0.0},
        "yarn_ext_factor is 0. It must be 1",
    ),
    ({"scaling__yarn_ext_factor": 1.0}, "yarn_ext_factor is 1. It must be 0"),
    (
        {"scaling__type": "yarn", "scaling__yarn_log_multiplier": 0.1},
        "yarn_log_multiplier is 0.1",
    ),
    ({"scaling__attn_factor": 1.2}, r"attn_factor is 1\.2. It must be 1"),
    ({"scaling__type": "none", "scaling__attn_factor": 1.2}, "attn_factor is 1.2"),
]


@pytest.mark.parametrize(("values", "message"), BAD_KEYS, ids=lambda v: str(v)[:50])
def test_rope_from_gguf_keys_that_change_results_are_rejected(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        from_gguf(**values)


def test_rope_from_gguf_neutral_keys_are_accepted() -> None:
    neutral = {"scaling__attn_factor": 1.0, "scaling__yarn_attn_factor": 1.0}
    assert from_gguf(scaling__yarn_ext_factor=0.0, **neutral) == RopeSettings()
    assert from_gguf(scaling__yarn_ext_factor=-1.0, **neutral) == RopeSettings()
    assert from_gguf(freq_base=1e6, freq_base_swa=1e4) == RopeSettings(theta=1e6)  # no windows
    yarn = {"scaling__type": "yarn", "scaling__factor": 4.0}
    assert from_gguf(
        scaling__yarn_ext_factor=1.0, scaling__yarn_log_multiplier=0.0, **yarn
    ) == from_gguf(**yarn)


def test_open_checkpoint_gguf_rope_reaches_the_config(tmp_path: Path) -> None:
    model = make_model(TINY_MODELS[0])
    write_gguf(model, tmp_path / "l.gguf", extra={"rope.scale_linear": 4.0})
    rope = open_checkpoint(tmp_path / "l.gguf").config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 3.0}, 768),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({**YARN, "factor": 8.0}, 512),
        ({**YARN, "factor": 2.0}, 256),
    ],
    ids=lambda value: str(value)[:24],
)
def test_engine_config_of_too_long_session_logs_a_warning(
    rope: dict[str, Any], longest: int, caplog: pytest.LogCaptureFixture
) -> None:
    values = TINY_MODELS[0].config_values() | {"rope_parameters": rope, "rms_norm_eps": 1e-5}
    values["hidden_act"] = "silu"
    model = read_decoder(ConfigReader(values, "x"), LLAMA).to_engine("bfloat16")
    assert longest_position(model) == longest

    def plan(session_len: int | None) -> tuple[int, str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lmdeploy"):
            config = TurbomindEngineConfig(session_len=session_len)
            engine_config, _ = engine_config_of(config, model, model_path="x")
        return engine_config.session_len, caplog.text

    assert plan(None) == (256, "")
    assert plan(longest) == (longest, "")
    session_len, text = plan(longest + 1)
    assert session_len == longest + 1
    assert f"session_len is {longest + 1}. It should be at most {longest}, the number of" in text
    assert ("Dynamic RoPE" in text) == (rope["rope_type"] == "dynamic")


def test_rope_from_gguf_other_base_for_windows_is_rejected() -> None:
    values = {"m.rope.freq_base": 1e6, "m.rope.freq_base_swa": 1e4}
    values["m.attention.sliding_window"] = 24
    with pytest.raises(ModelFormatError, match=r"freq_base_swa is 10000. It must be 1e\+06"):
        of_metadata(values)
    values["m.rope.freq_base_swa"] = 1e6
    assert of_metadata(values) == RopeSettings(theta=1e6)
