"""Tests of the weight cache: equal logits with and without it, and at worst a warning."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_runs import EngineRun
from tiny_gguf import write_gguf
from tiny_models import TINY_MODELS, make_model, save_model
from tiny_moe import QWEN2_MOE

from lmdeploy import TurbomindEngineConfig
from lmdeploy.checkpoint import fingerprint, weight_cache, weight_cache_file
from lmdeploy.checkpoint import load as weight_loader
from lmdeploy.checkpoint.convert import WEIGHT_CACHE_VERSION
from lmdeploy.checkpoint.weight_cache import CacheOptions, options_from_environment
from lmdeploy.engine.async_engine import AsyncEngine

IDS = [1, 5, 40, 7, 300, 12, 9, 9]
DEADLINE = 60.0


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama.gguf"
    write_gguf(make_model(TINY_MODELS[0]), path, weight_format="Q4_1")
    return path


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(QWEN2_MOE), tmp_path_factory.mktemp("experts"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of an empty cache that also accepts tiny and new models."""
    monkeypatch.setenv("LMDEPLOY_CACHE", "1")
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_loader, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(fingerprint, "SETTLE_NS", -(10**18))
    monkeypatch.setattr(weight_cache, "_START_SECONDS", 0.0)
    return tmp_path / "cache"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "lmdeploy"):
        yield caplog


class Start:
    """One start of the engine: its logits, and whether the weights came from the cache."""

    def __init__(self, path: Path) -> None:
        with EngineRun(str(path), exact=False) as run:
            self.logits = run.logits(IDS)
            writer = run.model.cache_writer
            self.mapped_bytes = run.model.mapped_bytes
            self.from_cache = writer is None
            self.stored = False
            if writer is not None:
                writer.start()
                assert writer.join(DEADLINE)
                self.stored = writer.stored


def only_file(folder: Path) -> Path:
    [path] = folder.iterdir()
    return path


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("model", ["gguf", "experts"])
def test_weight_cache_second_start_gives_equal_bits(
    model: str,
    in_place: bool,
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_cache_file, "_is_in_huge_pages", lambda *_: in_place)
    path = request.getfixturevalue(model)
    first, second = Start(path), Start(path)
    assert first.stored and not first.from_cache and second.from_cache
    np.testing.assert_array_equal(first.logits.view(np.uint32), second.logits.view(np.uint32))
    # The memory plan counts mapped weights.
    size = only_file(folder).stat().st_size
    assert 0.8 * size < second.mapped_bytes < size if in_place else second.mapped_bytes == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only_file(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "harm", ["flip", "cut", "empty", "symlink", "fifo", "writable", "other user", "folder"]
)
def test_weight_cache_bad_file_is_replaced(
    harm: str,
    gguf: Path,
    folder: Path,
    tmp_path: Path,
    warnings: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Start(gguf)
    path = only_file(folder)
    good = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm == "symlink":
        path.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_bytes(good)
    elif harm == "fifo":
        os.mkfifo(path, 0o600)
    else:
        flipped = good[:-100] + bytes([good[-100] ^ 4]) + good[-99:]
        path.write_bytes({"flip": flipped, "cut": good[:5000], "empty": b""}.get(harm, good))
        path.chmod(0o660 if harm == "writable" else 0o600)
    if harm == "other user":
        if os.geteuid() != 0:
            pytest.skip("only root can make another user's file")
        os.chown(path, 12345, -1)
    second = Start(gguf)
    np.testing.assert_array_equal(first.logits, second.logits)
    assert not second.from_cache
    texts = [record.getMessage() for record in warnings.records]
    assert "packed again" in texts[0] and not any("\n" in text for text in texts)
    if harm == "folder":
        assert not second.stored and len(texts) == 2
        return
    assert second.stored and len(texts) == 1
    assert path.read_bytes() == good and not path.is_symlink()
    assert Start(gguf).from_cache


@pytest.mark.parametrize("change", ["byte", "replaced", "touched", "moved"])
def test_weight_cache_changed_model_is_packed_again(
    change: str, gguf: Path, folder: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copy(gguf, tmp_path / "model.gguf"))
    first = Start(model)
    before = model.stat()
    time.sleep(0.05)  # file timestamps have a coarse resolution
    data = bytearray(model.read_bytes())
    data[-100] ^= 1  # in the middle of a tensor, outside the hashed samples
    if change == "byte":
        with model.open("r+b") as file:
            file.write(data)
    elif change == "replaced":
        (tmp_path / "new").write_bytes(data)
        os.replace(tmp_path / "new", model)
    elif change == "moved":
        model = model.rename(tmp_path / "other.gguf")
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = Start(model)
    assert not second.from_cache and second.stored
    assert np.array_equal(first.logits, second.logits) == (change in ("touched", "moved"))
    assert Start(model).from_cache


def test_identify_files_covers_every_shard_and_the_index(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "nowhere.safetensors").symlink_to(tmp_path / "missing")
    (tmp_path / "itself.safetensors").symlink_to("itself.safetensors")
    before = fingerprint.identify_files(tmp_path)
    assert len(before.files) == 3
    for name in [Path(place).name for place, *_ in before.files]:
        time.sleep(0.02)
        os.utime(tmp_path / name)
        after = fingerprint.identify_files(tmp_path)
        assert after.files != before.files
        before = after


def test_weight_cache_recently_changed_file_is_not_stored(
    gguf: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copy(gguf, tmp_path / "model.gguf"))
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "SETTLE_NS", 10**12)
        assert not Start(model).stored
    with EngineRun(str(model), exact=False) as run:
        time.sleep(0.05)
        os.utime(model)  # a change during the run
        run.model.cache_writer.start()
        assert run.model.cache_writer.join(DEADLINE) and not run.model.cache_writer.stored
    assert not folder.exists()


