"""Tests of GGUF files: every format, the row order of q and k, and damaged files."""

import gc
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import write_gguf
from tiny_models import TINY_MODELS, TinyModel, make_model

from lmdeploy import ChatTemplateConfig, TurbomindEngineConfig, _turbomind
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.checkpoint import gguf as gguf_checkpoint
from lmdeploy.checkpoint.convert import (
    bf16_bits,
    matrix_for_engine,
    vector_for_engine,
)
from lmdeploy.checkpoint.files import gguf_file
from lmdeploy.checkpoint.files.gguf_file import FORMATS, GgufFile, format_name
from lmdeploy.checkpoint.files.tensor_file import (
    SUPPORTED_FORMATS,
)
from lmdeploy.checkpoint.load import LoadedWeights, load_weights
from lmdeploy.checkpoint.open import Checkpoint, open_checkpoint
from lmdeploy.engine import model_files
from lmdeploy.engine.load import TextOptions, load_engine
from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.gguf_config import check_window_pattern

LLAMA = TINY_MODELS[0]
WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")


def by_name(checkpoint: Checkpoint) -> dict[str, Any]:
    return {planned.name: planned for planned in checkpoint.tensors}


def values_of(planned: Any, exact: bool = True) -> np.ndarray:
    """Return the values that the engine computes with, in FP32."""
    import gguf

    kind, data = matrix_for_engine(
        planned.tensor, exact=exact, interleaved_heads=planned.interleaved_heads
    )
    assert data.flags.c_contiguous
    if kind == "f32":
        return data
    if kind == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    assert data.dtype == np.uint8
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(make_model(LLAMA), path)
    return path


