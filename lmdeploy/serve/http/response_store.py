"""The responses that later requests continue by `previous_response_id`."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmdeploy.serve.errors import json_bytes

MAX_ENTRIES = 4096
MAX_BYTES = 256 << 20
MAX_AGE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class StoredResponse:
    """A response, and all input items of its conversation.

    `owner` is the hash of the key that made the response.
    """

    owner: str
    body: dict[str, Any]
    input_items: Sequence[dict[str, Any]]


class ResponseStore:
    """Keeps responses in memory. The oldest are removed where a bound is exceeded. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, int, StoredResponse]] = OrderedDict()
        self.num_bytes = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, response: StoredResponse) -> None:
        """Keep a response under its id, unless it exceeds the bounds alone."""
        size = len(json_bytes(response.body)) + len(json_bytes(list(response.input_items)))
        with self._lock:
            self._entries[response.body["id"]] = (self._clock(), size, response)
            self.num_bytes += size
            self._prune()

    def get(self, response_id: str, *, owner: str) -> StoredResponse | None:
        """Return a response of `owner`, or None."""
        with self._lock:
            self._prune()
            found = self._entries.get(response_id)
        return found[2] if found is not None and found[2].owner == owner else None

    def remove(self, response_id: str, *, owner: str) -> bool:
        """Remove a response of `owner`. Return whether there was one."""
        with self._lock:
            if self.get(response_id, owner=owner) is None:
                return False
            self.num_bytes -= self._entries.pop(response_id)[1]
            return True

    def _prune(self) -> None:
        oldest = self._clock() - MAX_AGE_SECONDS
        while self._entries:
            made, size, _ = next(iter(self._entries.values()))
            within = len(self._entries) <= MAX_ENTRIES and self.num_bytes <= MAX_BYTES
            if within and made >= oldest:
                return
            self._entries.popitem(last=False)
            self.num_bytes -= size
