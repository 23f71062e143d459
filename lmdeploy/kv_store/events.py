"""Publish the changes of the prefix cache in the wire format of vLLM's KV events.

Each message of the PUB socket has three parts: the topic, the sequence number of the batch (8
bytes, big-endian) and a msgpack array [time in seconds, events, data-parallel rank], in which each
event is a map. The ROUTER socket answers the number of a batch with this batch and all later ones,
and ends with number -1. The format is that of `vllm/distributed/kv_events.py` in vLLM 0.33.0.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError
from lmdeploy.base.installed import install_command
from lmdeploy.config.kv_events import KvEventsConfig
from lmdeploy.kv_store.event_sockets import MAX_PEER_BYTES, EventSockets

if TYPE_CHECKING:
    from lmdeploy import _turbomind

logger = logging.getLogger("lmdeploy")

# vLLM's name for the memory of the engine itself. Routers weigh "CPU" as an offload tier.
MEDIUM = "GPU"
_WAIT_MS = 50  # also the longest time until a replay request is answered
_BUSY_WAIT_MS = 2  # while a client of the replay socket still takes batches
_BATCH_BYTES = 16 << 10
_FIELD_BYTES = 1024  # of a batch beside its blocks
_MAX_REPLAYS = 64  # clients at once
_MAX_REQUESTS = 16  # taken from the replay socket between two batches
_MAX_REPEATED = 256  # batches for one client between two others
_LAST = (-1).to_bytes(8, "big", signed=True)
_NO_SALT = bytes(16)


def encode_event(event: _turbomind.PrefixEvent, *, block_tokens: int) -> dict[str, Any]:
    """Return an event as the map that stands for it in a batch.

    `extra_keys` has one entry per block: the salt of the cache in hexadecimal digits. Without a
    salt it is absent, and so are the fields of a group if all layers share their blocks.
    """
    if event.kind == "cleared":
        return {"type": "AllBlocksCleared"}
    fields: dict[str, Any]
    if event.kind == "removed":
        fields = {"type": "BlockRemoved", "block_hashes": event.blocks, "medium": MEDIUM}
        if event.group is not None:
            fields["group_idx"] = event.group.index
        return fields
    fields = {
        "type": "BlockStored",
        "block_hashes": event.blocks,
        "parent_block_hash": event.parent,
        "token_ids": event.tokens,
        "block_size": block_tokens,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
    }
    if event.salt != _NO_SALT:
        fields["extra_keys"] = [[event.salt.hex()]] * len(event.blocks)
    if event.group is not None:
        fields |= {"group_idx": event.group.index, "kv_cache_spec_kind": _spec_kind(event.group)}
        if event.group.window > 0:
            fields["kv_cache_spec_sliding_window"] = event.group.window
    return fields


def _spec_kind(group: _turbomind.PrefixGroup) -> str:
    """Return the member of vLLM's KVCacheSpecKind that tells routers what a hit needs."""
    if group.is_state:
        return "mamba"
    if group.window > 0:
        return "sliding_window"
    return "chunked_local_attention" if group.window < 0 else "full_attention"


