"""The responses that later requests continue by `previous_response_id`."""

from __future__ import annotations

import json
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
_ENTRY_BYTES = 1024  # of an entry besides its JSON
_ITEM_BYTES = 192  # of an output item besides its JSON


@dataclass(frozen=True)
class StoredResponse:
    """A response, and all input items of its conversation, as JSON.

    Python's objects would take up to 25 times as many bytes. zlib would make the JSON of text three
    times smaller, but it stops other requests for up to 1.6 s while it compresses 32 MiB.

    `owner` is the hash of the key that made the response. `output_items` has the JSON of the output
    items by their ids.
    """

    owner: str
    response_id: str
    body: bytes
    input_items: bytes
    output_items: dict[str, bytes]

    @classmethod
    def of(
        cls, owner: str, body: dict[str, Any], *, input_items: Sequence[dict[str, Any]]
    ) -> StoredResponse:
        """Return the response with this body."""
        output = {item["id"]: json_bytes(item) for item in body["output"]}
        return cls(owner, body["id"], json_bytes(body), json_bytes(list(input_items)), output)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the response takes in memory."""
        output = sum(len(item) + _ITEM_BYTES for item in self.output_items.values())
        return len(self.body) + len(self.input_items) + output + _ENTRY_BYTES

    def read_input_items(self) -> list[dict[str, Any]]:
        """Return the input items."""
        items: list[dict[str, Any]] = json.loads(self.input_items)
        return items

    def read_conversation(self) -> list[dict[str, Any]]:
        """Return the input items and those of the output."""
        return [*self.read_input_items(), *map(json.loads, self.output_items.values())]


class ResponseStore:
    """Keeps responses in memory. Thread-safe.

    Where a bound is exceeded, the oldest response of the owner with the most bytes (or entries) is
    removed. An owner thus never loses responses while others hold more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()
        self._response_ids: dict[str, str] = {}  # id of an output item → id of its response
        # Owner → its ids, from the oldest, and the bytes of its entries.
        self._ids: dict[str, OrderedDict[str, None]] = {}
        self._owner_bytes: dict[str, int] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all entries."""
        return sum(self._owner_bytes.values())

    def add(self, response: StoredResponse) -> None:
        """Keep a response, unless it exceeds the bounds alone."""
        if response.num_bytes > MAX_BYTES:
            return
        owner, response_id = response.owner, response.response_id
        with self._lock:
            self._entries[response_id] = (self._clock(), response)
            self._response_ids.update(dict.fromkeys(response.output_items, response_id))
            self._ids.setdefault(owner, OrderedDict())[response_id] = None
            self._owner_bytes[owner] = self._owner_bytes.get(owner, 0) + response.num_bytes
            self._prune()

    def get(self, response_id: str, *, owner: str) -> StoredResponse | None:
        """Return a response of `owner`, or None."""
        with self._lock:
            self._prune()
            found = self._entries.get(response_id)
        return found[1] if found is not None and found[1].owner == owner else None

    def get_item(self, item_id: str, *, owner: str) -> dict[str, Any] | None:
        """Return an output item of a response of `owner`, or None."""
        with self._lock:
            response = self.get(self._response_ids.get(item_id, ""), owner=owner)
        if response is None:
            return None
        item: dict[str, Any] = json.loads(response.output_items[item_id])
        return item

    def remove(self, response_id: str, *, owner: str) -> bool:
        """Remove a response of `owner`. Return whether there was one."""
        with self._lock:
            if self.get(response_id, owner=owner) is None:
                return False
            self._drop(response_id)
            return True

    def _prune(self) -> None:
        """Remove what is too old or exceeds a bound."""
        oldest = self._clock() - MAX_AGE_SECONDS
        while self._entries and next(iter(self._entries.values()))[0] < oldest:
            self._drop(next(iter(self._entries)))
        while self.num_bytes > MAX_BYTES:
            largest = max(self._owner_bytes, key=self._owner_bytes.__getitem__)
            self._drop(next(iter(self._ids[largest])))
        while len(self._entries) > MAX_ENTRIES:
            largest = max(self._ids, key=lambda owner: len(self._ids[owner]))
            self._drop(next(iter(self._ids[largest])))

    def _drop(self, response_id: str) -> None:
        response = self._entries.pop(response_id)[1]
        for item_id in response.output_items:
            del self._response_ids[item_id]
        owner = response.owner
        self._owner_bytes[owner] -= response.num_bytes
        del self._ids[owner][response_id]
        if not self._ids[owner]:
            del self._ids[owner], self._owner_bytes[owner]
