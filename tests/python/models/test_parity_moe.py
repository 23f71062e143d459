"""Tests of models with experts against transformers in FP32, and of MXFP4 against equal weights."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import EngineRun
from parity import mean_kl, prompt, reference_logits, relative_error
from safetensors.numpy import load_file, save_file
from tiny_models import TinyModel, make_model, save_model
from tiny_moe import (
    GPT_OSS,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    TINY_MOE_MODELS,
    change_config,
    round_experts,
    save_mxfp4,
    write_moe_gguf,
)

# Largest difference of a logit, relative to the largest logit. Both sides compute in FP32 but sum
# in different orders.
MAX_RELATIVE_ERROR = 3e-5
# For equal weights from two files: exact mode computes with the same FP32 values.
SAME_WEIGHTS = 1e-5
# Serving rounds weights to BF16. In a random model with hard routing, rounding alone gives a KL of
# 0.002 to 0.010 (FP32 compute with rounded weights). When served, MXFP4 experts gave 0.004 to
# 0.009, and the same weights in BF16 gave 0.005 to 0.010.
MAX_KL = 0.02
MAX_KL_RATIO = 1.2
# Longer than every window of TINY_MOE_MODELS and over 200 tokens.
NUM_TOKENS = 210
NUM_GREEDY = 64


def logits_of(path: Path, ids: list[int], *, exact: bool = True) -> np.ndarray:
    with EngineRun(str(path), exact=exact) as run:
        return run.logits(ids)


def check_greedy(run: EngineRun, model: Any, ids: list[int]) -> None:
    """Check that each greedy token of the engine is the model's argmax."""
    answer = run.greedy(ids, NUM_GREEDY)
    assert len(answer) == NUM_GREEDY
    wanted = reference_logits(model, ids + answer)[len(ids) - 1 : -1].argmax(axis=1)
    assert answer == wanted.tolist()


@pytest.mark.parametrize("tiny", TINY_MOE_MODELS, ids=lambda tiny: tiny.name)
def test_moe_logits_and_greedy_tokens_equal_transformers(tiny: TinyModel, tmp_path: Path) -> None:
    model = make_model(tiny)
    folder = save_model(model, tmp_path)
    ids = prompt(NUM_TOKENS)
    with EngineRun(str(folder), exact=True) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
        print(f"{tiny.name}: relative error {error:.2e}")
        assert error <= MAX_RELATIVE_ERROR
        check_greedy(run, model, ids)


def test_mxfp4_logits_equal_those_of_dequantized_weights(tmp_path: Path) -> None:
    model = make_model(GPT_OSS)
    stored = save_mxfp4(model, tmp_path / "mxfp4")  # this also rounds the experts of `model`
    plain = save_model(model, tmp_path / "plain")
    ids = prompt(NUM_TOKENS)
    wanted = reference_logits(model, ids)
    with EngineRun(str(stored), exact=True) as run:
        got = run.logits(ids)
        check_greedy(run, model, ids)
    assert relative_error(got, wanted) <= MAX_RELATIVE_ERROR
    difference = relative_error(got, logits_of(plain, ids))
    assert difference <= SAME_WEIGHTS
    served, rounded = (
        mean_kl(logits_of(folder, ids, exact=False), wanted) for folder in (stored, plain)
    )
    print(f"mxfp4 against dequantised {difference:.2e}, KL served {served:.2e}, BF16 {rounded:.2e}")
    assert served < min(MAX_KL, MAX_KL_RATIO * rounded)


def test_mxfp4_logits_equal_dequantization_by_transformers(tmp_path: Path) -> None:
    # transformers dequantizes the stored blocks and scales itself.
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = make_model(GPT_OSS)
    folder = save_mxfp4(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    ).float()
    ids = prompt(60)
    assert relative_error(logits_of(folder, ids), reference_logits(theirs, ids)) < 1e-4


def test_bf16_transposed_experts_give_logits_of_transformers(tmp_path: Path) -> None:
    model = make_model(GPT_OSS)
    folder = save_model(copy.deepcopy(model).to(torch.bfloat16), tmp_path)
    with torch.no_grad():  # only parameters: .to() would also round the RoPE frequencies
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    ids = prompt(80)
    error = relative_error(logits_of(folder, ids), reference_logits(model, ids))
    assert error <= MAX_RELATIVE_ERROR


