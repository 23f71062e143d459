"""GPT-OSS in NumPy against the engine: its attention in every KV format, and its experts."""

import numpy as np
import pytest
from reference import codecs
from reference.decoder import Decoder, Shape, random_weights
from reference.moe import Experts, choose
from reference.quality import BALANCED
from reference.rope import Rope
from test_quality_engine import (
    CLOSE,
    DECODED,
    PLANTED,
    PROMPTS,
    Case,
    check_prompts,
    difference,
    make_case,
    random_prompt,
    run,
)
from test_reference_engine import EXACT_MAX, VOCAB, collect_logits, make_engine

from lmdeploy import _turbomind

QUANTISED = [mode for mode in codecs.MODES if mode != "none"]
ROPE = Rope(64, "yarn", theta=150000.0, factor=32.0, original_max_position=128, truncate=False)
# 8 query heads on one of K and V, a sink for each, biases, one window of 128 as published.
GPT_OSS = {
    "heads": 16,
    "kv_heads": 2,
    "rope": ROPE,
    "optional": frozenset({"sinks", "bias", "o_bias", "head"}),
}
WINDOW = 128
# How far a format may move the logits of a layer with a window and one without, as a mean over the
# spread: what rounding K and V costs GPT-OSS's attention (measured with `raw`, context 300, and
# rounded up).
DEPARTURE = {
    "none": 1e-3,
    "int8": 8e-3,
    "fp8": 4e-2,
    "fp8_e5m2": 8e-2,
    "int4": 0.15,
    "mxfp4": 0.2,
    "nvfp4": 0.15,
}


def attention_case(mode: str, quality: str = "raw", *, windows: tuple[int, ...], **more) -> Case:
    return make_case(
        mode, quality, **{**GPT_OSS, "windows": windows, "layers": len(windows)}, **more
    )


@pytest.mark.parametrize("quality", ["raw", "balanced"])
@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("mode", codecs.MODES)
def test_sinks_and_window_in_every_format(mode: str, window: int, quality: str) -> None:
    """Prefill in pieces of 48 and decode, beyond the window and across edges of blocks."""
    if mode == "none" and quality == "balanced":
        pytest.skip("16 bit has one quality")
    for block_len in (16, 64):
        case = attention_case(mode, quality, windows=(window,), block_len=block_len)
        check_prompts(case, [190, 300])


@pytest.mark.parametrize("block_len", PROMPTS)
@pytest.mark.parametrize("mode", ["int8", "nvfp4"])
def test_edges_of_blocks_and_of_the_window(mode: str, block_len: int) -> None:
    """Decode steps over every position where a block begins or leaves the window."""
    case = attention_case(mode, windows=(WINDOW,), block_len=block_len)
    edges = [WINDOW - 2, WINDOW + block_len - 2, WINDOW + 2 * block_len - 2]
    check_prompts(case, edges, decoded=5)
    check_prompts(attention_case(mode, windows=(24,), block_len=block_len), [22, 38, 62, 86])


@pytest.mark.parametrize("mode", codecs.MODES)
def test_error_bound_of_every_format(mode: str) -> None:
    """Two layers, one with a window: the engine's distance from a cache that rounds nothing."""
    case = attention_case(mode, windows=(WINDOW, 0))
    exact = Decoder(case.shape, case.weights)
    engine = case.engine()
    try:
        ids, got = run(engine, random_prompt(300, seed=1), number=1, decoded=DECODED)
    finally:
        engine.close()
    moved = float(difference(got, exact.logits(np.array(ids))).mean())
    print(f"{mode}: {moved:.2e}")
    assert DEPARTURE[mode] / 4 < moved < DEPARTURE[mode]


@pytest.mark.parametrize("mode", codecs.MODES)
@pytest.mark.parametrize("wrong", ["no sinks", "window", "no truncation"])
def test_a_wrong_attention_is_caught(mode: str, wrong: str) -> None:
    """Dropped sinks, a window one too long, or a rounded YaRN ramp do not pass."""
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
def test_prefix_hits_and_preemption(mode: str) -> None:
    """A prompt that finds its beginning cached, and a sequence that is computed again."""
    case = attention_case(mode, windows=(WINDOW, 0))
    options = _turbomind.EngineConfig()
    options.kv_mode, options.cache_block_seq_len = mode, 16
    options.enable_prefix_caching = True
    engine = make_engine(case.shape, case.weights, dtype="float16", options=options)
    shared = random_prompt(200, seed=5)
    try:
        run(engine, shared, number=1, decoded=40)
        for number in (2, 3):
            prompt = shared + random_prompt(30, seed=number)
            ids, got = run(engine, prompt, number=number, decoded=DECODED)
            wanted = case.decoder().logits(np.array(ids))[-len(got) :]
            assert difference(got, wanted).mean() < FAR_FROM_CLOSE
        assert engine.stats().prefix_hit_tokens > 0
    finally:
        engine.close()


# A code that falls on the other side of a border may be met anywhere; see test_quality_engine.
FAR_FROM_CLOSE = 5e-3


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
        Experts(8, 3, 48, normalise=False),
        Experts(4, 4, 32, normalise=False),
    ],
    ids=["gpt-oss", "limit", "top-1", "silu", "plain", "all"],
)
def test_experts(experts: Experts) -> None:
    shape = moe_shape(experts)
    weights = random_weights(shape, seed=3)
    ids = np.random.default_rng(4).integers(0, shape.vocab, 150)
    options = _turbomind.EngineConfig()
    options.kv_mode = "none"
    engine = make_engine(shape, weights, dtype="float32", options=options)
    try:
        got = collect_logits(engine, ids)
    finally:
        engine.close()
    wanted = Decoder(shape, weights).logits(ids)
    assert (np.abs(got - wanted).max() / wanted.std()) < EXACT_MAX


def test_choice_of_experts_by_hand() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.4, 0.1]))
    assert [e for e, _ in choose(Experts(4, 3, 1), logits)] == [1, 2, 0]
    assert dict(choose(Experts(4, 2, 1), logits)) == pytest.approx({1: 0.5, 2: 0.5})
    plain = dict(choose(Experts(4, 2, 1, normalise=False), logits))
    assert plain == pytest.approx({1: 0.4, 2: 0.4})


def test_balanced_keeps_the_first_tokens_of_a_window_layer_out_of_sight() -> None:
    """Beyond its window a layer sees no sink block, whatever the quality keeps in 16 bit."""
    case = attention_case("nvfp4", "balanced", windows=(24,))
    assert case.quality == BALANCED
    ids = np.array(random_prompt(200, seed=3))
    one = case.decoder().logits(ids)
    ids[:64] = (ids[:64] + 1) % VOCAB
    assert (one[100:] == case.decoder().logits(ids)[100:]).all()
