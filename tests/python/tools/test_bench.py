"""The benchmarks: rows and files of the suite, the load of the server benchmark, GPU programs."""

from __future__ import annotations

import dataclasses
import json
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_drafts
import bench_engine
import bench_gpu
import bench_server
import draft_workloads
import numpy as np
import pytest
from results import ResultsFile
from targets import BY_NAME, Cpu, Runs, TargetSuite, row_of

ROOT = Path(__file__).parents[3]
DECODE, MEMORY = BY_NAME["decode-2048-batch-1"], BY_NAME["memory"]
MACHINE = {"cpu": "x", "cores": 2, "threads": 2, "caches": {}, "isa": "avx2"}


def runs(ours: list[float], baseline: list[float]) -> Runs:
    return Runs(ours, baseline, "nvfp4", "f16")


def test_row_of_ratio_is_median_of_paired_ratios():
    row = row_of(DECODE, runs([10, 20, 90], [10, 10, 30]), model="m")
    assert [row[key] for key in ("ratio", "ratio_low", "ratio_high")] == [2.0, 1.0, 3.0]
    assert row["met"] is True and row["note"] == "runs: only 3"
    assert row_of(MEMORY, runs([11] * 5, [10] * 5), model="m")["met"] is False
    assert row_of(DECODE, None, model="m", note="why")["met"] is None
    with pytest.raises(ValueError, match="not pairs of positive figures"):
        row_of(DECODE, runs([0.0], [1.0]), model="m")


def test_results_file_resumes_and_keeps_complete_rows(tmp_path, capsys):
    path = tmp_path / "rows.json"
    file = ResultsFile(path, commit="a")
    file.measured_on(MACHINE)
    file.add(row_of(DECODE, runs([2.0] * 5, [1.0] * 5), model="m"))
    file.add(row_of(DECODE, None, model="m"))
    assert file.search("key", lambda: 1) == 1
    again = ResultsFile(path, commit="a")
    assert again.search("key", lambda: 2) == 1
    row = again.row("m", DECODE.name, repeats=5)
    assert row["ratio"] == 2.0 and row["commit"] == "a"
    assert again.row("m", DECODE.name, repeats=6) is None
    other = ResultsFile(path, commit="b")
    assert other.row("m", DECODE.name, repeats=5) is None
    assert "measured again" in capsys.readouterr().out
    with pytest.raises(ValueError, match="cores 2, but this machine has 4"):
        again.measured_on({**MACHINE, "cores": 4})
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]


def test_committed_results_contain_rows_of_the_suite():
    for path in (ROOT / "benchmarks/results").glob("targets_*.json"):
        rows = json.loads(path.read_text())["rows"]
        assert rows and all(row["name"] in BY_NAME for row in rows)


def test_suite_leaves_a_row_empty_if_the_baseline_refuses_every_setting(tmp_path, capsys):
    class Refusing:
        name = "other engine"

        def settings(self, work: str) -> list[SimpleNamespace]:
            assert work == "batch"
            return [SimpleNamespace(name="a"), SimpleNamespace(name="b")]

        def context(self, cell: Any, setting: Any) -> Any:
            raise RuntimeError(f"no {setting.name} with {cell.batch} sequences")

    loaded = SimpleNamespace(path="model.gguf")
    file = ResultsFile(tmp_path / "rows.json", commit="a")
    suite = TargetSuite(loaded, Refusing(), file=file, cpu=Cpu(1), repeats=5, attention_bench=None)
    suite.run([BY_NAME["decode-128-batch-32"]])
    printed = capsys.readouterr().out
    assert "other engine, b: skipped: no b with 32 sequences" in printed
    assert "not measured: other engine refuses every setting" in printed


def test_bench_engine_rejects_unknown_targets(capsys):
    assert bench_engine.main(["--suite", "targets", "--only", "no-such-target"]) == 2
    assert "decode-2048-batch-1" in capsys.readouterr().err
    options = bench_engine.parse_arguments(["--suite", "targets", "--only", "memory"])
    assert bench_engine.targets_of(options) == [MEMORY]


