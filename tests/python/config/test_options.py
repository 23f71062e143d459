"""Tests of options: defaults, ranges, unsupported fields, quant_policy to format name."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from lmdeploy import (
    ChatTemplateConfig,
    GenerationConfig,
    Response,
    TurbomindEngineConfig,
    _turbomind,
)
from lmdeploy.config.kv_format_options import parse_quant_policy
from lmdeploy.config.option import unsupported_defaults
from lmdeploy.engine.devices import step_sizes
from lmdeploy.response import join_pieces

POLICIES = {
    given: row.name
    for row in _turbomind.kv_formats()
    for given in (row.name, *row.aliases, row.quant_policy)
    if given is not None
}
# The public names. The table may gain names, but must not lose one.
PUBLIC = {
    **{0: "none", 4: "int4", 8: "int8", 16: "fp4"},
    **{"none": "none", "auto": "none", "bf16": "none", "bfloat16": "none"},
    **{"int4": "int4", "int8": "int8", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8_e5m2"},
    **{"fp4": "fp4", "fp4_e2m1": "fp4", "mxfp4": "mxfp4", "nvfp4": "nvfp4"},
}


@pytest.mark.parametrize(("given", "name"), list(POLICIES.items()))
def test_quant_policy_accepts_numbers_and_names_in_any_case(given, name):
    assert TurbomindEngineConfig(quant_policy=given).kv_format == name
    assert parse_quant_policy(f" {given} ".upper()) == name


def test_public_names_of_formats_stay():
    assert POLICIES.items() >= PUBLIC.items()


def test_kv_format_enum_has_the_canonical_names():
    rows = [row for row in _turbomind.kv_formats() if row.format is not None]
    assert [row.format for row in rows] == list(_turbomind.KvFormat)
    assert [row.name for row in rows] == [member.name for member in _turbomind.KvFormat]


@pytest.mark.parametrize(
    "bad",
    [5, 12, 17, 42, -1, "fp3", "", "5", None, 4.0, True, [4], 10**400, "\ud800", "fp8\0", "fp4\nx"],
)
def test_engine_config_invalid_quant_policy_is_rejected(bad):
    with pytest.raises(ValueError, match=r"^quant_policy is .*must be 0, 4, 8, 16.*--quant-policy"):
        TurbomindEngineConfig(quant_policy=bad)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session_len", 0),
        ("session_len", -5),
        ("session_len", True),
        ("session_len", 2.5),
        ("max_batch_size", 0),
        ("max_batch_size", -1),
        ("cache_max_entry_count", 0),
        ("cache_max_entry_count", -0.1),
        ("cache_max_entry_count", math.nan),
        ("cache_max_entry_count", math.inf),
        ("cache_max_entry_count", 1.5),
        ("cache_max_entry_count", True),
        ("cache_block_seq_len", 0),
        ("cache_block_seq_len", 48),
        ("cache_block_seq_len", "64"),
        ("max_prefill_token_num", 0),
        ("num_threads", 0),
        ("dtype", "int8"),
        ("device_type", "npu"),
        ("enable_prefix_caching", 1),
        ("deterministic", "yes"),
    ],
)
def test_engine_config_value_out_of_range_is_rejected(field, value):
    with pytest.raises(ValueError, match=rf"^{field} is .*\. It must be .*\.$"):
        TurbomindEngineConfig(**{field: value})


@pytest.mark.parametrize("field", unsupported_defaults(TurbomindEngineConfig))
def test_engine_config_unsupported_field_accepts_its_default(field):
    default = unsupported_defaults(TurbomindEngineConfig)[field]
    TurbomindEngineConfig(**{field: default})
    for other in (2, "other"):
        with pytest.raises(ValueError, match=rf"^{field} is .* not supported"):
            TurbomindEngineConfig(**{field: other})


def test_engine_config_language_model_only_is_accepted():
    assert TurbomindEngineConfig(language_model_only=True).language_model_only
    with pytest.raises(
        ValueError, match=r"^language_model_only is 'yes'\. It must be True or False"
    ):
        TurbomindEngineConfig(language_model_only="yes")


@pytest.mark.parametrize("field", unsupported_defaults(GenerationConfig))
def test_generation_config_unsupported_field_accepts_only_its_default(field):
    GenerationConfig(**{field: unsupported_defaults(GenerationConfig)[field]})
    with pytest.raises(ValueError, match=rf"^{field} is .* not supported"):
        GenerationConfig(**{field: "other"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("max_new_tokens", -1),
        ("temperature", math.nan),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 1.0),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("random_seed", -1),
        ("priority", 2**31),
        ("priority", 1.0),
        ("random_seed", 2**64),
        ("stop_words", ["a"] * 1000),
        ("stop_words", [""]),
        ("stop_words", ["a" * 4096] * 17),
        ("stop_words", "text"),
        ("stop_words", [1]),
        ("bad_token_ids", [-1]),
        ("logprobs", 1000),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 0.0}),
        ("output_logits", "some"),
        ("do_sample", 1),
        ("response_format", "json"),
        ("min_new_tokens", -1),
    ],
)
def test_generation_config_value_out_of_range_is_rejected(field, value):
    with pytest.raises(
        ValueError, match=rf"^{field} (is|contains|has) .*\. (It|Every item) must (be|have) .*\.$"
    ):
        GenerationConfig(**{field: value})


def test_step_sizes_on_cpu_are_smaller_but_hold_the_batch():
    cpu = _turbomind.DeviceCapability()
    assert step_sizes(TurbomindEngineConfig(), cpu) == (32, 256)
    assert step_sizes(TurbomindEngineConfig(max_batch_size=400), cpu) == (400, 400)
    assert step_sizes(TurbomindEngineConfig(max_prefill_token_num=7), cpu) == (32, 7)


def test_configs_have_defaults_of_lmdeploy():
    config = GenerationConfig()
    assert (config.max_new_tokens, config.top_k, config.temperature) == (512, 50, 0.8)
    assert (config.do_sample, config.top_p, config.repetition_penalty) == (False, 1.0, 1.0)
    engine = TurbomindEngineConfig()
    assert (engine.cache_max_entry_count, engine.cache_block_seq_len) == (0.8, 64)
    assert (engine.quant_policy, engine.dtype) == (0, "auto")
    assert step_sizes(engine, _turbomind.cuda_capability(90)) == (128, 8192)
    assert engine.enable_prefix_caching


def test_generation_config_error_message_is_short():
    with pytest.raises(ValueError, match="1000000") as info:
        GenerationConfig(stop_words=["word"] * 10**6)
    assert len(str(info.value)) < 300


def test_response_extend_appends_a_chunk():
    whole = Response("a", 1, 5, token_ids=[1], logprobs=[{1: -0.5}])
    whole.extend(Response("b", 2, 5, "stop", [2], [{2: -0.25}], cached_tokens=4))
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("ab", [1, 2], "stop")
    assert whole.logprobs == [{1: -0.5}, {2: -0.25}]
    assert (whole.generate_token_len, whole.cached_tokens) == (2, 4)


def test_chat_template_config_json_round_trips_and_rejects_bad_files(tmp_path):
    config = ChatTemplateConfig(model_name="m", user="U:", stop_words=["X"])
    path = tmp_path / "template.json"
    config.to_json(str(path))
    assert ChatTemplateConfig.from_json(str(path)) == config
    for bad in ('{"nonsense": 1}', "[1]", "{", str(tmp_path / "none.json"), '{"user": 3}'):
        with pytest.raises(ValueError, match=r"chat[_-]template"):
            ChatTemplateConfig.from_json(bad)
    path.write_bytes(b'{"user": "\xff"}')
    with pytest.raises(ValueError, match=r"must be a file in UTF-8 \(--chat-template\)"):
        ChatTemplateConfig.from_json(str(path))
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"is \[1\]\. It must be a JSON object \(--chat-template\)"
    ):
        ChatTemplateConfig.from_json(str(path))


def test_join_pieces_returns_whole_response_and_changes_no_chunk():
    chunks = [
        Response("", 0, 3, prompt_logprobs=[{1: -1.0}], logits=np.ones((2, 4), np.float32)),
        Response("a", 1, 3, token_ids=[5], logprobs=[{5: -0.5}], index=1, cached_tokens=2),
        Response("bc", 2, 3, finish_reason="stop", token_ids=[6], logprobs=[{6: -0.1}], index=1),
        Response("", 2, 3, finish_reason="length", logits=np.zeros((1, 4), np.float32), index=1),
    ]
    before = copy.deepcopy(chunks)
    whole = join_pieces(chunks)
    assert (whole.text, whole.token_ids, whole.generate_token_len) == ("abc", [5, 6], 2)
    assert (whole.finish_reason, whole.index) == ("length", 1)
    assert whole.logprobs == [{5: -0.5}, {6: -0.1}] and whole.prompt_logprobs == [{1: -1.0}]
    assert whole.logits is not None and whole.logits.sum(1).tolist() == [4.0, 4.0, 0.0]
    assert [p.text for p in chunks] == [p.text for p in before]
    assert [p.logprobs for p in chunks] == [p.logprobs for p in before]
    assert join_pieces([Response("x", 1, 1)]).logprobs is None


def test_generation_config_negative_runs_turn_the_stop_at_repetitions_off():
    config = GenerationConfig(repetition_ngram_size=-1, repetition_ngram_threshold=-2)
    assert (config.repetition_ngram_size, config.repetition_ngram_threshold) == (0, 0)
