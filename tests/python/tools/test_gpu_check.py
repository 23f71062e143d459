"""scripts/gpu_check.sh with made-up programs: every part, and what becomes of one that fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_fakes import ABOUT, BENCH, GENERATION, TESTS, program
from gpu_results import merge_into, read_document

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts/gpu_check.sh"
LIMIT_S = 480  # of all parts together
TOOLS = ("nvidia-smi", "compute-sanitizer", "python")  # of the machine, not of the build

PASSES = TESTS.format(failing="")
# compute-sanitizer that runs the program, and may have found something.
SANITIZER = """
import os, subprocess
command = sys.argv[sys.argv.index("--error-exitcode") + 2:]
code = subprocess.run(command).returncode
print({says!r})
sys.exit({status} or code)
"""
CLEAN = SANITIZER.format(says="========= ERROR SUMMARY: 0 errors", status=0)
# A Python whose torch sees no GPU; the scripts run as ever.
PYTHON = f"""
import os
if sys.argv[1].endswith("peers_gpu.py"):
    print("torch is not installed: no figures of it")
    sys.exit({{status}})
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""


class Machine:
    """A folder with programs, and what the script made of them."""

    def __init__(self, folder: Path, **bodies: str) -> None:
        self.folder = folder
        self.build = folder / "build"
        self.build.mkdir()
        (self.build / "libturbomind_cuda.so").touch()
        bodies = {
            "device_bench": BENCH,
            "generation_bench": GENERATION,
            "gpu_ops_test": PASSES,
            "nvidia_smi": "print('9.0')",
            "compute_sanitizer": CLEAN,
            "python": PYTHON.format(status=3),
        } | bodies
        for name, body in bodies.items():
            name = name.replace("_", "-") if name.replace("_", "-") in TOOLS else name
            program((folder if name in TOOLS else self.build) / name, body)

    def check(self, *parts: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs the script."""
        own = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "TM_CUDA_BUILD": str(self.build),
            "TM_GPU_RESULTS": str(self.folder / "results"),
            "TM_GPU_LOGS": str(self.folder / "logs"),
            "PYTHON": str(self.folder / "python"),
        }
        return subprocess.run(
            [str(SCRIPT), *parts],
            env=os.environ | own | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )

    @property
    def document(self) -> dict[str, Any]:
        """The file of results."""
        return read_document(self.folder / "results/gpu_synthetic_gpu.json")

    @property
    def checks(self) -> dict[str, Any]:
        """What it says of every part."""
        return {row["name"]: row for row in self.document["checks"]}


def test_every_part_runs_and_one_failure_is_the_exit_status(tmp_path):
    machine = Machine(tmp_path, gpu_ops_test=TESTS.format(failing="step_test.cc"))
    done = machine.check(SECONDS_kernels="30", SECONDS_generation="30")
    assert done.returncode == 1, done.stderr
    assert "FAILED  step_test.cc" in done.stdout and "ok      kv_ops_test.cc, 3" in done.stdout
    verdicts = {name: row["verdict"] for name, row in machine.checks.items()}
    assert verdicts == {
        "conformance": "FAILED",
        "kernels": "FAILED",  # flatten
        "generation": "FAILED",  # int8
        "memcheck": "ok",
        "racecheck": "ok",
        "torch": "skipped",
    }
    assert "step_test" in machine.checks["conformance"]["note"]
    assert "op=flatten" in machine.checks["kernels"]["note"]
    assert machine.document["generation"] and machine.document["kernels"]
    assert "== summary" in done.stdout and "3 cases without an error" in done.stdout


def test_parts_that_pass(tmp_path):
    machine = Machine(tmp_path, python=PYTHON.format(status=0))
    merge_into(tmp_path / "gpu.json", ABOUT, lists={})
    (tmp_path / "results").mkdir()
    (tmp_path / "gpu.json").rename(tmp_path / "results/gpu_synthetic_gpu.json")
    done = machine.check("conformance", "memcheck", "peers")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["verdict"] for row in machine.checks.values()} == {"ok"}
    assert "is not installed" in machine.checks["peers"]["note"]


@pytest.mark.parametrize(
    ("tests", "words"),
    [("", "no tests in"), ("print('test cases: 0 | 0 passed')", "no tests in"),
     (TESTS.format(failing="").replace("cases: 3", "cases: 0"), "FAILED  kv_ops_test.cc")],
)  # fmt: skip
def test_no_tests_are_a_failure(tmp_path, tests, words):
    machine = Machine(tmp_path, gpu_ops_test=tests)
    done = machine.check("conformance")
    assert done.returncode == 1 and words in done.stdout
    assert machine.checks["conformance"]["verdict"] == "FAILED"


def test_a_test_that_hangs_leaves_the_verdicts_of_others(tmp_path):
    slow = PASSES.replace('print("[doctest]', 'time.sleep(60 * (name[0] == "s"))\nprint("[doctest]')
    machine = Machine(tmp_path, gpu_ops_test=slow)
    done = machine.check("conformance", "memcheck", SECONDS_conformance="3")
    assert done.returncode == 1
    assert "ok      kv_ops_test.cc" in done.stdout and "FAILED  step_test.cc" in done.stdout
    assert machine.checks["memcheck"]["verdict"] == "ok"


@pytest.mark.parametrize(
    ("sanitizer", "verdict", "words"),
    [
        (SANITIZER.format(says="========= Invalid __global__ write", status=99), "FAILED", "Inval"),
        (
            SANITIZER.format(says="========= Device not supported", status=1),
            "skipped",
            "cannot run",
        ),
        ("time.sleep(60)", "FAILED", "no test came to its end"),
        ("print('========= Error: Race reported', flush=True); time.sleep(60)", "FAILED", "Race"),
    ],
)
def test_what_a_sanitizer_says(tmp_path, sanitizer, verdict, words):
    machine = Machine(tmp_path, compute_sanitizer=sanitizer)
    done = machine.check("racecheck", SECONDS_racecheck="3")
    assert machine.checks["racecheck"]["verdict"] == verdict, done.stdout
    assert words in done.stdout and done.returncode == (verdict == "FAILED")


def test_without_small_tests_a_sanitizer_checks_nothing(tmp_path):
    machine = Machine(tmp_path, gpu_ops_test=PASSES.replace('("kv_ops",) if', "() if"))
    assert "no small tests" in machine.check("memcheck").stdout
    assert machine.checks["memcheck"]["verdict"] == "FAILED"


def test_a_benchmark_that_does_not_end_is_ended(tmp_path):
    python = PYTHON.replace("peers_gpu.py", "bench_kernels.py").replace(
        "print(", "time.sleep(60); ("
    )
    machine = Machine(tmp_path, python=python.format(status=0))
    done = machine.check("kernels", SECONDS_kernels="2")
    assert machine.checks["kernels"]["verdict"] == "FAILED" and done.returncode == 1
    assert "time over: ended after 2 s" in machine.checks["kernels"]["note"]


def test_peers_that_compile_for_too_long_are_no_failure(tmp_path):
    python = PYTHON.replace("print(", "time.sleep(60 * ('torch,flashinfer' in sys.argv)); print(")
    machine = Machine(tmp_path, python=python.format(status=0))
    merge_into(tmp_path / "gpu.json", ABOUT, lists={})
    (tmp_path / "results").mkdir()
    (tmp_path / "gpu.json").rename(tmp_path / "results/gpu_synthetic_gpu.json")
    done = machine.check("peers", SECONDS_peers="2")
    assert done.returncode == 0 and "time over: ended after 2 s" in done.stdout


def test_peers_without_figures_of_ours(tmp_path):
    machine = Machine(tmp_path)
    assert machine.check("torch").returncode == 0
    assert machine.checks["torch"]["note"] == "skipped: nothing of ours was measured"


def test_without_a_gpu(tmp_path):
    machine = Machine(
        tmp_path, device_bench="print('no driver here', file=sys.stderr); sys.exit(2)"
    )
    done = machine.check()
    assert done.returncode == 3 and done.stderr.strip().count("\n") == 0
    assert "no driver here" in done.stderr and not list((tmp_path / "results").glob("*.json"))
    done = machine.check("nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr


def test_programs_that_do_not_run_here(tmp_path):
    wrong = "print('version GLIBC_9 not found', file=sys.stderr); sys.exit(1)"
    machine = Machine(tmp_path, device_bench=wrong)
    done = machine.check()
    assert done.returncode == 2 and "does not run here: version GLIBC_9" in done.stderr
    (machine.build / "libturbomind_cuda.so").unlink()
    done = machine.check()
    assert done.returncode == 2 and "libturbomind_cuda.so: build it" in done.stderr


def test_what_is_missing_for_a_build_is_said(tmp_path):
    machine = Machine(tmp_path)
    for name in ("bash", "dirname", "realpath", "mkdir", "tail", "head", "cat", "env"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    alone = {"TM_CUDA_BUILD": "", "PATH": str(tmp_path)}
    if not Path("/usr/local/cuda/bin/nvcc").exists():  # where the script looks beside PATH
        done = machine.check("build", **alone)
        assert done.returncode == 3 and "no nvcc" in done.stderr
    program(tmp_path / "nvcc", "")
    assert "no cmake" in machine.check("build", **alone).stderr
    program(tmp_path / "cmake", "print('no doctest/doctest.h found'); sys.exit(1)")
    assert "no ninja" in machine.check("build", **alone).stderr
    program(tmp_path / "ninja", "")
    done = machine.check("build", **alone)
    assert done.returncode == 1 and "no doctest/doctest.h found" in done.stderr
    program(tmp_path / "cmake", "print(*sys.argv)")
    done = machine.check("build", **alone)
    assert done.returncode == 0, done.stderr
    assert "-DTM_CUDA_ARCHS=90a" in (tmp_path / "logs/build.log").read_text()
    machine.check("build", **alone, TM_CUDA_ARCHS="80")
    assert "-DTM_CUDA_ARCHS=80" in (tmp_path / "logs/build.log").read_text()


def test_help_and_times():
    text = SCRIPT.read_text(encoding="utf-8")
    shown = subprocess.run([str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    (default,) = re.findall(r"DEFAULT_PARTS=\((.+)\)", text)
    limits = {name: int(s) for name, s in re.findall(r"SECONDS_(\w+):-(\d+)", text)}
    assert set(limits) == {*default.split(), "peers"}
    for name in (*limits, "build", "TM_CUDA_BUILD", "DOCTEST_INCLUDE", "TM_GPU_RESULTS"):
        assert name in shown.stdout
    (kill,) = re.findall(r"KILL_S=(\d+)", text)
    assert sum(limits[name] + int(kill) for name in default.split()) < LIMIT_S


def test_every_file_of_kernels_has_small_tests():
    small = {
        path.name
        for path in (ROOT / "tests/cpp/cuda").glob("*_test.cc")
        if 'test_suite("small")' in path.read_text(encoding="utf-8")
    }
    assert small == {
        f"{name}_test.cc"
        for name in (
            "decode_ops",
            "dense_ops",
            "sampling_ops",
            "kv_flatten",
            "kv_ops",
            "linear_ops",
            "prefill_ops",
        )
    }
