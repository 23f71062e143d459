"""Tests of calibration and search with the engine on a tiny model, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from tiny_models import TinyModel, make_model, save_model

from lmdeploy import GenerationConfig, TurbomindEngineConfig, pipeline
from lmdeploy.cli.main import main
from lmdeploy.cli.serve import dry_run_lines
from lmdeploy.engine.kv_calibration import read_calibration
from lmdeploy.lite.divergence import cache_variants, cut_contexts, evaluate
from lmdeploy.lite.prompt_engine import open_model

TEXT = Path(__file__).parents[1] / "data" / "austen.txt"
CONTEXT = 128
TOKENS = 320  # two and a half contexts
# The engine's cache dtype is FP16, so values have a relative rounding error of up to 2^-11.
ROUNDING = 2.0**-10

# Qwen2 has a bias on K, so there is a mean to subtract.
TINY = TinyModel("qwen2", "Qwen2", {"max_position_embeddings": 512})


@pytest.fixture(scope="module")
def model():
    return make_model(TINY)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> str:
    return str(save_model(model, tmp_path_factory.mktemp("qwen2")))


def calibrate(folder: str, output: Path, *flags: str) -> Path:
    size = ("--tokens", str(TOKENS), "--context", str(CONTEXT), "--exact")
    arguments = ("calibrate", folder, "--text", str(TEXT), "--output", str(output))
    assert main(["lite", *arguments, *size, *flags]) == 0
    return output


@pytest.fixture(scope="module")
def file(folder, tmp_path_factory) -> Path:
    return calibrate(folder, tmp_path_factory.mktemp("file") / "calibration.safetensors")


@pytest.fixture(scope="module")
def opened(folder):
    return open_model(folder, exact=True)


@pytest.fixture(scope="module")
def ids(opened) -> list[int]:
    text = TEXT.read_text(encoding="utf-8")
    return opened.loaded.tokenizer.encode(text, add_special=False)[:TOKENS]


@pytest.fixture(scope="module")
def wanted(model, ids) -> SimpleNamespace:
    """Return K (after RoPE) and V of every layer from transformers.

    Both have the shape [layers, kv_heads, tokens, head_dim].
    """
    parts = []
    for start in range(0, TOKENS, CONTEXT):
        prompt = torch.tensor([ids[start : start + CONTEXT]])
        with torch.no_grad():
            cache = model(prompt, use_cache=True).past_key_values
        parts.append([(layer.keys[0].numpy(), layer.values[0].numpy()) for layer in cache.layers])
    k, v = (
        np.stack(
            [np.concatenate([p[i][s] for p in parts], axis=1) for i in range(len(parts[0]))]
        ).astype(np.float64)
        for s in (0, 1)
    )
    return SimpleNamespace(k=k, v=v)


def hadamard(size: int) -> np.ndarray:
    """Return the normalized Hadamard matrix in Sylvester's order."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.sqrt(2)
    return matrix


def test_calibrate_statistics_equal_transformers(opened, file, wanted):
    found = read_calibration(file, opened.config, model_hash=opened.hash)
    assert (found.facts.tokens, found.facts.context) == (TOKENS, CONTEXT)
    scale = np.abs(wanted.k).max()
    mean = wanted.k.mean(axis=2)
    np.testing.assert_allclose(found.k_mean, mean, atol=scale * ROUNDING)
    assert np.abs(mean).max() > 0.1 * scale  # there is a mean to subtract
    np.testing.assert_allclose(found.v_amax, np.abs(wanted.v).max(axis=(2, 3)), rtol=ROUNDING)
    rotated = (wanted.k - mean[:, :, None]) @ hadamard(wanted.k.shape[-1])
    np.testing.assert_allclose(
        found.k_amax_rotated, np.abs(rotated).max(axis=(2, 3)), rtol=4 * ROUNDING
    )
    plain = np.abs(wanted.k - mean[:, :, None]).max(axis=(2, 3))
    assert (found.k_amax >= plain * (1 - ROUNDING)).all()


def test_calibrate_repeats_bit_for_bit(folder, file, tmp_path):
    assert calibrate(folder, tmp_path / "again").read_bytes() == file.read_bytes()


def test_calibrate_reads_prompts_of_a_jsonl_file(folder, opened, file, ids, tmp_path):
    """One prompt per context gives the calibration of the whole text, except its hash."""
    encode, decode = opened.loaded.tokenizer.encode, opened.loaded.tokenizer.decode
    pieces = [ids[i : i + CONTEXT] for i in range(0, TOKENS, CONTEXT)]
    texts = [decode(piece[:CONTEXT]) for piece in pieces]
    assert [encode(text, add_special=False) for text in texts] == [p[:CONTEXT] for p in pieces]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    output = tmp_path / "of-prompts"
    size = ("--tokens", str(TOKENS), "--context", str(CONTEXT), "--exact")
    arguments = ("calibrate", folder, "--text", str(prompts), "--output", str(output))
    assert main(["lite", *arguments, *size]) == 0
    wanted = read_calibration(file, opened.config, model_hash=opened.hash)
    found = read_calibration(output, opened.config, model_hash=opened.hash)
    assert found.facts.tokens == TOKENS
    np.testing.assert_array_equal(found.k_mean, wanted.k_mean)
    np.testing.assert_array_equal(found.v_amax, wanted.v_amax)


