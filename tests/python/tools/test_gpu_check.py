"""Tests of scripts/gpu_check.sh and of the baselines on a GPU, with stand-ins for both.

The stand-in for the GPU answers cells with made-up times. FlashInfer's functions are replaced by
ones that compute attention from the pages, windows and sinks that they are given.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import bench_gpu
import pytest
import torch.nn.attention
from baselines import flashinfer, gpu, torch_gpu
from gpu_tables import GpuResults, main, server_table, window_table
from results import read_rows

ROOT = Path(__file__).resolve().parents[3]
DEVICE_BENCH = f"""#!{sys.executable}
import json, sys
if sys.argv[1:] == ["formats"]:
    print("none fp8 int8 nvfp4 mxfp4 int4")
    sys.exit()
print(json.dumps({{"device": "Synthetic GPU", "generation": "SM 90", "driver": "1", "cuda": "13"}}))
for line in sys.stdin:
    sizes = {{"weight_bytes": 1, "kv_bytes": 1, "activation_bytes": 1}}
    print(json.dumps({{"us": 10.0, **sizes}}), flush=True)
"""
MACHINE = "Synthetic GPU, SM 90, driver 1, CUDA 13"
# The command line of doctest, with 30 test cases of which one fails on demand.
OPS_TEST = f"""#!{sys.executable}
import os, sys
if "--count" in sys.argv:
    print("[doctest] unskipped test cases passing the current filters: 30")
elif "--test-suite=small" in sys.argv:
    print("[doctest] test cases: 3 | 3 passed")
else:
    first, last = (int(word.split("=")[1]) for word in sys.argv[1:])
    ran = [case for case in range(first, last + 1) if case <= 30]
    print(f"[doctest] test cases: {{len(ran)}} | ran {{ran}}")
    sys.exit(int(os.environ.get("BAD_CASE", "0")) in ran)
"""
KVX = f"""#!{sys.executable}
import os, sys
print("ran", os.path.basename(sys.argv[0]))
sys.exit(int(os.environ.get("BAD_KVX", "0")))
"""
# Runs bench_gpu.py, and notes the arguments of the programs that need a real GPU.
PYTHON = f"""#!{sys.executable}
import os, subprocess, sys
real = [sys.executable, *sys.argv[1:]]
if sys.argv[1].endswith(("bench_engine.py", "bench_server.py")):
    print("started:", *sys.argv[1:])
    sys.exit(int(os.environ.get("BAD_BENCH", "0")))
if sys.argv[1] == "-c":
    sys.exit("lmdeploy" in sys.argv[2] and "NO_LMDEPLOY" in os.environ)