def test_weight_cache_other_version_is_packed_again(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Start(gguf).stored
    monkeypatch.setattr(weight_cache, "WEIGHT_CACHE_VERSION", WEIGHT_CACHE_VERSION + 1)
    assert not Start(gguf).from_cache and Start(gguf).from_cache
    only_file(folder)


def test_weight_cache_exact_or_small_model_is_not_stored(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineRun(str(gguf), exact=True) as run:
        assert run.model.cache_writer is None
    monkeypatch.setenv("LMDEPLOY_CACHE_LIMIT", "0")
    assert Start(gguf).from_cache  # there is nothing to write
    monkeypatch.delenv("LMDEPLOY_CACHE_LIMIT")
    monkeypatch.setattr(weight_loader, "MIN_CACHED_BYTES", 1 << 40)
    assert Start(gguf).from_cache
    assert not folder.exists()


def test_options_from_environment_reads_and_checks_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("LMDEPLOY_CACHE", "LMDEPLOY_CACHE_DIR", "LMDEPLOY_CACHE_LIMIT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert options_from_environment() == CacheOptions(tmp_path / ".cache/lmdeploy/packed")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG specification ignores relative paths
    assert options_from_environment() == CacheOptions(tmp_path / ".cache/lmdeploy/packed")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert options_from_environment() == CacheOptions(Path("/somewhere/lmdeploy/packed"))
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", "~/mine")
    for text, limit in {"1": 1, "20GB": 20 * 10**9, "1.5 gib": 3 << 29, "100 MB": 10**8}.items():
        monkeypatch.setenv("LMDEPLOY_CACHE_LIMIT", text)
        assert options_from_environment() == CacheOptions(tmp_path / "mine", limit)
    for bad in ("-1", "20 parsecs", "nan", "1e9", "0x10", "9" * 400):
        monkeypatch.setenv("LMDEPLOY_CACHE_LIMIT", bad)
        with pytest.raises(ValueError, match="LMDEPLOY_CACHE_LIMIT is"):
            options_from_environment()
    monkeypatch.delenv("LMDEPLOY_CACHE_LIMIT")
    monkeypatch.setenv("LMDEPLOY_CACHE", "0")
    assert options_from_environment() is None
    monkeypatch.setenv("LMDEPLOY_CACHE", "yes")
    with pytest.raises(ValueError, match=r"LMDEPLOY_CACHE is 'yes'. It must be 0 or 1"):
        options_from_environment()


def test_weight_cache_limit_removes_least_recently_used_files(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert Start(gguf).stored
    path = only_file(folder)
    size = path.stat().st_size
    os.utime(path, (1, 1))
    assert Start(gguf).from_cache and path.stat().st_mtime > time.time() - 100
    path.unlink()
    names = ("new.packed", "old.packed", "oldest.packed", ".killed.packed.unfinished")
    for age, name in enumerate(names, start=1):
        (folder / name).write_bytes(bytes(size))
        os.utime(folder / name, (time.time() - 1000 * age,) * 2)
    (folder / "notes.txt").write_bytes(bytes(10 * size))  # not a file of the cache
    monkeypatch.setenv("LMDEPLOY_CACHE_LIMIT", str(size - 1))
    assert not Start(gguf).stored
    assert (
        f"has {size} bytes. It must have at most {size - 1} (LMDEPLOY_CACHE_LIMIT)" in caplog.text
    )
    assert {found.name for found in folder.iterdir()} == {*names, "notes.txt"}
    monkeypatch.setenv("LMDEPLOY_CACHE_LIMIT", str(2 * size + size // 2))
    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "_KEEP_FREE", 1 << 60)
        assert not Start(gguf).stored  # and no file was removed for it
    assert {found.name for found in folder.iterdir()} == {*names[:3], "notes.txt"}
    assert Start(gguf).stored
    assert {found.name for found in folder.iterdir()} == {path.name, "new.packed", "notes.txt"}


@pytest.mark.parametrize("place", ["/proc/none", "file", "open", "other", "link"])
def test_weight_cache_unusable_folder_logs_a_warning(
    place: str,
    gguf: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: pytest.LogCaptureFixture,
) -> None:
    bad = tmp_path / "bad"
    if place == "file":
        bad.write_bytes(b"")
    elif place == "link":
        if os.geteuid() != 0:
            pytest.skip("only root can make another user's link")
        bad.symlink_to(tmp_path)
        os.lchown(bad, 12345, 12345)
    elif place in ("open", "other"):
        bad.mkdir()
        bad.chmod(0o777 if place == "open" else 0o700)
    else:
        bad = Path(place)
    if place == "other":
        monkeypatch.setattr(os, "geteuid", lambda: bad.stat().st_uid + 1)
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", str(bad))
    start = Start(gguf)
    assert not start.stored and not start.from_cache
    assert 1 <= len(warnings.records) <= 2
    assert all("\n" not in record.getMessage() for record in warnings.records)
    if bad.is_dir():
        assert not list(bad.glob("*.packed*"))


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_weight_cache_write_error_logs_a_warning(
    code: int,
    gguf: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", fail)
    assert not Start(gguf).stored
    [record] = warnings.records
    assert os.strerror(code) in record.getMessage()
    assert list(folder.iterdir()) == []


def test_weight_cache_concurrent_writers_do_not_collide(gguf: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with EngineRun(str(gguf), exact=False) as run:
        entry = run.model.cache_writer._entry
        other = entry.path.with_name(f".{entry.path.name}.unfinished")
        other.write_bytes(b"of another process")
        assert not Start(gguf).stored and only_file(folder) == other
        os.utime(other, (1, 1))  # as if that process had been killed
    assert Start(gguf).stored
    assert only_file(folder) == entry.path


def test_async_engine_stores_weights_and_close_stops_it(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TurbomindEngineConfig(session_len=128)
    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "_START_SECONDS", 1000.0)
        engine = AsyncEngine.load(str(gguf), config, progress=False)
        [thread] = [t for t in weight_cache.threading.enumerate() if t.name == "tm-cache"]
        engine.close()
        thread.join(DEADLINE)
        assert not thread.is_alive() and not folder.exists()
    engine = AsyncEngine.load(str(gguf), config, progress=False)
    deadline = time.monotonic() + DEADLINE
    while not list(folder.glob("*.packed")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.close()
    assert Start(gguf).from_cache


# Load a model and end the process during the write.
PROCESS = """
import os, sys, time
from engine_runs import EngineRun
from lmdeploy.checkpoint import fingerprint, weight_cache
from lmdeploy.checkpoint import load as weight_loader
fingerprint.SETTLE_NS = -10**18
weight_cache._START_SECONDS = 0.0
weight_loader.MIN_CACHED_BYTES = 0
real_write = os.pwrite
def write(fd, *data):
    print("writing", flush=True)
    time.sleep(1000 if sys.argv[2] == "kill" else 0.5)
    return real_write(fd, *data)
os.pwrite = write
run = EngineRun(sys.argv[1], exact=False)
run.model.cache_writer.start()
time.sleep(1000 if sys.argv[2] == "kill" else 0.2)
"""


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    paths = [
        str(Path(weight_cache.__file__).parents[2]),
        str(Path(__file__).parents[1] / "support"),
    ]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_weight_cache_exit_leaves_no_unfinished_file(end: str, gguf: Path, folder: Path) -> None:
    process = run_python(PROCESS, str(gguf), end)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    if end == "kill":
        process.send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == (0 if end == "exit" else -signal.SIGKILL), errors
    # A killed process cannot remove its unfinished file. A later store removes it.
    assert len(list(folder.glob(".*.unfinished"))) == (end == "kill")


# Modules that take 0.1 s or more in total and that the engine does not need to start.
UNUSED = ["starlette", "gguf", "importlib.metadata", "matplotlib", "openai", "safetensors", "torch"]
UNUSED += ["tqdm", "transformers", "uvicorn", "yaml"]


def test_async_engine_start_imports_no_unused_module() -> None:
    process = run_python(
        f"""
import sys
from lmdeploy.engine.async_engine import AsyncEngine
AsyncEngine.load("smollm2", progress=False).close()
print([name for name in {UNUSED} if name in sys.modules])
"""
    )
    out, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    assert out == "[]\n"
