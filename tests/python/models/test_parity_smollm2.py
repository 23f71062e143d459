"""Tests of SmolLM2: the engine against transformers with the same dequantized weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import EngineRun

from lmdeploy.checkpoint.convert import matrix_for_engine, vector_for_engine
from lmdeploy.checkpoint.hub import resolve_model
from lmdeploy.checkpoint.open import Checkpoint, open_checkpoint

# Mean KL divergence per position, in nats.
MAX_KL_EXACT = 1e-8  # measured: 5e-11
# Measured: 1e-6. Omitting one int8 half in one kind of layer costs at least 5e-4.
MAX_KL_INT8_ACTIVATIONS = 1e-5
MAX_KL_8_BIT_ACTIVATIONS = 5e-3  # with gemm_input_dtype int8
# A KV format's served cost divided by its cost in FP32 arithmetic. Measured: 0.87 to 1.04. Other
# arithmetic stores other codes next to midpoints, at equal cost.
SERVED_COST = (0.7, 1.3)
SERVED_TOKENS = 384
SERVED_TEXT = Path(__file__).parents[1] / "data" / "austen.txt"
NUM_GREEDY = 64
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "List three prime numbers above 10.",
    "Who wrote Pride and Prejudice?",
    "Translate 'good morning' into Spanish.",
    "What is 12 plus 30?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Summarise the story of Romeo and Juliet.",
)
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. However little known the feelings or views of such a man may be on "
    "his first entering a neighbourhood, this truth is so well fixed in the minds of the "
    "surrounding families, that he is considered the rightful property of some one or other of "
    "their daughters. In 1813 there were 4 of them; def f(x): return x ** 2  # 1234567890"
)


def dequantized(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return FP32 tensors by Hugging Face name, dequantized by the gguf library."""
    import gguf

    names = {
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "attention_norm": "input_layernorm.weight",
        "ffn_norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
        **{letter: f"self_attn.{letter}_proj.weight" for letter in "qkvo"},
    }
    tensors = {}
    for planned in checkpoint.tensors:
        if len(planned.tensor.shape) == 1:
            values = vector_for_engine(planned.tensor)
        else:
            kind, data = matrix_for_engine(
                planned.tensor, exact=True, interleaved_heads=planned.interleaved_heads
            )
            values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])
        *layer, name = planned.name.rsplit(".", 1)
        prefix = f"model.{layer[0]}." if layer else ""
        tensors[prefix + names[name]] = torch.tensor(values)
    return tensors


@pytest.fixture(scope="module")
def reference() -> Any:
    """Return LlamaForCausalLM in FP32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(resolve_model("smollm2"))
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        )
    ).eval()
    missing, unexpected = model.load_state_dict(dequantized(checkpoint), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def exact_run() -> Iterator[EngineRun]:
    with EngineRun("smollm2", exact=True, max_prefill=512) as run:
        yield run


def log_probs(logits: np.ndarray) -> torch.Tensor:
    return torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)


def mean_kl(wanted: np.ndarray, got: np.ndarray) -> float:
    p, q = log_probs(wanted), log_probs(got)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def wanted_logits(reference: Any, exact_run: EngineRun) -> np.ndarray:
    ids = exact_run.model.tokenizer.encode(TEXT)
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].numpy()


def test_smollm2_exact_logits_equal_transformers(
    wanted_logits: np.ndarray, exact_run: EngineRun
) -> None:
    got = exact_run.logits(exact_run.model.tokenizer.encode(TEXT))
    kl = mean_kl(wanted_logits, got)
    print(f"exact: KL {kl:.2e}, largest error {np.abs(got - wanted_logits).max():.2e}")
    assert kl < MAX_KL_EXACT


def test_smollm2_int8_activations_add_little_divergence(wanted_logits: np.ndarray) -> None:
    with EngineRun("smollm2", exact=False, max_prefill=512) as run:
        got = run.logits(run.model.tokenizer.encode(TEXT))
    kl = mean_kl(wanted_logits, got)
    print(f"activations of two int8 halves, FP16 cache: KL {kl:.2e}")
    assert 0 < kl <= MAX_KL_INT8_ACTIVATIONS


def test_smollm2_8_bit_activations_stay_below_the_documented_divergence(
    exact_run: EngineRun,
) -> None:
    ids = exact_run.model.tokenizer.encode(SERVED_TEXT.read_text("utf-8"))[:SERVED_TOKENS]
    with EngineRun("smollm2", exact=False, max_prefill=512, int8_activations=True) as run:
        kl = mean_kl(exact_run.logits(ids), run.logits(ids))
    print(f"activations of 8 bits, FP16 cache: KL {kl:.2e}")
    assert MAX_KL_INT8_ACTIVATIONS < kl <= MAX_KL_8_BIT_ACTIVATIONS


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4", "nvfp4", "mxfp4"])
def test_smollm2_served_kv_formats_cost_as_much_as_in_fp32(
    exact_run: EngineRun, kv_format: str
) -> None:
    ids = exact_run.model.tokenizer.encode(SERVED_TEXT.read_text("utf-8"))[:SERVED_TOKENS]
    plain = exact_run.logits(ids)
    costs = {}
    for exact in (True, False):
        with EngineRun("smollm2", exact=exact, kv_format=kv_format) as run:
            costs[exact] = mean_kl(plain, run.logits(ids))
    print(f"{kv_format}: KL {costs[True]:.2e} in FP32, {costs[False]:.2e} served")
    assert SERVED_COST[0] < costs[False] / costs[True] < SERVED_COST[1]


@pytest.mark.parametrize("question", QUESTIONS)
def test_smollm2_greedy_tokens_equal_transformers(
    question: str, reference: Any, exact_run: EngineRun
) -> None:
    model = exact_run.model
    assert model.chat_template is not None
    prompt = model.chat_template.render([{"role": "user", "content": question}])
    ids = model.tokenizer.encode(prompt, add_special=False)
    got = exact_run.greedy(ids, NUM_GREEDY)
    print(model.tokenizer.decode(got)[:100])
    # The tokens are greedy if each of them is the likeliest one after those before it.
    with torch.no_grad():
        logits = reference(torch.tensor([ids + got[:-1]])).logits
    assert got == logits[0, len(ids) - 1 :].argmax(-1).tolist()