sys.exit(subprocess.run(real).returncode)
"""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Check:
    """A folder with stand-ins, in which gpu_check.sh runs."""

    def __init__(self, folder: Path) -> None:
        self.build, self.results, self.models = (folder / n for n in ("build", "results", "models"))
        self.build.mkdir()
        (self.build / "libturbomind_cuda.so").touch()
        write_program(self.build / "device_bench", DEVICE_BENCH)
        write_program(self.build / "gpu_ops_test", OPS_TEST)
        for name in ("kvx_device_c", "kvx_device_cpp"):
            write_program(self.build / name, KVX)
        write_program(folder / "python", PYTHON)
        for name in ("llama-3-8b", "gpt-oss-20b"):
            (self.models / name).mkdir(parents=True)
        self.env = {
            "PYTHON": str(folder / "python"),
            "TM_CUDA_BUILD": str(self.build),
            "TM_GPU_RESULTS": str(self.results),
            "TM_GPU_MODELS": str(self.models),
            "TM_GPU_LOGS": str(folder / "logs"),
        }

    def run(self, *parts: str, **more: str) -> tuple[int, str, dict[str, str]]:
        """Return the status, the output, and the line of each part in the summary."""
        done = subprocess.run(
            [str(ROOT / "scripts/gpu_check.sh"), *parts],
            env=os.environ | self.env | more,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        summary = done.stdout.partition("== summary")[2].splitlines()[1:]
        lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in summary}
        return done.returncode, done.stdout + done.stderr, lines


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


def test_all_parts_run_in_order_within_six_minutes(check: Check) -> None:
    status, output, summary = check.run()
    order = "conformance tuner kernels baselines generation server memcheck racecheck"
    assert status == 0 and " ".join(summary) == order
    limits = [int(seconds) for seconds in re.findall(r"^== \w+, at most (\d+) s$", output, re.M)]
    assert len(limits) == len(summary) and sum(limits) <= 360
    assert "ran kvx_device_c\n" in output and "ran kvx_device_cpp\n" in output
    ran = re.findall(r"ran \[([\d, ]+)\]", output)
    assert len(ran) > 5 and [int(x) for share in ran for x in share.split(",")] == [*range(1, 31)]
    started = re.findall(r"^started: (.*)$", output, re.M)
    assert len(started) == 3 and all(f"--machine {MACHINE}" in line for line in started)
    assert any("--modes none,mxfp4" in x and "gpt-oss-20b" in x for x in started)
    assert "bench_server.py" in started[2] and "--clients 64" in started[2]
    # torch of the tests has no CUDA, which is said in one line.
    assert summary["baselines"].startswith("skipped") and "no torch that uses the GPU" in output
    rows = read_rows(check.results / "gpu_synthetic_gpu.jsonl")
    formats = bench_gpu.kv_formats(check.build / "device_bench")
    assert [row["cell"] for row in rows] == list(bench_gpu.device_cells(formats))
    assert all(row["machine"] == MACHINE and row["commit"] and row["date"] for row in rows)


def test_missing_models_and_packages_are_said_in_one_line(check: Check) -> None:
    shutil.rmtree(check.models / "gpt-oss-20b")
    status, output, summary = check.run("generation", "server")
    assert status == 0 and output.count("started:") == 2  # the other model, and the server
    why = f"skipped: no {check.models}/gpt-oss-20b; scripts/gpu_check.sh models makes it"
    assert summary["generation"].endswith(why)
    status, output, summary = check.run("generation", "server", NO_LMDEPLOY="1")
    assert status == 0 and "started:" not in output
    assert all("cannot import lmdeploy" in line for line in summary.values())


@pytest.mark.parametrize(
    ("part", "bad"),
    [
        ("conformance", "BAD_CASE"),
        ("conformance", "BAD_KVX"),
        ("generation", "BAD_BENCH"),
        ("server", "BAD_BENCH"),
    ],
)
def test_failing_part_is_reported_and_the_next_runs(check: Check, part: str, bad: str) -> None:
    status, _, summary = check.run(part, "tuner", **{bad: "7"})
    assert status == 1
    assert summary[part].startswith("FAILED") and "FAILED  " in summary[part]
    assert summary["tuner"].startswith("ok")


def test_program_without_a_folder_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path / "device_bench", DEVICE_BENCH)
    monkeypatch.chdir(tmp_path)
    arguments = ["device", "--small", "--bench", "./device_bench", "--json", "rows.jsonl"]
    assert bench_gpu.main(arguments) == 0
    assert len(read_rows(tmp_path / "rows.jsonl")) == len(list(bench_gpu.small_cells()))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the baselines use the CPU of torch, and time each launch as 10 µs."""

    def time_launches(launch: gpu.Launch, *, layers: int, launches: int) -> list[float]:
        for i in range(layers):
            launch(i)
        return [9.0, 10.0, 11.0]

    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "ROTATE_BYTES", 1)
    monkeypatch.setattr(gpu, "time_launches", time_launches)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def attention(q: Any, k: Any, v: Any, *, window: int, sinks: Any) -> Any:
    """Return the attention of q [heads, dim] over keys [kv heads, tokens, dim]."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.float().repeat_interleave(group, 0)[:, -window:] for x in (k, v))
    scores = torch.einsum("hd,htd->ht", q.float(), k) * q.shape[1] ** -0.5
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None]], 1)
    weights = torch.softmax(scores, 1)[:, : k.shape[1]]
    return torch.einsum("ht,htd->hd", weights, v)


def xqa_batch_decode_with_kv_cache(
    query: Any,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Any,
    seq_lens: Any,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    out: Any = None,
    sinks: Any = None,
    kv_layout: str = "NHD",
) -> Any:
    """Compute what FlashInfer 0.7.4 documents for this function."""
    two, tokens, dim = kv_cache.shape[1], kv_cache.shape[3], kv_cache.shape[4]
    assert two == 2 and kv_layout == "HND" and tokens in (16, 32, 64, 128)
    assert block_tables.dtype == torch.int32 and seq_lens.dtype == torch.uint32
    assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer.any()
    assert workspace_buffer.numel() > 8 << 20 and bmm1_scale == dim**-0.5 and bmm2_scale == 1
    assert out.dtype == query.dtype == torch.bfloat16
    assert sinks is None or (sinks.dtype == torch.float32 and len(sinks) == query.shape[1])
    for i, table in enumerate(block_tables.long()):
        length = int(seq_lens[i])
        assert length <= max_seq_len <= len(table) * tokens
        k, v = kv_cache[table].transpose(0, 1).transpose(1, 2).flatten(2, 3)[:, :, :length]
        window = window_left + 1 or length
        out[i] = attention(query[i], k, v, window=window, sinks=sinks).to(out.dtype)
    return out


class BatchDecodeWithPagedKVCacheWrapper:
    """Computes what FlashInfer 0.7.4 documents for the class of this name."""

    def __init__(self, workspace: Any, layout: str, **options: Any) -> None:
        assert layout == "HND" and options == {"use_tensor_cores": True, "backend": "fa2"}
        self.planned: Any = None

    def plan(self, indptr: Any, indices: Any, last: Any, *sizes: int, **options: Any) -> None:
        self.planned, self.window = (indptr, indices, last), options["window_left"]
        assert options["kv_data_type"] in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8)

    def run(self, q: Any, cache: Any, *, out: Any, kv_cache_sf: Any = None) -> None:
        assert (cache.dtype == torch.uint8) == (kv_cache_sf is not None)
        indptr, indices, last = self.planned
        if kv_cache_sf is None:
            lengths = (indptr[1:] - indptr[:-1] - 1) * cache.shape[3] + last
            tables = indices.reshape(len(q), -1)
            xqa_batch_decode_with_kv_cache(
                q, cache, torch.zeros(9 << 20, dtype=torch.uint8), tables,
                lengths.to(torch.uint32), int(lengths.max()), q.shape[2] ** -0.5,
                window_left=self.window, out=out, kv_layout="HND",
            )  # fmt: skip


@pytest.fixture
def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    package, decode = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.decode")
    for module in (package, decode):
        for thing in (xqa_batch_decode_with_kv_cache, BatchDecodeWithPagedKVCacheWrapper):
            setattr(module, thing.__name__, thing)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    versions = {"flashinfer-python": "0.7.4", "torch": "2.11"}
    monkeypatch.setattr(gpu.importlib.metadata, "version", versions.__getitem__)


DECODE = "op=decode mode={} batch=3 context=150 kv_heads=2 group=4 head_dim=16"


def result_of(launch: gpu.Launch) -> dict[str, Any]:
    """Launch layer 1, and return the variables of the launch."""
    launch(1)
    return inspect.getclosurevars(launch).nonlocals


@pytest.mark.parametrize("mode", ["none", "fp8"])
@pytest.mark.parametrize("rest", ["", " window=70", " window=70 sinks=1"])
def test_xqa_gets_the_pages_window_and_sinks_of_the_cell(
    on_cpu: None, fake_flashinfer: None, mode: str, rest: str
) -> None:
    cell = gpu.Cell.parse(DECODE.format(mode) + rest)
    own = result_of(flashinfer.make_xqa(cell, 2))
    cache = own["cache"][1]
    assert own["cache"].element_size() == (1 if mode == "fp8" else 2)
    sinks = torch.zeros(8) if cell["sinks"] else None
    for i, table in enumerate(own["tables"].long()):
        k, v = cache[table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :150]
        wanted = attention(own["q"][i], k, v, window=cell["window"] or 150, sinks=sinks)
        torch.testing.assert_close(own["out"][i].float(), wanted, atol=1e-2, rtol=1e-2)


def test_every_baseline_measures_its_cells_and_says_what_it_leaves_out(
    on_cpu: None, fake_flashinfer: None, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "op=prefill mode={} batch=1 context=48 new_tokens={} kv_heads=1 group=2 head_dim=64"
    cells = [
        *(DECODE.format(mode) for mode in ("none", "fp8", "nvfp4")),
        DECODE.format("fp8") + " window=70 sinks=1",
        DECODE.format("nvfp4") + " k_offset=1",
        "op=linear format=bf16 batch=2 rows=32 cols=64 launches=4",
        "op=linear format=q4_0 batch=2 rows=32 cols=64",
        prompt.format("none", 48) + " launches=4",
        prompt.format("nvfp4", 48),
        "op=copy mb=4096",
    ]
    rows: list[dict[str, Any]] = []
    failed = gpu.measure_all(cells, save=rows.append, budget_s=60)
    found = {(row["by"], row["cell"]) for row in rows}
    cublas, flash = "cuBLAS, torch 2.11", "FlashAttention 2, torch 2.11"
    xqa, fa2 = (f"{name}, flashinfer-python 0.7.4" for name in ("XQA", "FlashInfer fa2"))
    wanted = {(cublas, cells[5]), (flash, cells[7])}
    wanted |= {(xqa, cells[0]), (xqa, cells[1]), (xqa, cells[3])}
    wanted |= {(fa2, cells[i]) for i in (0, 1, 2)}
    cudnn = {("cuDNN, torch 2.11", cells[7])}  # torch of the tests may lack it
    assert found - cudnn == wanted and len(failed) == len(cudnn - found)
    assert all(row["us"] == 10 and row["us_low"] == 9 and row["layers"] >= 2 for row in rows)
    output = capsys.readouterr().out
    assert f"not measured: {fa2}: its kernel takes no sinks (1 cells)" in output
    assert f"not measured: {xqa}: it has no such cache (2 cells)" in output
    assert gpu.measure_all(cells, save=rows.append, budget_s=0) == []
    assert "the time is over, 2 cells are left" in capsys.readouterr().out


def test_missing_flashinfer_is_one_line_and_torch_is_still_measured(
    on_cpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [DECODE.format("fp8"), "op=linear format=bf16 batch=2 rows=32 cols=64"]
    rows: list[dict[str, Any]] = []
    assert gpu.measure_all(cells, save=rows.append, budget_s=60) == []
    assert [row["cell"] for row in rows] == cells[1:]
    output = capsys.readouterr().out
    assert output.count("not measured: XQA: ") == 1 and output.count("\n") == 2


def test_failing_baseline_is_reported_and_the_next_runs(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cell: gpu.Cell, layers: int) -> gpu.Launch:
        raise ValueError("no kernel for this shape")

    broken = replace(torch_gpu.PEERS[0], name="broken", make=fail)
    monkeypatch.setattr(torch_gpu, "PEERS", (broken, torch_gpu.PEERS[0]))
    rows: list[dict[str, Any]] = []
    cells = ["op=linear format=bf16 batch=2 rows=32 cols=64"]
    failed = gpu.measure_all(cells, save=rows.append, budget_s=60)
    assert len(failed) == len(rows) == 1 and "no kernel for this shape" in failed[0]


@pytest.mark.parametrize(("new", "context"), [(48, 48), (16, 48)])
@pytest.mark.parametrize("name", ["cuDNN", "FlashAttention 2"])
def test_prompts_are_causal_with_the_last_query_at_the_last_key(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, name: str, new: int, context: int
) -> None:
    asked, kernel = [], torch.nn.attention.sdpa_kernel

    @wraps(kernel)  # torch unwraps it when it is compiled for the first time
    def use_math(backends: list[Any]) -> Any:
        asked.extend(str(backend) for backend in backends)
        return kernel([torch.nn.attention.SDPBackend.MATH])

    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", use_math)
    text = f"op=prefill mode=none batch=1 context={context} new_tokens={new} kv_heads=2 group=2"
    (peer,) = (peer for peer in torch_gpu.PEERS if peer.name == name)
    launch = peer.make(gpu.Cell.parse(text + " head_dim=64"), 2)
    own, out = inspect.getclosurevars(launch).nonlocals, launch(1)
    assert asked == ["SDPBackend." + ("CUDNN" if name == "cuDNN" else "FLASH") + "_ATTENTION"]
    k, v = own["kv"][1, :, 0]
    for i in range(new):
        seen = context - new + i + 1
        wanted = attention(own["q"][0, :, i], k[:, :seen], v[:, :seen], window=seen, sinks=None)
        torch.testing.assert_close(out[0, :, i].float(), wanted, atol=2e-2, rtol=2e-2)


def test_tables_show_windows_and_servers(capsys: pytest.CaptureFixture[str]) -> None:
    window = DECODE.format("fp8") + " window=128 sinks=1"
    rows = [
        {"by": "lmdeploy-fp4", "cell": window, "us": 8.13},
        {"by": "XQA, flashinfer-python 0.7.4", "cell": window, "us": 12.0},
        {"model": "llama-3-8b", "work": "server", "mode": "nvfp4", "clients": 64, "context": 512,
         "answer": 128, "requests_per_s": 10.0, "p50_first": 0.5, "p99_first": 0.9,
         "p50_token": 0.012, "p99_token": 0.02},
    ]  # fmt: skip
    assert "| 8.1 | – | – | – | – | – | 12.0 |" in window_table(GpuResults(rows))
    row = "| Llama 3 8B, BF16 | 64 × (512 + 128) | `nvfp4` | 1,280 | 500.0 | 900.0 | 12.0 | 20.0 |"
    assert row in server_table(GpuResults(rows))
    path = ROOT / "benchmarks/results/gpu_nvidia_h100_80gb_hbm3.jsonl"
    assert main([str(path)]) == 0
    page = (ROOT / "docs/gpu.md").read_text("utf-8")
    printed = re.findall(r"^## (\w+)\n\n(.*?)\n\n", capsys.readouterr().out, re.M | re.S)
    tables = dict(printed)
    for name in ("decode", "others", "linear", "prefill", "models"):
        assert tables[name] in page