def test_calibrate_mean_option_selects_channels(folder, opened, file, tmp_path):
    def mean(*flags):
        path = calibrate(folder, tmp_path / "m", *flags)
        return read_calibration(path, opened.config, model_hash=opened.hash).k_mean

    every, slow = mean(), mean("--mean", "slow")
    assert (mean("--mean", "none") == 0).all()
    kept = slow != 0
    assert 0 < kept.sum() < kept.size and (slow[kept] == every[kept]).all()


def test_calibrate_percentile_clips_amax(folder, opened, file, wanted, tmp_path):
    path = calibrate(folder, tmp_path / "p", "--percentile", "90")
    found = read_calibration(path, opened.config, model_hash=opened.hash)
    exact = np.quantile(np.abs(wanted.v), 0.9, axis=(2, 3))
    assert (found.v_amax >= exact * (1 - ROUNDING)).all()
    assert (found.v_amax <= exact * (17 / 16) * (1 + 2 * ROUNDING)).all()


def test_pipeline_quality_best_uses_the_calibration(folder, file):
    config = TurbomindEngineConfig(
        quant_policy=16, kv_quality="best", kv_calibration=file, session_len=512
    )
    assert "calibration calibration.safetensors" in "\n".join(dry_run_lines(folder, config))
    with pipeline(folder, config) as pipe:
        assert "quality best" in pipe.engine.cache_line()
        answer = pipe("x" * 200, gen_config=GenerationConfig(max_new_tokens=100, ignore_eos=True))
        assert answer.generate_token_len == 100


def test_api_server_calibration_of_another_model_is_rejected(file, tmp_path, capsys):
    other = str(save_model(make_model(TINY, seed=1), tmp_path))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        flags = ("--kv-quality", "best", "--kv-calibration", str(file), "--quant-policy", "4")
        main(["serve", "api_server", other, *flags, "--dry-run"])
    message = capsys.readouterr().err
    assert "for another model" in message and message.count("\n") == 1


def test_evaluate_better_quality_reduces_divergence(opened, ids, file):
    variants = cache_variants(
        ["none", "nvfp4", "int4"], ["raw", "balanced", "best"], calibration=str(file)
    )
    configures = {label: opened.configure(config) for label, config in variants.items()}
    # Longer than the 16-bit window, so that the format matters.
    contexts = cut_contexts(ids, TOKENS, max_tokens=TOKENS)
    scores = evaluate(opened, contexts, variants=configures)
    kl = {label: score.report()["kl_mean"] for label, score in scores.items()}
    print(kl)
    assert kl["none"] == 0
    for name in ("nvfp4", "int4"):
        # Measured: 15 to 23 times less.
        assert kl[name] > 8 * kl[f"{name}/balanced"] > 0
        assert kl[name] > 8 * kl[f"{name}/best"] > 0
        assert kl[f"{name}/best"] != kl[f"{name}/balanced"]
    assert kl["nvfp4/best"] < kl["nvfp4/balanced"]


def test_evaluate_formats_by_layer_change_divergence(opened, ids):
    contexts = cut_contexts(ids, CONTEXT, max_tokens=CONTEXT)
    tables = {"nvfp4": "nvfp4", "0": {"default": "none", 0: "nvfp4"}, "1": {0: "none", 1: "nvfp4"}}
    configures = {
        label: opened.configure(TurbomindEngineConfig(kv_cache_format=table, kv_quality="raw"))
        for label, table in tables.items()
    }
    kl = {
        k: s.report()["kl_mean"] for k, s in evaluate(opened, contexts, variants=configures).items()
    }
    assert 0 < kl["0"] < kl["nvfp4"] and 0 < kl["1"] < kl["nvfp4"] and kl["0"] != kl["1"]


def test_kv_search_writes_a_table_within_the_budget(folder, tmp_path, capsys):
    out = tmp_path / "table.yaml"
    size = ("--tokens", "256", "--context", "256", "--at-tokens", "4096")
    flags = ("--budget", "7.0", "--formats", "nvfp4;fp8", "--output", str(out))
    assert main(["lite", "kv-search", folder, "--text", str(TEXT), *size, *flags]) == 0
    printed = capsys.readouterr().out
    assert "proposed: " in printed
    bits = float(printed.split("proposed: ")[1].split()[0])
    assert 4.5 < bits <= 7.0
    assert yaml.safe_load(out.read_text())
    config = TurbomindEngineConfig(kv_cache_format=str(out), session_len=512)
    assert any("KV cache" in line for line in dry_run_lines(folder, config))


def test_eval_ppl_labels_every_format_and_quality(folder, file, tmp_path):
    import importlib.util

    root = Path(__file__).resolve().parents[3]
    spec = importlib.util.spec_from_file_location("eval_ppl_q", root / "scripts/eval_ppl.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "figures.json"
    flags = ("--context", "256", "--max-tokens", "256", "--json", str(out))
    quality = ("--kv-quality", "raw,balanced,best", "--kv-calibration", str(file))
    table = ("--kv-cache-format", "k=fp8,v=nvfp4")
    assert script.main([folder, str(TEXT), "--modes", "none,int4", *quality, *table, *flags]) == 0
    facts = json.loads(out.read_text())
    assert list(facts["modes"]) == [
        *("none", "int4", "int4/balanced", "int4/best"),
        *("k=fp8,v=nvfp4", "k=fp8,v=nvfp4/balanced", "k=fp8,v=nvfp4/best"),
    ]
    assert facts["setups"]["int4/best"]["calibration"] == file.name
    assert facts["setups"]["int4"]["k_offset"] == "block"  # the model has a bias of K
    assert "none" not in facts["setups"]
    assert all(row["tokens"] == 255 for row in facts["modes"].values())
