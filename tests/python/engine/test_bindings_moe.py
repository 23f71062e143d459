"""Tests of experts through the bindings: config, names, MXFP4 arrays that are not copied."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from lmdeploy import _turbomind as tm

VOCAB = 64
HIDDEN = 64
INNER = 32
EXPERTS = 6


def model_config(*, shared: int = 0) -> Any:
    config = tm.ModelConfig()
    config.num_layers = 2
    config.hidden_size = HIDDEN
    config.num_heads = 2
    config.num_kv_heads = 1
    config.head_dim = 64
    config.vocab_size = VOCAB
    config.max_position = 1024
    config.windows = [16, 0]
    config.dtype = "float32"
    config.activation = "clamped_swiglu"
    config.swiglu_limit = 2.0
    rope = tm.RopeConfig()
    rope.dim = 64
    config.ropes = [rope]
    config.moe.num_experts = EXPERTS
    config.moe.top_k = 2
    config.moe.intermediate_size = INNER
    config.moe.shared_intermediate_size = shared
    config.moe.normalize = True
    config.moe.layers = [1, 1]
    return config


def dense_parts() -> dict[str, tuple[int, ...]]:
    parts: dict[str, tuple[int, ...]] = {"embedding": (VOCAB, HIDDEN), "final_norm": (HIDDEN,)}
    for i in range(2):
        layer = {
            "attention_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "q": (128, HIDDEN),
            "k": (64, HIDDEN),
            "v": (64, HIDDEN),
            "o": (HIDDEN, 128),
            "sinks": (2,),
            "router": (EXPERTS, HIDDEN),
            "router.bias": (EXPERTS,),
        }
        parts |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return parts


def expert_parts() -> dict[str, tuple[int, int]]:
    shapes = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return {
        f"layers.{i}.experts.{e}.{name}": shape
        for i in range(2)
        for e in range(EXPERTS)
        for name, shape in shapes.items()
    }


def mxfp4(rng: np.random.Generator, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random codes [rows, cols / 2] and exponents [rows, cols / 32] for values below 1."""
    codes = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    return codes, rng.integers(122, 125, (rows, cols // 32), dtype=np.uint8)


def gguf_blocks(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return [rows, cols / 32, 17]: the exponent, then a byte for each pair of values j, 16 + j."""
    rows = codes.shape[0]
    values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, -1, 32)
    packed = values[..., :16] | values[..., 16:] << 4
    return np.ascontiguousarray(np.concatenate([scales[..., None], packed], axis=-1))


def dequantized(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode MXFP4 as the OCP specification defines it."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1, 32)
    signed = np.where(values & 8, -1, 1) * magnitudes[values & 7]
    scaled = signed * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return np.ascontiguousarray(scaled.reshape(codes.shape[0], -1), np.float32)


def add_dense(builder: Any) -> None:
    rng = np.random.default_rng(3)
    for name, shape in dense_parts().items():
        values = (0.3 * rng.standard_normal(shape)).astype(np.float32)
        if len(shape) == 1:
            builder.add_vector(name, values + np.float32(name.endswith("norm")))
        else:
            builder.add_matrix(name, "f32", values, *shape)


def build_weights(device: Any, form: str) -> Any:
    builder = tm.WeightsBuilder(model_config(), device, True)
    add_dense(builder)
    rng = np.random.default_rng(4)
    for name, (rows, cols) in expert_parts().items():
        codes, scales = mxfp4(rng, rows, cols)
        if form == "mxfp4_split":
            builder.add_matrix(name, form, codes, rows, cols, scales)
        elif form == "mxfp4":
            builder.add_matrix(name, form, gguf_blocks(codes, scales), rows, cols)
        else:
            builder.add_matrix(name, "f32", dequantized(codes, scales), rows, cols)
    return builder.build()


def make_engine(weights: Any, device: Any) -> Any:
    config = tm.EngineConfig()
    config.kv_format = "none"
    config.max_batch_size = 4
    config.session_len = 256
    config.max_prefill_token_num = 64
    config.cache_block_seq_len = 16
    return tm.Engine(model_config(), config, weights, device, 64 << 20)


def logits_of(engine: Any) -> np.ndarray:
    request = tm.Request()
    request.id = 1
    request.prompt = list(range(50))
    request.max_new_tokens = 8
    request.logits_output = "all"
    engine.submit(request)
    rows = []
    finish = "none"
    while finish == "none":
        outputs = engine.wait_outputs(10_000)
        assert outputs, "no output within 10 s"
        rows += [output.logits for output in outputs if output.logits is not None]
        finish = outputs[-1].finish_reason
    assert finish == "length"
    return np.concatenate(rows)


def test_engine_both_mxfp4_forms_equal_dequantized_weights() -> None:
    device = tm.make_cpu_device(1)
    engines = {
        form: make_engine(build_weights(device, form), device)
        for form in ("f32", "mxfp4", "mxfp4_split")
    }
    want = logits_of(engines["f32"])
    assert want.shape == (57, VOCAB)
    assert np.isfinite(want).all() and np.abs(want).max() > 1
    for form in ("mxfp4", "mxfp4_split"):
        assert np.array_equal(logits_of(engines[form]), want), form
    for engine in engines.values():
        engine.close()


def test_mxfp4_arrays_live_as_long_as_their_weights() -> None:
    device = tm.make_cpu_device(1)
    config = model_config()
    rng = np.random.default_rng(4)
    builder = tm.WeightsBuilder(config, device, False)
    add_dense(builder)
    arrays = []
    for name, (rows, cols) in expert_parts().items():
        codes, scales = mxfp4(rng, rows, cols)
        builder.add_matrix(name, "mxfp4_split", codes, rows, cols, scales)
        arrays += [weakref.ref(codes), weakref.ref(scales)]
    del codes, scales
    weights = builder.build()
    del builder
    gc.collect()
    assert all(array() is not None for array in arrays)
    engine = make_engine(weights, device)
    del weights
    first = logits_of(engine)
    assert np.isfinite(first).all()
    assert all(array() is not None for array in arrays)
    engine.close()
    del engine
    gc.collect()
    assert all(array() is None for array in arrays)


def weights_with_biases(device: Any, *, interleaved: bool) -> Any:
    builder = tm.WeightsBuilder(model_config(), device, True)
    add_dense(builder)
    rng = np.random.default_rng(5)
    for name, (rows, cols) in expert_parts().items():
        values = (0.3 * rng.standard_normal((rows, cols))).astype(np.float32)
        bias = rng.standard_normal(rows).astype(np.float32)
        parts = {name: slice(None)}
        if name.endswith("gate_up") and not interleaved:
            expert = name.removesuffix("gate_up")
            parts = {f"{expert}gate": slice(0, None, 2), f"{expert}up": slice(1, None, 2)}
        for part, which in parts.items():
            matrix = np.ascontiguousarray(values[which])
            builder.add_matrix(part, "f32", matrix, *matrix.shape)
            builder.add_vector(f"{part}.bias", bias[which])
    return builder.build()


def test_engine_separate_gate_and_up_equal_interleaved() -> None:
    device = tm.make_cpu_device(2)
    logits = []
    for interleaved in (True, False):
        engine = make_engine(weights_with_biases(device, interleaved=interleaved), device)
        logits.append(logits_of(engine))
        engine.close()
    assert np.array_equal(*logits)


@pytest.mark.parametrize(
    ("form", "rows", "scales", "want"),
    [
        ("mxfp4_split", 64, None, "has no separate scales"),
        (
            "mxfp4_split",
            64,
            np.zeros((64, 3), np.uint8),
            r"\(scales\) has 192 bytes, but needs 128",
        ),
        ("mxfp4_split", 64, np.zeros((64, 2), np.int8), r"\(scales\) has values of dtype int8"),
        ("mxfp4_split", 64, np.zeros((64, 4), np.uint8)[:, ::2], r"\(scales\) is a strided array"),
        ("mxfp4", 64, np.zeros((64, 2), np.uint8), "has 2048 bytes, but needs 2176"),
        ("mxfp4_split", 32, np.zeros((32, 2), np.uint8), "has 2048 bytes, but needs 1024"),
    ],
)
def test_add_matrix_mxfp4_array_of_wrong_shape_is_rejected(
    form: str, rows: int, scales: np.ndarray | None, want: str
) -> None:
    builder = tm.WeightsBuilder(model_config(), tm.make_cpu_device(1), True)
    codes = np.zeros((64, HIDDEN // 2), np.uint8)
    with pytest.raises(ValueError, match=want) as error:
        builder.add_matrix("layers.0.experts.0.gate_up", form, codes, rows, HIDDEN, scales)
    assert "layers.0.experts.0.gate_up" in str(error.value)


def test_add_matrix_scales_without_split_form_are_rejected() -> None:
    builder = tm.WeightsBuilder(model_config(), tm.make_cpu_device(1), True)
    values = np.zeros((2 * INNER, HIDDEN), np.float32)
    scales = np.zeros((2 * INNER, HIDDEN // 32), np.uint8)
    with pytest.raises(ValueError, match="f32 must not have them"):
        builder.add_matrix("layers.0.experts.0.gate_up", "f32", values, 2 * INNER, HIDDEN, scales)


def test_validate_invalid_moe_config_names_the_field() -> None:
    for field, value in [
        ("num_experts", -1),
        ("num_experts", 1 << 20),
        ("top_k", 0),
        ("top_k", EXPERTS + 1),
        ("intermediate_size", 0),
        ("shared_intermediate_size", -1),
        ("layers", [1]),
        ("layers", [1, 2]),
        ("layers", [1, 0]),  # the dense layer then lacks intermediate_size
    ]:
        config = model_config()
        setattr(config.moe, field, value)
        name = "intermediate_size" if value == [1, 0] else f"moe.{field}"
        with pytest.raises(ValueError, match=name):
            config.validate()
    config = model_config()
    config.swiglu_limit = float("nan")
    with pytest.raises(ValueError, match="swiglu_limit"):
        config.validate()
    assert config.moe.layers == [1, 1]


def test_plan_memory_counts_scratch_of_the_decoder() -> None:
    config = tm.EngineConfig()
    config.max_prefill_token_num = rows = 128  # experts process this many rows at a time
    scratch = {
        width: tm.plan_memory(model_config(shared=width), config, 1 << 30).scratch_bytes
        for width in (1024, 2048)  # more than attention uses of the same memory
    }
    # Gate, up and their product.
    assert scratch[2048] - scratch[1024] == rows * 3 * (2048 - 1024) * 4
