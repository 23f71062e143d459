"""Tests of the engine's logits in every KV format against the NumPy decoder; memory plans."""

import numpy as np
import pytest
from reference import codecs
from reference.decoder import Decoder, Shape, random_weights
from reference.layout import ALIGNMENT, row_bytes
from reference.layout import Shape as CacheShape
from reference.rope import Rope
from reference_runs import (
    EXACT_MAX,
    SESSION_LEN,
    STORED_MEAN,
    engine_logits,
    make_shape,
)

from lmdeploy import _turbomind


def compare(shape: Shape, *, mode: str, dtype: str, tokens: int = 150) -> tuple[float, float]:
    """Return (maximum, mean) of the absolute difference, relative to the logits' spread."""
    weights = random_weights(shape, seed=3)
    ids = np.random.default_rng(4).integers(0, shape.vocab, tokens)
    got = engine_logits(shape, weights, ids, mode=mode, dtype=dtype)
    wanted = Decoder(shape, weights, mode, dtype).logits(ids)
    assert got.shape == wanted.shape
    difference = np.abs(got - wanted) / wanted.std()
    return float(difference.max()), float(difference.mean())


ROPES = [
    Rope(64, theta=500.0),
    Rope(64, "linear", factor=4.0),
    Rope(64, "dynamic", factor=4.0, original_max_position=32, session_len=SESSION_LEN),
    Rope(64, "dynamic", factor=4.0, original_max_position=2048, session_len=SESSION_LEN),
    Rope(64, "llama3", theta=500000.0, factor=8.0, original_max_position=64),
    Rope(64, "yarn", factor=4.0, original_max_position=64),
    Rope(64, "yarn", theta=150000.0, factor=32.0, original_max_position=64, truncate=False),
]


@pytest.mark.parametrize(
    "rope", ROPES, ids=lambda rope: rope.kind if rope.truncate else "yarn-untruncated"
)
def test_engine_every_rope_kind_equals_reference(rope: Rope) -> None:
    assert compare(make_shape(rope=rope), mode="none", dtype="float32")[0] < EXACT_MAX


@pytest.mark.parametrize(
    "changes",
    [
        {"windows": (0, 40)},
        {"windows": (33, 33)},
        {"windows": (-40, 0)},
        {"windows": (-33, 40), "optional": frozenset({"sinks"})},
        {"optional": frozenset({"sinks"})},
        {"optional": frozenset({"sinks"}), "windows": (20, 0)},
        {"optional": frozenset({"bias", "head"})},
        {"optional": frozenset({"qk_norm"}), "kv_heads": 1},
        {"head_dim": 80, "rope": Rope(80), "kv_heads": 4},
        {"head_dim": 128, "rope": Rope(128), "heads": 6},
        {"head_dim": 64, "rope": Rope(32)},
    ],
    ids=[
        "window",
        "windows",
        "chunks",
        "chunks-sinks",
        "sinks",
        "sinks-window",
        "bias",
        "qk-norm",
        "d80",
        "d128",
        "part",
    ],
)
def test_engine_decoder_variants_equal_reference(changes: dict[str, object]) -> None:
    assert compare(make_shape(**changes), mode="none", dtype="float32")[0] < EXACT_MAX


@pytest.mark.parametrize(
    ("dtype", "windows"), [("float16", (0, 70)), ("bfloat16", (0, 70)), ("bfloat16", (-40, 0))]
)
@pytest.mark.parametrize("mode", codecs.MODES)
def test_engine_every_kv_format_equals_reference(
    mode: str, dtype: str, windows: tuple[int, ...]
) -> None:
    shape = make_shape(windows=windows, optional=frozenset({"sinks"}))
    assert compare(shape, mode=mode, dtype=dtype)[1] < STORED_MEAN


def test_tolerance_detects_another_kv_format() -> None:
    # Logits of two formats must differ far more than the tolerance.
    shape = make_shape()
    weights = random_weights(shape, seed=3)
    ids = np.random.default_rng(4).integers(0, shape.vocab, 150)
    wanted = Decoder(shape, weights, "nvfp4", "float16").logits(ids)
    other = Decoder(shape, weights, "mxfp4", "float16").logits(ids)
    assert np.abs(wanted - other).mean() / wanted.std() > 100 * STORED_MEAN


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mode", codecs.MODES)
def test_plan_memory_counts_bytes_of_the_reference_layout(mode: str, head_dim: int) -> None:
    cache = CacheShape(layers=3, kv_heads=2, head_dim=head_dim)
    config = _turbomind.ModelConfig()
    config.num_layers, config.hidden_size, config.intermediate_size = 3, 256, 256
    config.num_heads, config.num_kv_heads, config.head_dim = 4, 2, head_dim
    config.vocab_size, config.max_position, config.norm_eps = 64, 65536, 1e-5
    config.windows, config.dtype = [0, 0, 0], "bfloat16"
    rope = _turbomind.RopeConfig()
    rope.kind, rope.theta, rope.dim = "default", 10000.0, head_dim
    config.ropes = [rope]
    options = _turbomind.EngineConfig()
    options.kv_format, options.session_len, options.max_batch_size = mode, 65536, 64
    options.cache_max_entry_count = 0.5
    budget = 64 << 20
    plan = _turbomind.plan_memory(config, options, 2 * budget)
    block = cache.block_bytes(mode) + cache.scale_block_bytes(mode)
    assert plan.bytes_per_token == cache.bytes_per_token(mode)
    assert plan.bytes_per_token_none == cache.bytes_per_token("none")
    assert plan.num_blocks == budget // block
    assert plan.max_tokens == plan.num_blocks * cache.block_seq_len
    assert cache.block_bytes(mode) % ALIGNMENT == cache.scale_block_bytes(mode) % ALIGNMENT == 0


def test_row_bytes_equal_table() -> None:
    wanted = {
        "none": (256, 128),
        "int8": (132, 68),
        "int4": (68, 36),
        "fp8": (128, 64),
        "fp8_e5m2": (128, 64),
        "mxfp4": (72, 36),
        "nvfp4": (72, 36),
    }
    assert {mode: (row_bytes(mode, 128), row_bytes(mode, 64)) for mode in wanted} == wanted
