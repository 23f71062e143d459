"""The benchmarks that ask programs on a GPU, with programs that are none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

import bench_generation
import bench_kernels
import gpu_plan
import pytest
from bench_process import BenchProcess, NoAnswer
from checkpoint_configs import NAMED_CONFIGS
from gpu_fakes import BENCH, BENCH_THAT_HANGS, GENERATION, program
from gpu_results import read_document

from lmdeploy.checkpoint.hf import _config_from_hf
from lmdeploy.models import family_of_hf
from lmdeploy.models.config_reader import ConfigReader

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("TM_BUILD_FOLDER", ROOT / "build/release"))


def kernels(path: Path, bench: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and rows of bench_kernels.py."""
    status = bench_kernels.main(["--bench", str(bench), "--json", str(path), *more])
    return status, read_document(path)["kernels"]


def test_a_cell_that_fails_is_reported_and_the_rest_measured(tmp_path, capsys):
    bench = program(tmp_path / "bench", BENCH)
    path = tmp_path / "gpu.json"
    status, rows = kernels(path, bench, "--small")
    assert status == 1
    text = capsys.readouterr().out
    assert text.count("FAILED: op=flatten") == 4 and "skipped, too little memory: op=exp" in text
    assert {row["op"] for row in rows} == {"copy", "decode", "write", "prefill", "linear"}
    assert len({row["run"] for row in rows}) == 1 and all(row["of_copy"] > 0 for row in rows)
    assert kernels(path, bench, "--small", "--only", "op=decode")[0] == 0


def test_time_that_is_over_is_said(tmp_path, capsys):
    bench = program(tmp_path / "bench", BENCH)
    assert kernels(tmp_path / "gpu.json", bench, "--budget-s", "0") == (1, [])
    text = capsys.readouterr().out
    assert f"{len(gpu_plan.kernel_cells())} cells left out" in text
    assert "FAILED: nothing was measured" in text


def test_a_program_that_hangs_loses_nothing_and_is_not_waited_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_kernels, "WAIT_BEYOND_S", 0.2)
    bench = program(tmp_path / "bench", BENCH_THAT_HANGS)
    begun = time.monotonic()
    status, rows = kernels(tmp_path / "gpu.json", bench, "--budget-s", "2")
    assert time.monotonic() - begun < 10
    assert status == 0 and [row["op"] for row in rows] == ["copy", "decode"]
    text = capsys.readouterr().out
    assert "without an answer to: op=decode" in text
    assert f"{len(gpu_plan.kernel_cells()) - 2} cells left out" in text


def test_a_program_that_does_not_start_again_loses_nothing(tmp_path, capsys):
    bench = program(
        tmp_path / "bench",
        f"""
        import pathlib
        begun = pathlib.Path({str(tmp_path / "begun")!r})
        if begun.exists():
            sys.exit("no GPU any more")
        begun.touch()
        print(json.dumps({{"device": "Synthetic GPU", "kind": "cuda"}}), flush=True)
        for number, line in enumerate(sys.stdin):
            if number >= 2:
                sys.exit(9)
            print(json.dumps({{"us": 10.0, "kv_bytes": 1000}}), flush=True)
        """,
    )
    status, rows = kernels(tmp_path / "gpu.json", bench)
    assert status == 1 and len(rows) == 2
    text = capsys.readouterr().out
    assert "ended with 9" in text and "not started again after that" in text
    assert f"{len(gpu_plan.kernel_cells()) - 3} cells left out" in text


