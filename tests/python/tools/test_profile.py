"""Profiles of the engine: what they count, and the report and trace made of them."""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import bench_engine
import profile_report
import pytest
from cells import Cell
from our_engine import OurSetting
from profile_report import ProfiledEngine, ProfileSession, TracedEngine
from tiny_engine import VOCAB, build_weights, collect, make_request, model_config, shapes

from lmdeploy import _turbomind as tm

LAYERS = 2
PROMPT = 40
NEW_TOKENS = 9  # the first one comes from the prompt's step
KV_TOKEN_BYTES = {"none": 2 * 128, "nvfp4": 2 * (32 + 4), "int8": 2 * (64 + 4)}  # a layer, one head
WINDOW = 24  # of the second layer


def profiled(mode: str, *, max_events: int = 0, max_prefill: int = 64) -> tuple[Any, Any]:
    """An engine of test_bindings' model, and its device."""
    config = tm.EngineConfig()
    config.kv_mode = mode
    config.max_batch_size, config.session_len = 4, 256
    config.max_prefill_token_num, config.cache_block_seq_len = max_prefill, 16
    device = tm.make_profiling_device(tm.make_cpu_device(1), max_events)
    return tm.Engine(model_config(), config, build_weights(device), device, 64 << 20), device


def run_profile(mode: str, **options: Any) -> tuple[dict[str, Any], Any, float]:
    """Phases by name, the profile, and the seconds that the request took."""
    engine, device = profiled(mode, **options)
    assert device.profile().phases == []
    begun = time.perf_counter()
    engine.submit(make_request(1, list(range(PROMPT)), NEW_TOKENS))
    collect(engine)
    wall = time.perf_counter() - begun
    engine.close()
    profile = device.profile()
    return {phase.phase: phase for phase in profile.phases}, profile, wall


def find(phase: Any, kind: str, rows: int = 0, cols: int = 0) -> Any:
    records = [r for r in phase.records if (r.kind, r.rows, r.cols) == (kind, rows, cols)]
    assert len(records) == 1
    return records[0]


