"""The cache of packed weights: the same logits with it, and a warning at worst."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
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

from lmdeploy.checkpoint import load, weight_cache, weight_cache_file
from lmdeploy.checkpoint.weight_cache import CacheOptions, options_from_environment
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.engine.async_engine import AsyncEngine

IDS = [1, 5, 40, 7, 300, 12, 9, 9]
SETTLED_NS = -(10**18)  # every file is old enough
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
    """An empty cache that takes tiny models, and new ones too."""
    monkeypatch.setenv("LMDEPLOY_CACHE", "1")
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(weight_cache, "SETTLE_NS", SETTLED_NS)
    monkeypatch.setattr(weight_cache, "_START_SECONDS", 0.0)
    return tmp_path / "cache"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "lmdeploy"):
        yield caplog


class Start:
    """One start of the engine: what it computes, and whether it found its weights packed."""

    def __init__(self, path: Path, *, store: bool = True) -> None:
        with EngineRun(str(path), exact=False) as run:
            self.logits = run.logits(IDS)
            writer = run.model.cache_writer
            self.mapped_bytes = run.model.mapped_bytes
            self.from_cache = writer is None
            self.stored = False
            if writer is not None and store:
                writer.start(is_busy=lambda: False)
                assert writer.join(DEADLINE)
                self.stored = writer.stored


def only_file(folder: Path) -> Path:
    [path] = folder.iterdir()
    return path


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("model", ["gguf", "experts"])
def test_the_second_start_has_the_same_bits(
    model: str,
    in_place: bool,
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_cache_file, "_is_in_huge_pages", lambda *_: in_place)
    path = request.getfixturevalue(model)
    first = Start(path)
    assert first.stored and not first.from_cache
    second = Start(path)
    assert second.from_cache
    np.testing.assert_array_equal(first.logits.view(np.uint32), second.logits.view(np.uint32))
    # What is mapped is weights that the memory plan must see.
    size = only_file(folder).stat().st_size
    assert 0.8 * size < second.mapped_bytes < size if in_place else second.mapped_bytes == 0


def test_file_and_folder_are_private(gguf: Path, folder: Path) -> None:
    assert Start(gguf).stored
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only_file(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("harm", ["flip", "header", "cut", "empty", "version", "folder", "symlink"])
def test_a_broken_file_is_replaced(
    harm: str, gguf: Path, folder: Path, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    first = Start(gguf)
    path = only_file(folder)
    good = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm == "symlink":
        (tmp_path / "elsewhere").write_bytes(good)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        broken = {
            "flip": good[:-100] + bytes([good[-100] ^ 4]) + good[-99:],
            "header": good[:90] + b"\0" + good[91:],
            "cut": good[: len(good) // 2],
            "empty": b"",
            "version": good[:8] + b"\2" + good[9:],
        }[harm]
        path.write_bytes(broken)
        path.chmod(0o600)
    second = Start(gguf)
    np.testing.assert_array_equal(first.logits, second.logits)
    assert not second.from_cache
    [warning, *others] = [record.getMessage() for record in warnings.records]
    assert "packed anew" in warning and "\n" not in warning
    if harm == "folder":
        assert not second.stored and len(others) == 1
        return
    assert second.stored and not others
    assert path.read_bytes() == good and not path.is_symlink()
    assert Start(gguf).from_cache


@pytest.mark.parametrize("change", ["byte", "replaced", "touched", "moved"])
def test_a_changed_model_is_packed_anew(
    change: str, gguf: Path, folder: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copy(gguf, tmp_path / "model.gguf"))
    first = Start(model)
    assert Start(model).from_cache
    before = model.stat()
    time.sleep(0.05)  # the clock of the file system moves in steps
    data = bytearray(model.read_bytes())
    data[-100] ^= 1  # in the middle of a tensor that only a full hash would see
    if change == "byte":
        with model.open("r+b") as file:
            file.seek(len(data) - 100)
            file.write(data[-100:-99])
    elif change == "replaced":
        (tmp_path / "new").write_bytes(data)
        os.replace(tmp_path / "new", model)
    elif change == "moved":
        model = model.rename(tmp_path / "other.gguf")
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = Start(model)
    assert not second.from_cache and second.stored
    assert np.array_equal(first.logits, second.logits) == (change in ("touched", "moved"))
    assert len(list(folder.iterdir())) == (2 if change == "moved" else 1)
    assert Start(model).from_cache


def test_every_shard_and_the_index_count(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "nowhere.safetensors").symlink_to(tmp_path / "missing")
    (tmp_path / "itself.safetensors").symlink_to("itself.safetensors")
    before = weight_cache.stamp_files(tmp_path)
    assert len(before.files) == 3
    time.sleep(0.05)
    for name in [Path(place).name for place, *_ in before.files]:
        os.utime(tmp_path / name)
        after = weight_cache.stamp_files(tmp_path)
        assert after.files != before.files
        before = after


def test_a_file_that_may_still_change_is_not_kept(
    gguf: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copy(gguf, tmp_path / "model.gguf"))
    monkeypatch.setattr(weight_cache, "SETTLE_NS", 10**12)
    assert not Start(model).stored
    monkeypatch.setattr(weight_cache, "SETTLE_NS", SETTLED_NS)
    with EngineRun(str(model), exact=False) as run:
        time.sleep(0.05)
        os.utime(model)  # changed while it was in use
        assert run.model.cache_writer is not None
        run.model.cache_writer.start(is_busy=lambda: False)
        assert run.model.cache_writer.join(DEADLINE)
        assert not run.model.cache_writer.stored
    assert not folder.exists()


def test_another_build_packs_anew(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Start(gguf).stored
    monkeypatch.setattr(weight_cache, "_build_facts", lambda: [1, 2])
    assert not Start(gguf).from_cache
    assert Start(gguf).from_cache
    assert len(list(folder.iterdir())) == 1


def test_what_is_not_cached(gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineRun(str(gguf), exact=True) as run:
        assert run.model.cache_writer is None
    monkeypatch.setattr(load, "MIN_CACHED_BYTES", 1 << 40)
    assert Start(gguf).from_cache  # nothing to write
    monkeypatch.setattr(load, "MIN_CACHED_BYTES", 0)
    for name, value in (("LMDEPLOY_CACHE", "0"), ("LMDEPLOY_CACHE_LIMIT", "0")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert Start(gguf).from_cache
    assert not folder.exists()


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LMDEPLOY_CACHE", "LMDEPLOY_CACHE_DIR", "LMDEPLOY_CACHE_LIMIT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert options_from_environment() == CacheOptions(tmp_path / ".cache/lmdeploy/packed")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification ignores
    assert options_from_environment() == CacheOptions(tmp_path / ".cache/lmdeploy/packed")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert options_from_environment() == CacheOptions(Path("/somewhere/lmdeploy/packed"))
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", "~/mine")
    for text, limit in {"1": 1, "20GB": 20 * 10**9, "1.5 gib": 3 << 29, "100 MB": 10**8}.items():
        monkeypatch.setenv("LMDEPLOY_CACHE_LIMIT", text)
        assert options_from_environment() == CacheOptions(tmp_path / "mine", limit)
    for bad in ("-1", "20 parsecs", "nan", "1e9", "0x10", "9" * 400):
        monkeypatch.setenv("LMDEPLOY_CACHE_LIMIT", bad)
        with pytest.raises(ValueError, match="LMDEPLOY_CACHE_LIMIT: got"):
            options_from_environment()
    monkeypatch.delenv("LMDEPLOY_CACHE_LIMIT")
    monkeypatch.setenv("LMDEPLOY_CACHE", "yes")
    with pytest.raises(ValueError, match="LMDEPLOY_CACHE: got 'yes', wanted 0 or 1"):
        options_from_environment()


def test_what_another_process_has_written_is_not_read_again(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineRun(str(gguf), exact=False) as run:
        writer = run.model.cache_writer
        assert writer is not None
        assert Start(gguf).stored  # meanwhile
        written = only_file(folder).stat()

        def read_packed(*_: Any, **__: Any) -> None:
            raise AssertionError("all of it is read")

        monkeypatch.setattr(weight_cache, "read_packed", read_packed)
        writer.start(is_busy=lambda: False)
        assert writer.join(DEADLINE)
        assert writer.stored and os.path.samestat(only_file(folder).stat(), written)


def test_a_fifo_in_its_place_is_no_file(
    gguf: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Start(gguf).stored
    file = only_file(folder)
    file.unlink()
    os.mkfifo(file, 0o600)
    assert not Start(gguf, store=False).from_cache
    assert "not a file that this user alone may change" in caplog.text


def test_the_least_recently_used_go_first(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert Start(gguf).stored
    ours = only_file(folder)
    size = ours.stat().st_size
    for age, name in enumerate(("new.packed", "old.packed", "oldest.packed"), start=1):
        (folder / name).write_bytes(bytes(size))
        os.utime(folder / name, (time.time() - 1000 * age,) * 2)
    (folder / "notes.txt").write_bytes(bytes(10 * size))  # not ours to remove
    os.utime(ours, (1, 1))
    assert Start(gguf).from_cache  # now the most recently used of all
    assert ours.stat().st_mtime > time.time() - 100
    ours.unlink()
    monkeypatch.setenv("LMDEPLOY_CACHE_LIMIT", str(2 * size + size // 2))
    assert Start(gguf).stored
    assert {path.name for path in folder.iterdir()} == {ours.name, "new.packed", "notes.txt"}
    ours.unlink()
    monkeypatch.setenv("LMDEPLOY_CACHE_LIMIT", str(size - 1))
    assert not Start(gguf).stored  # larger than the limit: nothing else has to go for it
    wanted = f"got {size} bytes, wanted at most {size - 1}; change LMDEPLOY_CACHE_LIMIT"
    assert wanted in caplog.text
    assert {path.name for path in folder.iterdir()} == {"new.packed", "notes.txt"}


def test_nothing_goes_for_what_would_not_fit_then(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Start(gguf).stored
    (ours,) = folder.iterdir()
    size = ours.stat().st_size
    ours.unlink()
    (folder / "old.packed").write_bytes(bytes(size))
    monkeypatch.setenv("LMDEPLOY_CACHE_LIMIT", str(size + size // 2))  # one of the two
    usage = shutil.disk_usage(folder)
    free = weight_cache._KEEP_FREE - 1  # and `size` once the old one has gone

    def disk_usage(_: int) -> Any:
        gone = 0 if (folder / "old.packed").exists() else size
        return usage._replace(free=free + gone)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert not Start(gguf).stored
    assert [path.name for path in folder.iterdir()] == ["old.packed"]
    free += 1
    assert Start(gguf).stored
    assert [path.name for path in folder.iterdir()] == [ours.name]


def test_a_full_disk_is_left_alone(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "_KEEP_FREE", 1 << 60)
    assert not Start(gguf).stored
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("place", ["/proc/none", "file", "open", "other"])
def test_a_folder_that_cannot_be_used(
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
    elif place == "open":
        bad.mkdir()
        bad.chmod(0o777)
    elif place == "other":
        bad.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: bad.stat().st_uid + 1)
    else:
        bad = Path(place)
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", str(bad))
    start = Start(gguf)
    assert not start.stored and not start.from_cache
    assert 1 <= len(warnings.records) <= 2
    assert all("\n" not in record.getMessage() for record in warnings.records)
    if place in ("open", "other"):
        assert list(bad.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_another_users_link_is_not_followed(
    gguf: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", str(link))
    assert Start(gguf).stored  # our own link is as good as the folder
    os.lchown(link, 12345, 12345)
    assert not Start(gguf).from_cache


def test_the_engine_writes_when_it_is_ready(gguf: Path, folder: Path) -> None:
    config = TurbomindEngineConfig(session_len=128)
    engine = AsyncEngine.load(str(gguf), config, progress=False)
    try:
        deadline = time.monotonic() + DEADLINE
        while not (folder.exists() and list(folder.glob("*.packed"))):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        engine.close()
    assert Start(gguf).from_cache


def test_closing_the_engine_stops_the_writer(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "_START_SECONDS", 1000.0)
    before = threading.enumerate()
    engine = AsyncEngine.load(str(gguf), TurbomindEngineConfig(session_len=128), progress=False)
    started = [thread for thread in threading.enumerate() if thread not in before]
    [writer] = [thread for thread in started if thread.name == "tm-cache"]
    engine.close()
    writer.join(DEADLINE)
    assert not writer.is_alive()
    assert not folder.exists() or list(folder.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_file_system_that_takes_nothing(
    code: int,
    gguf: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert not Start(gguf).stored
    [record] = warnings.records
    assert os.strerror(code) in record.getMessage()
    assert list(folder.iterdir()) == []


def test_a_file_system_without_unnamed_files(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def no_tmpfile(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", no_tmpfile)
    assert Start(gguf).stored
    assert Start(gguf).from_cache
    [stored] = folder.iterdir()
    stored.unlink()
    killed = folder / f".{stored.name}.{os.getpid()}.unfinished"  # in a container pids are few
    killed.write_bytes(b"of a process that was killed a moment ago")
    assert Start(gguf).stored and not killed.exists()
    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "write_packed", lambda *_, **__: os.stat("/nonexistent"))
        patch.setattr(weight_cache, "_build_facts", lambda: [3])
        assert not Start(gguf).stored
    assert len(list(folder.iterdir())) == 1
    leftover = folder / ".model.packed.1.unfinished"
    leftover.write_bytes(b"of a process that was killed")
    os.utime(leftover, (1, 1))
    only = [path for path in folder.iterdir() if path != leftover]
    only[0].unlink()
    assert Start(gguf).stored and not leftover.exists()


def test_a_write_waits_for_requests_but_not_for_ever(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "_WAIT_SECONDS", 0.001)
    asked = []
    with EngineRun(str(gguf), exact=False) as run:
        writer = run.model.cache_writer
        assert writer is not None
        writer.start(is_busy=lambda: asked.append(1) is None)
        assert writer.join(DEADLINE) and writer.stored
    assert len(asked) >= weight_cache._BUSY_WAITS


def test_closing_the_engine_ends_the_write(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "_BUSY_WAITS", 10**9)
    with EngineRun(str(gguf), exact=False) as run:
        writer = run.model.cache_writer
        assert writer is not None
        writer.start(is_busy=lambda: True)
        writer.stop()
        assert writer.join(DEADLINE) and not writer.stored
    assert not folder.exists() or list(folder.iterdir()) == []


# Prints "ready" when the engine's weights are there, then writes the cache.
PROCESS = """
import json, os, resource, sys, time
from engine_runs import EngineRun
from lmdeploy.checkpoint import load as weight_loader, weight_cache as packed_cache
packed_cache.SETTLE_NS = -10**18
packed_cache._START_SECONDS = 0.0
weight_loader.MIN_CACHED_BYTES = 0
model, behaviour = sys.argv[1:]
with EngineRun(model, exact=False) as run:
    writer = run.model.cache_writer
    total = float(run.logits([1, 5, 40]).sum())
    print("ready", flush=True)
    if behaviour == "together":
        sys.stdin.readline()
    elif behaviour == "small":
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    elif behaviour in ("hang", "exit"):
        def hang(fd, *_, **__):
            os.pwrite(fd, bytes(1000), 0)
            print("hanging", flush=True)
            time.sleep(1000)
        packed_cache.write_packed = hang
    stored = False
    if writer is not None:
        writer.start(is_busy=lambda: False)
        if behaviour == "exit":
            time.sleep(0.5)
        else:
            writer.join(60)
            stored = writer.stored
    print(json.dumps([total, writer is None, stored]), flush=True)