def test_gguf_mxfp4_logits_equal_those_of_the_folder(tmp_path: Path) -> None:
    # llama.cpp's converter splits gate and up and reorders the nibbles of a block.
    model = make_model(GPT_OSS)
    folder = save_mxfp4(model, tmp_path)
    stored = write_moe_gguf(model, tmp_path / "m.gguf", expert_format="MXFP4")
    values = dict(model.named_parameters())
    for name, rows in stored.items():
        np.testing.assert_array_equal(rows, values[name].detach().numpy())
    ids = prompt(NUM_TOKENS)
    assert relative_error(logits_of(tmp_path / "m.gguf", ids), logits_of(folder, ids)) <= (
        SAME_WEIGHTS
    )
    served = [logits_of(path, ids, exact=False) for path in (tmp_path / "m.gguf", folder)]
    assert relative_error(*served) <= SAME_WEIGHTS


@pytest.mark.parametrize(
    ("tiny", "expert_format"),
    [
        (GPT_OSS, "Q8_0"),
        (MIXTRAL, "F32"),
        (MIXTRAL, "Q8_0"),
        (MIXTRAL, "MXFP4"),
        (QWEN2_MOE, "F32"),
        (QWEN3_MOE, "F32"),
        (QWEN3_MOE, "Q4_0"),
        (QWEN3_MOE, "Q5_1"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_gguf_moe_logits_equal_transformers_with_equal_values(
    tiny: TinyModel, expert_format: str, tmp_path: Path
) -> None:
    model = make_model(tiny)
    stored = write_moe_gguf(model, tmp_path / "m.gguf", expert_format=expert_format)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in stored:
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(stored[name])))
    ids = prompt(80)
    error = relative_error(logits_of(tmp_path / "m.gguf", ids), reference_logits(model, ids))
    print(f"{tiny.name} {expert_format}: relative error {error:.2e}")
    assert error <= MAX_RELATIVE_ERROR


def change_tensor(folder: Path, name: str, change: Any) -> None:
    """Replace one tensor of a folder."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


MISTAKES: dict[str, Any] = {
    "no sinks": lambda f: change_tensor(
        f, "model.layers.3.self_attn.sinks", lambda x: np.full_like(x, -1e4)
    ),
    "window": lambda f: change_config(f, sliding_window=25),
    "layer types": lambda f: change_config(
        f, layer_types=["sliding_attention"] * 3 + ["full_attention"]
    ),
    "limit": lambda f: change_config(f, swiglu_limit=1.0),
    "top k": lambda f: change_config(f, num_experts_per_tok=3),
    "router bias": lambda f: change_tensor(
        f, "model.layers.2.mlp.router.bias", lambda x: np.roll(x, 1)
    ),
    "expert bias": lambda f: change_tensor(
        f, "model.layers.2.mlp.experts.gate_up_proj_bias", lambda x: np.roll(x, 1, axis=1)
    ),
    "expert order": lambda f: change_tensor(
        f, "model.layers.1.mlp.experts.down_proj", lambda x: np.roll(x, 1, axis=0)
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_moe_tolerance_detects_single_mistakes(mistake: str, tmp_path: Path) -> None:
    # A model that differs in one detail, such as dropped sinks, must fail the comparison.
    model = make_model(GPT_OSS)
    folder = save_model(model, tmp_path)
    MISTAKES[mistake](folder)
    ids = prompt(80)
    assert relative_error(logits_of(folder, ids), reference_logits(model, ids)) > (
        10 * MAX_RELATIVE_ERROR
    )


def test_moe_tolerance_detects_unnormalized_expert_weights(tmp_path: Path) -> None:
    model = make_model(QWEN3_MOE)
    folder = save_model(model, tmp_path)
    change_config(folder, norm_topk_prob=False)
    ids = prompt(80)
    assert relative_error(logits_of(folder, ids), reference_logits(model, ids)) > (
        10 * MAX_RELATIVE_ERROR
    )


def test_round_experts_changes_logits_far_above_the_tolerance() -> None:
    # Otherwise, parity with the dequantized model would prove nothing.
    model, ids = make_model(GPT_OSS), prompt(80)
    before = reference_logits(model, ids)
    round_experts(model)
    assert relative_error(reference_logits(model, ids), before) > 100 * SAME_WEIGHTS