def test_rows_are_in_the_file_as_they_are_measured(tmp_path):
    path = tmp_path / "gpu.json"
    bench = program(tmp_path / "bench", BENCH_THAT_HANGS)
    command = ["python3", str(ROOT / "benchmarks/bench_kernels.py"), "--bench", str(bench)]
    command += ["--json", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        os.killpg(process.pid, signal.SIGKILL)  # and the bench that hangs
    assert [row["op"] for row in read_document(path)["kernels"]] == ["copy", "decode"]


def test_the_file_of_another_gpu_is_refused_before_anything_is_measured(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    path.write_text(
        json.dumps({"about": {"device": "x"}, "kernels": [], "generation": [], "checks": []})
    )
    for main, body in ((bench_kernels.main, BENCH), (bench_generation.main, GENERATION)):
        bench = program(tmp_path / "bench", body)
        assert main(["--bench", str(bench), "--small", "--json", str(path)]) == 2
        captured = capsys.readouterr()
        assert "come from x" in captured.err and "µs" not in captured.out


def test_without_a_gpu(tmp_path, capsys):
    bench = program(tmp_path / "bench", "sys.exit('CUDA is not used: no driver')")
    json_path = str(tmp_path / "gpu.json")
    for main in (bench_kernels.main, bench_generation.main):
        assert main(["--bench", str(bench), "--small", "--json", json_path]) == 3
        assert "no GPU" in capsys.readouterr().err
        assert main(["--bench", str(tmp_path / "none"), "--small", "--json", json_path]) == 2
        with pytest.raises(SystemExit):  # small figures are none for the results
            main(["--bench", str(bench), "--small"])
        assert "--small needs --json" in capsys.readouterr().err


def test_a_program_that_hangs_or_ends_is_no_end(tmp_path):
    hangs = program(tmp_path / "hangs", "time.sleep(60)")
    with BenchProcess([str(hangs)]) as process, pytest.raises(NoAnswer, match="no answer in"):
        process.answer(0.2)
    ends = program(tmp_path / "ends", "sys.exit(7)")
    with BenchProcess([str(ends)]) as process:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ended with 7"):
                process.answer(10)


def test_generation(tmp_path, capsys):
    bench = program(tmp_path / "bench", GENERATION)
    path = tmp_path / "gpu.json"
    assert bench_generation.main(["--bench", str(bench), "--json", str(path)]) == 1
    rows = read_document(path)["generation"]
    assert len(rows) == 2 * 2 * (len(bench_generation.WORK) - 1)  # models, works, but int8
    assert {row["model"] for row in rows} == set(bench_generation.MODELS)
    assert all(row["run"] for row in rows)
    assert capsys.readouterr().out.count("FAILED: ") == 2
    late = ["--bench", str(bench), "--json", str(path), "--budget-s", "0"]
    assert bench_generation.main(late) == 1
    text = capsys.readouterr().out
    assert "left out: llama-3-8b: mode=nvfp4" in text
    assert "FAILED: gpt-oss-20b: nothing was measured" in text


@pytest.mark.parametrize(("end", "status"), [("time.sleep(600)", 0), ("sys.exit(9)", 1)])
def test_generation_keeps_what_it_has(tmp_path, capsys, monkeypatch, end, status):
    monkeypatch.setattr(bench_kernels, "WAIT_BEYOND_S", 0.2)
    body = GENERATION.replace('print(json.dumps({"error": "broken"}), flush=True)', end)
    bench = program(tmp_path / "bench", body)
    path = tmp_path / "gpu.json"
    arguments = ["--bench", str(bench), "--json", str(path), "--budget-s", "3"]
    assert bench_generation.main([*arguments, "--models", "llama-3-8b"]) == status
    before = [mode for mode, _ in bench_generation.WORK].index("int8")
    assert len(read_document(path)["generation"]) == 2 * before
    text = capsys.readouterr().out
    assert ("without an answer" in text) == (status == 0) and "left out: " in text


def built(name: str) -> Path:
    """A program of the build folder."""
    if not (BUILD / name).exists():
        pytest.skip(f"no {BUILD / name}: build there, or set TM_BUILD_FOLDER")
    return BUILD / name


def test_small_cells_run_on_the_cpu(tmp_path):
    for main, name, more in (
        (bench_kernels.main, "device_bench", []),
        (bench_generation.main, "generation_bench", ["--models", "tiny-llama,tiny-gpt-oss"]),
    ):
        arguments = ["--bench", str(built(name)), "--device", "cpu", "--small", *more]
        assert main([*arguments, "--json", str(tmp_path / f"{name}.json")]) == 0
    rows = read_document(tmp_path / "device_bench.json")["kernels"]
    assert len(rows) == len(gpu_plan.small_cells())
    rows = read_document(tmp_path / "generation_bench.json")["generation"]
    assert len(rows) == 2 * 3 * bench_generation.SMALL_WORK
    assert all(row["tokens_per_s"] >= 0 for row in rows)


ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")  # in the order of C++
ROPES = ("none", "default", "linear", "dynamic", "llama3", "yarn")


@pytest.mark.parametrize("name", bench_generation.MODELS)
def test_models_with_random_weights_are_those_that_were_published(name):
    command = [str(built("generation_bench")), f"model={name}", "config=1"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    values = NAMED_CONFIGS[name]
    reader = ConfigReader(values, name)
    family = family_of_hf(values["architectures"][0], name)
    config = _config_from_hf(reader.with_defaults(family.hf_defaults), family).to_engine("bfloat16")
    expected = {
        "activation": ACTIVATIONS.index(config.activation),
        "windows": " ".join(str(window) for window in config.windows),
        "rope.kind": ROPES.index(config.rope.kind),
        "moe.layers": sum(config.moe.layers),
    }
    if expected["moe.layers"] == config.num_layers:
        expected["intermediate_size"] = 0  # no layer has a dense feed-forward
    for key, value in found.items():
        wanted = expected[key] if key in expected else attrgetter(key)(config)
        assert value == (wanted if isinstance(wanted, str) else pytest.approx(float(wanted))), key
