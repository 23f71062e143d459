"""Run the C++ engine with the weights of the NumPy decoder."""

import numpy as np
from reference.decoder import Shape
from reference.rope import Rope

from lmdeploy import _turbomind

VOCAB = 97
SESSION_LEN = 1024
TIMEOUT_MS = 60_000
# An FP32 engine against a double-precision decoder: rounding noise of 2 layers, relative to the
# spread of the logits (measured: 2e-5).
EXACT_MAX = 1e-4
# Where that noise moves a cached value over a rounding border, its code differs by one step. So the
# mean is limited instead (measured: 6e-5). Another format differs by 1e-2.
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
    """Return the logits [tokens, vocab] of a prompt from the C++ engine in exact mode."""
    options = _turbomind.EngineConfig()
    options.kv_format = mode
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
    """Return a C++ engine in exact mode; `options` choose the KV cache format."""
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
    config.ropes = [rope]
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
    moe.intermediate_size, moe.normalize = experts.width, experts.normalize
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
