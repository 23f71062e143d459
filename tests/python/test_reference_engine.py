"""The engine's logits against the NumPy decoder, for every KV format; memory figures too."""

import numpy as np
import pytest
from reference import codecs
from reference.decoder import Decoder, Shape, random_weights
from reference.layout import ALIGNMENT, row_bytes
from reference.layout import Shape as CacheShape
from reference.rope import Rope

from lmdeploy import _turbomind

VOCAB = 97
SESSION_LEN = 1024
TIMEOUT_MS = 60_000
# FP32 engine against a double-precision decoder: rounding noise of 2 layers, relative to the
# spread of the logits (measured: 2e-5).
EXACT_MAX = 1e-4
# Where that noise moves a value over a rounding border of the cache, one code differs by a step:
# the mean is bounded instead (measured: 6e-5). One format passed for another differs by 1e-2.
STORED_MEAN = 2e-4


def make_shape(**changes: object) -> Shape:
    sizes = {
        "layers": 2,
        "hidden": 64,
        "intermediate": 96,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
    }
    sizes |= {"vocab": VOCAB, "rope": Rope(dim=64)}
    return Shape(**(sizes | changes))  # type: ignore[arg-type]


def engine_logits(
    shape: Shape, weights: dict[str, np.ndarray], ids: np.ndarray, *, mode: str, dtype: str
) -> np.ndarray:
    """[tokens, vocab] of a prompt, from the C++ engine in its exact form."""
    options = _turbomind.EngineConfig()
    options.kv_mode = mode
    engine = make_engine(shape, weights, dtype=dtype, options=options)
    try:
        return collect_logits(engine, ids)
    finally:
        engine.close()


def make_engine(
    shape: Shape,
    weights: dict[str, np.ndarray],
    *,
    dtype: str,
    options: "_turbomind.EngineConfig",
) -> "_turbomind.Engine":
    """The C++ engine in its exact form; `options` say what the cache stores."""
    config = _turbomind.ModelConfig()
    config.num_layers, config.hidden_size = shape.layers, shape.hidden
    config.intermediate_size, config.num_heads = shape.intermediate, shape.heads
    config.num_kv_heads, config.head_dim = shape.kv_heads, shape.head_dim
    config.vocab_size, config.max_position = shape.vocab, 4096
    config.norm_eps, config.dtype = shape.norm_eps, dtype
    config.windows = list(shape.windows or (0,) * shape.layers)
    rope = _turbomind.RopeConfig()
    for name in ("kind", "theta", "dim", "factor", "original_max_position"):
        setattr(rope, name, getattr(shape.rope, name))
    for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate"):
        setattr(rope, name, getattr(shape.rope, name))
    config.rope = rope
    if shape.experts is not None:
        set_experts(config, shape)
    device = _turbomind.make_cpu_device(2)
    builder = _turbomind.WeightsBuilder(config, device, True)
    for name, (rows, cols) in shape.matrices().items():
        builder.add_matrix(name, "f32", weights[name], rows, cols)
    for name in shape.vectors():
        builder.add_vector(name, weights[name])
    options.session_len, options.max_batch_size = SESSION_LEN, 2
    options.max_prefill_token_num, options.check_integrity = 48, True
    return _turbomind.Engine(config, options, builder.build(), device, 1 << 30)


def set_experts(config: "_turbomind.ModelConfig", shape: Shape) -> None:
    experts = shape.experts
    assert experts is not None
    moe = _turbomind.MoeConfig()
    moe.num_experts, moe.top_k = experts.count, experts.top_k
    moe.intermediate_size, moe.normalise = experts.width, experts.normalise
    moe.layers = [1] * shape.layers
    config.moe, config.swiglu_limit = moe, experts.limit
    config.activation = "clamped_swiglu" if experts.gpt_oss else "silu"


def collect_logits(engine: "_turbomind.Engine", ids: np.ndarray) -> np.ndarray:
    request = _turbomind.Request()
    request.id, request.prompt, request.max_new_tokens = 1, ids.tolist(), 1
    request.ignore_eos, request.logits_output = True, "all"
    engine.submit(request)
    pieces: list[np.ndarray] = []
    while True:
        outputs = engine.wait_outputs(TIMEOUT_MS)
        assert outputs, "the engine gave no output in time"
        for output in outputs:
            assert not output.error, output.error
            if output.logits is not None:
                pieces.append(output.logits)
            if output.finish_reason != "none":
                return np.concatenate(pieces)[: len(ids)]


