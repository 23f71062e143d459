"""Tests of engine profiles: calls and bytes per op, and the table of the benchmark."""

from __future__ import annotations

from typing import Any

import our_engine
import pytest
from test_bindings import VOCAB, build_weights, collect, make_request, model_config

from lmdeploy import _turbomind as tm

LAYERS = 2
PROMPT = 40
NEW_TOKENS = 9  # the prefill step gives the first token
KV_TOKEN_BYTES = {"none": 2 * 128, "nvfp4": 2 * (32 + 4), "int8": 2 * (64 + 4)}  # per layer
WINDOW = 24  # of the second layer


def profiled(mode: str, *, max_prefill: int = 64) -> tuple[Any, Any]:
    """Return an engine of the model of test_bindings, and its device."""
    config = tm.EngineConfig()
    config.kv_format = mode
    config.max_batch_size, config.session_len = 4, 256
    config.max_prefill_token_num, config.cache_block_seq_len = max_prefill, 16
    device = tm.make_profiling_device(tm.make_cpu_device(1))
    return tm.Engine(model_config(), config, build_weights(device), device, 64 << 20), device


def run_profile(mode: str, **options: Any) -> dict[str, Any]:
    """Run a request and return the phases by name."""
    engine, device = profiled(mode, **options)
    assert device.profile() == []
    engine.submit(make_request(1, list(range(PROMPT)), NEW_TOKENS))
    collect(engine)
    engine.close()
    return {phase.phase: phase for phase in device.profile()}


def find(phase: Any, kind: str, rows: int = 0, cols: int = 0) -> Any:
    records = [r for r in phase.records if (r.kind, r.rows, r.cols) == (kind, rows, cols)]
    assert len(records) == 1
    return records[0]


def test_profile_counts_the_calls_of_every_layer():
    phases = run_profile("nvfp4")
    assert set(phases) == {"prefill", "decode"}
    decode, steps = phases["decode"], NEW_TOKENS - 1
    assert decode.num_steps == decode.num_tokens == steps
    calls = {(r.kind, r.rows, r.cols): r.calls for r in decode.records}
    assert calls.pop(("engine", 0, 0)) > 0
    assert calls.pop(("between_steps", 0, 0)) == steps - 1
    assert calls == {
        ("embed", VOCAB, 64): steps,
        ("norm", 0, 0): (2 * LAYERS + 1) * steps,
        ("linear", 256, 64): LAYERS * steps,  # q, k, v
        ("linear", VOCAB, 64): steps,  # head
        ("linear", 64, 128): LAYERS * steps,  # output
        ("linear", 192, 64): LAYERS * steps,  # gate, up
        ("linear", 64, 96): LAYERS * steps,  # down
        ("process_kv", 0, 0): LAYERS * steps,
        ("decode_attention", 0, 0): LAYERS * steps,
        ("activation", 0, 0): LAYERS * steps,
    }
    for phase in phases.values():
        inside = [r.nanoseconds for r in phase.records if r.kind != "between_steps"]
        assert sum(inside) == phase.nanoseconds and min(inside) >= 0


@pytest.mark.parametrize("mode", sorted(KV_TOKEN_BYTES))
def test_profile_attention_bytes_equal_visible_positions(mode):
    phases = run_profile(mode)
    token = KV_TOKEN_BYTES[mode]
    contexts = [PROMPT + i for i in range(1, NEW_TOKENS)]
    record = find(phases["decode"], "decode_attention")
    assert [kv_format.name for kv_format in record.kv_formats] == [mode, mode]
    table = our_engine.format_phase(phases["decode"])
    assert f"decode_attention {mode} " in table and "linear 64 x 96 f32" in table
    assert record.kv_bytes == token * sum(context + min(context, WINDOW) for context in contexts)
    prefill = find(phases["prefill"], "prefill_attention")
    assert prefill.kv_bytes == token * 2 * PROMPT
    written = find(phases["prefill"], "process_kv").kv_bytes
    assert written == token * LAYERS * PROMPT


def test_profile_counts_each_chunk_of_a_prompt_as_a_step():
    phases = run_profile("nvfp4", max_prefill=16)
    assert phases["prefill"].num_steps == 3
    assert phases["prefill"].num_tokens == PROMPT
