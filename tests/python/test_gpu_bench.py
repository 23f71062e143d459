"""The benchmarks of a GPU, without one: files, targets, tables, and the programs they run.

Every figure here is made up. None of it is written outside a temporary folder.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import bench_generation
import bench_kernels
import gpu_plan
import gpu_results
import gpu_tables
import gpu_targets
import peers_gpu
import pytest
from bench_process import BenchProcess
from gpu_results import Row, merge_into, read_document, with_ratios
from reference.layout import row_bytes

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"device": "Synthetic GPU", "sm": 90, "memory_bytes": 1 << 37}
COPY_US = 1000.0  # of 4 GB, read and written: 4000 GB/s

# What a made-up GPU takes beside 16 bit.
SPEED = {"none": 1.0, "int8": 1.9, "fp8": 1.9, "fp8_e5m2": 1.9}
SPEED |= {"int4": 3.3, "mxfp4": 3.4, "nvfp4": 3.4}


def copy_row() -> Row:
    return {
        "by": "ours",
        "op": "copy",
        "mode": "",
        "shape": {"mb": 4096},
        "us": COPY_US,
        "activation_bytes": 4_000_000_000,
    }


def decode_row(mode: str, us: float, *, by: str = "ours", **shape: int) -> Row:
    """KV of 16 bit: 600 MB; of the others accordingly."""
    full = gpu_plan.attention_shape(8, 32768) | shape
    values = full["batch"] * full["context"] * 2 * full["kv_heads"] * full["head_dim"]
    kv_bytes = round(values * gpu_tables.value_bytes(mode, full["head_dim"]))
    return {"by": by, "op": "decode", "mode": mode, "shape": full, "us": us, "kv_bytes": kv_bytes}


def verdict(rows: list[Row], name: str, mode: str = "nvfp4") -> gpu_targets.Verdict:
    (target,) = [t for t in gpu_targets.TARGETS if t.name == name]
    return gpu_targets.judge(target, mode, rows=with_ratios(rows))


def test_goals():
    assert {t.name: (t.better, t.goal) for t in gpu_targets.TARGETS} == {
        "decode-bandwidth": (">=", 0.85),
        "decode-16bit": (">=", 3.0),
        "decode-fp8": (">=", 1.6),
        "decode-8x32k": ("<=", 83.0),
        "decode-window": ("<=", 8.0),
        "prefill": ("<=", 1.05),
        "write": ("<=", 1.2),
        "write-served": ("<=", 1.2),
    }


def test_ratios_are_of_the_same_shape_and_engine():
    rows = [
        copy_row(),
        decode_row("none", 300.0),
        decode_row("nvfp4", 100.0),
        decode_row("none", 30.0, by="a peer"),
        decode_row("none", 10.0, batch=1),
        decode_row("nvfp4", 5.0, batch=1),
    ]
    found = with_ratios(rows)
    assert found[2]["vs_none"] == 3.0 and "vs_fp8" not in found[2]
    assert found[5]["vs_none"] == 2.0
    assert found[2]["gb_per_s"] == pytest.approx(rows[2]["kv_bytes"] / 1e5, rel=1e-3)
    assert found[2]["of_copy"] == pytest.approx(found[2]["gb_per_s"] / 4000, rel=1e-3)
    again = with_ratios([row for row in found if row["op"] != "copy"])
    assert all("of_copy" not in row for row in again)  # nothing stale stays
    assert with_ratios([{**copy_row(), "us": None}]) == [{**copy_row(), "us": None}]


def test_written_bytes_of_a_format_are_compared_with_plain_16_bit():
    shape = gpu_plan.attention_shape(1, 2048) | {"new_tokens": 2048}
    served = shape | {"search": 1, "rotate": 1}
    rows = [
        {"by": "ours", "op": "write", "mode": "none", "shape": shape, "us": 10.0},
        {"by": "ours", "op": "write", "mode": "nvfp4", "shape": shape, "us": 11.0},
        {"by": "ours", "op": "write", "mode": "nvfp4", "shape": served, "us": 20.0},
    ]
    assert verdict(rows, "write").value == pytest.approx(1.1)
    assert verdict(rows, "write").met is True
    assert verdict(rows, "write-served").value == pytest.approx(2.0)
    assert verdict(rows, "write-served").met is False


def test_the_worst_shape_and_the_best_peer_decide():
    rows = [copy_row()]
    for batch, fp4 in ((16, 300.0), (32, 700.0)):
        rows += [decode_row("none", 1200.0, batch=batch), decode_row("nvfp4", fp4, batch=batch)]
    found = verdict(rows, "decode-16bit")
    assert (found.value, found.num_shapes, found.met) == (pytest.approx(1200 / 700), 2, False)
    assert "batch 32" in found.shape and "MISSED" in str(found) and "batch 32" in str(found)
    rows = rows[:3]
    assert verdict(rows, "decode-16bit").met is True
    rows.append(decode_row("none", 600.0, by="a peer", batch=16))
    assert verdict(rows, "decode-16bit").value == pytest.approx(2.0)
    assert verdict(rows, "decode-fp8").value is None  # no fp8 was measured
    assert "not measured" in str(verdict(rows, "decode-fp8"))


def test_small_caches_are_none_of_the_bandwidth_targets():
    rows = [copy_row(), decode_row("nvfp4", 1e6, batch=1)]
    assert verdict(rows, "decode-bandwidth").value is None
    rows.append(decode_row("nvfp4", 100.0, batch=32))
    assert verdict(rows, "decode-bandwidth").num_shapes == 1


@pytest.mark.parametrize(
    ("us", "words"),
    [(70.0, "met, stretch|stretch 74 met"), (80.0, "stretch 74 missed"), (90.0, "MISSED")],
)
def test_a_layer_of_8_times_32k(us, words):
    text = str(verdict([decode_row("nvfp4", us)], "decode-8x32k"))
    assert any(word in text for word in words.split("|")), text


def synthetic_rows() -> list[Row]:
    """The whole plan, measured on a GPU that nobody has."""
    rows = []
    for cell in gpu_plan.kernel_cells():
        size = cell.shape.get("batch", 1) * cell.shape.get("context", 64)
        us = COPY_US if cell.op == "copy" else 1.0 + size * 1e-3 / SPEED.get(cell.mode, 1.0)
        found: dict[str, Any] = {"us": us, "us_low": us, "us_high": us}
        if cell.op == "copy":
            found["activation_bytes"] = 4_000_000_000
        elif cell.mode:
            values = size * 2 * cell.shape["kv_heads"] * cell.shape["head_dim"]
            per_value = gpu_tables.value_bytes(cell.mode, cell.shape["head_dim"])
            found["kv_bytes"] = round(values * per_value)
        else:
            found |= {"weight_bytes": 10_000_000, "operations": 20_000_000}
        rows.append(cell.row("ours", found))
    return rows


def test_the_plan_measures_every_target():
    cells = gpu_plan.kernel_cells()
    assert len({cell.line() for cell in cells}) == len(cells)
    assert cells[0].op == "copy"
    assert {cell.op for cell in gpu_plan.small_cells()} == {cell.op for cell in cells}
    missing = [v for v in gpu_targets.verdicts(with_ratios(synthetic_rows())) if v.value is None]
    assert not missing


def test_bytes_of_a_value_are_those_of_the_layout():
    for mode in gpu_tables.MODES:
        for dim in (64, 128):
            assert gpu_tables.value_bytes(mode, dim) * dim == row_bytes(mode, dim)
    for mode in ("none", "fp8", "nvfp4"):
        shape = gpu_plan.attention_shape(3, 100)
        assert peers_gpu.kv_bytes(mode, shape) == 3 * 100 * 2 * 8 * row_bytes(mode, 128)
    assert peers_gpu.kv_bytes("none", gpu_plan.window_shape(2)) == 2 * 128 * 2 * 8 * 64 * 2


def test_the_roof_is_the_formula():
    # 8 sequences of 32k: 8 * 32768 * 2 * 8 * 128 values, 0.5625 bytes each, at 4.3 TB/s.
    assert gpu_tables.least_us("nvfp4", 8, context=32768, gb_per_s=4300) == pytest.approx(
        70.2, rel=1e-2
    )
    assert gpu_tables.least_us("none", 1, context=8192, gb_per_s=4300) == pytest.approx(
        7.8, rel=1e-2
    )


def test_files_are_merged_by_key(tmp_path):
    path = tmp_path / gpu_results.file_name("Synthetic GPU")
    assert path.name == "gpu_synthetic_gpu.json"
    old, new = decode_row("none", 300.0), decode_row("none", 200.0)
    merge_into(path, ABOUT, lists={"kernels": [copy_row(), old]})
    peer = decode_row("none", 150.0, by="a peer")
    check = {"name": "kernels", "verdict": "ok", "seconds": 3, "note": ""}
    merge_into(path, ABOUT | {"lmdeploy": "9"}, lists={"kernels": [new, peer], "checks": [check]})
    document = read_document(path)
    assert document["about"]["lmdeploy"] == "9"
    assert [row["us"] for row in document["kernels"]] == [COPY_US, 200.0, 150.0]
    assert document["kernels"][1]["of_copy"] > 0 and document["checks"] == [check]
    with pytest.raises(ValueError, match="come from Synthetic GPU"):
        merge_into(path, {"device": "another"}, lists={})
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"about": {}}', '{"about": {}, "kernels": [], "generation": [], "checks": []}',
     '{"about": {"device": "x"}, "kernels": [1], "generation": [], "checks": []}'],
)  # fmt: skip
def test_foreign_files_are_refused(tmp_path, text):
    path = tmp_path / "gpu_x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"gpu_x\.json"):
        read_document(path)
    assert gpu_tables.main(["--results", str(tmp_path), "--page", str(path)]) == 2


def test_the_page_says_that_nothing_was_measured(tmp_path):
    text = gpu_tables.render([])
    assert gpu_tables.NOTHING in text and "|" not in text
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_tables.BEGIN}\nold\n{gpu_tables.END}\nafter\n")
    assert gpu_tables.main(["--results", str(tmp_path), "--page", str(page), "--check"]) == 1
    assert gpu_tables.main(["--results", str(tmp_path), "--page", str(page)]) == 0
    assert page.read_text() == f"before\n{text}\nafter\n"
    assert gpu_tables.main(["--results", str(tmp_path), "--page", str(page), "--check"]) == 0
    page.write_text("no markers")
    assert gpu_tables.main(["--results", str(tmp_path), "--page", str(page)]) == 2


def test_the_page_shows_what_was_measured(tmp_path):
    rows = [*synthetic_rows(), decode_row("none", 1.5, by="a peer")]
    generation = [
        {
            "by": "ours",
            "work": "decode",
            "model": "llama-3-8b",
            "mode": "nvfp4",
            "shape": {"batch": 32, "context": 512, "quality": "balanced"},
            "tokens_per_s": 1234.5,
            "bytes_per_token": 1.0,
        }
    ]
    checks = gpu_results.check_rows("kernels\tFAILED\t12\tFAILED: one\npeers\tskipped\t0\t")
    path = tmp_path / "gpu_synthetic_gpu.json"
    merge_into(path, ABOUT, lists={"kernels": rows, "generation": generation, "checks": checks})
    (document,) = gpu_tables.read_documents(tmp_path)
    text = gpu_tables.render([document])
    assert "### Synthetic GPU" in text and "a large copy moves 4,000 GB/s" in text
    assert "| kernels | FAILED | 12 s | FAILED: one |" in text
    assert "window 128 with sinks" in text and "best peer, 16 bit" in text and "1.5 µs" in text
    assert "| llama-3-8b | decode | `nvfp4`, balanced | 32 | 512 | 1,234 |" in text
    assert "≥ 0.85" in text and "experts 32" in text and gpu_tables.NOTHING not in text
    widths = {}
    for line in text.splitlines():  # every table is one
        if line.startswith("|"):
            widths.setdefault(line.count("|"), line)
            assert line.endswith("|")


def test_the_page_is_what_the_script_makes():
    documents = gpu_tables.read_documents(ROOT / "benchmarks/results")
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert gpu_tables.put_in(text, gpu_tables.render(documents)) == text, (
        "run benchmarks/gpu_tables.py"
    )


def test_verdicts_of_checks():
    with pytest.raises(ValueError, match="wanted one of"):
        gpu_results.check_rows("kernels\tfine\t1\t")
    with pytest.raises(ValueError, match="unpack"):
        gpu_results.check_rows("kernels ok")


def program(path: Path, body: str) -> Path:
    """A program in Python."""
    path.write_text(f"#!{sys.executable}\nimport json, sys, time\n" + textwrap.dedent(body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


FAKE_BENCH = """
print(json.dumps({"device": "Synthetic GPU", "kind": "cuda", "sm": 90}), flush=True)
print("noise of a library", flush=True)
for line in sys.stdin:
    cell = dict(word.split("=") for word in line.split())
    if cell["op"] == "flatten":
        answer = {"error": "an illegal access"}
    elif cell["op"] == "experts":
        answer = {"skipped": "memory"}
    else:
        answer = {"us": 10.0, "us_low": 9.0, "us_high": 11.0, "launches": 1, "layers": 2,
                  "weight_bytes": 0, "kv_bytes": 1000, "activation_bytes": 10, "operations": 5}
    print(json.dumps(answer), flush=True)
