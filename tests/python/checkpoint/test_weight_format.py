"""Tests of `weight_format`: matrices of plain checkpoints that are quantized at load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_runs import EngineRun
from parity import MAX_RELATIVE_ERROR, prompt, reference_logits, relative_error
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf
from tiny_models import TINY_MODELS, make_model, save_model
from tiny_moe import GPT_OSS, QWEN3_MOE

from lmdeploy import TurbomindEngineConfig, _turbomind
from lmdeploy.checkpoint import fingerprint, weight_cache
from lmdeploy.checkpoint import load as weight_loader
from lmdeploy.checkpoint.convert import engine_format, matrix_for_engine
from lmdeploy.checkpoint.gguf_blocks import values_to_q4_1, values_to_q8_0
from lmdeploy.checkpoint.methods.at_load import part_of, with_weight_format
from lmdeploy.checkpoint.open import Checkpoint, open_checkpoint
from lmdeploy.cli.serve import dry_run_lines
from lmdeploy.config.weight_format_options import parse_weight_format
from lmdeploy.engine.model_files import ModelChanges, open_files

LLAMA = TINY_MODELS[0]
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IDS = [1, 5, 40, 7, 300, 12, 9, 9]
# The step of FP16, relative to a value: what a scale of Q8_0 loses.
FP16_STEP = 2.0**-11


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(LLAMA), tmp_path_factory.mktemp("llama"))


def formatted(path: Path, text: str) -> Checkpoint:
    return with_weight_format(open_checkpoint(path), parse_weight_format(text), text=text)


def save_as(folder: Path, target: Path, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Copy the folder with another type of matrices and return its values."""
    stored = load_file(folder / "model.safetensors")
    cast = {n: data.to(dtype) if data.ndim == 2 else data for n, data in stored.items()}
    save_file(cast, target / "model.safetensors")
    for path in folder.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    return {name: data.float().numpy() for name, data in cast.items()}


@pytest.mark.parametrize("stored_format", DTYPES)
def test_matrices_are_those_of_independent_quantizers(
    llama: Path, tmp_path: Path, stored_format: str
) -> None:
    values = save_as(llama, tmp_path, DTYPES[stored_format])["model.layers.1.mlp.down_proj.weight"]
    for text, kind in (("int8", "q8_0"), ("int4", "q4_1")):
        planned = {p.name: p for p in formatted(tmp_path, text).tensors}["layers.1.down"]
        found, blocks = matrix_for_engine(planned.tensor, exact=False)
        assert found == kind
        ggml = gguf.GGMLQuantizationType[kind.upper()]
        decoded = gguf.quants.dequantize(blocks, ggml)
        np.testing.assert_array_equal(matrix_for_engine(planned.tensor, exact=True)[1], decoded)
        if kind == "q4_1":
            np.testing.assert_array_equal(blocks, gguf.quants.quantize(values, ggml))
        step = np.abs(values).reshape(-1, 32).max(axis=1, keepdims=True) / 127
        error = np.abs(decoded - values).reshape(-1, 32)
        assert kind == "q4_1" or (error <= step * (0.5 + 127 * FP16_STEP)).all()


def test_parts_are_chosen_one_by_one(llama: Path) -> None:
    kinds: dict[str, set[str]] = {}
    for planned in formatted(llama, " MLP = int4 , attn=int8 ").tensors:
        part = part_of(planned)
        if part is not None:
            kinds.setdefault(part, set()).add(engine_format(planned.tensor, exact=False))
        else:
            assert planned.tensor.matrix is None
    assert kinds == {"attn": {"q8_0"}, "mlp": {"q4_1"}, "other": {"bf16"}}


@pytest.mark.parametrize("text", ["int8", "int4", "attn=int8,mlp=int4"])
@pytest.mark.parametrize("tiny", [LLAMA, GPT_OSS, QWEN3_MOE], ids=lambda tiny: tiny.name)
def test_exact_logits_equal_those_of_the_rounded_weights(
    tmp_path: Path, tiny: Any, text: str
) -> None:
    model = make_model(tiny)
    folder = save_model(model, tmp_path)
    quantizers = {"q8_0": values_to_q8_0, "q4_1": values_to_q4_1}
    table = parse_weight_format(text)

    def rounded(values: np.ndarray, part: str) -> torch.Tensor:
        if part not in table:
            return torch.from_numpy(values)
        blocks = quantizers[table[part]](np.ascontiguousarray(values))
        kind = gguf.GGMLQuantizationType[table[part].upper()]
        return torch.from_numpy(gguf.quants.dequantize(blocks, kind).reshape(values.shape))

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim >= 2 and "bias" not in name
            if not is_matrix or "router" in name or name.endswith(("gate.weight", "e_proj_bias")):
                continue
            part = "attn" if "self_attn" in name else "mlp" if "mlp" in name else "other"
            values = parameter.numpy().copy()
            turned = tiny is GPT_OSS and values.ndim == 3  # [experts, inputs, outputs]
            if turned:
                values = values.swapaxes(1, 2)
            flat = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
            result = rounded(flat, part).reshape(values.shape)
            parameter.copy_(result.swapaxes(1, 2) if turned else result)
    ids = prompt(20)
    with EngineRun(str(folder), exact=True, weight_format=text) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    assert error <= MAX_RELATIVE_ERROR


