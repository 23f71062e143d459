"""Tests of bad GPUs: too old, too small, busy, lost or hung while sequences run.

The stand-in for CUDA plays the GPU (CUDA_SHIM_FAULT, tests/cpp/cuda_shim/runtime.cc). Each test
starts a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tiny_models import TinyModel, make_model, save_model

ROOT = Path(__file__).parents[3]
SERVE = """
import sys
from lmdeploy.cli.main import main
from lmdeploy.engine import load
from lmdeploy.serve import server
load.GPU_STEP_LIMIT_S, server._LAST_RESORT_SECONDS = 2.0, 1
sys.exit(main(["serve", "api_server", *sys.argv[1:]]))
"""
ENGINE = ("--session-len=256", "--max-batch-size=2", "--cache-max-entry-count=0.01")
SERVER = ("--server-port=0", "--device=cuda", "--shutdown-timeout=1")
NUM_CLIENTS = 5  # more than the engine runs at a time
DEADLINE_S = 60.0
LOST = "unspecified launch failure"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = make_model(TinyModel("llama", "Llama"))
    return str(save_model(tiny, tmp_path_factory.mktemp("tiny")))


def environment(shim: Path, fault: str) -> dict[str, str]:
    own = {"LMDEPLOY_CUDA_LIBRARY": str(shim), "CUDA_SHIM_FAULT": fault, "PYTHONPATH": str(ROOT)}
    return os.environ | own


def refusal(shim: Path, model: str, *, fault: str) -> str:
    """Return the sentence with which a server refuses to start."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE, model, *SERVER, *ENGINE],
        env=environment(shim, fault),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    lines = [line for line in done.stderr.splitlines() if line and "Loading" not in line]
    assert len(lines) == 1 and lines[0].startswith("lmdeploy: error: ")
    return lines[0].removeprefix("lmdeploy: error: ")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            "sm=75",
            r"GPU 0: shim has compute capability 7\.5; 8\.0 or newer is required\. Change --dev",
        ),
        ("busy", r"GPU 0: CUDA: .*busy or unavailable\. Change --device or --devices\."),
        ("no_kernels", r"GPU 0: SM 90 is not supported.*\(TM_CUDA_ARCHS\): .*no kernel image"),
        ("lost=/", rf"GPU 0: CUDA: \S+: {LOST}\. Change --device or --devices\."),
        (
            "memory=100000",
            r"weights take [\d,]+ bytes, but the GPU has only 100,000 free\. .*--devices",
        ),
        (
            "memory=1000000",
            r"The KV cache does not hold one sequence.*Raise --cache-max-entry-count",
        ),
    ],
)
def test_server_on_a_bad_gpu_ends_with_one_sentence(
    shim: Path, model: str, fault: str, reason: str
) -> None:
    assert re.search(reason, refusal(shim, model, fault=fault))


@pytest.mark.parametrize("fault", ["sm=75", "busy", "no_kernels"])
def test_auto_on_a_bad_gpu_uses_the_cpu_and_says_why(shim: Path, fault: str) -> None:
    code = """
import logging
from lmdeploy import TurbomindEngineConfig
from lmdeploy.engine import devices
logging.basicConfig(level="INFO")
print(devices.device_line(devices.open_device(TurbomindEngineConfig(num_threads=1))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(shim, fault),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stdout.startswith("device: cpu (") and "CUDA is not used: GPU 0: " in done.stderr


@dataclass
class Running:
    """A server process, its address and the lines that it has logged."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)


