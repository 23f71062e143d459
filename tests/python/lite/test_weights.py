"""Tests of `lite auto_gptq` and `auto_awq`: the arithmetic, the solvers and the folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import EngineRun
from parity import MAX_RELATIVE_ERROR, prompt, reference_logits, relative_error
from reference.weights import read_awq, read_gptq
from safetensors.torch import load_file
from tiny_families import FAMILY_MODELS
from tiny_gguf import write_gguf
from tiny_models import TINY_MODELS, TinyModel, make_model, save_model
from tiny_moe import QWEN3_MOE

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.convert import matrix_for_engine
from lmdeploy.checkpoint.files.tensor_file import StoredTensor
from lmdeploy.checkpoint.methods.awq import awq_parts
from lmdeploy.checkpoint.methods.gptq import gptq_parts
from lmdeploy.checkpoint.open import Checkpoint, open_checkpoint
from lmdeploy.cli.main import main
from lmdeploy.lite.weights import folder as folders
from lmdeploy.lite.weights.awq import search_scales
from lmdeploy.lite.weights.folder import write_folder
from lmdeploy.lite.weights.forward import READERS, Forward, LayerReader, rms_norm
from lmdeploy.lite.weights.gptq import solve_gptq
from lmdeploy.lite.weights.layers import (
    MATRICES,
    input_moments,
    quantize_layers,
    scale_inputs,
)
from lmdeploy.lite.weights.quantize import WeightOptions, check_model, quantize_folder, split_text
from lmdeploy.lite.weights.rounding import Grid, output_error

TEXT = Path(__file__).parents[1] / "data" / "austen.txt"
WITHOUT_DYNAMIC = [tiny for tiny in TINY_MODELS if tiny.rope.get("rope_type") != "dynamic"]
GRID = Grid(32, False)
# The sums of XᵀX and of norms that undo scales: FP32 of a few hundred terms.
ROUNDING = 1e-4
SMALL = TinyModel("small", "Llama", {"intermediate_size": 128, "num_hidden_layers": 2})
BIASED = TinyModel(
    "biased",
    "Qwen2",
    {"intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 32},
)


def saved(tiny: TinyModel, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Path]:
    model = make_model(tiny)
    save_model(model.to(dtype), folder)
    return model.float(), folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(SMALL, tmp_path_factory.mktemp("small"))[1]


def logits(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    reader = LayerReader(checkpoint)
    forward = Forward.of(checkpoint.config, len(ids))
    x = reader.embed(ids)
    for layer in range(checkpoint.config.num_layers):
        x = forward.run(x, reader.layer(layer), layer=layer)
    x = rms_norm(x, reader.tensor("final_norm"), eps=checkpoint.config.norm_eps)
    return x @ reader.tensor("embedding" if checkpoint.config.tied_head else "head").T


@pytest.mark.parametrize("tiny", WITHOUT_DYNAMIC, ids=lambda tiny: tiny.name)
def test_forward_equals_transformers(tiny: TinyModel, tmp_path: Path) -> None:
    model, folder = saved(tiny, tmp_path)
    ids = prompt()
    error = relative_error(logits(open_checkpoint(folder), ids), reference_logits(model, ids))
    assert error <= MAX_RELATIVE_ERROR


def test_forward_more_positions_than_a_block_of_queries(tmp_path: Path) -> None:
    tiny = TinyModel("long", "Mistral", {"sliding_window": 300, "max_position_embeddings": 1024})
    model, folder = saved(tiny, tmp_path)
    ids = prompt(600)
    error = relative_error(logits(open_checkpoint(folder), ids), reference_logits(model, ids))
    assert error <= MAX_RELATIVE_ERROR


def test_forward_gelu_equals_transformers(tmp_path: Path) -> None:
    model, folder = saved(TinyModel("gelu", "Llama", {"hidden_act": "gelu_new"}), tmp_path)
    ids = prompt(40)
    error = relative_error(logits(open_checkpoint(folder), ids), reference_logits(model, ids))
    assert error <= MAX_RELATIVE_ERROR


def test_input_moments_equal_those_of_the_inputs_in_transformers(tmp_path: Path) -> None:
    model, folder = saved(BIASED, tmp_path)
    texts = [prompt(30, seed) for seed in (1, 2)]
    block = model.model.layers[1]
    modules = {
        "attention": block.self_attn.v_proj,
        "heads": block.self_attn.o_proj,
        "ffn": block.mlp.up_proj,
        "hidden": block.mlp.down_proj,
    }
    wanted = {name: np.zeros((module.in_features,) * 2) for name, module in modules.items()}
    for name, module in modules.items():

        def add(_: Any, inputs: Any, name: str = name) -> None:
            x = inputs[0][0].double().numpy()
            wanted[name] += x.T @ x

        module.register_forward_pre_hook(add)
    for ids in texts:
        reference_logits(model, ids)
    checkpoint = open_checkpoint(folder)
    reader, forward = LayerReader(checkpoint), Forward.of(checkpoint.config, 30)
    states = [forward.run(reader.embed(ids), reader.layer(0), layer=0) for ids in texts]
    moments = input_moments(forward, states, weights=reader.layer(1), layer=1)
    assert moments.keys() == wanted.keys() == READERS.keys()
    for name, expected in wanted.items():
        assert relative_error(moments[name], expected) <= ROUNDING


def correlated(cols: int, seed: int = 0) -> np.ndarray:
    """Return XᵀX of inputs that depend on each other and have different sizes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * cols, cols // 4)) @ rng.standard_normal((cols // 4, cols))
    x = (x + 0.3 * rng.standard_normal(x.shape)) * np.exp(rng.standard_normal(cols))
    return (x.T @ x).astype(np.float32)


