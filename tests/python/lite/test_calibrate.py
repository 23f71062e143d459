"""Tests of `lmdeploy lite calibrate`: statistics, file, engine constants, and rejected input."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import rope as reference_rope
from safetensors.numpy import save_file
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.fingerprint import hash_model
from lmdeploy.cli.main import main
from lmdeploy.config.kv_format_options import FormatPair
from lmdeploy.engine.kv_calibration import (
    Calibration,
    CalibrationMetadata,
    engine_constants,
    read_calibration,
    write_calibration,
)
from lmdeploy.lite import calibrate as module
from lmdeploy.lite.calibrate import (
    CalibrationOptions,
    calibrate,
    calibrate_prompts,
    clipped_amax,
    k_mean,
)
from lmdeploy.lite.prompts import encode_prompts, read_prompts
from lmdeploy.lite.rope_speed import inverse_frequencies, slow_channels

LAYERS, HEADS, HEAD_DIM, BINS = 3, 2, 16, 640
MODEL = SimpleNamespace(
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    max_position=64,
    ropes=[
        SimpleNamespace(kind="default", theta=10000.0, dim=HEAD_DIM, factor=1.0, freq_factors=[])
    ],
    layer_ropes=[],
    attention_cap=0.0,
)
HASH = "ab" * 32


def make_calibration(**changes) -> Calibration:
    random = np.random.default_rng(0)
    facts = CalibrationMetadata(HASH, "cd" * 32, 100, 64, "all", 100.0)
    amax = {
        name: random.uniform(1, 9, (LAYERS, HEADS)).astype(np.float32)
        for name in ("k_amax", "k_amax_rotated", "v_amax")
    }
    mean = random.normal(size=(LAYERS, HEADS, HEAD_DIM)).astype(np.float32)
    return dataclasses.replace(Calibration(facts, k_mean=mean, **amax), **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.safetensors"
    write_calibration(path, make_calibration())
    return path


def read(path: Path) -> Calibration:
    return read_calibration(path, MODEL, model_hash=HASH)


def test_read_calibration_returns_what_was_written(path):
    wanted, got = make_calibration(), read(path)
    assert got.facts == wanted.facts
    for name in ("k_mean", "k_amax", "k_amax_rotated", "v_amax"):
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))


def test_write_calibration_equal_calibrations_give_equal_bytes(path, tmp_path):
    for i in range(5):
        other = tmp_path / str(i)
        write_calibration(other, make_calibration())
        assert other.read_bytes() == path.read_bytes()


def test_read_calibration_other_model_is_rejected(path):
    with pytest.raises(ModelFormatError, match=r"for another model .*--kv-calibration"):
        read_calibration(path, MODEL, model_hash="00" * 32)


def test_read_calibration_truncated_file_is_rejected(path):
    data = path.read_bytes()
    for size in [*range(0, 700, 7), *range(700, len(data), 41), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ModelFormatError) as info:
            read(path)
        assert "\n" not in str(info.value)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_read_calibration_random_bytes_are_rejected(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "noise"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError):
        read(path)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_read_calibration_changed_header_never_crashes(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "changed"
    write_calibration(path, make_calibration())
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, 8 + header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        assert read(path).k_mean.shape == (LAYERS, HEADS, HEAD_DIM)
    except ModelFormatError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "text"), [("missing.safetensors", "cannot be read"), (".", "not a regular file")]
)
def test_read_calibration_unreadable_file_is_rejected(tmp_path, name, text):
    with pytest.raises(ModelFormatError, match=text):
        read(tmp_path / name)


def write_raw(path: Path, facts: object, **changes) -> None:
    calibration = make_calibration()
    names = ("k_mean", "k_amax", "k_amax_rotated", "v_amax")
    tensors = {name: getattr(calibration, name) for name in names} | changes
    metadata = {"kv_calibration": facts if isinstance(facts, str) else json.dumps(facts)}
    save_file({k: v for k, v in tensors.items() if v is not None}, path, metadata=metadata)


FACTS = dataclasses.asdict(make_calibration().facts)
NAN = np.full((LAYERS, HEADS), np.nan, np.float32)


@pytest.mark.parametrize(
    ("facts", "changes", "text"),
    [
        (FACTS, {"k_mean": None}, "k_mean is missing"),
        (FACTS, {"k_mean": np.zeros((LAYERS, HEADS, 8), np.float32)}, "must be F32"),
        (FACTS, {"v_amax": np.zeros((LAYERS, HEADS), np.float64)}, "must be F32"),
        (FACTS, {"v_amax": np.zeros((HEADS, LAYERS), np.float32)}, "must be F32"),
        (FACTS, {"v_amax": NAN}, "v_amax contains"),
        (FACTS, {"k_amax": np.full((LAYERS, HEADS), -1, np.float32)}, "k_amax contains"),
        (FACTS, {"v_amax": np.full((LAYERS, HEADS), 3e38, np.float32)}, "v_amax contains"),
        (
            FACTS,
            {"k_mean": np.full((LAYERS, HEADS, HEAD_DIM), -3e38, np.float32)},
            "k_mean contains",
        ),
        (FACTS | {"version": 2}, {}, "version is 2. It must be 1"),
        (FACTS | {"tokens": "many"}, {}, "not those of version 1"),
        (FACTS | {"more": 1}, {}, "not those of version 1"),
        ({"version": 1, "model_hash": HASH}, {}, "not those of version 1"),
        ([1], {}, "version is None"),
        ("{", {}, "not JSON"),
        ("[" * 100_000, {}, "not JSON"),
    ],
)
def test_read_calibration_wrong_contents_are_rejected(tmp_path, facts, changes, text):
    path = tmp_path / "wrong"
    write_raw(path, facts, **changes)
    with pytest.raises(ModelFormatError, match=text) as info:
        read(path)
    assert str(info.value).endswith(" Change --kv-calibration.")


def test_read_calibration_checkpoint_is_rejected(tmp_path):
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match="not a calibration file"):
        read(tmp_path / "model.safetensors")


def test_engine_constants_scales_follow_the_format():
    calibration = make_calibration()
    layers = [FormatPair("nvfp4", "fp8"), FormatPair("fp8_e5m2", "int4"), FormatPair("int8", "fp8")]
    mean, k, v = engine_constants(calibration, layers, rotated=True)
    np.testing.assert_array_equal(mean, calibration.k_mean)
    assert k.dtype == v.dtype == np.float32
    np.testing.assert_allclose(k[0], calibration.k_amax_rotated[0] / (6 * 256), rtol=1e-6)
    np.testing.assert_allclose(k[1], calibration.k_amax_rotated[1] / 57344, rtol=1e-6)
    np.testing.assert_allclose(v[0], calibration.v_amax[0] / 448, rtol=1e-6)
    assert (k[2] == 1).all() and (v[1] == 1).all()
    plain = engine_constants(calibration, layers, rotated=False)[1]
    np.testing.assert_allclose(plain[0], calibration.k_amax[0] / (6 * 256), rtol=1e-6)


def test_engine_constants_zero_heads_get_scale_one():
    zeros = np.zeros((LAYERS, HEADS), np.float32)
    mean = np.zeros((LAYERS, HEADS, HEAD_DIM), np.float32)
    calibration = make_calibration(v_amax=zeros, k_mean=mean)
    layers = [FormatPair("nvfp4", "nvfp4")] * LAYERS
    mean, _, v = engine_constants(calibration, layers, rotated=True)
    assert mean is None and (v == 1).all()


def histogram_of(values: np.ndarray) -> np.ndarray:
    """Return a histogram as _turbomind.pyi defines it: 16 bins per octave from 2^-20."""
    bits = np.abs(values.astype(np.float32)).view(np.uint32).astype(np.int64)
    bins = np.clip((bits >> 19) - ((127 - 20) << 4), 0, BINS - 1)
    return np.bincount(bins, minlength=BINS)


@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.0, 99.9])
def test_clipped_amax_percentile_is_within_one_bin(percentile):
    values = np.random.default_rng(1).normal(size=20_000).astype(np.float32) * 3
    statistics = {
        "k_amax": np.abs(values).max()[None, None],
        "k_histogram": histogram_of(values)[None, None],
    }
    clipped = clipped_amax(statistics, "k", percentile=percentile)[0, 0]
    exact = np.quantile(np.abs(values), percentile / 100, method="higher")
    assert exact <= clipped <= exact * (17 / 16) * (1 + 1e-6)
    assert clipped_amax(statistics, "k", percentile=100.0)[0, 0] == np.abs(values).max()


def test_clipped_amax_is_never_above_the_largest_value():
    values = np.full(10, 1.01, np.float32)
    statistics = {
        "v_amax": values.max()[None, None],
        "v_histogram": histogram_of(values)[None, None],
    }
    assert clipped_amax(statistics, "v", percentile=99.0)[0, 0] == np.float32(1.01)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_inverse_frequencies_equal_reference(kind):
    settings = {"factor": 4.0, "original_max_position": 32}
    config = SimpleNamespace(
        kind=kind,
        theta=10000.0,
        dim=64,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
        freq_factors=[],
        **settings,
    )
    wanted = reference_rope.frequencies(reference_rope.Rope(dim=64, kind=kind, **settings))
    np.testing.assert_allclose(inverse_frequencies(config), wanted, rtol=1e-9)


def test_slow_channels_come_in_pairs():
    slow = slow_channels(MODEL, 64)[0]
    half = HEAD_DIM // 2
    assert (slow[:half] == slow[half:]).all()
    turns = 64 * 10000.0 ** (-np.arange(half) / half) / (2 * np.pi)
    assert (slow[:half] == (turns < 0.25)).all() and 0 < slow.sum() < HEAD_DIM
    assert slow_channels(MODEL, 10**9).sum() == 0


def test_k_mean_selects_all_slow_or_no_channels():
    statistics = {"k_sum": np.ones((LAYERS, HEADS, HEAD_DIM)) * 6, "tokens": 3}
    assert (k_mean(statistics, MODEL, which="all", context=64) == 2).all()
    assert (k_mean(statistics, MODEL, which="none", context=64) == 0).all()
    slow = k_mean(statistics, MODEL, which="slow", context=64)
    np.testing.assert_array_equal(slow[:, 0] == 2, slow_channels(MODEL, 64))
    capped = SimpleNamespace(**{**vars(MODEL), "attention_cap": 50.0})
    assert (k_mean(statistics, capped, which="all", context=64) == 0).all()


def test_every_channel_of_a_layer_without_rope_is_slow():
    model = SimpleNamespace(**{**vars(MODEL), "layer_ropes": [-1] + [0] * (LAYERS - 1)})
    slow = slow_channels(model, 10**9)
    assert slow[0].all() and not slow[1:].any()


class FakeEngine:
    """Records the prompts and returns different statistics for the two passes."""

    prompts: list[list[int]] = []  # noqa: RUF012
    engine_configs: list[SimpleNamespace] = []  # noqa: RUF012

    def __init__(self, model, configure, *, context):
        self.engine_config = SimpleNamespace(constants=None)
        self.engine_config.set_kv_calibration = lambda *values: setattr(
            self.engine_config, "constants", values
        )
        configure(self.engine_config)
        self.engine_configs.append(self.engine_config)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self, prompt):
        self.prompts.append(list(prompt))

    def statistics(self):
        second = hasattr(self.engine_config, "kv_rotate_k")
        amax = np.full((LAYERS, HEADS), 5.0 if second else 9.0, np.float32)
        return {
            "tokens": 10,
            "k_sum": np.full((LAYERS, HEADS, HEAD_DIM), -20.0),
            "k_amax": amax,
            "v_amax": np.full((LAYERS, HEADS), 7.0, np.float32),
        }


def test_calibrate_runs_two_passes(monkeypatch):
    monkeypatch.setattr(module, "PromptEngine", FakeEngine)
    FakeEngine.prompts, FakeEngine.engine_configs = [], []
    model = SimpleNamespace(config=MODEL, hash=HASH, has_statistics=True)
    options = CalibrationOptions(tokens=150, context=2048)
    found = calibrate(model, list(range(200)), text_hash="t", options=options)
    assert [len(p) for p in FakeEngine.prompts] == [64, 64, 22] * 2  # cut to max_position
    first, second = FakeEngine.engine_configs
    assert first.kv_format == second.kv_format == "none" and first.constants is None
    assert (second.constants[0] == -2).all() and second.constants[1:] == (None, None)
    assert (found.k_mean == -2).all() and (found.v_amax == 7).all()
    assert (found.k_amax == 9 + 2).all() and (found.k_amax_rotated == 5).all()
    assert (found.facts.tokens, found.facts.context, found.facts.model_hash) == (150, 64, HASH)


def test_calibrate_prompts_do_not_share_contexts(monkeypatch):
    monkeypatch.setattr(module, "PromptEngine", FakeEngine)
    FakeEngine.prompts, FakeEngine.engine_configs = [], []
    model = SimpleNamespace(config=MODEL, hash=HASH, has_statistics=True)
    prompts = [[1] * 10, [], [2] * 100, [3] * 10, [4] * 10]
    options = CalibrationOptions(tokens=125, context=64)
    found = calibrate_prompts(model, prompts, text_hash="t", options=options)
    assert FakeEngine.prompts == [[1] * 10, [2] * 64, [2] * 36, [3] * 10, [4] * 5] * 2
    assert found.facts.tokens == 125


def test_read_prompts_takes_a_prompt_from_each_line(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    lines = ["a\u2028b", {"text": "c\n"}, "", {"prompt": "d", "id": 3}, {"messages": messages}]
    path = tmp_path / "prompts.jsonl"
    encoded = [json.dumps(line, ensure_ascii=False) if line else "" for line in lines]
    path.write_text("\n".join(encoded) + "\n", encoding="utf-8")
    assert read_prompts(path) == ["a\u2028b", "c\n", "d", messages]
    plain = path.with_suffix(".txt")
    plain.write_bytes(path.read_bytes())
    assert read_prompts(plain) == [path.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    "line",
    [
        *("{", "3", "null", "[]", "[3]", "{}", '{"text": 3}', '{"text": "a", "prompt": "b"}'),
        *('{"messages": []}', '{"messages": [{"role": "user"}]}', '{"messages": ["Hi"]}'),
        pytest.param("[" * 9999, id="deep"),
    ],
)
def test_read_prompts_names_the_line_that_is_not_a_prompt(tmp_path, line):
    path = tmp_path / "prompts.JSONL"
    path.write_text(f'"good"\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"^prompts.JSONL, line 2: ") as info:
        read_prompts(path)
    assert len(str(info.value)) < 200


def test_encode_prompts_renders_messages_by_the_chat_template():
    def render(messages, *, add_generation_prompt):
        assert not add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    def encode(text, *, add_special):
        assert not add_special
        return list(map(ord, text))

    loaded = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode))
    loaded.chat_template = SimpleNamespace(render=render)
    model = SimpleNamespace(loaded=loaded)
    messages = [{"role": "user", "content": "Hi"}]
    assert encode_prompts(model, ["ab", messages]) == [[97, 98], list(map(ord, "<user>Hi"))]
    loaded.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompts(model, [messages])


def test_calibrate_empty_text_is_rejected():
    model = SimpleNamespace(config=MODEL, hash=HASH, has_statistics=True)
    with pytest.raises(ValueError, match="The text has no tokens"):
        calibrate(model, [], text_hash="t", options=CalibrationOptions())


def test_calibrate_model_without_statistics_is_rejected():
    model = SimpleNamespace(config=MODEL, hash=HASH, has_statistics=False)
    with pytest.raises(ValueError, match=r"has no calibration.* Use kv_quality balanced"):
        calibrate(model, [1, 2], text_hash="t", options=CalibrationOptions())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tokens": 0}, "--tokens"),
        ({"context": 0}, "--context"),
        ({"mean": "fast"}, "--mean"),
        ({"percentile": 101.0}, "--percentile"),
        ({"percentile": 1.0}, "--percentile"),
    ],
)
def test_calibration_options_out_of_range_are_rejected(given, text):
    with pytest.raises(ValueError, match=text):
        CalibrationOptions(**given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(make_model(TINY_MODELS[0]), tmp_path_factory.mktemp("model"))


def test_hash_model_changes_with_weights_and_config(folder, tmp_path):
    wanted = hash_model(str(folder))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert hash_model(str(copy)) == wanted
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert hash_model(str(copy)) != wanted
    shutil.copy(folder / "model.safetensors", weights)
    config = json.loads((copy / "config.json").read_text())
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    config[key] = {"rope_type": "default", "rope_theta": 20000.0}
    (copy / "config.json").write_text(json.dumps(config))
    assert hash_model(str(copy)) != wanted


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["calibrate", "smollm2"], "--text"),
        (["calibrate", "smollm2", "--text", "no.txt", "--output", "o"], "no.txt"),
        (["calibrate", "smollm2", "--text", __file__, "--output", "/no/such/o"], "--output"),
        (["calibrate", "smollm2", "--text", __file__, "--output", "."], "--output"),
        (["calibrate", "smollm2", "--text", __file__, "--output", "o", "--tokens", "0"], "tokens"),
        (["calibrate", "no.gguf", "--text", __file__, "--output", "o"], "no.gguf"),
        (["kv-search", "smollm2", "--text", __file__], "--budget"),
        (["kv-search", "smollm2", "--text", __file__, "--budget", "0"], "budget"),
        (["kv-search", "smollm2", "--text", __file__, "--budget", "5", "--formats", "x"], "--form"),
    ],
)
def test_lite_invalid_input_is_a_one_line_error(capsys, arguments, text):
    with pytest.raises(SystemExit) as info:
        main(["lite", *arguments])
    assert info.value.code == 2
    message = capsys.readouterr().err
    assert text in message and message.count("\n") == 1
