"""Tests of engine profiles: steps, bytes per op, and the table of the benchmark."""

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


def run_profile(mode: str) -> dict[str, Any]:
    """Run a request on the model of test_bindings and return the phases by name.

    The profiling device passes every op on, so the answer equals that without it.
    """
    config = tm.EngineConfig()
    config.kv_format = mode
    config.max_batch_size, config.session_len = 4, 256
    config.max_prefill_token_num, config.cache_block_seq_len = 64, 16
    answers = []
    plain = tm.make_cpu_device(1)
    device = tm.make_profiling_device(plain)
    assert device.profile() == []
    for each in (plain, device):
        engine = tm.Engine(model_config(), config, build_weights(each), each, 64 << 20)
        engine.submit(make_request(1, list(range(PROMPT)), NEW_TOKENS))
        answers.append([token for output in collect(engine) for token in output.tokens])
        engine.close()
    assert len(answers[0]) == NEW_TOKENS and answers[0] == answers[1]
    return {phase.phase: phase for phase in device.profile()}


def find(phase: Any, kind: str, rows: int = 0, cols: int = 0) -> Any:
    records = [r for r in phase.records if (r.kind, r.rows, r.cols) == (kind, rows, cols)]
    assert len(records) == 1
    return records[0]


@pytest.mark.parametrize("mode", sorted(KV_TOKEN_BYTES))
def test_profile_attention_bytes_equal_visible_positions(mode):
    phases = run_profile(mode)
    assert phases["decode"].num_steps == phases["decode"].num_tokens == NEW_TOKENS - 1
    assert find(phases["decode"], "linear", VOCAB, 64).calls == NEW_TOKENS - 1  # head
    for phase in phases.values():
        inside = [r.nanoseconds for r in phase.records if r.kind != "between_steps"]
        assert sum(inside) == phase.nanoseconds and min(inside) >= 0
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