# The server benchmark.

USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}


def stream(*events: Any) -> list[tuple[float, bytes]]:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return [(float(i), f"data: {text}\n".encode()) for i, text in enumerate(texts)]


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}]}


def test_summarize_counts_pieces_and_gaps():
    lines = stream(piece("a"), piece(""), piece("b"), piece("c"), USAGE, "[DONE]")
    answer = bench_server.read_answer(-1.0, lines, lengths=(3, 4))
    assert answer.pieces == [0.0, 2.0, 3.0]
    other = dataclasses.replace(answer, pieces=[0.0, 5.0])
    result = bench_server.summarize([answer, other], 10.0)
    assert result["requests_per_s"] == 0.2
    assert result["p50_token"] == 2.0 and result["p50_first"] == 1.0


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([piece("a"), piece("b"), USAGE], "DONE"),
        ([piece("a"), piece("b"), "[DONE]"], "None prompt tokens"),
        ([piece("a"), USAGE, "[DONE]"], "1 pieces"),
        ([{"error": {"message": "full"}}, "[DONE]"], "full"),
    ],
)
def test_read_answer_rejects_incomplete_answers(events, words):
    with pytest.raises(RuntimeError, match=words):
        bench_server.read_answer(0.0, stream(*events), lengths=(3, 4))


# GPU programs. Small cells run on the CPU in ctest (cuda/bench_device).

DEVICE_BENCH = f"""#!{sys.executable}
import json, sys
print(json.dumps({{"device": "Synthetic GPU"}}), flush=True)
for line in sys.stdin:
    if "op=flatten" in line:
        sys.exit(9)
    print(json.dumps({{"us": 10.0}}), flush=True)
"""


def test_replayed_answers_are_forced_token_by_token():
    tokens = [0, 31, 63, 5]
    forced = bench_drafts.ForcedText(tokens)
    mask = np.zeros(2, np.int32)
    assert forced([], mask) and mask.tolist() == [1, 0]
    assert forced([0], mask) and mask.tolist() == [-(1 << 31), 0]
    assert forced([31, 63], mask) and mask.tolist() == [1 << 5, 0]


def test_workloads_of_drafts_have_references():
    for workload in draft_workloads.workloads():
        assert len(workload.reference) > 700
        assert workload.target >= 0.98


def test_bench_gpu_restarts_the_program_after_a_crash(tmp_path, capsys):
    program, path = tmp_path / "device_bench", tmp_path / "gpu.json"
    program.write_text(DEVICE_BENCH)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    command = ["device", "--small", "--bench", str(program), "--json", str(path)]
    assert bench_gpu.main(command) == 1
    rows = json.loads(path.read_text())["rows"]
    cells = [cell for cell in bench_gpu.small_cells() if "op=flatten" not in cell]
    assert [row["cell"] for row in rows] == cells
    assert all(row["commit"] and row["date"] for row in rows)
    assert capsys.readouterr().out.count("FAILED: op=flatten") == len(bench_gpu.FEW_MODES)
    assert bench_gpu.main(command) == 1
    assert len(json.loads(path.read_text())["rows"]) == len(cells)  # replaced, not repeated
    path.write_text(path.read_text().replace("Synthetic", "Other"))
    assert bench_gpu.main(command) == 2
    program.write_text("#!/bin/sh\nexit 2\n")
    assert bench_gpu.main(command) == bench_gpu.NO_GPU


def test_gpu_ops_have_small_tests_for_the_memory_checkers():
    small = {
        path.name.removesuffix("_test.cc")
        for path in (ROOT / "tests/cpp/cuda").rglob("*_test.cc")
        if 'test_suite("small")' in path.read_text(encoding="utf-8")
    }
    ops = {"decode_ops", "dense_ops", "sampling_ops", "kv_flatten", "kv_ops", "linear_ops"}
    assert small == {*ops, "prefill_ops"}