def test_load_model_frees_vocabulary_before_weights_load(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pairs(dict[str, Any]):
        """A dict that supports weak references."""

    seen: list[weakref.ref[Pairs]] = []
    alive: list[bool] = []

    class Watched(GgufFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.metadata = Pairs(self.metadata)
            seen.append(weakref.ref(self.metadata))

    def load(*arguments: Any, **options: Any) -> LoadedWeights:
        alive.extend(pairs() is not None for pairs in seen)
        return load_weights(*arguments, **options)

    monkeypatch.setattr(gguf_checkpoint, "GgufFile", Watched)
    monkeypatch.setattr(model_files, "load_weights", load)
    model_files.load_model(
        str(good), device=_turbomind.make_cpu_device(1), exact=True, progress=False
    )
    assert alive == [False]


SMALL = TurbomindEngineConfig(
    session_len=64, max_batch_size=1, cache_max_entry_count=0.01, num_threads=1
)


def test_load_engine_opens_gguf_file_once(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    class Counted(GgufFile):
        def __init__(self, path: Path) -> None:
            opened.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf_checkpoint, "GgufFile", Counted)
    _, running = load_engine(str(good), SMALL, progress=False)
    running.core.close()
    assert opened == [good]


def test_load_engine_closed_engine_frees_its_weights(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Any]] = []
    load = model_files.ModelFiles.load

    def watched(*args: Any, **options: Any) -> model_files.LoadedModel:
        model = load(*args, **options)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(model_files.ModelFiles, "load", watched)
    _, running = load_engine(str(good), SMALL, progress=False)
    running.on_close()
    running.core.close()
    gc.collect()
    assert loaded[0]() is None


def test_load_engine_bad_template_is_rejected_before_loading(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> LoadedWeights:
        raise AssertionError("weights are read")

    monkeypatch.setattr(model_files, "load_weights", load)
    bad = tmp_path / "bad.jinja"
    bad.write_text("{% if %}")
    options = TextOptions(ChatTemplateConfig("custom", model_path=str(bad)))
    with pytest.raises(ModelFormatError, match=r"bad\.jinja"):
        load_engine(str(good), SMALL, options=options, progress=False)
    with pytest.raises(AssertionError, match="weights are read"):
        load_engine(str(good), SMALL, progress=False)


@pytest.mark.parametrize("weight_format", WRITABLE)
def test_matrix_for_engine_every_writable_format_gives_its_values(
    weight_format: str, tmp_path: Path
) -> None:
    model = make_model(LLAMA)
    stored = write_gguf(model, tmp_path / "m.gguf", weight_format=weight_format)
    planned = by_name(open_checkpoint(tmp_path / "m.gguf"))
    for ours, name in (
        ("embedding", "model.embed_tokens.weight"),
        ("layers.0.q", "model.layers.0.self_attn.q_proj.weight"),
        ("layers.1.k", "model.layers.1.self_attn.k_proj.weight"),
        ("layers.1.down", "model.layers.1.mlp.down_proj.weight"),
    ):
        np.testing.assert_array_equal(values_of(planned[ours]), stored[name])
    if weight_format in ("F32", "F16"):
        wanted = (bf16_bits(stored[name]).astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(values_of(planned[ours], exact=False), wanted)


def test_format_name_equals_ggml() -> None:
    import gguf

    for kind in gguf.GGMLQuantizationType:
        assert format_name(int(kind)) == kind.name
    assert set(FORMATS.values()) == set(SUPPORTED_FORMATS)
    assert format_name(12345) == "number 12345"


@pytest.mark.parametrize(
    "tiny",
    [t for t in TINY_MODELS if not t.rope and "bias" not in t.settings],
    ids=lambda tiny: tiny.name,
)
def test_open_checkpoint_gguf_families_restore_row_order(tiny: TinyModel, tmp_path: Path) -> None:
    model = make_model(tiny)
    stored = write_gguf(model, tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    planned = by_name(checkpoint)
    assert len(planned) == len(stored)
    assert checkpoint.config.head_dim == model.config.head_dim
    for letter in "qkv":
        name = f"model.layers.1.self_attn.{letter}_proj.weight"
        np.testing.assert_array_equal(values_of(planned[f"layers.1.{letter}"]), stored[name])
        if f"layers.1.{letter}.bias" in planned:
            bias = planned[f"layers.1.{letter}.bias"]
            np.testing.assert_array_equal(
                vector_for_engine(bias.tensor, interleaved_heads=bias.interleaved_heads),
                stored[name.replace("weight", "bias")],
            )
    assert (planned["layers.0.q"].interleaved_heads > 0) == (
        tiny.architecture in ("Llama", "Mistral")
    )


def test_open_checkpoint_gguf_rope_metadata_is_read(tmp_path: Path) -> None:
    model = make_model(LLAMA)
    factors = np.linspace(1.0, 8.0, 32)
    write_gguf(model, tmp_path / "f.gguf", freq_factors=factors)
    rope = open_checkpoint(tmp_path / "f.gguf").config.rope
    np.testing.assert_allclose(rope.freq_factors, factors, rtol=1e-7)
    extra = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    write_gguf(model, tmp_path / "l.gguf", extra=extra)
    rope = open_checkpoint(tmp_path / "l.gguf").config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    write_gguf(model, tmp_path / "bad.gguf", freq_factors=-factors)
    with pytest.raises(ModelFormatError, match="rope_freqs"):
        open_checkpoint(tmp_path / "bad.gguf")


BAD_METADATA: list[tuple[dict[str, Any], str]] = [
    ({"rope.scaling.type": "longrope"}, "longrope"),
    ({"rope.dimension_count": 31}, "rope.dimension_count is 31"),
    ({"expert_count": 8}, "expert_used_count is missing"),
    ({"attention.causal": False}, "attention.causal is false. It must be true"),
]


@pytest.mark.parametrize(("extra", "message"), BAD_METADATA, ids=str)
def test_open_checkpoint_gguf_unsupported_metadata_is_rejected(
    extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_gguf(make_model(LLAMA), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(tmp_path / "m.gguf")


# Keys that llama.cpp's converters write as one value, or as one for each layer, and their values.
LAYER_KEYS = {
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "feed_forward_length": 160,
    "attention.key_length": 64,
    "attention.value_length": 64,
}


def test_open_checkpoint_gguf_equal_values_of_layers_are_one_value(tmp_path: Path) -> None:
    model = make_model(LLAMA)
    layers = model.config.num_hidden_layers
    assert layers > 1
    write_gguf(model, tmp_path / "one.gguf")
    one = open_checkpoint(tmp_path / "one.gguf").config
    arrays: dict[str, Any] = {key: [value] * layers for key, value in LAYER_KEYS.items()}
    write_gguf(model, tmp_path / "arrays.gguf", extra=arrays)
    assert open_checkpoint(tmp_path / "arrays.gguf").config == one


@pytest.mark.parametrize("key", LAYER_KEYS)
def test_open_checkpoint_gguf_other_values_of_layers_are_refused(key: str, tmp_path: Path) -> None:
    model = make_model(LLAMA)
    layers, value = model.config.num_hidden_layers, LAYER_KEYS[key]
    for values, message in (
        ([value] * (layers - 1) + [2 * value], f"{key} is .*. It must be the same in all layers"),
        ([value] * (layers + 1), f"{key} has {layers + 1} values, but .*block_count is {layers}"),
    ):
        write_gguf(model, tmp_path / "m.gguf", extra={key: values})
        with pytest.raises(ModelFormatError, match=message):
            open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("pattern", "good"),
    [
        (2, True),
        ([True, False, True, False], True),
        ([1, 0, 1, 0], True),
        (0, False),
        (4, False),
        ([True, True, True, False], False),
        ([True, False], False),
    ],
    ids=str,
)
def test_check_window_pattern_accepts_only_the_given_windows(pattern: Any, good: bool) -> None:
    # llama.cpp stores a period or one flag per layer; GPT-OSS alternates.
    key = "gpt-oss.attention.sliding_window_pattern"
    reader = ConfigReader({key: pattern}, "x")
    if good:
        check_window_pattern(reader, "gpt-oss", windows=(128, 0, 128, 0))
    else:
        with pytest.raises(
            ModelFormatError, match=f"{key} has other windows.* must be true, false, true, false"
        ):
            check_window_pattern(reader, "gpt-oss", windows=(128, 0, 128, 0))
    check_window_pattern(reader, "gpt-oss", windows=(0, 0, 0, 0))
    check_window_pattern(ConfigReader({}, "x"), "gpt-oss", windows=(128, 0, 128, 0))


def damaged(good: Path, tmp_path: Path, change: Any) -> Path:
    data = bytearray(good.read_bytes())
    path = tmp_path / "bad.gguf"
    path.write_bytes(bytes(change(data) or data))
    return path


def replaced(old: bytes, new: bytes) -> Any:
    def change(data: bytearray) -> bytes:
        assert old in data
        return bytes(data).replace(old, new, 1)

    return change


def number_at(offset: int, code: str, value: int) -> Any:
    def change(data: bytearray) -> None:
        struct.pack_into(code, data, offset, value)

    return change


def tensor_record(name: bytes, shift: int, code: str, value: int) -> Any:
    """Return a change of the number `shift` bytes after a tensor's name."""

    def change(data: bytearray) -> None:
        struct.pack_into(code, data, data.rindex(name) + len(name) + shift, value)

    return change


DAMAGES: list[tuple[Any, str]] = [
    (lambda data: data[:3], "truncated"),
    (lambda data: data[:40], "truncated"),
    (lambda data: data[:5000], "truncated"),
    (lambda data: data[: len(data) // 2], "truncated"),
    (lambda data: data[:-64], "truncated"),
    (number_at(0, "<I", 0x12345678), "not a GGUF file"),
    (number_at(4, "<I", 1), "GGUF version is 1. It must be 2 or 3"),
    (number_at(4, "<I", 0x03000000), "little-endian"),
    (number_at(8, "<Q", 1 << 60), "tensors"),
    (number_at(16, "<Q", 1 << 60), "keys"),
    (number_at(8, "<Q", 5000), "0 dimensions"),
    (number_at(24, "<Q", 1 << 62), "bytes, but the file has"),
    (replaced(b"llama.block_count", b"llama.block_cound"), "block_count is missing"),
    (replaced(b"general.architecture\x08\0\0\0\5\0\0\0\0\0\0\0llama",
              b"general.architecture\x08\0\0\0\5\0\0\0\0\0\0\0mamba"), "'mamba'.*llama4, qwen2"),
    (tensor_record(b"blk.0.ffn_up.weight", 0, "<I", 9), "9 dimensions"),
    (tensor_record(b"blk.0.ffn_up.weight", 4, "<Q", 0), "Sizes must be above 0"),
    (tensor_record(b"blk.0.ffn_up.weight", 4, "<Q", 1 << 63), "exceeds the file"),
    (tensor_record(b"blk.0.ffn_up.weight", 4, "<Q", 32), "has shape"),
    (tensor_record(b"blk.0.ffn_up.weight", 20, "<I", 99), "has format number 99"),
    (tensor_record(b"blk.0.ffn_up.weight", 20, "<I", 16), "has format IQ2_XXS.*MXFP4"),
    (tensor_record(b"blk.0.ffn_up.weight", 20, "<I", 12), "block size 256"),
    (tensor_record(b"blk.0.ffn_up.weight", 24, "<Q", 1 << 62), "but the file has"),
    (tensor_record(b"blk.0.ffn_up.weight", 24, "<Q", 7), "not aligned"),
    (
        tensor_record(b"blk.0.ffn_up.weight", 24, "<Q", 1 << 40),
        r"begins at byte 10995\d+, but the file has \d+ bytes",
    ),
    (replaced(b"blk.0.ffn_up.weight", b"blk.0.ffn_ux.weight"), "ffn_up.weight is missing"),
    (replaced(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"), "appears twice"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), DAMAGES, ids=[text for _, text in DAMAGES])
def test_open_checkpoint_damaged_gguf_is_one_clear_line(
    good: Path, tmp_path: Path, change: Any, message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message) as caught:
        open_checkpoint(damaged(good, tmp_path, change))
    assert "\n" not in str(caught.value)


def test_gguf_file_string_list_must_end_inside_the_file(good: Path, tmp_path: Path) -> None:
    content = good.read_bytes()
    key = b"tokenizer.ggml.tokens"
    first = content.index(key) + len(key) + 16  # after the types and the count
    path = tmp_path / "bad.gguf"
    for end in range(first, first + 40):
        path.write_bytes(content[:end])
        with pytest.raises(ModelFormatError, match="truncated"):
            GgufFile(path)
    for size in (len(content), (1 << 63) - 1, (1 << 64) - 1):
        path.write_bytes(content[:first] + struct.pack("<Q", size) + content[first + 8 :])
        with pytest.raises(ModelFormatError, match=r"tokens needs .* bytes, but"):
            GgufFile(path)


@pytest.mark.parametrize("kind", ["<u1", "<f4", "string"])
def test_gguf_file_arrays_share_one_size_limit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise, a small file could need memory without limit.
    monkeypatch.setattr(gguf_file, "_MAX_ELEMENTS", 1000)

    def array(name: bytes, count: int) -> bytes:
        number = {"<u1": 0, "<f4": 6, "string": 8}[kind]
        values = bytes(count * {"<u1": 1, "<f4": 4, "string": 8}[kind])
        head = struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, number, count)
        return head + values

    path = tmp_path / "arrays.gguf"
    for sizes, is_good in (((1000,), True), ((1001,), False), ((500, 501), False)):
        content = b"GGUF" + struct.pack("<IQQ", 3, 0, len(sizes))
        content += b"".join(array(b"key%d" % i, size) for i, size in enumerate(sizes))
        path.write_bytes(content + bytes(64))
        if is_good:
            assert len(GgufFile(path).metadata["key0"]) == 1000
        else:
            with pytest.raises(ModelFormatError, match=r"key\d is an array of .*at most 1000"):
                GgufFile(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_open_checkpoint_damaged_gguf_header_never_crashes(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(good.read_bytes())
    header = content.rindex(b"blk.1.ffn_down.weight") + 64
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        tokenizer_from_gguf(checkpoint.metadata, "fuzz")
    except ModelFormatError as error:
        assert len(str(error)) < 1000


def test_gguf_file_metadata_equals_gguf_library(good: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(good)
    ours = GgufFile(good)
    theirs = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    assert ours.metadata == theirs
    assert ours.names == [tensor.name for tensor in reader.tensors]