@pytest.mark.parametrize("weight_format", ["F16", "BF16", "F32"])
def test_gguf_and_folder_give_equal_bits(llama: Path, tmp_path: Path, weight_format: str) -> None:
    """GGUF has another order of the rows of q and k, which quantization must not change."""
    path = tmp_path / "tiny.gguf"
    write_gguf(make_model(LLAMA), path, weight_format=weight_format)
    folder = tmp_path / "folder"
    folder.mkdir()
    save_as(llama, folder, DTYPES[weight_format])
    logits = []
    for model in (path, folder):
        files = open_files(str(model), changes=ModelChanges(weight_format="attn=int8"))
        assert files.info.parts["attn"].formats == ("q8_0",)
        with EngineRun(str(model), exact=True, weight_format="attn=int8,mlp=int4") as run:
            logits.append(run.logits(IDS))
    np.testing.assert_array_equal(*logits)


def test_weight_cache_key_includes_the_format(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMDEPLOY_CACHE", "1")
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_loader, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(fingerprint, "SETTLE_NS", -(10**18))
    monkeypatch.setattr(weight_cache, "_START_SECONDS", 0.0)

    def start(text: str | None) -> tuple[np.ndarray, bool]:
        with EngineRun(str(llama), exact=False, weight_format=text) as run:
            writer = run.model.cache_writer
            if writer is not None:
                writer.start()
                assert writer.join(60.0) and writer.stored
            return run.logits(IDS), writer is None

    for text in (None, "int8", "int4", "attn=int4,mlp=int8", None):
        packed, from_cache = start(text)
        assert not from_cache
        mapped, from_cache = start(text)
        assert from_cache
        np.testing.assert_array_equal(packed, mapped)


def test_memory_and_dry_run_show_bytes_by_part(llama: Path) -> None:
    config = TurbomindEngineConfig(weight_format="attn=int8,mlp=int4", session_len=64)
    line = next(line for line in dry_run_lines(str(llama), config) if "by part" in line)
    attn = 2 * (256 * 64 * 2 + 2 * 128 * 64) * 34 // 32
    mlp = 2 * 3 * 160 * 64 * 20 // 32
    other = 2 * 304 * 64 * 2
    rest = 5 * 64 * 4
    assert line == (
        f"weights by part: attn {attn:,} bytes (q8_0), mlp {mlp:,} bytes (q4_1), "
        f"other {other:,} bytes (bf16), rest {rest:,} bytes (f32)"
    )
    info = open_files(str(llama), changes=ModelChanges(weight_format="attn=int8,mlp=int4")).info
    assert info.weight_bytes == attn + mlp + other + rest


def test_pipeline_restart_keeps_the_format(llama: Path) -> None:
    from lmdeploy.engine.load import load_engine

    config = TurbomindEngineConfig(
        weight_format="int8", session_len=64, max_batch_size=1, num_threads=1
    )
    config.cache_max_entry_count = 4
    _, running = load_engine(str(llama), config, progress=False)
    running.on_close()
    running.core.close()
    started = running.restart()
    started.on_close()
    started.core.close()
    assert running.cache_identity()["weights"] == parse_weight_format("int8")


def test_quantized_checkpoints_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(make_model(LLAMA), path, weight_format="Q8_0")
    with pytest.raises(ValueError, match=r"weight_format is 'attn=int8', but .* is quantized .*Q8"):
        open_files(str(path), changes=ModelChanges(weight_format="attn=int8"))


def test_inputs_that_do_not_fill_blocks_are_rejected(tmp_path: Path) -> None:
    tiny = next(tiny for tiny in TINY_MODELS if "dim80" in tiny.name)
    save_model(make_model(tiny), tmp_path)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has 80 inputs.* multiple of 32"):
        formatted(tmp_path, "int8")


@pytest.mark.parametrize("text", ["int8", "int4"])
def test_values_beyond_fp16_are_rejected_by_name(llama: Path, tmp_path: Path, text: str) -> None:
    save_as(llama, tmp_path, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight"][3, 5] = 1e9
    save_file(stored, tmp_path / "model.safetensors")
    planned = {p.name: p for p in formatted(tmp_path, text).tensors}["layers.0.up"]
    with pytest.raises(ValueError, match=r"up_proj\.weight: .*beyond 65504"):
        matrix_for_engine(planned.tensor, exact=False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("int3", "weight_format is 'int3'. It must be int8 or int4, or formats of the parts"),
        ("", "weight_format is ''"),
        ("attn=int8,", r"weight_format is 'attn=int8,'"),
        ("attn", "weight_format is 'attn'"),
        ("head=int8", "weight_format is 'head=int8'"),
        ("attn=int8,attn=int4", r"must name attn at most once \(--weight-format\)"),
        (8, "weight_format is 8"),
    ],
)
def test_unknown_formats_are_rejected(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurbomindEngineConfig(weight_format=value)


def test_flags_reach_the_options(llama: Path) -> None:
    from lmdeploy.cli.engine_flags import engine_config
    from lmdeploy.cli.main import make_parser

    def parse(*flags: str) -> TurbomindEngineConfig:
        parser = make_parser()
        return engine_config(parser.parse_args(["serve", "api_server", str(llama), *flags]))

    assert parse("--weight-format", "mlp=int4").weight_format == "mlp=int4"


def test_formats_are_those_that_the_engine_has() -> None:
    for kind in {*parse_weight_format("int8").values(), *parse_weight_format("int4").values()}:
        assert _turbomind.packed_bytes(kind, 64, 64) > 0
    assert json.dumps(parse_weight_format(None)) == "{}"