"""


def test_a_cell_that_fails_is_reported_and_the_rest_measured(tmp_path, capsys):
    bench = program(tmp_path / "bench", FAKE_BENCH)
    path = tmp_path / "gpu.json"
    assert bench_kernels.main(["--bench", str(bench), "--small", "--json", str(path)]) == 1
    text = capsys.readouterr().out
    assert text.count("FAILED: op=flatten") == 4 and "skipped, too little memory: op=exp" in text
    ops = {row["op"] for row in read_document(path)["kernels"]}
    assert ops == {"copy", "decode", "write", "prefill", "linear"}
    only = ["--bench", str(bench), "--small", "--json", str(path), "--only", "op=decode"]
    assert bench_kernels.main(only) == 0


def test_time_that_is_over_is_said(tmp_path, capsys):
    bench = program(tmp_path / "bench", FAKE_BENCH)
    path = tmp_path / "gpu.json"
    arguments = ["--bench", str(bench), "--json", str(path), "--budget-s", "0"]
    assert bench_kernels.main(arguments) == 0
    assert f"{len(gpu_plan.kernel_cells())} cells left out" in capsys.readouterr().out
    assert read_document(path)["kernels"] == []


def test_without_a_gpu(tmp_path, capsys):
    bench = program(tmp_path / "bench", "sys.exit('CUDA is not used: no driver')")
    for main in (bench_kernels.main, bench_generation.main):
        assert main(["--bench", str(bench), "--small"]) == 3
        assert "no GPU" in capsys.readouterr().err
        assert main(["--bench", str(tmp_path / "none"), "--small"]) == 2
        capsys.readouterr()


def test_a_program_that_hangs_or_ends_is_no_end(tmp_path):
    hangs = program(tmp_path / "hangs", "time.sleep(60)")
    with BenchProcess([str(hangs)]) as process, pytest.raises(RuntimeError, match="no answer in"):
        process.answer(0.2)
    ends = program(tmp_path / "ends", "sys.exit(7)")
    with BenchProcess([str(ends)]) as process:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ended with 7"):
                process.answer(10)


FAKE_GENERATION = """
print(json.dumps({"device": "Synthetic GPU", "kind": "cuda"}), flush=True)
print(json.dumps({"model": "x", "weight_bytes": 1, "seconds": 1.0}), flush=True)
for line in sys.stdin:
    cell = dict(word.split("=") for word in line.split())
    if cell["mode"] == "int8":
        print(json.dumps({"error": "broken"}), flush=True)
    else:
        row = {"mode": cell["mode"], "quality": cell["quality"], "context": 512,
               "tokens_per_s": 100.0, "bytes_per_token": 5.0}
        print(json.dumps({**row, "work": "prompts", "batch": 8}), flush=True)
        print(json.dumps({**row, "work": "decode", "batch": 1}), flush=True)
    print(json.dumps({"done": line.strip()}), flush=True)
