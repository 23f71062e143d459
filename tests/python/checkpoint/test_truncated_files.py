"""Tests of model files that are truncated while they are mapped.

Each case runs in a process of its own, because a fault would end the process with SIGBUS.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_gguf import write_gguf
from tiny_models import TINY_MODELS, make_model
from tiny_moe import GPT_OSS, save_mxfp4

from lmdeploy.checkpoint import load

ASK = """
import asyncio, os, sys, time
from pathlib import Path
from lmdeploy import TurbomindEngineConfig
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint import fingerprint, load, weight_cache, weight_cache_file
from lmdeploy.base.errors import EngineFailure
from lmdeploy.engine.async_engine import AsyncEngine

model, file = sys.argv[1:]

def start():
    return AsyncEngine.load(model, TurbomindEngineConfig(session_len=256), progress=False)

async def ask(engine):
    return [chunk async for chunk in engine.generate([1, 5, 40, 7])]

def truncate():
    os.truncate(file, 4096)
"""
ASK_TWICE = """
engine = start()
assert asyncio.run(ask(engine))[-1].finish_reason in ("stop", "length")
truncate()
for attempt in range(2):
    try:
        last = asyncio.run(ask(engine))[-1]
        print(last.finish_reason + ":", last.error_message)
    except EngineFailure as error:
        print("failure:", error)
print("healthy:", engine.healthy)
engine.close()
"""
USE_CACHE_IN_PLACE = """
load.MIN_CACHED_BYTES = 0
fingerprint.SETTLE_NS = -(10**18)
weight_cache._START_SECONDS = 0.0
weight_cache_file._is_in_huge_pages = lambda mapped, data: True
engine = start()
folder = Path(os.environ["LMDEPLOY_CACHE_DIR"])
end = time.monotonic() + 60
while not list(folder.glob("*.packed")) and time.monotonic() < end:
    time.sleep(0.01)
engine.close()
(file,) = folder.glob("*.packed")
"""
TRUNCATE_WHILE_LOADING = """
add = load._add
def truncate_first(*args, **options):
    truncate()
    load._add = add
    add(*args, **options)
load._add = truncate_first
try:
    start()
except ModelFormatError as error:
    print("failure:", error)
"""


def run(code: str, model: Path, *, file: Path, cache: Path) -> str:
    package, support = Path(load.__file__).parents[2], Path(__file__).parents[1] / "support"
    environment = {
        "PYTHONPATH": f"{package}{os.pathsep}{support}",
        "LMDEPLOY_CACHE_DIR": str(cache),
        "LMDEPLOY_CACHE": "1",
    }
    process = subprocess.run(
        [sys.executable, "-c", ASK + code, str(model), str(file)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, (process.returncode, process.stderr)
    return process.stdout


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "llama.gguf"
    write_gguf(make_model(TINY_MODELS[0]), path, weight_format="Q4_1")
    return path


def assert_engine_failed(output: str, name: str) -> None:
    first, second, health = output.splitlines()
    assert health == "healthy: False"
    # The engine may notice it before the first request: it checks its files when it is idle.
    assert first.startswith(("error: ", "failure: The engine has failed: "))
    assert second.startswith("failure: The engine has failed: ")
    for line in (first, second):
        assert name in line and "The file was truncated or could not be read" in line


def test_truncated_expert_file_fails_the_engine(tmp_path: Path) -> None:
    model = save_mxfp4(make_model(GPT_OSS), tmp_path / "model")
    (file,) = model.glob("*.safetensors")
    assert_engine_failed(run(ASK_TWICE, model, file=file, cache=tmp_path / "cache"), file.name)


def test_truncated_weight_cache_fails_the_engine(gguf: Path, tmp_path: Path) -> None:
    code = USE_CACHE_IN_PLACE + ASK_TWICE
    assert_engine_failed(run(code, gguf, file=gguf, cache=tmp_path / "cache"), ".packed")


def test_truncated_file_while_loading_is_one_error(gguf: Path, tmp_path: Path) -> None:
    output = run(TRUNCATE_WHILE_LOADING, gguf, file=gguf, cache=tmp_path / "cache")
    assert output.startswith(f"failure: {gguf}: The file was truncated")