"""


def start_process(model: Path, behaviour: str) -> subprocess.Popen[str]:
    root = Path(weight_cache.__file__).parents[2]
    paths = [str(root), str(Path(__file__).parents[1] / "support")]
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(model), behaviour],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once(gguf: Path, folder: Path) -> None:
    processes = [start_process(gguf, "together") for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    results = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, err
        results.append(json.loads(out))
    assert results[0] == results[1]
    assert results[0][1:] == [False, True]
    only_file(folder)
    assert Start(gguf).from_cache


@pytest.mark.parametrize("behaviour", ["small", "hang", "exit"])
def test_a_process_that_ends_early_leaves_nothing(behaviour: str, gguf: Path, folder: Path) -> None:
    process = start_process(gguf, behaviour)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if behaviour == "hang":
        assert process.stdout.readline() == "hanging\n"
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=DEADLINE)
    else:
        out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, err
        assert json.loads(out.splitlines()[-1])[1:] == [False, False]
        assert ("not cached" in err) == (behaviour == "small")
    assert list(folder.iterdir()) == []


# Modules that cost a tenth of a second or more together, and no start of the engine needs.
UNUSED = ["fastapi", "gguf", "importlib.metadata", "matplotlib", "openai", "safetensors", "torch"]
UNUSED += ["tqdm", "transformers", "uvicorn", "yaml"]


def test_a_start_imports_only_what_it_uses() -> None:
    code = f"""
import sys
from lmdeploy.engine.async_engine import AsyncEngine
AsyncEngine.load("smollm2", progress=False).close()
print([name for name in {UNUSED} if name in sys.modules])
"""
    root = Path(weight_cache.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