def packed_bytes(rows: int, cols: int) -> int:
    """FP32 in tiles of 16 outputs."""
    return -(-rows // 16) * 16 * cols * 4


def test_decode_steps_count_what_the_layers_imply():
    phases, profile, wall = run_profile("nvfp4")
    assert set(phases) == {"prefill", "decode"} and profile.events == []
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
    spent = sum(r.nanoseconds for phase in phases.values() for r in phase.records)
    assert 0 < spent <= wall * 1e9


def test_linear_bytes_are_the_packed_weights():
    phases, _, _ = run_profile("none")
    matrices = [shape for name, shape in shapes().items() if len(shape) == 2]
    # The table once more: it is the head.
    per_step = sum(packed_bytes(*shape) for shape in matrices)
    for phase in phases.values():
        linears = [r for r in phase.records if r.kind == "linear"]
        assert sum(r.weight_bytes for r in linears) == per_step * phase.num_steps
        assert {r.format for r in linears} == {"f32"}
    decode = phases["decode"]
    products = sum(2 * rows * cols for rows, cols in matrices)
    linears = [r for r in decode.records if r.kind == "linear"]
    assert sum(r.operations for r in linears) == products * decode.num_steps


@pytest.mark.parametrize("mode", sorted(KV_TOKEN_BYTES))
def test_attention_bytes_are_the_visible_positions(mode):
    phases, _, _ = run_profile(mode)
    token = KV_TOKEN_BYTES[mode]
    contexts = [PROMPT + i for i in range(1, NEW_TOKENS)]
    record = find(phases["decode"], "decode_attention")
    assert record.kv_formats == [mode, mode]
    assert profile_report.name_of(record, {}) == f"decode_attention {mode}"
    assert record.kv_bytes == token * sum(context + min(context, WINDOW) for context in contexts)
    heads = 2 * 64
    scores = sum(context + min(context, WINDOW) for context in contexts)
    assert record.operations == 4 * heads * scores
    prefill = find(phases["prefill"], "prefill_attention")
    assert prefill.kv_bytes == token * 2 * PROMPT
    written = find(phases["prefill"], "process_kv").kv_bytes
    assert written == token * LAYERS * PROMPT


def test_chunks_of_a_prompt_are_steps_of_their_own():
    phases, _, _ = run_profile("nvfp4", max_prefill=16)
    assert phases["prefill"].num_steps == 3
    assert phases["prefill"].num_tokens == PROMPT


def test_clear_begins_anew():
    engine, device = profiled("nvfp4")
    for request_id in (1, 2):
        device.clear()
        engine.submit(make_request(request_id, [1, 2, 3], 1))
        collect(engine)
    engine.close()
    assert [(p.phase, p.num_steps) for p in device.profile().phases] == [("prefill", 1)]
    device.clear()
    assert device.profile().phases == []


def test_answers_are_those_of_the_plain_device():
    def tokens(wrapped: bool) -> list[int]:
        device: Any = tm.make_cpu_device(1)
        if wrapped:
            device = tm.make_profiling_device(device)
        config = tm.EngineConfig()
        config.kv_mode, config.session_len = "nvfp4", 256
        engine = tm.Engine(model_config(), config, build_weights(device), device, 64 << 20)
        engine.submit(make_request(1, list(range(PROMPT)), NEW_TOKENS))
        found = [token for output in collect(engine) for token in output.tokens]
        engine.close()
        return found

    assert tokens(True) == tokens(False)


def test_wrong_arguments_are_refused():
    device = tm.make_cpu_device(1)
    with pytest.raises(ValueError, match="max_events: got -1"):
        tm.make_profiling_device(device, -1)
    with pytest.raises(ValueError, match="seconds: got 0"):
        tm.measure_ceilings(device, 0.0)
    with pytest.raises(ValueError, match="seconds: got nan"):
        tm.measure_ceilings(tm.make_profiling_device(device), float("nan"))


def test_ceilings_are_of_the_device():
    device = tm.make_profiling_device(tm.make_cpu_device(2, "scalar"))
    ceilings = tm.measure_ceilings(device, 0.05)
    assert (ceilings.isa, ceilings.num_threads) == ("scalar", 2)
    assert ceilings.memory.bytes_per_s > 0 and ceilings.memory.working_set >= 64 << 20
    assert ceilings.int8_ops_per_s > 0 and ceilings.fp32_ops_per_s > 0
    assert ceilings.bf16_ops_per_s == 0  # no instruction for it
    text = profile_report.format_ceilings(ceilings)
    assert "bf16 not available" in text and "AMX not available" in text
    assert profile_report.ceiling_facts(ceilings)["bf16_gop_per_s"] is None


# --- The report


def ceilings(tile_rate: float = 0.0) -> Any:
    """Round numbers: memory 10 GB/s, L3 40, L2 100; int8 2000 GOP/s, BF16 800, FP32 400; tiles."""
    read = [SimpleNamespace(bytes_per_s=rate * 1e9, working_set=1 << 20) for rate in (10, 40, 100)]
    return SimpleNamespace(
        isa="avx512",
        num_threads=2,
        l2_bytes=1 << 20,
        l3_bytes=32 << 20,
        memory=read[0],
        l3=read[1],
        l2=read[2],
        int8_ops_per_s=2e12,
        bf16_ops_per_s=8e11,
        fp32_ops_per_s=4e11,
        tile_int8_ops_per_s=tile_rate,
        tile_bf16_ops_per_s=tile_rate / 2,
    )


def record(kind: str, ms: float, **values: Any) -> Any:
    numbers = {"rows": 0, "cols": 0, "format": "", "calls": 1, "weight_bytes": 0, "kv_bytes": 0}
    numbers |= {
        "kv_formats": [],
        "activation_bytes": 0,
        "operations": 0,
        "nanoseconds": round(ms * 1e6),
    }
    return SimpleNamespace(kind=kind, **{**numbers, **values})


@pytest.mark.parametrize(
    ("values", "streamed", "ceiling", "least_ms"),
    [
        ({"weight_bytes": 20_000_000}, 100e6, "memory", 2.0),
        ({"weight_bytes": 20_000_000}, 20e6, "L3", 0.5),
        ({"weight_bytes": 1_000_000}, 1e6, "L2", 0.01),
        ({"kv_bytes": 10_000_000, "operations": 10**9}, 100e6, "fp32", 2.5),
        ({"kv_bytes": 40_000_000, "operations": 10**9}, 100e6, "memory", 4.0),
        # Two int8 products for each value of a quantised weight.
        ({"weight_bytes": 1000, "format": "q4_0", "operations": 10**9}, 1e8, "int8", 1.0),
        ({"kv_formats": ["nvfp4", "int8"], "kv_bytes": 9, "operations": 10**9}, 1e8, "int16", 1.0),
        ({"kv_formats": ["nvfp4", "fp8"], "kv_bytes": 9, "operations": 10**9}, 1e8, "fp32", 2.5),
        ({"weight_bytes": 1000, "format": "bf16", "operations": 8 * 10**8}, 1e8, "bf16", 1.0),
        ({"weight_bytes": 1000, "format": "f32", "operations": 4 * 10**8}, 1e8, "fp32", 1.0),
        # Activations live where those of one call fit, whatever the step streams.
        ({"activation_bytes": 1_000_000}, 100e6, "L2", 0.01),
        ({"activation_bytes": 100_000_000, "calls": 10}, 100e6, "L3", 2.5),
    ],
)
def test_the_slower_ceiling_binds(values, streamed, ceiling, least_ms):
    op = record("linear", 5.0, **values)
    name, share = profile_report.binding_ceiling(op, ceilings(), streamed=streamed)
    assert (name, share) == (ceiling, pytest.approx(least_ms / 5.0))


@pytest.mark.parametrize(
    ("kind", "values", "ceiling"),
    [
        ("linear", {"format": "q4_0", "operations": 2 * 32 * 32 * 12}, "tiles"),
        ("linear", {"format": "q4_0", "operations": 2 * 32 * 32 * 11}, "int8"),
        ("linear", {"format": "bf16", "operations": 2 * 32 * 32}, "tiles"),
        ("linear", {"format": "f32", "operations": 2 * 32 * 32 * 12}, "fp32"),
        ("prefill_attention", {"kv_formats": ["nvfp4"], "operations": 1}, "tiles"),
        ("prefill_attention", {"kv_formats": ["int8", "nvfp4"], "operations": 1}, "int16"),
        ("decode_attention", {"kv_formats": ["nvfp4"], "operations": 1}, "int16"),
    ],
)
def test_tiles_bind_what_goes_through_them(kind, values, ceiling):
    op = record(kind, 5.0, **({"rows": 32, "cols": 32} | values))
    name, rate = profile_report.product_rate(op, ceilings(tile_rate=8e12))
    assert name == ceiling
    products = 1 if values.get("format") == "bf16" else 2  # for 16 bits
    assert name != "tiles" or rate == 8e12 / 2 / products
    assert profile_report.product_rate(op, ceilings())[0] != "tiles"


def test_time_without_work_has_no_ceiling():
    for kind in ("engine", "between_steps", "linear"):
        assert profile_report.binding_ceiling(record(kind, 1.0), ceilings(), streamed=1.0) == (
            "",
            None,
        )


def test_a_phase_in_numbers():
    records = [
        record("norm", 2.0, activation_bytes=100_000, calls=10),
        record("linear", 6.0, weight_bytes=30_000_000, operations=60_000_000, rows=64, cols=96),
        record("between_steps", 2.0, calls=2),
    ]
    phase = SimpleNamespace(phase="decode", num_steps=2, num_tokens=8, records=records)
    report = profile_report.phase_report(
        phase, ceilings(), roles=profile_report.roles_of(model_config())
    )
    assert (report.ms_per_step, report.tokens_per_step) == (5.0, 4.0)
    assert [row.op.split()[0] for row in report.rows] == ["linear", "norm", "between_steps"]
    linear = report.rows[0]
    assert linear.op.endswith("(down)")
    assert (linear.ms_per_step, linear.share) == (3.0, 0.6)
    assert (linear.gb_per_s, linear.gop_per_s) == (5.0, 10.0)
    assert (linear.ceiling, linear.of_ceiling) == ("L3", pytest.approx(0.125))  # 15 MB a step
    assert report.rows[1].calls_per_step == 5.0
    text = profile_report.format_phase(report)
    assert "decode: 2 steps, 4.0 tokens and 5.000 ms each" in text
    assert "12.5% L3" in text


def test_roles_name_every_matrix_of_the_model():
    roles = profile_report.roles_of(model_config())
    assert roles["linear", 256, 64] == "q, k, v"
    assert roles["linear", VOCAB, 64] == "head"
    assert roles["embed", VOCAB, 64] == "embedding"
    phases, _, _ = run_profile("none")
    for op in phases["decode"].records:
        assert bool(op.rows) == ((op.kind, op.rows, op.cols) in roles)


def check_trace(events: list[dict[str, Any]]) -> dict[tuple[int, int], int]:
    """Complete events of each track in ns: none overlaps the next; returns how many."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] != "X":
            assert event["ph"] == "M"
            continue
        begin = round(event["ts"] * 1000)
        end = begin + round(event["dur"] * 1000)
        assert 0 <= begin <= end and event["name"] and event["args"]["step"] >= 0
        tracks.setdefault((event["pid"], event["tid"]), []).append((begin, end))
    for spans in tracks.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(spans)):
            assert end <= begin
    return {track: len(spans) for track, spans in tracks.items()}


def test_an_overlap_in_a_trace_is_found():
    event = {"ph": "X", "pid": 1, "tid": 1, "name": "a", "args": {"step": 0}}
    with pytest.raises(AssertionError):
        check_trace([{**event, "ts": 0.0, "dur": 2.0}, {**event, "ts": 1.0, "dur": 2.0}])


def test_the_bound_on_events():
    _, profile, _ = run_profile("nvfp4", max_events=10)
    _, whole, _ = run_profile("nvfp4", max_events=10_000)
    assert len(profile.events) == 10
    assert profile.num_dropped_events == len(whole.events) - 10
    assert whole.num_dropped_events == 0


def session_run(tmp_path: Any, engine_class: type[ProfiledEngine]) -> tuple[str, Any, Any, Any]:
    """Printed text, the parsed JSON, the parsed trace and the last profile of two cells."""
    config, device = model_config(), tm.make_cpu_device(1)
    config.vocab_size = 304  # prompts draw from the middle of the vocabulary
    weights = build_large_vocab(config, device)
    paths = tmp_path / "profile.json", tmp_path / "trace.json"
    session = ProfileSession(config, threads=1, json_path=paths[0], trace_path=paths[1])
    setting = OurSetting("nvfp4", session_len=256, num_blocks=32)
    engine = engine_class(config, weights, setting=setting, threads=1)
    cells = [Cell(context=64, batch=1, steps=4), Cell(context=32, batch=2, steps=4)]
    texts = []
    for cell in cells:
        engine.run(cell)
        texts.append(session.add(cell, engine))
    engine.close()
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return "\n".join(texts), *documents, engine.profiling.profile()


def build_large_vocab(config: Any, device: Any) -> Any:
    """As build_weights, for the vocabulary of `config`."""
    import numpy as np

    builder = tm.WeightsBuilder(config, device, False)
    rng = np.random.default_rng(3)
    for name, shape in {**shapes(), "embedding": (config.vocab_size, 64)}.items():
        values = (0.3 * rng.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)
        if len(shape) == 1:
            builder.add_vector(name, values)
        else:
            builder.add_matrix(name, "f32", values, *shape)
    return builder.build()


def test_a_session_writes_tables_json_and_a_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_report, "CEILING_SECONDS", 0.05)
    text, report, trace, profile = session_run(tmp_path, TracedEngine)
    assert "profile of nvfp4, balanced (" in text and ", batch 1, context 64" in text
    assert ", batch 2, context 32" in text
    assert report["cells"][0]["quality"].startswith("balanced")
    assert "linear 256 x 64 f32 (q, k, v)" in text and "decode_attention" in text
    assert report["ceilings"]["read"]["memory"]["gb_per_s"] > 0
    assert [cell["batch"] for cell in report["cells"]] == [1, 2]
    for cell in report["cells"]:
        for phase in cell["phases"]:
            assert sum(row["share"] for row in phase["rows"]) == pytest.approx(1.0)
            assert sum(row["ms_per_step"] for row in phase["rows"]) == pytest.approx(
                phase["ms_per_step"]
            )
    assert any(phase["phase"] == "decode" for phase in report["cells"][1]["phases"])
    counts = check_trace(trace["traceEvents"])
    assert set(counts) == {(pid, tid) for pid in (1, 2) for tid in (1, 2)}
    assert counts[2, profile_report.OPS_TRACK] == len(profile.events)
    steps = sum(phase.num_steps for phase in profile.phases)
    assert counts[2, profile_report.STEPS_TRACK] == steps


def test_the_profile_is_of_the_last_run(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_report, "CEILING_SECONDS", 0.05)
    _, report, trace, profile = session_run(tmp_path, ProfiledEngine)
    assert profile.events == [] and check_trace(trace["traceEvents"]) == {}
    last = {phase["phase"]: phase["num_steps"] for phase in report["cells"][1]["phases"]}
    assert last == {phase.phase: phase.num_steps for phase in profile.phases}


def test_flags_of_the_benchmark():
    assert bench_engine.parse_arguments([]).profile is None
    assert bench_engine.parse_arguments(["--profile"]).profile == ""
    options = bench_engine.parse_arguments(["--profile", "p.json", "--trace", "t.json"])
    assert (options.profile, str(options.trace)) == ("p.json", "t.json")


def test_a_suite_has_no_profile(capsys):
    with pytest.raises(SystemExit):
        bench_engine.parse_arguments(["--suite", "targets", "--profile"])
    assert "not of --suite" in capsys.readouterr().err


def test_each_timing_begins_anew():
    config, device = model_config(), tm.make_cpu_device(1)
    config.vocab_size = 304
    weights = build_large_vocab(config, device)
    setting = OurSetting("none", session_len=256, num_blocks=32)
    with ProfiledEngine(config, weights, setting=setting, threads=1) as engine:
        cell = Cell(context=130, batch=1, steps=4, shared=True)
        for _ in range(2):
            engine.prefill(cell)
            (phase,) = engine.profiling.profile().phases
            assert (phase.phase, phase.num_steps, phase.num_tokens) == ("prefill", 1, 130)
        engine.run(cell)  # the shared prompt is read before the timing
        phases = {p.phase: p for p in engine.profiling.profile().phases}
        assert phases["prefill"].num_tokens == 130 - 128
        assert phases["decode"].num_steps >= 4


def test_a_plain_engine_has_no_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_report, "CEILING_SECONDS", 0.01)
    session = ProfileSession(model_config(), threads=1, json_path=None, trace_path=None)
    with pytest.raises(TypeError, match="got object, want a ProfiledEngine"):
        session.add(Cell(1, 1, 1), object())