def _pieces(event: _turbomind.PrefixEvent, *, block_tokens: int) -> Iterator[Any]:
    """Yield events of few blocks that together are `event`."""
    if event.kind == "cleared":
        yield event
        return
    step = max(_BATCH_BYTES // _block_bytes(block_tokens), 1)
    for i in range(0, len(event.blocks), step):
        blocks = event.blocks[i : i + step]
        if event.kind == "removed":
            yield SimpleNamespace(kind="removed", blocks=blocks, group=event.group)
        else:
            yield SimpleNamespace(
                kind="stored",
                blocks=blocks,
                parent=event.blocks[i - 1] if i else event.parent,
                tokens=event.tokens[i * block_tokens : (i + step) * block_tokens],
                salt=event.salt,
                group=event.group,
            )


def _block_bytes(block_tokens: int) -> int:
    """Return the most bytes of a block in an event: 5 for a token, 9 for a hash, 35 for a salt."""
    return 5 * block_tokens + 9 + 35


class KvEventPublisher:
    """Publishes the events of `events` from a thread of its own until `close`.

    A batch has at most _BATCH_BYTES + _FIELD_BYTES, so that limits on numbers of batches are limits
    on bytes. Raises OptionError if a package is missing or an address cannot be bound.
    """

    def __init__(self, config: KvEventsConfig, *, block_tokens: int) -> None:
        from lmdeploy import _turbomind

        try:
            import msgpack
        except ImportError as error:
            reason = f"needs {error.name}. Run: {install_command('events')}"
            raise OptionError("kv_events_config", reason) from None
        self.events = _turbomind.PrefixEvents()
        self._packer = msgpack.Packer()
        self._topic = config.topic.encode()
        self._block_tokens = block_tokens
        self._max_recent = config.buffer_steps
        self._recent: OrderedDict[int, bytes] = OrderedDict()  # batches by number
        self._recent_bytes = 0
        self._next = 0
        self._replays: dict[bytes, range] = {}  # client → the batches that it still gets
        self._sockets = EventSockets(config, batch_bytes=_BATCH_BYTES + _FIELD_BYTES)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish what is left and close the sockets. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            is_last = False
            while not is_last:
                is_last = self._closing.is_set()
                wait_ms = 0 if is_last else _BUSY_WAIT_MS if self._replays else _WAIT_MS
                events = self.events.take(wait_ms)
                if events:
                    self._publish(events)
                if self._sockets.replay is not None:
                    self._receive()
                    self._repeat()
        except Exception:
            logger.exception("KV events are no longer published.")
        finally:
            self._sockets.close(linger_ms=100)

    def _publish(self, events: list[_turbomind.PrefixEvent]) -> None:
        for batch in self._batches(events):
            number = self._next
            self._next += 1
            self._recent[number] = batch
            self._recent_bytes += len(batch)
            while len(self._recent) > self._max_recent or self._recent_bytes > MAX_PEER_BYTES:
                self._recent_bytes -= len(self._recent.popitem(last=False)[1])
            self._sockets.publish([self._topic, _number(number), batch])

    def _batches(self, events: list[_turbomind.PrefixEvent]) -> Iterator[bytes]:
        """Yield the events as arrays of limited size."""
        packed: list[bytes] = []
        num_bytes = 0
        for event in events:
            for piece in _pieces(event, block_tokens=self._block_tokens):
                fields = self._packer.pack(encode_event(piece, block_tokens=self._block_tokens))
                if packed and num_bytes + len(fields) > _BATCH_BYTES:
                    yield self._batch(packed)
                    packed, num_bytes = [], 0
                packed.append(fields)
                num_bytes += len(fields)
        yield self._batch(packed)

    def _batch(self, packed: list[bytes]) -> bytes:
        pack = self._packer
        head = pack.pack_array_header(3) + pack.pack(time.time())
        return b"".join([head, pack.pack_array_header(len(packed)), *packed, pack.pack(0)])

    def _receive(self) -> None:
        """Take requests from the replay socket. Malformed ones are ignored."""
        for _ in range(_MAX_REQUESTS):
            if not self._sockets.replay.poll(0):
                return
            parts = self._sockets.replay.recv_multipart()
            if len(parts) != 3 or len(parts[2]) != 8:
                logger.warning("A replay request of KV events must be one number of 8 bytes.")
            elif parts[0] not in self._replays and len(self._replays) >= _MAX_REPLAYS:
                logger.warning("More than %d clients replay KV events.", _MAX_REPLAYS)
            else:
                first = int.from_bytes(parts[2], "big")
                self._replays[parts[0]] = range(min(first, self._next), self._next)

    def _repeat(self) -> None:
        """Send to each client of the replay socket what it takes at once."""
        import zmq

        for client, numbers in list(self._replays.items()):
            oldest = next(iter(self._recent), self._next)
            left = range(max(numbers.start, oldest), numbers.stop)
            try:
                for number in left[:_MAX_REPEATED]:
                    self._send(client, [_number(number), self._recent[number]])
                    left = left[1:]
                self._replays[client] = left
                if not left:
                    self._send(client, [_LAST, b""])
                    del self._replays[client]
            except zmq.Again:  # the client is slow
                self._replays[client] = left
            except zmq.ZMQError:  # the client is gone
                del self._replays[client]

    def _send(self, client: bytes, parts: list[bytes]) -> None:
        import zmq

        self._sockets.replay.send_multipart([client, b"", *parts], zmq.NOBLOCK)


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")
