"""Tests of benchmarks/make_random_checkpoint.py: names, shapes, formats and statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_tensors
import make_random_checkpoint as maker
import numpy as np
import pytest

CONFIGS = maker.named_configs()
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 640,
    "max_position_embeddings": 512,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
TINY: dict[str, dict[str, Any]] = {
    "llama-3-8b": COMMON,
    "llama-3.2-1b": COMMON,
    "qwen3-8b": COMMON,
    "mixtral-8x7b": {**COMMON, **EXPERTS},
    # Without head_dim, because transformers does not have it for this family.
    "qwen1.5-moe-a2.7b": {
        **{key: value for key, value in COMMON.items() if key != "head_dim"},
        **EXPERTS,
        "mlp_only_layers": [1],
    },
    "qwen3-30b-a3b": {**COMMON, **EXPERTS, "decoder_sparse_step": 2},
    "gpt-oss-20b": {
        **COMMON,
        **EXPERTS,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
    },
}
PLAIN = [name for name in TINY if name != "gpt-oss-20b"]
# In GGUF, these architectures have experts in every layer.
IN_GGUF = {"mlp_only_layers": [], "decoder_sparse_step": 1}
STD_TOLERANCE = 0.03  # for at least 2^18 random values, whose own deviation is below 0.2 %


def tiny_config(name: str, path: Path, **changes: Any) -> str:
    path.write_text(json.dumps({**CONFIGS[name], **TINY[name], **changes}))
    return str(path)


def make(name: str, output: Path, *options: str) -> Path:
    changes = IN_GGUF if "gguf" in options else {}
    config = tiny_config(name, output.parent / f"{name}.json", **changes)
    assert maker.main([config, str(output), *options]) == 0
    return output


def stored(folder: Path) -> dict[str, np.ndarray]:
    from safetensors import safe_open

    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                tensor = opened.get_tensor(name)
                tensors[name] = (
                    tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
                )
    return tensors


@pytest.mark.parametrize("name", PLAIN)
def test_random_checkpoint_contains_every_tensor_of_transformers(name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    folder = make(name, tmp_path / "model")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    logits = model(torch.arange(40)[None] + 100).logits.detach().numpy()
    assert np.isfinite(logits).all() and 0.5 < logits.std() < 8


def test_random_checkpoint_gpt_oss_contains_every_tensor_of_transformers(tmp_path: Path) -> None:
    import torch
    import transformers

    folder = make("gpt-oss-20b", tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        wanted = dict(transformers.GptOssForCausalLM(config).named_parameters())
    tensors = stored(folder)
    for name, parameter in wanted.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            assert tensors.pop(name).shape == tuple(parameter.shape), name
            continue
        count, columns, rows = parameter.shape
        blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        assert blocks.shape == (count, rows, columns // 32, 16) and blocks.dtype == np.uint8
        assert scales.shape == blocks.shape[:3] and scales.dtype == np.uint8
    assert not tensors


def test_random_checkpoint_gpt_oss_folder_has_published_layout(tmp_path: Path) -> None:
    folder = make("gpt-oss-20b", tmp_path / "model", "--shard-bytes", "100000")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2 and set(index["weight_map"].values()) == set(shards)
    assert set(index["weight_map"]) == set(stored(folder))
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert config["eos_token_id"] == 640 - 21 + 4  # <|return|>, the fifth of the last 21 tokens


@pytest.mark.parametrize("name", TINY)
def test_random_checkpoint_gguf_contains_tensors_of_its_architecture(
    name: str, tmp_path: Path
) -> None:
    import gguf

    reader = gguf.GGUFReader(make(name, tmp_path / "m.gguf", "--format", "gguf"))
    architecture = reader.get_field("general.architecture").contents()
    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    known = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[arch]}
    formats = {}
    for tensor in reader.tensors:
        pattern, suffix = tensor.name.rsplit(".", 1)
        if pattern.startswith("blk."):
            pattern = "blk.{bid}." + pattern.split(".", 2)[2]
        assert pattern in known and suffix in ("weight", "bias"), tensor.name
        formats[f"{pattern}.{suffix}"] = tensor.tensor_type.name
    assert formats["token_embd.weight"] == "Q8_0" and formats["output_norm.weight"] == "F32"
    if architecture == "gpt-oss":
        for part in ("gate", "up", "down"):
            assert formats[f"blk.{{bid}}.ffn_{part}_exps.weight"] == "MXFP4"
            assert formats[f"blk.{{bid}}.ffn_{part}_exps.bias"] == "F32"
        per_layer = len([t for t in reader.tensors if t.name.startswith("blk.0.")])
        assert per_layer == 19 and len(reader.tensors) == 3 * 19 + 3


@pytest.mark.parametrize("name", TINY)
def test_random_checkpoint_generates_in_llama_cpp(name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = make(name, tmp_path / "m.gguf", "--format", "gguf")
    model = llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, verbose=False)
    ids = model.tokenize(b"Some words, 123 of them.", add_bos=False)
    tokens = [token for token, _ in zip(model.generate(ids, temp=0), range(5), strict=False)]
    assert len(set(tokens)) > 1 and all(0 <= token < 640 for token in tokens)
    folder = make(name, tmp_path / "model")
    from lmdeploy.chat.tokenizer import tokenizer_from_folder

    text = "It's 2024, “so be it”!\n\n  <|end|>\tdone"
    ours = tokenizer_from_folder(folder).encode(text, add_special=False)
    assert ours == model.tokenize(text.encode(), add_bos=False, special=True)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.2-1b", "qwen3-8b"])
def test_random_checkpoint_loads_in_our_engine(name: str, tmp_path: Path) -> None:
    from lmdeploy import GenerationConfig, TurbomindEngineConfig, pipeline

    folder = make(name, tmp_path / "model")
    file = make(name, tmp_path / "m.gguf", "--format", "gguf")
    for path in (folder, file):
        with pipeline(str(path), TurbomindEngineConfig(cache_max_entry_count=4)) as pipe:
            messages = [{"role": "user", "content": "Good day"}]
            answer = pipe(messages, gen_config=GenerationConfig(max_new_tokens=4, ignore_eos=True))
            assert answer.generate_token_len == 4


def test_random_tensor_has_the_given_standard_deviation() -> None:
    import gguf

    encodings = checkpoint_tensors.Encoding
    shape, std = (2048, 288), 0.0186

    def values(encoding: Any, kind: str) -> np.ndarray:
        tensor = checkpoint_tensors.RandomTensor("t", shape, encoding, std)
        data = np.concatenate(list(tensor.pieces(0))).reshape(shape[0], -1)
        assert data.nbytes == tensor.num_bytes
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])

    for encoding in ("MXFP4", "Q8_0", "Q4_0", "BF16"):
        got = values(encodings[encoding], encoding)
        assert got.shape == shape
        assert got.std() == pytest.approx(std, rel=STD_TOLERANCE)
        assert abs(got.mean()) < STD_TOLERANCE * std
    codes = checkpoint_tensors.RandomTensor("c", (2048, 9, 32), encodings.E2M1_PAIRS, std)
    scales = checkpoint_tensors.RandomTensor("s", (2048, 9), encodings.E8M0, std)
    pairs = np.concatenate(list(codes.pieces(0)))
    exponents = np.concatenate(list(scales.pieces(0))).astype(np.float64) - 127
    table = np.array(
        [*checkpoint_tensors.E2M1_MAGNITUDES, *(-v for v in checkpoint_tensors.E2M1_MAGNITUDES)]
    )
    split = table[np.stack([pairs & 15, pairs >> 4], 1)].reshape(-1, 32) * 2 ** exponents[:, None]
    assert len(np.unique(exponents)) == 2
    assert split.std() == pytest.approx(std, rel=STD_TOLERANCE)


def test_random_checkpoint_fewer_layers_equal_the_first_layers(tmp_path: Path) -> None:
    whole = stored(make("gpt-oss-20b", tmp_path / "whole"))
    short = stored(make("gpt-oss-20b", tmp_path / "short", "--layers", "2"))
    other = stored(make("gpt-oss-20b", tmp_path / "other", "--seed", "1", "--layers", "1"))
    assert {name for name in whole if ".layers.2." not in name} == set(short)
    assert all(np.array_equal(whole[name], value) for name, value in short.items())
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    assert not np.array_equal(whole[name], other[name])
    assert json.loads((tmp_path / "short/config.json").read_text())["layer_types"] == [
        "sliding_attention",
        "full_attention",
    ]


def test_random_checkpoint_sizes_equal_published_models() -> None:
    def total(name: str) -> int:
        shape = maker.make_model(name, layers=None, seed=0).shape
        return sum(tensor.num_bytes for tensor in maker.hf_tensors(shape))

    assert total("gpt-oss-20b") == 13_761_264_768  # total_size of the published index
    assert total("gpt-oss-120b") == 65_248_815_744
    assert total("mixtral-8x7b") == 93_405_585_408
    assert total("llama-3-8b") == 16_060_522_496


def test_random_checkpoint_gguf_with_dense_layers_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config("qwen1.5-moe-a2.7b", tmp_path / "config.json")
    assert maker.main([config, str(tmp_path / "m.gguf"), "--format", "gguf"]) == 2
    assert "2 of 3 layers have experts" in capsys.readouterr().err


def test_random_checkpoint_existing_file_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("gpt-oss-20b", tmp_path / "m.gguf", "--format", "gguf")
    config = tiny_config("gpt-oss-20b", tmp_path / "config.json")
    assert maker.main([config, str(tmp_path / "m.gguf"), "--format", "gguf"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert maker.main(["gpt-oss-7b", str(tmp_path / "new")]) == 2
    assert "gpt-oss-20b" in capsys.readouterr().err
