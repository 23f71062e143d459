"""Tests of the stores: a folder, and a real Redis server."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_redis import BEHAVIORS, hostile_redis

from lmdeploy.kv_store import redis_store
from lmdeploy.kv_store.address import open_store
from lmdeploy.kv_store.file_store import FileStore
from lmdeploy.kv_store.store import BlockStore, StoreError

NAMES = [f"{i:064x}" for i in range(256)]
MAX = 1 << 20


@pytest.fixture(params=["file", "redis", "valkey"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    if request.param == "file":
        opened = open_store(f"file://{tmp_path}/store")
    else:
        url = request.getfixturevalue("redis_url")
        opened = open_store(url.replace("redis://", f"{request.param}://"))
    yield opened
    for entry in list(opened.entries()):
        opened.remove(entry.name)
    opened.close()


def test_values_are_kept_replaced_listed_and_removed(store: BlockStore) -> None:
    assert store.get(NAMES[0], max_bytes=MAX) is None
    assert not store.remove(NAMES[0])
    store.put(NAMES[0], b"old")
    store.put(NAMES[0], b"new value")
    store.put(NAMES[1], bytes(100_000))
    assert store.get(NAMES[0], max_bytes=MAX) == b"new value"
    assert {(entry.name, entry.num_bytes) for entry in store.entries()} == {
        (NAMES[0], 9),
        (NAMES[1], 100_000),
    }
    assert store.remove(NAMES[1])
    assert [entry.name for entry in store.entries()] == [NAMES[0]]


def test_a_folder_removes_what_was_unused_for_longest(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_bytes=32_000)
    for i, name in enumerate(NAMES[:30]):
        store.put(name, bytes(1000))
        os.utime(tmp_path / name[:2] / name, (1000 + i, 1000 + i))
    assert store.get(NAMES[0], max_bytes=MAX) == bytes(1000)  # is now the newest
    for name in NAMES[30:40]:
        store.put(name, bytes(1000))
    kept = {entry.name for entry in store.entries()}
    assert sum(entry.num_bytes for entry in store.entries()) <= 32_000 * 17 / 16
    assert NAMES[0] in kept and NAMES[39] in kept
    assert NAMES[1] not in kept and NAMES[2] not in kept


def test_processes_that_share_a_folder_read_whole_values(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path, max_bytes=100_000) for _ in range(4)]
    wrong: list[object] = []

    def work(store: FileStore, number: int) -> None:
        for i in range(200):
            name = NAMES[(i * 7 + number) % 64]
            store.put(name, name.encode() * 40)
            value = store.get(NAMES[(i * 5 + number) % 64], max_bytes=MAX)
            if value is not None and value != NAMES[(i * 5 + number) % 64].encode() * 40:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(s, i)) for i, s in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not list(tmp_path.glob("*/*.tmp"))


def test_a_folder_follows_no_link_and_no_other_name(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    store = FileStore(tmp_path / "store", max_bytes=1000)
    store.put(NAMES[0], b"x")
    path = tmp_path / "store" / NAMES[0][:2] / NAMES[0]
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError):
        store.get(NAMES[0], max_bytes=MAX)
    for name in ("../../secret", "", "0" * 63, "G" * 64):
        with pytest.raises(ValueError, match="64 hex digits"):
            store.get(name, max_bytes=MAX)


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_folder(path: Path) -> None:
    path.mkdir()
    (path / "inner").write_bytes(b"")


def put_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)  # paths of sockets are short
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def put_large_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


HOSTILE_FILES = [put_fifo, put_folder, put_device_link, put_socket, put_large_file]


@pytest.mark.parametrize("make", HOSTILE_FILES)
def test_a_folder_opens_and_reads_only_small_regular_files(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path, max_bytes=1000)
    store.put(NAMES[0], b"x")
    store.put(NAMES[1], b"y")
    path = tmp_path / NAMES[1][:2] / NAMES[1]
    path.unlink()
    make(path)
    opened: list[object] = []
    real_open = os.open

    def spy(path: Any, *args: Any, **options: Any) -> int:
        opened.append(path)
        return real_open(path, *args, **options)

    monkeypatch.setattr(os, "open", spy)
    with pytest.raises(StoreError):
        store.get(NAMES[1], max_bytes=MAX)
    assert (NAMES[1] in opened) == (make is put_large_file)
    assert store.get(NAMES[0], max_bytes=MAX) == b"x"
    with pytest.raises(StoreError, match="more than 0"):
        store.get(NAMES[0], max_bytes=0)
    again = FileStore(tmp_path, max_bytes=1000)  # removes the large file, and lists no other
    assert [entry.name for entry in again.entries()] == [NAMES[0]]


def test_a_folder_does_not_leave_itself_by_a_link_to_a_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / NAMES[0]).write_bytes(b"secret")
    (outside / ".old.tmp").write_bytes(b"")
    os.utime(outside / ".old.tmp", (1000, 1000))
    store = FileStore(tmp_path / "store", max_bytes=1000)
    (tmp_path / "store" / NAMES[0][:2]).symlink_to(outside)
    for call in (
        lambda: store.get(NAMES[0], max_bytes=MAX),
        lambda: store.put(NAMES[0], b"x"),
        lambda: store.remove(NAMES[0]),
    ):
        with pytest.raises(StoreError):
            call()
    assert list(FileStore(tmp_path / "store", max_bytes=1).entries()) == []
    assert sorted(file.name for file in outside.iterdir()) == [".old.tmp", NAMES[0]]


def test_a_folder_opens_while_another_process_holds_its_lock(tmp_path: Path) -> None:
    FileStore(tmp_path, max_bytes=1000)
    with (tmp_path / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store = FileStore(tmp_path, max_bytes=16)
        store.put(NAMES[0], bytes(100))
        assert store.get(NAMES[0], max_bytes=MAX) == bytes(100)
    store.put(NAMES[1], bytes(10))  # the limit holds again
    assert sum(entry.num_bytes for entry in store.entries()) <= 16


def test_a_lock_that_is_no_file_is_one_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ValueError, match=r"cannot be used: .*no regular file"):
        FileStore(tmp_path, max_bytes=1000)


@pytest.mark.parametrize("behavior", BEHAVIORS)
def test_a_hostile_server_is_a_store_error_within_its_limits(
    behavior: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_ANSWER_BYTES", 8 << 20)
    with hostile_redis(behavior) as server:
        store = open_store(server.url)
        begin = time.monotonic()
        calls: list[Callable[[], object]] = [lambda: store.get(NAMES[0], max_bytes=60_000)]
        if behavior in ("hang", "trickle", "garbage"):
            calls.append(lambda: store.put(NAMES[0], b"x"))
        for call in calls:
            if behavior == "not authentic":
                assert call() == bytes(40)
            else:
                with pytest.raises(StoreError):
                    call()
        assert time.monotonic() - begin < len(calls) * 2 * 1.7  # one repetition
        assert server.asked.is_set()
        store.close()


def test_a_server_does_not_send_a_value_that_is_too_large(redis_url: str) -> None:
    store = open_store(redis_url)
    store.put(NAMES[0], bytes(100))
    assert store.get(NAMES[0], max_bytes=100) == bytes(100)
    with pytest.raises(StoreError, match="more than 99 bytes"):
        store.get(NAMES[0], max_bytes=99)
    assert store.remove(NAMES[0])
    store.close()


def test_a_folder_that_cannot_be_used_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be used"):
        open_store(f"file://{tmp_path}/file")


def test_a_server_that_is_away_is_a_store_error() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = open_store(f"redis://127.0.0.1:{probe.getsockname()[1]}/0")
        with pytest.raises(StoreError):
            store.get(NAMES[0], max_bytes=MAX)
        with pytest.raises(StoreError):
            store.put(NAMES[0], b"")
        with pytest.raises(StoreError):
            list(store.entries())


@pytest.mark.parametrize(
    "url",
    [
        "store",
        "http://127.0.0.1/",
        "file://",
        "file:///",
        "file://host/folder",
        "file:relative",
        "file:///folder?size=0GiB",
        "file:///folder?size=ten",
        "file:///folder?size=1GB",
        "file:///folder?limit=1GiB",
        "redis://host:port/0",
    ],
)
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"^kv_store is .*--kv-store"):
        open_store(url)


def test_an_error_does_not_show_the_password() -> None:
    with pytest.raises(ValueError, match="kv_store") as error:
        open_store("redis://:pa55@host:port/0")
    assert "pa55" not in str(error.value)


def test_the_size_of_a_folder_is_read_from_its_address(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/a%20b?size=3MiB")
    assert isinstance(store, FileStore)
    assert (store.folder, store._max_bytes) == (tmp_path / "a b", 3 << 20)
