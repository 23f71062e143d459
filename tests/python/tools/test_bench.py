"""The benchmarks: rows and files of the suite, the load of the server benchmark, GPU programs."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_engine
import bench_frontend
import bench_gpu
import bench_server
import pytest
from results import ResultsFile, read_rows
from suite import BY_NAME, ROW_KEY, Cpu, Runs, Suite, row_of

ROOT = Path(__file__).parents[3]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.jsonl"))
DECODE = BY_NAME["decode-2048-batch-1"]
MACHINE = "x, 2 cores, 2 threads, avx2"


def row(ours: list[float], baseline: list[float]) -> dict[str, Any]:
    return row_of(DECODE, Runs(ours, baseline, "nvfp4", "f16"), model="m", baseline_by="other 1")


def test_row_of_ratio_is_median_of_paired_ratios():
    found = row([10, 20, 90], [10, 10, 30])
    assert [found[key] for key in ("ratio", "ratio_low", "ratio_high")] == [2.0, 1.0, 3.0]
    assert found["note"] == "runs: only 3"
    for ours, baseline in (([0.0], [1.0]), ([1.0, 2.0], [1.0]), ([], [])):
        with pytest.raises(ValueError, match="not pairs of positive figures"):
            row(ours, baseline)


def test_results_file_resumes_and_replaces_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    file = ResultsFile(path, machine=MACHINE, key=ROW_KEY, commit="a")
    file.add(row([2.0] * 5, [1.0] * 5))
    file.add({"baseline_by": "other 1", "model": "m", "name": "memory"}, is_of_commit=False)
    again = ResultsFile(path, machine=MACHINE, key=ROW_KEY, commit="a")
    found = again.find(row([1.0], [1.0]))
    assert found["ratio"] == 2.0 and found["machine"] == MACHINE and found["date"]
    assert again.find({**found, "model": "other"}) is None
    other = ResultsFile(path, machine=MACHINE, key=ROW_KEY, commit="b")
    assert other.find(found) is None
    other.add(row([3.0] * 5, [1.0] * 5))
    assert [(r["name"], r.get("commit")) for r in read_rows(path)] == [
        ("memory", None),
        (DECODE.name, "b"),
    ]
    with pytest.raises(ValueError, match=r"rows of x, 2 cores.* but this machine is y"):
        ResultsFile(path, machine="y", key=ROW_KEY)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"ours": 1}', '{"machine": 2}'])
def test_results_file_rejects_lines_that_are_no_rows(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"machine": "x"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2 is not "):
        read_rows(path)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_rows_name_machine_commit_and_date(path):
    rows = read_rows(path)
    assert rows
    for found in rows:
        assert found["machine"] and found["date"].startswith("2026-")
        assert found.get("commit") or found.get("by", bench_gpu.OURS) != bench_gpu.OURS
        if path.stem in ("speed_avx512", "speed_avx2", "speed_amx"):
            assert found["name"] in BY_NAME and found["baseline_by"]


def test_every_committed_file_of_results_is_cited_by_a_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md"))
    names = [path.name for path in (ROOT / "benchmarks/results").iterdir()]
    assert [name for name in names if f"benchmarks/results/{name})" not in pages] == []


def test_suite_stores_no_row_if_the_baseline_refuses_every_setting(tmp_path, capsys):
    class Refusing:
        name = "other engine"

        def about(self) -> str:
            return "other engine 1"

        def settings(self, work: str) -> list[SimpleNamespace]:
            assert work == "batch"
            return [SimpleNamespace(name="a"), SimpleNamespace(name="b")]

        def context(self, cell: Any, setting: Any) -> Any:
            raise RuntimeError(f"no {setting.name} with {cell.batch} sequences")

    loaded = SimpleNamespace(path="model.gguf")
    file = ResultsFile(tmp_path / "rows.jsonl", machine=MACHINE, key=ROW_KEY, commit="a")
    Suite(loaded, Refusing(), file=file, cpu=Cpu(1), repeats=5).run(
        [BY_NAME["decode-128-batch-32"]]
    )
    assert file.rows == []
    printed = capsys.readouterr().out
    assert "other engine, b: skipped: no b with 32 sequences" in printed
    assert "not measured: other engine refuses every setting" in printed


def test_bench_engine_rejects_unknown_workloads(capsys):
    assert bench_engine.main(["--suite", "--only", "no-such-workload"]) == 2
    assert "decode-2048-batch-1" in capsys.readouterr().err
    options = bench_engine.parse_arguments(["--suite", "--only", "memory"])
    assert bench_engine.workloads_of(options) == [BY_NAME["memory"]]


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


def test_bench_gpu_restarts_the_program_after_a_crash(tmp_path, capsys):
    program, path = tmp_path / "device_bench", tmp_path / "gpu.jsonl"
    program.write_text(DEVICE_BENCH)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    command = ["device", "--small", "--bench", str(program), "--json", str(path)]
    assert bench_gpu.main(command) == 1
    rows = read_rows(path)
    cells = [cell for cell in bench_gpu.small_cells() if "op=flatten" not in cell]
    assert [row["cell"] for row in rows] == cells
    assert all(row["commit"] and row["date"] for row in rows)
    assert capsys.readouterr().out.count("FAILED: op=flatten") == len(bench_gpu.FEW_MODES)
    assert bench_gpu.main(command) == 1
    assert len(read_rows(path)) == len(cells)  # replaced, not repeated
    path.write_text(path.read_text().replace("Synthetic", "Other"))
    assert bench_gpu.main(command) == 2
    program.write_text("#!/bin/sh\nexit 2\n")
    assert bench_gpu.main(command) == bench_gpu.NO_GPU


def test_gpu_ops_have_small_tests_for_the_memory_checkers():
    folder = ROOT / "tests/cpp"
    small = {
        path.stem.removesuffix("_test")
        for path in [*folder.glob("cuda/*_test.cc"), *folder.glob("ops/*.h")]
        if 'test_suite("small")' in path.read_text(encoding="utf-8")
    }
    ops = {"decode_ops", "sampling_ops", "kv_flatten", "kv_ops", "linear_ops", "prefill_ops"}
    latents = {"latent_attention", "latent_rows"}
    assert small == {*ops, *latents, "device_suite", "recurrent_suite", "routing_suite"}


def test_gpu_check_tuner_prints_and_stores_rows_to_commit(tmp_path):
    build, results = tmp_path / "build", tmp_path / "results"
    build.mkdir()
    table = {"tuned_for": "Synthetic GPU, SM 90", "choices": [{"kernel": "tile"}], "num_left": 0}
    program = build / "device_bench"
    program.write_text(DEVICE_BENCH.replace('{"us": 10.0}', repr(table)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (build / "libturbomind_cuda.so").touch()
    env = {**os.environ, "PYTHON": sys.executable, "TM_CUDA_BUILD": str(build)}
    env |= {"TM_GPU_RESULTS": str(results), "TM_GPU_LOGS": str(tmp_path / "logs")}
    command = [str(ROOT / "scripts/gpu_check.sh"), "tuner"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_rows(results / "tuner_synthetic_gpu.jsonl")
    assert [row["cell"] for row in rows] == list(bench_gpu.tuner_cells())
    assert all(row["choices"] == table["choices"] for row in rows)
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert printed == rows
    program.write_text(
        '#!/bin/sh\necho \'{"device": "Synthetic GPU"}\'\nread cell && exit 9\nexit 0\n'
    )
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1 and "tuner        FAILED" in done.stdout


@pytest.mark.parametrize("endpoint", bench_frontend.ENDPOINTS)
def test_bench_frontend_counts_the_tokens_of_every_endpoint(endpoint):
    load = bench_frontend.Load(endpoint, streams=4, tokens=20, interval=0.005)
    figures = bench_frontend.measure(load, ROOT)
    assert 0 < figures["tokens_per_s"] < 4 / 0.005 * 1.5
    assert figures["events_per_token"] > 0.1 and figures["p99_gap_ms"] > 0


def test_bench_frontend_measures_the_memory_of_clients_that_do_not_read(monkeypatch):
    monkeypatch.setattr(bench_frontend, "SLOW_SECONDS", 0.5)
    load = bench_frontend.Load("chat", streams=4, tokens=100, interval=0.001, reads=False)
    assert bench_frontend.measure(load, ROOT)["rss_mib"] > 10
