"""benchmarks/make_random_checkpoint.py at tiny sizes: transformers, llama.cpp and the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_random_checkpoint as maker
import numpy as np
import pytest
from checkpoint_tensors import MIXTURES, SUPER_BLOCK_BYTES, RandomTensor

CONFIGS = maker.named_configs()
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 640,
    "max_position_embeddings": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
OF_MODEL: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {},
    "qwen3-8b": {},
    "mixtral-8x7b": {},
    "qwen1.5-moe-a2.7b": {"head_dim": None, "mlp_only_layers": [1]},
    "qwen3-30b-a3b": {"decoder_sparse_step": 2},
    "lfm2-1.2b": {"layer_types": ["conv", "full_attention", "conv"], "head_dim": 16},
    "granite-4-h-dense": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        "head_dim": 16,
        "logits_scaling": 1,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
    },
    "gpt-oss-20b": {"sliding_window": 16, "layer_types": CONFIGS["gpt-oss-20b"]["layer_types"][:3]},
}
PLAIN = [name for name in OF_MODEL if name != "gpt-oss-20b"]
IN_GGUF = {"mlp_only_layers": [], "decoder_sparse_step": 1}  # GGUF has experts in every layer
STD_TOLERANCE = 0.03  # of 2^18 values or more, whose own deviation is below 0.2 %


def make(name: str, output: Path, *options: str) -> Path:
    config = {**CONFIGS[name], **TINY, **OF_MODEL[name], **(IN_GGUF if "gguf" in options else {})}
    path = output.parent / f"{name}.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    assert maker.main([str(path), str(output), *options]) == 0
    return output


def stored(folder: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


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
        expected = dict(transformers.GptOssForCausalLM(config).named_parameters())
    tensors = stored(folder)
    for name, parameter in expected.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            assert tensors.pop(name).shape == parameter.shape, name
            continue
        count, columns, rows = parameter.shape
        blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        assert blocks.shape == (count, rows, columns // 32, 16) and blocks.dtype == torch.uint8
        assert scales.shape == blocks.shape[:3] and scales.dtype == torch.uint8
    assert not tensors


@pytest.mark.parametrize("name", OF_MODEL)
def test_random_checkpoint_generates_in_engine_and_llama_cpp(name: str, tmp_path: Path) -> None:
    from lmdeploy import GenerationConfig, TurbomindEngineConfig, pipeline

    file = make(name, tmp_path / "m.gguf", "--format", "gguf")
    folder = make(name, tmp_path / "model")
    text = "It's 2024, “so be it”!\n\n  <|end|>\tdone"
    for path in (folder, file):
        with pipeline(str(path), TurbomindEngineConfig(cache_max_entry_count=4)) as pipe:
            options = GenerationConfig(max_new_tokens=4, ignore_eos=True)
            assert pipe(text, gen_config=options).generate_token_len == 4
            ids = pipe.tokenizer.encode(text, add_special=False)
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = llama_cpp.Llama(str(file), n_ctx=128, n_threads=1, verbose=False)
    assert ids == model.tokenize(text.encode(), add_bos=False, special=True)
    tokens = [token for token, _ in zip(model.generate(ids, temp=0), range(5), strict=False)]
    assert len(set(tokens)) > 1 and all(0 <= token < 640 for token in tokens)


@pytest.mark.parametrize("encoding", ["MXFP4", "NVFP4", "Q8_0", "Q4_0", "BF16", *SUPER_BLOCK_BYTES])
def test_random_tensor_has_the_given_standard_deviation(encoding: str) -> None:
    import gguf

    columns = 512 if encoding in (*SUPER_BLOCK_BYTES, "NVFP4") else 288
    tensor = RandomTensor("t", (2048, columns), encoding, 0.0186)
    data = np.concatenate(list(tensor.pieces(0))).reshape(2048, -1)
    assert data.nbytes == tensor.num_bytes
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[encoding])
    assert values.shape == tensor.shape
    assert values.std() == pytest.approx(tensor.std, rel=STD_TOLERANCE)
    assert abs(values.mean()) < STD_TOLERANCE * tensor.std


@pytest.mark.parametrize("mixture", MIXTURES)
def test_random_checkpoint_mixture_has_the_formats_of_llama_cpp(mixture: str) -> None:
    layout = replace(maker.make_model("llama-3.2-1b", layers=None, seed=0).layout, matrices=mixture)
    usual, more = MIXTURES[mixture]
    matrices = {tensor.name: tensor.encoding for tensor in layout.tensors() if tensor.std}
    assert set(matrices.values()) == {usual, more}
    assert matrices["token_embd.weight"] == more  # also the head
    of_down = [matrices[f"blk.{layer}.ffn_down.weight"] == more for layer in range(16)]
    assert all(of_down) if usual == more else sum(of_down) == 8
    assert all(matrices[f"blk.{layer}.ffn_up.weight"] == usual for layer in range(16))


def test_random_checkpoint_fewer_layers_equal_the_first_layers(tmp_path: Path) -> None:
    whole = stored(make("gpt-oss-20b", tmp_path / "whole"))
    short = stored(make("gpt-oss-20b", tmp_path / "short", "--layers", "2"))
    other = stored(make("gpt-oss-20b", tmp_path / "other", "--seed", "1", "--layers", "1"))
    assert {name for name in whole if ".layers.2." not in name} == set(short)
    assert all(whole[name].equal(value) for name, value in short.items())
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    assert not whole[name].equal(other[name])


def test_random_checkpoint_sizes_equal_published_models() -> None:
    def total(name: str) -> int:
        layout = maker.make_model(name, layers=None, seed=0).layout
        return sum(tensor.num_bytes for tensor in layout.tensors())

    assert total("gpt-oss-20b") == 13_761_264_768  # total_size of the published index
    assert total("gpt-oss-120b") == 65_248_815_744
    assert total("mixtral-8x7b") == 93_405_585_408
    assert total("llama-3-8b") == 16_060_522_496
