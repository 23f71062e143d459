"""The ZeroMQ sockets of KV events: what a peer may send, what waits for it, and who it is.

ZeroMQ counts the messages that wait for a peer and not their bytes. So the caller limits the bytes
of a message, and the sockets limit the number.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from lmdeploy.base.checks import OptionError
from lmdeploy.base.files import open_regular_file
from lmdeploy.base.installed import install_command
from lmdeploy.config.kv_events import FLAG, KvEventsConfig

logger = logging.getLogger("lmdeploy")

MAX_PEER_BYTES = 64 << 20
_OVERHEAD_BYTES = 512  # of ZeroMQ per message
_REPLAY_MESSAGES = 64  # that wait for a peer of the replay socket
_MAX_RECEIVED_BYTES = 1024  # of a frame: a handshake, a subscription, a replay request
_MAX_RECEIVED = 64  # messages of a peer that wait
_MAX_TOPICS = 4096  # different subscriptions of all peers
_BIND_SECONDS = 2.0


class EventSockets:
    """The PUB socket and, if the config asks for it, the ROUTER socket. Not thread-safe.

    Raises OptionError if a package is missing, an address cannot be bound, or a key is wrong.
    """

    def __init__(self, config: KvEventsConfig, *, batch_bytes: int) -> None:
        """Bind the sockets. Every message will have at most `batch_bytes`."""
        try:
            import zmq
        except ImportError:
            raise _refused(f"needs zmq. Run: {install_command('events')}") from None
        self._config = config
        self._queued = min(config.hwm, MAX_PEER_BYTES // (batch_bytes + _OVERHEAD_BYTES))
        self._secret: bytes | None = None
        self._authenticator: Any = None
        self._context = zmq.Context()
        self.replay: Any = None
        try:
            if config.curve_secret_key is not None:
                self._use_curve(config.curve_secret_key)
            self.publisher = self._bind(zmq.PUB, config.endpoint)
            if config.replay_endpoint is not None:
                self.replay = self._bind(zmq.ROUTER, config.replay_endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise _refused(f"names an address that cannot be used: {error} ({FLAG}).") from None
        except BaseException:
            self.close()
            raise
        for address in (config.endpoint, config.replay_endpoint):
            if address is not None and self._secret is None and not is_local(address):
                logger.warning(
                    "KV events leave this machine at %s without encryption, and anyone who reaches "
                    "the address reads the tokens of prompts. Set curve_secret_key (%s).",
                    address,
                    FLAG,
                )

    def publish(self, message: list[bytes]) -> None:
        """Send a message to all subscribers. Those that are too slow miss it."""
        import zmq

        self.publisher.send_multipart(message)
        topics = self.publisher.getsockopt(zmq.TOPICS_COUNT)
        if topics > _MAX_TOPICS:
            logger.warning(
                "%d subscriptions to KV events are too many. All must begin again.", topics
            )
            self.publisher.close(linger=0)
            self.publisher = self._bind(zmq.PUB, self._config.endpoint, seconds=_BIND_SECONDS)

    def close(self, *, linger_ms: int = 0) -> None:
        """Close the sockets."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=linger_ms)

    def _bind(self, kind: int, address: str, *, seconds: float = 0.0) -> Any:
        """Return a bound socket. Wait for the address if a closed socket of ours still has it."""
        import zmq

        socket = self._context.socket(kind)
        socket.maxmsgsize = max(_MAX_RECEIVED_BYTES, 2 * len(self._config.topic.encode()))
        socket.rcvhwm = _MAX_RECEIVED
        socket.sndhwm = self._queued if kind == zmq.PUB else _REPLAY_MESSAGES
        if kind == zmq.ROUTER:
            socket.router_mandatory = (
                1  # sending to a slow peer fails instead of losing the message
            )
        if self._secret is not None:
            socket.curve_server = True
            socket.curve_secretkey = self._secret
        end = time.monotonic() + seconds
        while True:
            try:
                socket.bind(address)
                return socket
            except zmq.ZMQError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.01)

    def _use_curve(self, path: str) -> None:
        import zmq
        from zmq.auth import load_certificate
        from zmq.auth.thread import ThreadAuthenticator

        if not zmq.has("curve"):
            raise _refused("needs a libzmq with CURVE for curve_secret_key.")
        with open_regular_file(Path(path)) as (descriptor, _):
            mode = os.fstat(descriptor).st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise _refused(f"has a curve_secret_key that others can read. Run: chmod 600 {path}")
        try:
            self._secret = load_certificate(path)[1]
        except (OSError, ValueError):
            self._secret = None
        if self._secret is None or len(self._secret) != 40:
            reason = "has a curve_secret_key without a key. Make one with zmq.auth."
            raise _refused(f"{reason}create_certificates ({FLAG}).")
        folder = self._config.curve_client_keys
        if folder is not None:
            if not any(Path(folder).glob("*.key")):
                raise _refused(f"has curve_client_keys without any file *.key: {folder} ({FLAG}).")
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve(domain="*", location=folder)


def is_local(address: str) -> bool:
    """Return whether no other machine reaches an address of ZeroMQ."""
    transport, _, place = address.partition("://")
    if transport != "tcp":
        return True
    host = place.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # * or the name of an interface
        return False


def _refused(reason: str) -> OptionError:
    return OptionError("kv_events_config", reason)