def weights(rows: int = 24, cols: int = 192) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((rows, cols)).astype(np.float32)


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_round_is_nearest_and_covers_the_range(is_symmetric: bool) -> None:
    values = weights()
    values[0, :32] = 0
    values[1, :32] = np.abs(values[1, :32])
    codes = Grid(32, is_symmetric).round(values)
    step = np.repeat(codes.scales, 32, axis=1)
    # A symmetric grid has one step less above the middle than below.
    allowed = 0.5 + 0.01 if not is_symmetric else 1.01
    assert (np.abs(codes.values() - values) <= allowed * step).all()
    assert (codes.scales > 0).all()
    assert (codes.scales == codes.scales.astype(np.float16)).all()
    assert not is_symmetric or (codes.zeros == 8).all()


def test_solve_gptq_of_independent_inputs_is_rounding() -> None:
    values = weights()
    moments = np.diag(np.arange(1, 193, dtype=np.float32))
    solved, nearest = solve_gptq(values, moments, grid=GRID), GRID.round(values)
    np.testing.assert_array_equal(solved.codes, nearest.codes)
    np.testing.assert_array_equal(solved.scales, nearest.scales)


def plain_gptq(values: np.ndarray, moments: np.ndarray, grid: Grid) -> np.ndarray:
    """Return the values of optimal brain quantization in a fixed order, column by column."""
    left = values.astype(np.float64)
    damped = moments.astype(np.float64)
    damped += np.eye(len(damped)) * 0.01 * np.diagonal(moments).mean()
    scales, zeros = grid.parameters(values)
    result = np.empty_like(left)
    remaining = list(np.argsort(-np.diagonal(moments), kind="stable"))
    while remaining:
        inverse = np.linalg.inv(damped[np.ix_(remaining, remaining)])
        column = remaining[0]
        group = column // grid.group
        code = np.rint(left[:, column] / scales[:, group]) + zeros[:, group]
        code = np.clip(code, 0, 15) - zeros[:, group]
        result[:, column] = code * scales[:, group]
        error = (left[:, column] - result[:, column]) / inverse[0, 0]
        left[:, remaining] -= np.outer(error, inverse[0])
        remaining = remaining[1:]
    return result


@pytest.mark.parametrize("grid", [Grid(32, False), Grid(64, True), Grid(192, False)])
def test_solve_gptq_equals_optimal_brain_quantization(grid: Grid) -> None:
    values, moments = weights(), correlated(192)
    solved = solve_gptq(values, moments, grid=grid).values()
    expected = plain_gptq(values, moments, grid)
    # A column whose value lies between two codes may round to the other one in FP32.
    assert np.mean(solved != expected.astype(np.float32)) < 0.01
    nearest = output_error(grid.round(values).values() - values, moments)
    assert output_error(solved - values, moments) < 0.5 * nearest


def test_solve_gptq_accepts_inputs_that_are_always_zero() -> None:
    moments = correlated(192)
    moments[:, 7] = moments[7] = 0
    solved = solve_gptq(weights(), moments, grid=GRID)
    np.testing.assert_array_equal(solved.codes[:, 7], GRID.round(weights()).codes[:, 7])
    still = solve_gptq(weights(), np.zeros_like(moments), grid=GRID)
    np.testing.assert_array_equal(still.codes, GRID.round(weights()).codes)


