"""Tests of the memory plan against the resident memory of a full cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmdeploy import _turbomind as tm

VOCAB = 64
LAYERS = 2
HEADS = 8
HEAD_DIM = 128
HIDDEN = 64
SESSION_LEN = 512
BATCH = 32
# Resident bytes outside the cache: the allocator, the interpreter, partly used pages.
SLACK_BYTES = 3 << 20
SLACK_RATIO = 0.02


def model_config() -> Any:
    config = tm.ModelConfig()
    config.num_layers = LAYERS
    config.hidden_size = HIDDEN
    config.intermediate_size = 64
    config.num_heads = HEADS
    config.num_kv_heads = HEADS
    config.head_dim = HEAD_DIM
    config.vocab_size = VOCAB
    config.max_position = SESSION_LEN
    config.windows = [0] * LAYERS
    config.dtype = "bfloat16"
    rope = tm.RopeConfig()
    rope.dim = HEAD_DIM
    config.ropes = [rope]
    return config


def build_weights(device: Any) -> Any:
    rng = np.random.default_rng(5)
    width = HEADS * HEAD_DIM
    layer = {"q": (width, HIDDEN), "k": (width, HIDDEN), "v": (width, HIDDEN), "o": (HIDDEN, width)}
    layer |= {"gate": (64, HIDDEN), "up": (64, HIDDEN), "down": (HIDDEN, 64)}
    builder = tm.WeightsBuilder(model_config(), device, True)

    def matrix(name: str, rows: int, cols: int) -> None:
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        builder.add_matrix(name, "f32", values, rows, cols)

    ones = np.ones(HIDDEN, np.float32)
    matrix("embedding", VOCAB, HIDDEN)
    builder.add_vector("final_norm", ones)
    for i in range(LAYERS):
        builder.add_vector(f"layers.{i}.attention_norm", ones)
        builder.add_vector(f"layers.{i}.ffn_norm", ones)
        for name, (rows, cols) in layer.items():
            matrix(f"layers.{i}.{name}", rows, cols)
    return builder.build()


def engine_config(mode: str) -> Any:
    config = tm.EngineConfig()
    config.kv_format = mode
    config.max_batch_size = BATCH
    config.session_len = SESSION_LEN
    config.max_prefill_token_num = SESSION_LEN
    config.cache_block_seq_len = 16
    return config


def run_prompts(engine: Any, first: int, count: int) -> None:
    """Run unrelated prompts of session_len tokens; each fills its own blocks."""
    for request_id in range(first, first + count):
        request = tm.Request()
        request.id = request_id
        request.prompt = (
            np.random.default_rng(request_id).integers(VOCAB, size=SESSION_LEN).tolist()
        )
        engine.submit(request)
    finished = 0
    while finished < count:
        outputs = engine.wait_outputs(60_000)
        assert outputs, engine.failure
        assert not any(output.error for output in outputs)
        finished += sum(output.finish_reason != "none" for output in outputs)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS in /proc/self/status")


@pytest.mark.parametrize("mode", ["none", "int4", "nvfp4"])
def test_memory_plan_equals_resident_memory_of_a_full_cache(mode: str) -> None:
    config = engine_config(mode)
    plan = tm.plan_memory(model_config(), config, 8 << 30)
    assert plan.reserved_bytes == BATCH * SESSION_LEN * plan.bytes_per_token
    device = tm.make_cpu_device(2)
    engine = tm.Engine(model_config(), config, build_weights(device), device, 8 << 30)
    run_prompts(engine, 0, 1)  # from here on, the scratch of a full step is resident
    before = resident_bytes()
    touched_before = engine.memory_plan().touched_bytes
    assert touched_before == SESSION_LEN * plan.bytes_per_token
    run_prompts(engine, 1, BATCH - 1)
    assert engine.memory_plan().touched_bytes == plan.reserved_bytes
    grown = resident_bytes() - before
    planned = plan.reserved_bytes - touched_before
    assert abs(grown - planned) < SLACK_BYTES + SLACK_RATIO * planned, (grown, planned)
    engine.close()


def test_plan_memory_fp4_fits_three_and_a_half_times_the_tokens() -> None:
    budget = 64 << 20
    tokens = {}
    for mode in ("none", "mxfp4", "nvfp4"):
        config = engine_config(mode)
        config.max_batch_size = 1 << 16  # so that the budget is the limit
        config.cache_max_entry_count = 0.5
        tokens[mode] = tm.plan_memory(model_config(), config, 2 * budget).max_tokens
    assert tokens["mxfp4"] == tokens["nvfp4"]
    assert tokens["nvfp4"] >= 3.5 * tokens["none"]