def compare(shape: Shape, *, mode: str, dtype: str, tokens: int = 150) -> tuple[float, float]:
    """(maximum, mean) absolute difference over the spread of the wanted logits."""
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
def test_rope_kinds(rope: Rope) -> None:
    assert compare(make_shape(rope=rope), mode="none", dtype="float32")[0] < EXACT_MAX


@pytest.mark.parametrize(
    "changes",
    [
        {"windows": (0, 40)},
        {"windows": (33, 33)},
        {"optional": frozenset({"sinks"})},
        {"optional": frozenset({"sinks"}), "windows": (20, 0)},
        {"optional": frozenset({"bias", "head"})},
        {"optional": frozenset({"qk_norm"}), "kv_heads": 1},
        {"head_dim": 80, "rope": Rope(80), "kv_heads": 4},
        {"head_dim": 128, "rope": Rope(128), "heads": 6},
        {"head_dim": 64, "rope": Rope(32)},
    ],
    ids=["window", "windows", "sinks", "sinks-window", "bias", "qk-norm", "d80", "d128", "part"],
)
def test_parts_of_the_decoder(changes: dict[str, object]) -> None:
    assert compare(make_shape(**changes), mode="none", dtype="float32")[0] < EXACT_MAX


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", codecs.MODES)
def test_every_format(mode: str, dtype: str) -> None:
    shape = make_shape(windows=(0, 70), optional=frozenset({"sinks"}))
    assert compare(shape, mode=mode, dtype=dtype)[1] < STORED_MEAN


def test_the_comparison_tells_formats_apart() -> None:
    """Logits of one format do not pass for those of another."""
    shape = make_shape()
    weights = random_weights(shape, seed=3)
    ids = np.random.default_rng(4).integers(0, shape.vocab, 150)
    wanted = Decoder(shape, weights, "nvfp4", "float16").logits(ids)
    other = Decoder(shape, weights, "mxfp4", "float16").logits(ids)
    assert np.abs(wanted - other).mean() / wanted.std() > 100 * STORED_MEAN


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mode", codecs.MODES)
def test_memory_plan_counts_the_bytes_of_the_layout(mode: str, head_dim: int) -> None:
    cache = CacheShape(layers=3, kv_heads=2, head_dim=head_dim)
    config = _turbomind.ModelConfig()
    config.num_layers, config.hidden_size, config.intermediate_size = 3, 256, 256
    config.num_heads, config.num_kv_heads, config.head_dim = 4, 2, head_dim
    config.vocab_size, config.max_position, config.norm_eps = 64, 65536, 1e-5
    config.windows, config.dtype = [0, 0, 0], "bfloat16"
    rope = _turbomind.RopeConfig()
    rope.kind, rope.theta, rope.dim = "default", 10000.0, head_dim
    config.rope = rope
    options = _turbomind.EngineConfig()
    options.kv_mode, options.session_len, options.max_batch_size = mode, 65536, 64
    options.cache_max_entry_count = 0.5
    budget = 64 << 20
    plan = _turbomind.plan_memory(config, options, 2 * budget)
    block = cache.block_bytes(mode) + cache.scale_block_bytes(mode)
    assert plan.bytes_per_token == cache.bytes_per_token(mode)
    assert plan.bytes_per_token_none == cache.bytes_per_token("none")
    assert plan.num_blocks == budget // block
    assert plan.max_tokens == plan.num_blocks * cache.block_seq_len
    assert cache.block_bytes(mode) % ALIGNMENT == cache.scale_block_bytes(mode) % ALIGNMENT == 0


def test_row_bytes_table() -> None:
    wanted = {
        "none": (256, 128),
        "int8": (132, 68),
        "int4": (68, 36),
        "fp8": (128, 64),
        "fp8_e5m2": (128, 64),
        "mxfp4": (72, 36),
        "nvfp4": (72, 36),
    }
    assert {mode: (row_bytes(mode, 128), row_bytes(mode, 64)) for mode in codecs.MODES} == wanted
