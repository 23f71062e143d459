"""Tests of GPT-OSS against NumPy: its attention in every KV format, and its experts."""

import numpy as np
import pytest
from reference import codecs
from reference.decoder import Decoder, Shape, random_weights
from reference.moe import Experts, choose
from reference.quality import BALANCED
from reference.rope import Rope
from reference_runs import EXACT_MAX, TIMEOUT_MS, VOCAB, collect_logits, make_engine
from test_quality_engine import (
    CLOSE,
    DECODED,
    FAR,
    PLANTED,
    Case,
    difference,
    make_case,
    random_prompt,
    run,
)

from lmdeploy import _turbomind

ROPE = Rope(64, "yarn", theta=150000.0, factor=32.0, original_max_position=128, truncate=False)
# As in the published model: 8 query heads per KV head, a sink per head, biases, and one window of
# 128.
GPT_OSS = {
    "heads": 16,
    "kv_heads": 2,
    "rope": ROPE,
    "optional": frozenset({"sinks", "bias", "o_bias", "head"}),
}
WINDOW = 128
NUM_PROMPTS = 8
# How far a format may move the logits of two layers, one with a window, as a mean over the spread.
# It is the cost of rounding K and V in this random model. Measured with `raw` and context 300:
# 7e-4, 0.017, 0.089, 0.176, 0.273, 0.338, 0.284 in this order. The limits are a third higher.
DEPARTURE = {
    "none": 9e-4,
    "int8": 0.022,
    "fp8": 0.12,
    "fp8_e5m2": 0.23,
    "int4": 0.36,
    "mxfp4": 0.44,
    "nvfp4": 0.37,
}


def attention_case(
    mode: str, quality: str = "raw", *, windows: tuple[int, ...], block_len: int = 64
) -> Case:
    changes = {**GPT_OSS, "windows": windows, "layers": len(windows)}
    case = make_case(mode, quality, block_len=block_len, **changes)
    for layer in range(len(windows)):  # large enough to take a good part of the attention weights
        rng = np.random.default_rng([6, layer])
        case.weights[f"layers.{layer}.sinks"] = rng.normal(4, 1.5, 16).astype(np.float32)
    return case


def check_positions(case: Case, length: int, decoded: int) -> None:
    """Check prefill and decode against the reference, position by position.

    Rounding noise can change a code of the cache and move the positions that attend to it, in some
    prompts. A wrong rule moves a position in every prompt. So each position must be right in at
    least one prompt.
    """
    engine = case.engine()
    try:
        best = np.full(length + decoded, np.inf)
        for seed in range(NUM_PROMPTS):
            prompt = random_prompt(length, seed=seed)
            ids, got = run(engine, prompt, number=1 + seed, decoded=decoded)
            apart = difference(got, case.decoder().logits(np.array(ids)))
            assert apart.mean() < FAR
            best = np.minimum(best, apart)
            if best.max() < CLOSE:
                return
        assert best.max() < CLOSE, (int(best.argmax()), float(best.max()))
    finally:
        engine.close()


@pytest.mark.parametrize("quality", ["raw", "balanced"])
@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("mode", codecs.MODES)
def test_gpt_oss_attention_in_every_format_equals_reference(
    mode: str, window: int, quality: str
) -> None:
    # Prefill in chunks of 48, and decode across a block edge, beyond the window.
    if mode == "none" and quality == "balanced":
        pytest.skip("16 bit has one quality")
    case = attention_case(mode, quality, windows=(window,))
    check_positions(case, 254, decoded=4)


@pytest.mark.parametrize("block_len", [16, 64])
@pytest.mark.parametrize("window", [24, WINDOW])
@pytest.mark.parametrize("mode", ["int8", "nvfp4"])
def test_gpt_oss_attention_at_block_and_window_edges_equals_reference(
    mode: str, window: int, block_len: int
) -> None:
    """Decode across every position where a block begins or leaves the window."""
    case = attention_case(mode, windows=(window,), block_len=block_len)
    length = max(window, block_len) - 2
    check_positions(case, length, decoded=min(window, block_len) + 6)


@pytest.mark.parametrize("mode", DEPARTURE)
def test_gpt_oss_error_of_every_format_is_within_its_limits(mode: str) -> None:
    """Compare two layers, one with a window, with a cache that rounds nothing."""
    case = attention_case(mode, windows=(WINDOW, 0))
    exact = Decoder(case.shape, case.weights)
    engine = case.engine()
    try:
        ids, got = run(engine, random_prompt(300, seed=1), number=1, decoded=DECODED)
    finally:
        engine.close()
    moved = float(difference(got, exact.logits(np.array(ids))).mean())
    print(f"{mode}: {moved:.2e}")
    assert DEPARTURE[mode] / 2 < moved < DEPARTURE[mode]


@pytest.mark.parametrize("mode", codecs.MODES)
@pytest.mark.parametrize("wrong", ["no sinks", "window", "no truncation"])
def test_gpt_oss_tolerance_detects_wrong_attention(mode: str, wrong: str) -> None:
    # Dropped sinks, a window longer by one, or a rounded YaRN ramp must be detected.
    case = attention_case(mode, windows=(WINDOW,))
    changed = attention_case(mode, windows=(WINDOW + 1 if wrong == "window" else WINDOW,))
    if wrong == "no sinks":
        del changed.weights["layers.0.sinks"]
    elif wrong == "no truncation":
        rope = Rope(64, "yarn", theta=150000.0, factor=32.0, original_max_position=128)
        changed = attention_case(mode, windows=(WINDOW,))
        object.__setattr__(changed.shape, "rope", rope)
    engine = case.engine()
    try:
        ids, got = run(engine, random_prompt(300, seed=2), number=1, decoded=DECODED)
    finally:
        engine.close()
    apart = difference(got, changed.decoder().logits(np.array(ids)))[WINDOW + 1 :]
    assert apart.mean() > (10 * CLOSE if wrong == "window" else PLANTED), apart.mean()