def test_search_scales_lowers_the_error() -> None:
    values, moments = weights(), correlated(192)
    scales = search_scales(values, moments, grid=GRID, allowed=lambda wanted: wanted)
    error = output_error(GRID.round(values * scales).values() / scales - values, moments)
    assert error < 0.8 * output_error(GRID.round(values).values() - values, moments)
    zero = search_scales(values, np.zeros_like(moments), grid=GRID, allowed=lambda s: s)
    np.testing.assert_array_equal(zero, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiny", [SMALL, BIASED], ids=lambda tiny: tiny.name)
def test_scale_inputs_keeps_the_output_of_a_layer(
    tiny: TinyModel, dtype: torch.dtype, tmp_path: Path
) -> None:
    _, folder = saved(tiny, tmp_path, dtype)
    checkpoint = open_checkpoint(folder)
    reader, forward = LayerReader(checkpoint), Forward.of(checkpoint.config, 40)
    x = reader.embed(prompt(40))
    plain = reader.layer(0)
    moments = input_moments(forward, [x], weights=plain, layer=0)
    scaled = dict(plain)
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    scale_inputs(scaled, moments, formats=dict.fromkeys(plain, name), grid=GRID)
    is_mha = checkpoint.config.num_heads == checkpoint.config.num_kv_heads
    after = input_moments(forward, [x], weights=scaled, layer=0)
    for key in READERS:
        assert relative_error(moments[key], after[key]) <= ROUNDING
    changed = {n for n in plain if not np.array_equal(plain[n], scaled[n])}
    assert {"q", "gate", "down", "attention_norm", "ffn_norm"} <= changed
    assert ("o" in changed) == is_mha
    error = relative_error(forward.run(x, scaled, layer=0), forward.run(x, plain, layer=0))
    assert error <= ROUNDING
    for norm in ("attention_norm", "ffn_norm"):  # the folder stores them in the model's type
        stored = torch.from_numpy(scaled[norm]).to(dtype).float().numpy()
        assert relative_error(stored, scaled[norm]) <= 1e-6


def test_parts_are_read_back_by_independent_readers() -> None:
    codes = Grid(32, False).round(weights(rows=40))
    assert len(np.unique(codes.zeros)) > 2
    arguments = {"scales": codes.scales, "zeros": codes.zeros}
    read = read_gptq(gptq_parts(codes.codes, **arguments), bits=4)
    np.testing.assert_array_equal(read, codes.values())
    read = read_awq(awq_parts(codes.codes, **arguments))
    np.testing.assert_array_equal(read, codes.values())


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_folder_has_the_values_that_were_computed(
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    method: str,
    is_symmetric: bool,
    shard_bytes: int,
) -> None:
    monkeypatch.setattr(folders, "MAX_SHARD_BYTES", shard_bytes)
    grid = Grid(32, is_symmetric)
    source = open_checkpoint(small)
    prompts = [prompt(48, seed) for seed in (1, 2, 3)]
    layers = list(quantize_layers(source, prompts, method=method, grid=grid))
    write_folder(source, tmp_path, layers=layers, method=method, grid=grid)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_bytes < 1 << 30)
    planned = {p.name: p.tensor for p in open_checkpoint(tmp_path).tensors}
    before = {p.name: p.tensor for p in source.tensors}
    seen = set()
    for layer in layers:
        for name, codes in layer.codes.items():
            kind, values = matrix_for_engine(planned[name], exact=True)
            assert kind == "f32"
            np.testing.assert_array_equal(values, codes.values())
            expected = "q4_0" if is_symmetric else "q4_1"
            assert planned[name].matrix is not None
            assert planned[name].matrix.kind == expected
            seen.add(name.rpartition(".")[2])
        for name, vector in layer.vectors.items():
            np.testing.assert_array_equal(planned[name].raw.view(np.float32), vector)
    assert seen == set(MATRICES)
    for name in ("embedding", "head", "final_norm"):
        np.testing.assert_array_equal(planned[name].raw, before[name].raw)
    with EngineRun(str(tmp_path), exact=False) as run:
        assert np.isfinite(run.logits(prompt(20))).all()


