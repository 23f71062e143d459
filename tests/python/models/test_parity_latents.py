"""Tests of multi-head latent attention against transformers in FP32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import EngineRun
from parity import (
    MAX_RELATIVE_ERROR,
    NUM_GREEDY,
    prompt,
    reference_greedy,
    reference_logits,
    relative_error,
)
from safetensors.numpy import load_file, save_file
from tiny_latents import GLM, MINICPM3, TINY_LATENTS, V2, V3
from tiny_models import TinyModel, make_model, save_model
from tiny_moe import change_config

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.hf import open_folder

# Two splits of 256 positions and a part of a third one.
NUM_TOKENS = 530


@pytest.mark.parametrize("tiny", TINY_LATENTS, ids=lambda tiny: tiny.name)
def test_latent_logits_and_greedy_tokens_equal_transformers(
    tiny: TinyModel, tmp_path: Path
) -> None:
    model = make_model(tiny)
    ids = prompt(NUM_TOKENS)
    with EngineRun(str(save_model(model, tmp_path)), exact=True) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
        print(f"{tiny.name}: relative error {error:.2e}")
        assert error <= MAX_RELATIVE_ERROR
        assert run.greedy(ids, NUM_GREEDY) == reference_greedy(model, ids, NUM_GREEDY)


@pytest.mark.parametrize("chunk", [1, 7, 64, 600])
def test_chunks_do_not_change_latent_logits(chunk: int, tmp_path: Path) -> None:
    ids = prompt(NUM_TOKENS)
    folder = str(save_model(make_model(V3), tmp_path))
    logits = []
    for max_prefill in (chunk, 33):
        with EngineRun(folder, exact=True, max_prefill=max_prefill) as run:
            logits.append(run.logits(ids))
    np.testing.assert_array_equal(*logits)


def test_passes_of_heads_do_not_change_latent_logits(tmp_path: Path) -> None:
    # A step of so many tokens computes 16 of the 20 heads, and then the others.
    ids = prompt(600)
    folder = str(save_model(make_model(TINY_LATENTS[1]), tmp_path))
    logits = []
    for max_prefill in (64, 600):
        with EngineRun(folder, exact=True, max_prefill=max_prefill) as run:
            logits.append(run.logits(ids))
    np.testing.assert_array_equal(*logits)


def change_tensor(folder: Path, suffix: str, change: Any) -> None:
    """Replace the tensors whose names end with `suffix`."""
    tensors = load_file(folder / "model.safetensors")
    found = [name for name in tensors if name.endswith(suffix)]
    assert found
    for name in found:
        tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def rolled(values: np.ndarray) -> np.ndarray:
    return np.roll(values, 1, axis=0)


# A planted fault per structure: what the engine must read.
FAULTS: dict[str, tuple[TinyModel, Any]] = {
    "pairs of RoPE": (V3, lambda f: change_config(f, rope_interleave=False)),
    "halves of RoPE": (TINY_LATENTS[3], lambda f: change_config(f, rope_interleave=True)),
    "magnitude of YaRN": (V2, lambda f: change_rope(f, mscale_all_dim=0.0)),
    "groups": (V2, lambda f: change_config(f, topk_group=3)),
    "best of a group": (V2, lambda f: change_config(f, topk_method="greedy")),
    "scale of experts": (V2, lambda f: change_config(f, routed_scaling_factor=1.6)),
    "normalized experts": (V3, lambda f: change_config(f, norm_topk_prob=False)),
    "bias of scores": (
        V3,
        lambda f: change_tensor(f, "e_score_correction_bias", lambda x: np.zeros_like(x)),
    ),
    "dense layers": (GLM, lambda f: change_tensor(f, "layers.0.mlp.up_proj.weight", rolled)),
    "norm of latents": (GLM, lambda f: change_tensor(f, "kv_a_layernorm.weight", rolled)),
    "norm of queries": (V3, lambda f: change_tensor(f, "q_a_layernorm.weight", rolled)),
    "keys and values of heads": (GLM, lambda f: change_tensor(f, "kv_b_proj.weight", rolled)),
    "bias of latents": (
        TINY_LATENTS[3],
        lambda f: change_tensor(f, "kv_a_proj_with_mqa.bias", rolled),
    ),
    "scale of branches": (MINICPM3, lambda f: change_config(f, scale_depth=1.3)),
    "scale of logits": (MINICPM3, lambda f: change_config(f, dim_model_base=30)),
    "scale of the embedding": (MINICPM3, lambda f: change_config(f, scale_emb=3.1)),
}


def change_rope(folder: Path, **values: float) -> None:
    import json

    config = json.loads((folder / "config.json").read_text())
    change_config(folder, rope_parameters={**config["rope_parameters"], **values})


@pytest.mark.parametrize("fault", FAULTS)
def test_latent_tolerance_detects_single_faults(fault: str, tmp_path: Path) -> None:
    tiny, plant = FAULTS[fault]
    model = make_model(tiny)
    folder = save_model(model, tmp_path)
    plant(folder)
    ids = prompt(80)
    with EngineRun(str(folder), exact=True) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    assert error > 10 * MAX_RELATIVE_ERROR


def test_a_group_counts_as_its_best_expert(tmp_path: Path) -> None:
    # In DeepSeek-V2. The sum of a group's two best experts would choose other groups.
    from lmdeploy.engine.model_files import open_files

    model = make_model(V2)
    files = open_files(str(save_model(model, tmp_path)))
    assert files.info.config.moe.best_of_group
    ids = torch.tensor([prompt(200)])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True, output_router_logits=True)
    scores = torch.cat(list(states.router_logits)).softmax(-1).view(-1, 4, 2)
    best, sums = (values.topk(2)[1].sort()[0] for values in (scores.max(-1)[0], scores.sum(-1)))
    assert (best != sums).any()


@pytest.mark.parametrize(
    "architecture", ["DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM"]
)
def test_sparse_indexers_are_refused_by_name(architecture: str, tmp_path: Path) -> None:
    folder = save_model(make_model(V3), tmp_path)
    change_config(folder, architectures=[architecture])
    with pytest.raises(ModelFormatError, match=f"{architecture}: .*sparse indexer"):
        open_folder(folder)