@pytest.mark.parametrize("mode", ["none", "fp8", "nvfp4"])
def test_gpt_oss_prefix_hits_give_logits_of_reference(mode: str) -> None:
    # Cached prefix blocks lie inside and outside the window.
    case = attention_case(mode, windows=(WINDOW,), block_len=16)
    engine = case.engine()
    shared = random_prompt(200, seed=5)
    try:
        best = np.full(DECODED + 1, np.inf)
        for number in range(1, NUM_PROMPTS):
            prompt = shared + random_prompt(30, seed=number)
            ids, got = run(engine, prompt, number=number, decoded=DECODED, logits="generation")
            wanted = case.decoder().logits(np.array(ids))[len(prompt) - 1 :]
            best = np.minimum(best, difference(got, wanted))
        assert engine.stats().prefix_hit_tokens >= 192 * (NUM_PROMPTS - 2)
        assert best.max() < CLOSE
    finally:
        engine.close()


@pytest.mark.parametrize("mode", ["none", "fp8", "nvfp4"])
def test_gpt_oss_preempted_sequence_is_recomputed_correctly(mode: str) -> None:
    # Two sequences share blocks for one and a half, so the younger one is preempted.
    case = attention_case(mode, windows=(WINDOW, 0), block_len=16)
    options = _turbomind.EngineConfig()
    options.kv_format, options.cache_block_seq_len = mode, 16
    options.cache_max_entry_count = 18.0
    alone = {}
    prompts = {number: random_prompt(40, seed=number) for number in (1, 2)}
    for together in (False, True):
        engine = make_engine(case.shape, case.weights, dtype="float16", options=options)
        try:
            if together:
                for _ in range(20):  # the first request may end before the second one starts
                    assert run_all(engine, prompts, decoded=150) == alone
                    if engine.stats().num_preemptions > 0:
                        break
                assert engine.stats().num_preemptions > 0
            else:
                alone = {n: run(engine, p, number=n, decoded=150)[0] for n, p in prompts.items()}
        finally:
            engine.close()
    wanted = case.decoder().logits(np.array(alone[1]))[39:].argmax(axis=1).tolist()
    assert wanted[:5] == alone[1][40:45]


def run_all(
    engine: "_turbomind.Engine", prompts: dict[int, list[int]], *, decoded: int
) -> dict[int, list[int]]:
    """Run the requests concurrently. Return the ids of prompt and answer without the last one."""
    ids = {number: list(prompt) for number, prompt in prompts.items()}
    left = set(prompts)
    for number, prompt in prompts.items():
        request = _turbomind.Request()
        request.id, request.prompt, request.max_new_tokens = number, prompt, decoded + 1
        request.ignore_eos = True
        engine.submit(request)
    while left:
        outputs = engine.wait_outputs(TIMEOUT_MS)
        assert outputs, "the engine gave no output in time"
        for output in outputs:
            assert not output.error, output.error
            ids[output.request_id] += output.tokens
            if output.finish_reason != "none":
                left.remove(output.request_id)
    return {number: found[:-1] for number, found in ids.items()}


def moe_shape(experts: Experts) -> Shape:
    sizes = {"layers": 2, "hidden": 64, "intermediate": 96, "head_dim": 64, "vocab": VOCAB}
    return Shape(**sizes, **GPT_OSS, windows=(24, 0), experts=experts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "experts",
    [
        Experts(8, 4, 96, gpt_oss=True),
        Experts(8, 4, 96, gpt_oss=True, limit=0.5),
        Experts(5, 1, 64, gpt_oss=True),
        Experts(8, 3, 48),
        Experts(8, 3, 48, normalize=False),
        Experts(4, 4, 32, normalize=False),
    ],
    ids=["gpt-oss", "limit", "top-1", "silu", "plain", "all"],
)
def test_engine_expert_variants_equal_reference(experts: Experts) -> None:
    shape = moe_shape(experts)
    weights = random_weights(shape, seed=3)
    ids = np.random.default_rng(4).integers(0, shape.vocab, 150)
    options = _turbomind.EngineConfig()
    options.kv_format = "none"
    engine = make_engine(shape, weights, dtype="float32", options=options)
    try:
        got = collect_logits(engine, ids)
    finally:
        engine.close()
    wanted = Decoder(shape, weights).logits(ids)
    assert (np.abs(got - wanted).max() / wanted.std()) < EXACT_MAX


def test_choose_experts_breaks_ties_and_normalizes() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.4, 0.1]))
    assert [e for e, _ in choose(Experts(4, 3, 1), logits)] == [1, 2, 0]
    assert dict(choose(Experts(4, 2, 1), logits)) == pytest.approx({1: 0.5, 2: 0.5})
    plain = dict(choose(Experts(4, 2, 1, normalize=False), logits))
    assert plain == pytest.approx({1: 0.4, 2: 0.4})


def test_reference_window_layer_ignores_sink_blocks_beyond_its_window() -> None:
    # Beyond its window, a layer does not attend to sink blocks, whatever is kept in 16 bit.
    case = attention_case("nvfp4", "balanced", windows=(24,))
    assert case.quality == BALANCED
    ids = np.array(random_prompt(200, seed=3))
    one = case.decoder().logits(ids)
    ids[:64] = (ids[:64] + 1) % VOCAB
    assert (one[100:] == case.decoder().logits(ids)[100:]).all()