@contextmanager
def server_on(shim: Path, model: str, *, fault: str) -> Iterator[Running]:
    """Start a server and wait until it listens."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, model, *SERVER, *ENGINE],
        env=environment(shim, fault),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        running = Running(process)
        reader = threading.Thread(target=lambda: running.log.extend(process.stderr or ()))
        reader.start()
        try:
            found = next(filter(None, map(re.compile(r" at (http://\S+)").search, process.stdout)))
            running.url = found[1]
            yield running
        finally:
            process.kill()
            reader.join()


def last_event(url: str, model: str) -> str:
    """Stream an answer and return the last event that arrives."""
    body = {"model": model, "prompt": "hello", "stream": True, "ignore_eos": True}
    body |= {"max_tokens": 200}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE_S) as reply:
        return list(filter(None, reply.iter_lines()))[-1]


def num_requests(url: str) -> int:
    """Return how many requests run or wait."""
    text = httpx.get(f"{url}/metrics", timeout=DEADLINE_S).text
    counts = re.findall(r"^lmdeploy:num_requests_(?:running|waiting)\S* (\S+)$", text, re.M)
    assert len(counts) == 2
    return sum(int(float(count)) for count in counts)


def break_gpu_of_streams(running: Running, model: str, *, fault: Path, reason: str) -> None:
    """Break the GPU while all clients stream or wait, and check their last events."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        events = [pool.submit(last_event, running.url, model) for _ in range(NUM_CLIENTS)]
        deadline = time.monotonic() + DEADLINE_S
        while num_requests(running.url) < NUM_CLIENTS and time.monotonic() < deadline:
            time.sleep(0.01)
        fault.touch()
        for event in (event.result(DEADLINE_S) for event in events):
            assert event.startswith('data: {"error":') and reason in event


def assert_server_ends(running: Running, reason: str) -> None:
    """Check that the process ends with status 1 and has said why once."""
    assert running.process.wait(DEADLINE_S) == 1
    deadline = time.monotonic() + 5
    wanted = f"CRITICAL lmdeploy: The engine has failed: {reason}. The server stops."
    while not (said := [line for line in running.log if "The engine has failed" in line]):
        assert time.monotonic() < deadline, running.log
        time.sleep(0.01)
    assert len(said) == 1 and re.fullmatch(wanted, said[0].strip())
    assert not any("Traceback" in line for line in running.log)


def test_gpu_lost_while_decoding_ends_all_requests_and_the_server(
    shim: Path, model: str, tmp_path: Path
) -> None:
    fault = tmp_path / "lost"
    with server_on(shim, model, fault=f"lost={fault}") as running:
        break_gpu_of_streams(running, model, fault=fault, reason=LOST)
        assert_server_ends(running, rf"CUDA: [\w ]+: {LOST}")


def test_idle_server_whose_gpu_is_lost_fails_the_next_request(
    shim: Path, model: str, tmp_path: Path
) -> None:
    fault = tmp_path / "lost"
    with server_on(shim, model, fault=f"lost={fault}") as running:
        fault.touch()
        body = {"model": model, "prompt": "hello", "max_tokens": 2}
        reply = httpx.post(f"{running.url}/v1/completions", json=body, timeout=DEADLINE_S)
        assert reply.status_code in (500, 503) and LOST in reply.json()["error"]["message"]
        assert_server_ends(running, rf"CUDA: [\w ]+: {LOST}")


def test_gpu_that_hangs_ends_all_requests_and_the_server(
    shim: Path, model: str, tmp_path: Path
) -> None:
    fault = tmp_path / "hung"
    with server_on(shim, model, fault=f"hung={fault}") as running:
        break_gpu_of_streams(running, model, fault=fault, reason="step has not ended for 2 s")
        assert_server_ends(running, "A step has not ended for 2 s")
        assert any("The process ends now." in line for line in running.log)


ASK_TWICE = """
import sys
from pathlib import Path
from lmdeploy import GenerationConfig, TurbomindEngineConfig, pipeline
from lmdeploy.base.errors import EngineFailure
path, fault = sys.argv[1:]
config = TurbomindEngineConfig(
    device_type="cuda", session_len=256, max_batch_size=2, cache_max_entry_count=0.01
)
pipe = pipeline(path, backend_config=config)
gen = GenerationConfig(max_new_tokens=4, ignore_eos=True)
print(len(pipe("hello", gen_config=gen, do_preprocess=False).token_ids))
Path(fault).touch()
for attempt in range(2):
    try:
        print(pipe("hello", gen_config=gen, do_preprocess=False).error_message)
    except EngineFailure as error:
        print("EngineFailure:", error)
"""


def test_pipeline_on_a_lost_gpu_raises_and_ends(shim: Path, model: str, tmp_path: Path) -> None:
    fault = tmp_path / "lost"
    done = subprocess.run(
        [sys.executable, "-c", ASK_TWICE, model, str(fault)],
        env=environment(shim, f"lost={fault}"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == "4" and LOST in second and LOST in third
    # The first request may still be ending when the GPU is lost.
    assert second.startswith(("the engine has failed: ", "EngineFailure: The engine has failed: "))
    assert third.startswith("EngineFailure: The engine has failed: ")
