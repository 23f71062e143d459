"""Moves blocks between an engine and a store: reads for a prompt, and writes in the background."""

from __future__ import annotations

import logging
import operator
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lmdeploy.kv_store.blocks import pack_copies, unpack_copies
from lmdeploy.kv_store.keys import BlockKeys
from lmdeploy.kv_store.store import BlockStore, StoreError

logger = logging.getLogger("lmdeploy")

_PAUSE_SECONDS = 10.0  # after an error of the store
_FETCH_SECONDS = 0.5  # for all blocks of a prompt, and more for those that arrived:
_READ_BYTES_PER_SECOND = 16 << 20
_MAX_FETCHES = 8  # at once; those that hang count
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 1.0
_SEAL_BYTES = 64 << 10  # of a value beside the copies of its block, with their padding
_WRITE_BYTES_PER_SECOND = 64 << 20
_MAX_WAITING = 256  # prefixes to write; the oldest are dropped
_MAX_KNOWN = 1 << 16  # blocks that this process need not write again
_KNOWN_SECONDS = 600.0  # others may evict a block meanwhile
_SMOOTHING = 0.2  # weight of the newest measurement


class PrefixCache(Protocol):
    """The part of a core that traffic needs."""

    def cached_tokens(self, prompt: Sequence[int], salt: bytes) -> int: ...
    def export_prefix(
        self, tokens: Sequence[int], *, first: int, salt: bytes
    ) -> list[list[bytes]]: ...
    def import_prefix(
        self, tokens: Sequence[int], *, first: int, blocks: list[list[bytes]], salt: bytes
    ) -> int: ...


class NoPrefixCache:
    """A core whose blocks nobody moves, because it has none of its own."""

    def cached_tokens(self, prompt: Sequence[int], salt: bytes) -> int:
        """Return 0."""
        return 0

    def export_prefix(self, tokens: Sequence[int], *, first: int, salt: bytes) -> list[list[bytes]]:
        """Return no blocks."""
        return []

    def import_prefix(
        self, tokens: Sequence[int], *, first: int, blocks: list[list[bytes]], salt: bytes
    ) -> int:
        """Take no blocks."""
        return 0


@dataclass
class StoreStats:
    """Counts since the start. `rejected` values were not sealed with the store's secret."""

    hits: int = 0
    misses: int = 0
    rejected: int = 0
    errors: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    written_blocks: int = 0


@dataclass
class _Known:
    """Blocks in the store: name → the pools with a copy, and when that was known."""

    entries: OrderedDict[str, tuple[tuple[bool, ...], float]] = field(default_factory=OrderedDict)

    def add(self, name: str, pools: tuple[bool, ...]) -> None:
        self.entries[name] = (pools, time.monotonic())
        self.entries.move_to_end(name)
        if len(self.entries) > _MAX_KNOWN:
            self.entries.popitem(last=False)

    def pools(self, name: str) -> tuple[bool, ...] | None:
        pools, since = self.entries.get(name, (None, 0.0))
        return pools if time.monotonic() - since < _KNOWN_SECONDS else None


class _Fetch:
    """The blocks read for one prompt, and the deadline of all of them."""

    def __init__(self) -> None:
        self.blocks: list[list[bytes]] = []
        self.done = threading.Event()
        self.is_over = False  # nobody waits any more
        self._end = time.monotonic() + _FETCH_SECONDS

    def add(self, copies: list[bytes]) -> None:
        """Add an authentic block, whose size extends the deadline."""
        self._end += sum(map(len, copies)) / _READ_BYTES_PER_SECOND
        self.blocks.append(copies)

    def seconds_left(self) -> float:
        return self._end - time.monotonic()


