"""Tests of the traffic between an engine and a store, with fakes of both."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmdeploy.kv_store import traffic as module
from lmdeploy.kv_store.keys import BlockKeys
from lmdeploy.kv_store.store import Entry, StoreError
from lmdeploy.kv_store.traffic import PrefixTraffic

SALT = bytes(16)
TOKENS = list(range(17))  # four blocks and a token


class MemoryStore:
    folder: Path | None = None

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.fails: Exception | None = None
        self.hangs = False
        self.released = threading.Event()
        self.seconds = 0.0
        self.num_calls = 0

    def _call(self) -> None:
        self.num_calls += 1
        time.sleep(self.seconds)
        if self.hangs:
            self.released.wait()
        if self.fails is not None:
            raise self.fails

    def get(self, name: str, *, max_bytes: int) -> bytes | None:
        self._call()
        return self.values.get(name)

    def put(self, name: str, value: bytes) -> None:
        self._call()
        self.values[name] = value

    def remove(self, name: str) -> bool:
        return self.values.pop(name, None) is not None

    def entries(self) -> Iterator[Entry]:
        yield from (Entry(name, len(value)) for name, value in self.values.items())

    def close(self) -> None:
        pass


class Cache:
    """A prefix cache of one prompt. The copies of block i are [b"i", b""]."""

    def __init__(self, num_blocks: int = 0) -> None:
        self.blocks = [[f"{i}".encode(), b""] for i in range(num_blocks)]

    def cached_tokens(self, prompt: Sequence[int], salt: bytes) -> int:
        return 4 * len(self.blocks)

    def export_prefix(self, tokens: Sequence[int], *, first: int, salt: bytes) -> list[list[bytes]]:
        return self.blocks[first:]

    def import_prefix(
        self, tokens: Sequence[int], *, first: int, blocks: list[list[bytes]], salt: bytes
    ) -> int:
        assert first == len(self.blocks)
        if any(b"bad" in block for block in blocks):
            raise ValueError("A stored block is damaged")
        self.blocks += blocks
        return len(blocks)


def connect(store: MemoryStore, secret: bytes = b"secret") -> PrefixTraffic:
    keys = BlockKeys(secret, {}, block_tokens=4)
    return PrefixTraffic(store, keys, block_tokens=4, max_block_bytes=64, late_blocks=1)


@pytest.fixture
def full_store() -> MemoryStore:
    store = MemoryStore()
    traffic = connect(store)
    traffic.offer(Cache(4), TOKENS, salt=SALT)
    assert traffic.drain(10)
    assert (traffic.stats.written_blocks, len(store.values)) == (4, 4)
    traffic.close()
    return store


def test_a_prefix_written_by_one_process_is_read_by_another(full_store: MemoryStore) -> None:
    traffic = connect(full_store)
    for have, want in ((0, 4), (2, 2), (4, 0)):
        cache = Cache(have)
        assert traffic.fetch(cache, TOKENS, salt=SALT) == want
        assert cache.blocks == Cache(4).blocks
    assert (traffic.stats.hits, traffic.stats.misses) == (6, 0)
    assert traffic.fetch(Cache(), TOKENS[:16], salt=SALT) == 3  # the last token is always computed
    assert traffic.fetch(Cache(), TOKENS, salt=b"\1" * 16) == 0
    assert traffic.fetch(Cache(), [5, *TOKENS[1:]], salt=SALT) == 0
    assert traffic.stats.misses == 2
    traffic.close()


def test_a_block_is_written_once_and_again_with_its_late_copy(full_store: MemoryStore) -> None:
    traffic = connect(full_store)
    cache = Cache(4)
    assert traffic.fetch(Cache(), TOKENS, salt=SALT) == 4
    before = full_store.num_calls
    traffic.offer(cache, TOKENS, salt=SALT)
    assert traffic.drain(10)
    assert full_store.num_calls == before  # what was read is known
    cache.blocks[3] = [b"3", b"late"]
    cache.blocks.append([b"4", b""])
    traffic.offer(cache, [*TOKENS, 17, 18, 19], salt=SALT)
    assert traffic.drain(10)
    assert traffic.stats.written_blocks == 2
    traffic.close()
    fresh = Cache()
    reader = connect(full_store)
    assert reader.fetch(fresh, [*TOKENS, 17, 18, 19, 20], salt=SALT) == 5
    assert fresh.blocks == cache.blocks
    reader.close()


def test_foreign_and_damaged_values_are_misses(full_store: MemoryStore) -> None:
    forger = connect(full_store, b"another")
    assert forger.fetch(Cache(), TOKENS, salt=SALT) == 0
    forger.close()
    traffic = connect(full_store)
    names = BlockKeys(b"secret", {}, block_tokens=4).names(TOKENS, SALT)
    full_store.values[names[2]] = full_store.values[names[1]]  # sealed for another name
    assert traffic.fetch(Cache(), TOKENS, salt=SALT) == 2
    assert (traffic.stats.rejected, traffic.stats.misses) == (1, 1)
    traffic.close()


def test_blocks_that_the_engine_refuses_are_counted() -> None:
    store, cache = MemoryStore(), Cache(2)
    cache.blocks[1] = [b"bad"]
    traffic = connect(store)
    traffic.offer(cache, TOKENS, salt=SALT)
    assert traffic.drain(10)
    assert traffic.fetch(Cache(), TOKENS, salt=SALT) == 0
    assert traffic.stats.rejected == 1
    traffic.close()


@pytest.mark.parametrize(
    "error", [StoreError("It is down"), ValueError(), RecursionError()], ids=repr
)
def test_a_store_that_is_down_is_left_alone_for_a_while(
    full_store: MemoryStore, error: Exception
) -> None:
    traffic = connect(full_store)
    full_store.fails, full_store.num_calls = error, 0
    for _ in range(5):
        assert traffic.fetch(Cache(), TOKENS, salt=SALT) == 0
        traffic.offer(Cache(4), TOKENS, salt=SALT)
    assert traffic.drain(10)
    assert full_store.num_calls == 1
    assert traffic.stats.errors == 1
    traffic.close()


@pytest.mark.parametrize(("seconds", "num_blocks"), [(0.0, 0), (0.2, 2)], ids=["hangs", "slow"])
def test_all_blocks_of_a_prompt_share_one_deadline(
    full_store: MemoryStore, seconds: float, num_blocks: int
) -> None:
    traffic = connect(full_store)
    full_store.seconds, full_store.hangs = seconds, not seconds
    begin = time.monotonic()
    assert traffic.fetch(Cache(), TOKENS, salt=SALT) == num_blocks
    assert 0.4 < time.monotonic() - begin < 0.8
    assert traffic.stats.errors == 1
    begin = time.monotonic()
    assert traffic.fetch(Cache(), TOKENS, salt=SALT) == 0  # the store rests
    assert time.monotonic() - begin < 0.1
    traffic.close()
    full_store.released.set()


def test_a_store_that_hangs_has_a_limited_number_of_threads(
    full_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_FETCH_SECONDS", 0.05)
    traffic = connect(full_store)
    full_store.hangs = True
    for _ in range(20):
        assert traffic.fetch(Cache(), TOKENS, salt=SALT) == 0
    assert sum(thread.name == "kv-fetch" for thread in threading.enumerate()) == 8
    full_store.hangs = False
    full_store.released.set()
    monkeypatch.setattr(module, "_FETCH_SECONDS", 5.0)
    assert traffic.fetch(Cache(), TOKENS, salt=SALT) == 4
    traffic.close()


def test_closing_waits_for_no_store(full_store: MemoryStore) -> None:
    traffic = connect(full_store)
    full_store.hangs = True
    traffic.offer(Cache(4), [7, *TOKENS], salt=SALT)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(traffic.fetch, Cache(), TOKENS, salt=SALT)
        time.sleep(0.2)
        begin = time.monotonic()
        traffic.close()
        assert waiting.result(timeout=1) == 0
        assert time.monotonic() - begin < 1.5
    full_store.released.set()


def test_reading_stops_when_computing_would_be_faster(full_store: MemoryStore) -> None:
    traffic = connect(full_store)
    full_store.seconds = 0.02
    traffic.note_prompt(400, 0.001)  # ten microseconds a block
    assert traffic.fetch(Cache(), TOKENS, salt=SALT) == 1
    traffic.close()
    patient = connect(full_store)
    patient.note_prompt(4, 10.0)
    assert patient.fetch(Cache(), TOKENS, salt=SALT) == 4
    patient.close()


def test_many_prefixes_at_once_do_not_wait_for_the_store() -> None:
    store = MemoryStore()
    store.seconds = 0.05
    traffic = connect(store)
    begin = time.monotonic()
    for i in range(2000):
        traffic.offer(Cache(1), [i] * 5, salt=SALT)
    assert time.monotonic() - begin < 5
    traffic.close()
    assert len(store.values) < 2000