"""


def test_generation(tmp_path, capsys):
    bench = program(tmp_path / "bench", FAKE_GENERATION)
    path = tmp_path / "gpu.json"
    assert bench_generation.main(["--bench", str(bench), "--json", str(path)]) == 1
    rows = read_document(path)["generation"]
    assert len(rows) == 2 * 2 * (len(bench_generation.WORK) - 1)  # models, works, but int8
    assert {row["model"] for row in rows} == set(bench_generation.MODELS)
    assert capsys.readouterr().out.count("FAILED: ") == 2
    late = ["--bench", str(bench), "--json", str(path), "--budget-s", "0"]
    assert bench_generation.main(late) == 0
    assert "left out: llama-3-8b: mode=nvfp4" in capsys.readouterr().out


def test_peers_are_asked_for_our_shapes(monkeypatch, capsys):
    rows = [
        decode_row("none", 1.0),
        decode_row("nvfp4", 1.0),
        decode_row("none", 1.0, batch=1),
        decode_row("none", 1.0, by="a peer", batch=2),
    ]
    shapes = list(peers_gpu.shapes_of(rows))
    assert [shape["batch"] for shape in shapes] == [8, 1]

    def measure(peer: Any, mode: str, *, shape: Any, rotate_bytes: int) -> Row:
        if mode == "fp8":
            raise RuntimeError("first line\nno kernel")
        if mode == "nvfp4":
            raise peers_gpu.Unsupported("not here")
        return decode_row(mode, 2.0, by=peer.name, **shape)

    monkeypatch.setattr(peers_gpu, "measure", measure)
    monkeypatch.setattr(peers_gpu.FlashInfer, "name", "FlashInfer 0 fa2")
    peer = peers_gpu.FlashInfer("fa2")
    found, failed = peers_gpu.run([peer], shapes, budget_s=60, rotate_bytes=1)
    assert [row["mode"] for row in found] == ["none", "none"]
    assert len(failed) == 1 and failed[0].endswith("no kernel")
    assert capsys.readouterr().out.count("not here") == 2
    assert peers_gpu.run([peer], shapes, budget_s=0, rotate_bytes=1) == ([], [])


def test_layers_of_peers():
    shape = gpu_plan.attention_shape(1, 1024)  # 4 MiB in 16 bit
    assert peers_gpu.layers_for("none", shape, rotate_bytes=512 << 20) == (128, 128)
    large = gpu_plan.attention_shape(128, 8192)
    assert peers_gpu.layers_for("none", large, rotate_bytes=512 << 20) == (2, 24)


def test_missing_peers_are_named(monkeypatch, capsys, tmp_path):
    def absent(name: str) -> str:
        raise peers_gpu.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(peers_gpu.importlib.metadata, "version", absent)
    monkeypatch.setattr(peers_gpu, "has_gpu", lambda: False)
    path = tmp_path / "gpu.json"
    merge_into(path, ABOUT, lists={})
    assert peers_gpu.main(["--json", str(path)]) == 3
    text = capsys.readouterr().out
    assert "flashinfer-python is not installed" in text and "torch is not installed" in text
    assert peers_gpu.main(["--json", str(tmp_path / "none.json")]) == 2


def gpu_check(
    tmp_path: Path, *parts: str, **programs: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """scripts/gpu_check.sh with made-up programs and results in a temporary folder."""
    build = tmp_path / "build"
    build.mkdir()
    for name, body in programs.items():
        program((tmp_path if name == "nvidia-smi" else build) / name, body)
    program(tmp_path / "nvidia-smi", "print('9.0')")
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TM_CUDA_BUILD": str(build),
        "TM_GPU_RESULTS": str(tmp_path / "results"),
        "TM_GPU_LOGS": str(tmp_path / "logs"),
        "PYTHON": sys.executable,
    }
    done = subprocess.run(
        [str(ROOT / "scripts/gpu_check.sh"), *parts],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done, tmp_path / "results/gpu_synthetic_gpu.json"


FAKE_TEST = """
if sys.argv[1] == "--list-test-cases":
    for name in ("kv_ops", "step"):
        print('<TestCase name="x" filename="/src/' + name + '_test.cc" line="1"/>')
    sys.exit()