class PrefixTraffic:
    """The connection between one engine and one store.

    Errors of the store are counted, and the store is left alone for some seconds after each. They
    cost hits, but never fail a request. Any thread may use it.
    """

    def __init__(
        self,
        store: BlockStore,
        keys: BlockKeys,
        *,
        block_tokens: int,
        max_block_bytes: int,
        late_blocks: int,
    ) -> None:
        """Start the thread that writes.

        Args:
            max_block_bytes: of all copies of a block. The store returns no larger value.
            late_blocks: how many trailing blocks may still gain a quantized copy, when they leave
                the window, or a checkpoint, when a prompt begins with them.
        """
        self.stats = StoreStats()
        self._store = store
        self._keys = keys
        self._block_tokens = block_tokens
        self._max_block_bytes = max_block_bytes + _SEAL_BYTES
        self._late_blocks = late_blocks
        self._readers = threading.BoundedSemaphore(_MAX_FETCHES)
        self._known = _Known()
        self._lock = threading.Lock()  # of _known and stats
        self._resumes_at = 0.0
        self._compute_seconds: float | None = None  # per block of a prompt
        self._waiting: queue.Queue[tuple[PrefixCache, list[int], bytes] | None] = queue.Queue(
            _MAX_WAITING
        )
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_all, name="kv-store", daemon=True)
        self._writer.start()

    def note_prompt(self, num_tokens: int, seconds: float) -> None:
        """Learn from a prompt of `num_tokens` how long computing a block takes."""
        if num_tokens < self._block_tokens:
            return
        now = seconds * self._block_tokens / num_tokens
        before = self._compute_seconds
        self._compute_seconds = now if before is None else before + _SMOOTHING * (now - before)

    def fetch(self, cache: PrefixCache, prompt: list[int], *, salt: bytes) -> int:
        """Copy blocks of a prompt from the store to the engine. Return their number.

        It stops at the first missing block, when reading takes longer than computing would, and at
        the deadline of _Fetch. No error of the store leaves it.
        """
        # The last token is always computed.
        names = self._keys.names(prompt[:-1], salt)
        if not names or self._is_paused():
            return 0
        first = cache.cached_tokens(prompt, salt) // self._block_tokens
        begin = time.monotonic()
        blocks = self._read_blocks(names[first:])
        with self._lock:
            self.stats.read_seconds += time.monotonic() - begin
        if not blocks:
            return 0
        try:
            return cache.import_prefix(prompt, first=first, blocks=blocks, salt=salt)
        except Exception as error:  # sealed with the secret, but of another size
            logger.warning("The KV store has unusable blocks: %s", error)
            with self._lock:
                self.stats.rejected += 1
            return 0

    def offer(self, cache: PrefixCache, tokens: list[int], *, salt: bytes) -> None:
        """Write the blocks of `tokens` to the store later, as far as they are then cached."""
        item = (cache, tokens, salt)
        while len(tokens) >= self._block_tokens and not self._closing.is_set():
            try:
                self._waiting.put_nowait(item)
                return
            except queue.Full:
                try:
                    self._waiting.get_nowait()
                except queue.Empty:
                    continue

    def drain(self, seconds: float) -> bool:
        """Wait until everything offered is written. Return whether it is."""
        end = time.monotonic() + seconds
        while self._waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)
        return not self._waiting.unfinished_tasks

    def close(self) -> None:
        """Stop writing. Prefixes that wait are dropped. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                logger.debug("Prefixes wait for the KV store; they are dropped.")
            self._writer.join(_CLOSE_SECONDS)  # a store that hangs must not delay the end
            try:
                self._store.close()
            except Exception as error:
                logger.debug("The KV store was not closed: %s", error)

    def _read_blocks(self, names: list[str]) -> list[list[bytes]]:
        """Return the first blocks of `names` that the store has.

        Another thread reads them, because nothing can interrupt a file or a client that hangs.
        """
        fetch = _Fetch()
        if not names or not self._readers.acquire(timeout=fetch.seconds_left()):
            return []
        args = (names, fetch)
        try:
            threading.Thread(target=self._run, args=args, name="kv-fetch", daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            self._readers.release()
            self._pause(error)
            return []
        while not fetch.done.wait(min(max(fetch.seconds_left(), 0.0), _POLL_SECONDS)):
            is_late = fetch.seconds_left() <= 0
            if is_late:
                self._pause(StoreError("It did not answer in time"))
            if is_late or self._closing.is_set():
                fetch.is_over = True
                break
        return list(fetch.blocks)

    def _run(self, names: list[str], fetch: _Fetch) -> None:
        begin = time.monotonic()
        try:
            for name in names:
                limit = self._compute_seconds
                late = limit is not None and (
                    time.monotonic() - begin > limit * (len(fetch.blocks) + 1)
                )
                copies = None if late or fetch.is_over else self._read(name)
                if copies is None or fetch.is_over:
                    break
                fetch.add(copies)
        finally:
            self._readers.release()
            fetch.done.set()

    def _read(self, name: str) -> list[bytes] | None:
        """Return the copies of a block, or None for a miss."""
        try:
            value = self._store.get(name, max_bytes=self._max_block_bytes)
        except Exception as error:
            self._pause(error)
            return None
        data = None if value is None else self._keys.open(name, value)
        copies = None if data is None else unpack_copies(data)
        with self._lock:
            self.stats.hits += copies is not None
            self.stats.misses += copies is None
            self.stats.rejected += value is not None and copies is None
            self.stats.read_bytes += 0 if copies is None else len(data or b"")
            if copies is not None:
                self._known.add(name, tuple(map(bool, copies)))
        return copies

    def _write_all(self) -> None:
        while not self._closing.is_set():
            item = self._waiting.get()
            try:
                if item is not None and not self._closing.is_set():
                    self._write(item[0], item[1], salt=item[2])
            except Exception as error:  # the engine was closed, or a fault of ours
                logger.debug("A prefix was not written to the KV store: %s", error)
            finally:
                self._waiting.task_done()

    def _write(self, cache: PrefixCache, tokens: list[int], *, salt: bytes) -> None:
        names = self._keys.names(tokens, salt)
        with self._lock:
            is_new = [self._known.pools(name) is None for name in names]
        if not any(is_new) or self._is_paused():
            return
        first = max(is_new.index(True) - self._late_blocks, 0)
        for name, copies in zip(
            names[first:], cache.export_prefix(tokens, first=first, salt=salt), strict=False
        ):
            pools = tuple(map(bool, copies))
            with self._lock:
                known = self._known.pools(name)
            # A copy that the engine has lost meanwhile, such as a checkpoint, stays in the store.
            is_known = known is not None and all(map(operator.ge, known, pools))
            if is_known or self._closing.is_set():
                continue
            value = self._keys.seal(name, pack_copies(copies))
            try:
                self._store.put(name, value)
            except Exception as error:
                self._pause(error)
                return
            with self._lock:
                self._known.add(name, pools)
                self.stats.written_blocks += 1
                self.stats.written_bytes += len(value)
            self._closing.wait(len(value) / _WRITE_BYTES_PER_SECOND)

    def _is_paused(self) -> bool:
        return time.monotonic() < self._resumes_at

    def _pause(self, error: Exception) -> None:
        with self._lock:
            self.stats.errors += 1
            if not self._is_paused():
                logger.warning(
                    "The KV store does not work: %s. It is not used for %.0f s.",
                    error,
                    _PAUSE_SECONDS,
                )
            self._resumes_at = time.monotonic() + _PAUSE_SECONDS
