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
from collections import deque
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError
from lmdeploy.base.installed import install_command
from lmdeploy.config.kv_events import FLAG, KvEventsConfig

if TYPE_CHECKING:
    from lmdeploy import _turbomind

logger = logging.getLogger("lmdeploy")

# vLLM's name for the memory of the engine itself. Routers weigh "CPU" as an offload tier.
MEDIUM = "GPU"
_WAIT_MS = 50  # also the longest time until a replay request is answered
_LAST = (-1).to_bytes(8, "big", signed=True)
_NO_SALT = bytes(16)


def encode_event(event: _turbomind.PrefixEvent, *, block_tokens: int) -> dict[str, Any]:
    """Return an event as the map that stands for it in a batch.

    `extra_keys` has one entry per block: the salt of the cache in hexadecimal digits. Without a
    salt it is absent.
    """
    if event.kind == "cleared":
        return {"type": "AllBlocksCleared"}
    if event.kind == "removed":
        return {"type": "BlockRemoved", "block_hashes": event.blocks, "medium": MEDIUM}
    fields: dict[str, Any] = {
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
    return fields


class KvEventPublisher:
    """Publishes the events of `events` from a thread of its own until `close`.

    Raises OptionError if a package is missing or an address cannot be bound.
    """

    def __init__(self, config: KvEventsConfig, *, block_tokens: int) -> None:
        from lmdeploy import _turbomind

        try:
            import msgpack
            import zmq
        except ImportError as error:
            reason = f"needs {error.name}. Run: {install_command('events')}"
            raise OptionError("kv_events_config", reason) from None
        self.events = _turbomind.PrefixEvents()
        self._pack = msgpack.packb
        self._topic = config.topic.encode()
        self._block_tokens = block_tokens
        self._recent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(config.hwm)
        self._replay: Any = None
        try:
            self._publisher.bind(config.endpoint)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            reason = f"names an address that cannot be used: {error} ({FLAG})."
            raise OptionError("kv_events_config", reason) from None
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
                events = self.events.take(0 if is_last else _WAIT_MS)
                if events:
                    self._publish(events)
                if self._replay is not None and self._replay.poll(0):
                    self._repeat()
        except Exception:
            logger.exception("KV events are no longer published.")
        finally:
            self._context.destroy(linger=100)

    def _publish(self, events: list[_turbomind.PrefixEvent]) -> None:
        encoded = [encode_event(event, block_tokens=self._block_tokens) for event in events]
        batch = self._pack([time.time(), encoded, 0])
        number = self._next.to_bytes(8, "big")
        self._next += 1
        self._recent.append((number, batch))
        self._publisher.send_multipart([self._topic, number, batch])

    def _repeat(self) -> None:
        """Answer one request on the replay socket. Malformed ones are ignored."""
        parts = self._replay.recv_multipart()
        if len(parts) != 3 or len(parts[2]) != 8:
            logger.warning("A replay request of KV events must be one number of 8 bytes.")
            return
        client, _, first = parts
        for number, batch in [*self._recent, (_LAST, b"")]:
            if number >= first:  # big-endian numbers have the order of their bytes
                self._replay.send_multipart([client, b"", number, batch])