name = sys.argv[1].rsplit("/")[-1]
print("[doctest] test cases: 1 | 1 passed")
sys.exit(1 if name == "{failing}" else 0)
"""


def test_every_part_runs_and_one_failure_is_the_exit_status(tmp_path):
    done, path = gpu_check(
        tmp_path,
        "conformance",
        "generation",
        "peers",
        device_bench=FAKE_BENCH,
        generation_bench=FAKE_GENERATION,
        gpu_ops_test=FAKE_TEST.format(failing="step_test.cc"),
    )
    assert done.returncode == 1, done.stderr
    assert "FAILED  step_test.cc" in done.stdout and "ok      kv_ops_test.cc" in done.stdout
    checks = {row["name"]: row for row in read_document(path)["checks"]}
    assert checks["conformance"]["verdict"] == "FAILED" == checks["generation"]["verdict"]
    assert "step_test" in checks["conformance"]["note"]
    assert read_document(path)["generation"]
    assert list(checks) == ["conformance", "generation", "peers"]
    assert "== summary" in done.stdout


def test_parts_that_pass(tmp_path):
    done, path = gpu_check(
        tmp_path,
        "conformance",
        "memcheck",
        device_bench=FAKE_BENCH,
        gpu_ops_test=FAKE_TEST.format(failing=""),
        **{"compute-sanitizer": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {row["name"]: row["verdict"] for row in read_document(path)["checks"]}
    assert verdicts["conformance"] == "ok" and verdicts["memcheck"] in ("ok", "skipped")


def test_no_tests_are_a_failure(tmp_path):
    done, path = gpu_check(tmp_path, "conformance", device_bench=FAKE_BENCH, gpu_ops_test="")
    assert done.returncode == 1 and "no tests in" in done.stdout
    assert read_document(path)["checks"][0]["verdict"] == "FAILED"


def test_gpu_check_without_a_gpu(tmp_path):
    done, path = gpu_check(tmp_path, device_bench="sys.exit('no driver here')")
    assert done.returncode == 3 and done.stderr.strip().count("\n") == 0
    assert "no driver here" in done.stderr and not path.exists()
    done = subprocess.run(
        [str(ROOT / "scripts/gpu_check.sh"), "nonsense"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "nonsense" in done.stderr


def test_small_cells_run_on_the_cpu(tmp_path):
    folder = Path(os.environ.get("TM_BUILD_FOLDER", ROOT / "build/release"))
    if not (folder / "device_bench").exists():
        pytest.skip(f"no {folder / 'device_bench'}: build there, or set TM_BUILD_FOLDER")
    for main, name, more in (
        (bench_kernels.main, "device_bench", []),
        (bench_generation.main, "generation_bench", ["--models", "tiny-llama,tiny-gpt-oss"]),
    ):
        arguments = ["--bench", str(folder / name), "--device", "cpu", "--small", *more]
        assert main([*arguments, "--json", str(tmp_path / f"{name}.json")]) == 0
    rows = read_document(tmp_path / "device_bench.json")["kernels"]
    assert len(rows) == len(gpu_plan.small_cells())
    rows = read_document(tmp_path / "generation_bench.json")["generation"]
    assert len(rows) == 2 * 3 * bench_generation.SMALL_WORK
    assert all(row["tokens_per_s"] >= 0 for row in rows)