def test_transformers_reads_the_config_and_tokenizer(small: Path, tmp_path: Path) -> None:
    source = open_checkpoint(small)
    layers = quantize_layers(source, [prompt(40)], method="gptq", grid=GRID)
    write_folder(source, tmp_path, layers=layers, method="gptq", grid=GRID)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "desc_act": False,
        "checkpoint_format": "gptq",
    }
    names = {path.name for path in tmp_path.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= names
    stored = load_file(tmp_path / "model.safetensors")
    base = "model.layers.0.self_attn.q_proj."
    assert {n.removeprefix(base) for n in stored if n.startswith(base)} == {
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
    }
    assert stored[base + "scales"].dtype == torch.float16


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_command_writes_a_folder_and_prints_scores(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    output = tmp_path / "out"
    size = ("--tokens", "1024", "--context", "64", "--w-group-size", "32")
    arguments = (str(small), "--work-dir", str(output), "--text", str(TEXT), *size)
    assert main(["lite", f"auto_{method}", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{output}: measured on 126 tokens that the quantization did not use"
    assert [line.split()[0] for line in lines[2:]] == ["original", method, "round"]
    values = {
        line[:18].strip(): [float(v.rstrip("%")) for v in line[18:].split()] for line in lines[2:]
    }
    assert values["original"][1:] == [0, 100]
    if method == "gptq":  # random weights have no inputs that AWQ could favor
        assert values[method][1] < 0.9 * values["round to nearest"][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert open_checkpoint(output).stored_dtype == "quantized"


def refuse_model(checkpoint: Checkpoint, message: str, grid: Grid = GRID) -> None:
    with pytest.raises(ModelFormatError, match=message):
        check_model(checkpoint, grid)


def test_models_that_are_not_supported_are_rejected(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(make_model(SMALL), path)
    refuse_model(open_checkpoint(path), "A GGUF file is not supported")
    experts = tmp_path / "experts"
    save_model(make_model(QWEN3_MOE), experts)
    refuse_model(open_checkpoint(experts), "has experts")
    other = tmp_path / "other"
    save_model(make_model(FAMILY_MODELS[0]), other)
    refuse_model(open_checkpoint(other), "gemma2 computes its layers differently from Llama")
    source = open_checkpoint(small)
    refuse_model(
        source, r"64 inputs, which groups of 128 do not divide.*--w-group", Grid(128, True)
    )
    first = next(p for p in source.tensors if p.name == "layers.0.q")

    def changed(tensor: StoredTensor) -> Checkpoint:
        other = dataclasses.replace(first, tensor=tensor)
        tensors = tuple(other if p is first else p for p in source.tensors)
        return dataclasses.replace(source, tensors=tensors)

    refuse_model(changed(dataclasses.replace(first.tensor, format="Q8_0")), "is Q8_0. The weights")
    odd = dataclasses.replace(first.tensor, shape=(252, 64))
    refuse_model(changed(odd), "252 outputs. They must be a multiple of 8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "spin"}, "method is 'spin'"),
        ({"w_bits": 3}, r"w_bits is 3.*\(--w-bits\)"),
        (
            {"w_group_size": 48},
            r"is 48. It must be a multiple of 32 \(--w-group-size\)",
        ),
        ({"w_group_size": 0}, "w_group_size is 0"),
        ({"tokens": 0}, "tokens is 0"),
        ({"context": 1}, "context is 1"),
    ],
)
def test_options_out_of_range_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightOptions(**{"method": "gptq", **options})


def test_command_wrong_arguments_are_rejected(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*flags: str, output: Path = tmp_path / "out") -> str:
        arguments = (str(small), "--work-dir", str(output), "--text", str(TEXT))
        with pytest.raises(SystemExit):
            main(["lite", "auto_gptq", *arguments, *flags])
        return capsys.readouterr().err

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "--work-dir" in error(output=tmp_path / "full")
    assert "--work-dir" in error(output=tmp_path / "none" / "out")
    assert "--calib-dataset is not supported. Give a text file with --text" in error(
        "--calib-dataset", "ptb"
    )
    assert "do not divide" in error()
    assert "do not fill two contexts of 256" in error("--w-group-size", "32", "--tokens", "300")
    assert not (tmp_path / "out").exists()
    for name in ("smooth_quant", "blocked_fp8"):
        with pytest.raises(SystemExit):
            main(["lite", name, str(small)])
        assert f"lmdeploy lite has no command '{name}'" in capsys.readouterr().err


def test_split_text_keeps_an_eighth_for_the_evaluation() -> None:
    used, kept = split_text(range(1000), 10, max_tokens=805)
    assert (len(used), len(kept)) == (70, 10)
    assert kept[0][0] == 700
    used, kept = split_text(range(25), 10, max_tokens=1000)
    assert (used, kept) == ([list(range(10))], [list(range(10, 20))])
    assert len(split_text(range(200_000), 2048, max_tokens=200_000)[1]) == 2


def test_quantize_folder_leaves_no_folder_for_a_wrong_model(small: Path, tmp_path: Path) -> None:
    options = WeightOptions("awq", w_group_size=96, context=64)
    with pytest.raises(ModelFormatError, match="do not divide"):
        quantize_folder(str(small), TEXT, output=tmp_path / "out", options=options)
    assert list(tmp_path.iterdir()) == []
