"""The option `--kv-events-config`: publish the changes of the prefix cache as vLLM does."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from lmdeploy.base.checks import OptionError, check_int, flag_of, refuse

FLAG = flag_of("kv_events_config")
_TRANSPORTS = ("tcp://", "ipc://", "inproc://")
_MAX_TOPIC_CHARS = 256


@dataclass(frozen=True)
class KvEventsConfig:
    """Address and limits of the KV events. Events contain the tokens of prompts.

    Args:
        endpoint: ZeroMQ address of the PUB socket, which is bound. vLLM's default is tcp://*:5557.
        replay_endpoint: address of the ROUTER socket that repeats batches. None opens none.
        buffer_steps: number of the last batches that can be repeated.
            They take at most 64 MiB.
        hwm: number of batches that ZeroMQ queues for a slow subscriber. They take at most 64 MiB.
        topic: first part of each message.
        curve_secret_key: file of the key pair of CURVE, as zmq.auth.create_certificates writes it.
            Both sockets then encrypt, and clients need the public key. None does not encrypt.
        curve_client_keys: folder of the public keys (*.key) of the clients that are admitted. None
            admits every client that has the public key of the server.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""
    curve_secret_key: str | None = None
    curve_client_keys: str | None = None

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is None and name == "replay_endpoint":
                continue
            if not isinstance(value, str) or not value.startswith(_TRANSPORTS):
                wanted = f"an address that begins with {', '.join(_TRANSPORTS)}"
                raise refuse(name, value, wanted=wanted, flag=FLAG)
        for name in ("buffer_steps", "hwm"):
            check_int(name, getattr(self, name), low=1, high=1 << 24, flag=FLAG)
        if not isinstance(self.topic, str) or len(self.topic) > _MAX_TOPIC_CHARS:
            wanted = f"a string of at most {_MAX_TOPIC_CHARS} characters"
            raise refuse("topic", self.topic, wanted=wanted, flag=FLAG)
        for name in ("curve_secret_key", "curve_client_keys"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise refuse(name, value, wanted="a path", flag=FLAG)
        if self.curve_client_keys is not None and self.curve_secret_key is None:
            raise OptionError("curve_client_keys", f"needs curve_secret_key ({FLAG}).")


def parse_kv_events(value: str | dict[str, Any] | KvEventsConfig | None) -> KvEventsConfig | None:
    """Return the configuration, given as JSON text, a dict or None. None publishes no events.

    vLLM's fields `enable_kv_cache_events` and `publisher` are accepted. Raise ValueError for an
    unknown field or a wrong value.
    """
    if value is None or isinstance(value, KvEventsConfig):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise refuse("kv_events_config", value, wanted="a JSON object", flag=FLAG) from None
    if not isinstance(value, dict):
        raise refuse("kv_events_config", value, wanted="a JSON object", flag=FLAG)
    given = dict(value)
    enabled = given.pop("enable_kv_cache_events", True)
    publisher = given.pop("publisher", "zmq")
    given.pop("max_queue_size", None)  # of vLLM's queue between its threads
    if publisher not in ("zmq", "null"):
        raise refuse("publisher", publisher, wanted="zmq or null", flag=FLAG)
    names = [field.name for field in fields(KvEventsConfig)]
    unknown = sorted(set(given) - set(names))
    if unknown:
        reason = f"has no field {unknown[0]!r}. The fields are {', '.join(names)}."
        raise OptionError("kv_events_config", reason)
    config = KvEventsConfig(**given)
    return config if enabled and publisher == "zmq" else None
