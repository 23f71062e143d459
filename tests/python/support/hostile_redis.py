"""A server that speaks Redis's protocol badly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

# What is sent when a value is asked for.
ANSWERS = {
    "error": b"-ERR no\r\n",
    "integer": b":1\r\n",
    "null": b"_\r\n",
    "negative size": b"$-7\r\n",
    "no number": b"$abc\r\n",
    "garbage": bytes(range(256)) * 20 + b"\r\n",
    "deep": b"*1\r\n" * 100_000,
    "too long": b"$70000\r\n" + bytes(70_000) + b"\r\n",
    "not authentic": b"$40\r\n" + bytes(40) + b"\r\n",
}
BEHAVIORS = (*ANSWERS, "hang", "close", "trickle", "endless", "huge size")


@dataclass
class HostileRedis:
    """The server. `asked` is set when a client asked for a value."""

    url: str
    behavior: str = "hang"
    asked: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)

    def serve(self, connection: socket.socket) -> None:
        """Answer one client."""
        with connection, suppress(OSError):
            while (command := connection.recv(1 << 16)) and not self.closing.is_set():
                if b"HELLO" in command:
                    connection.sendall(b"%1\r\n$5\r\nproto\r\n:3\r\n")
                elif b"GETRANGE" not in command and b"SET" not in command:
                    connection.sendall(b"+OK\r\n")
                elif b"SETINFO" in command:
                    connection.sendall(b"+OK\r\n" * command.count(b"SETINFO"))
                else:
                    self.asked.set()
                    self._misbehave(connection)

    def _misbehave(self, connection: socket.socket) -> None:
        if self.behavior in ANSWERS:
            connection.sendall(ANSWERS[self.behavior])
        elif self.behavior == "close":
            connection.shutdown(socket.SHUT_RDWR)
        elif self.behavior == "hang":
            self.closing.wait()
        elif self.behavior == "trickle":
            connection.sendall(b"$40000\r\n")
            while not self.closing.wait(0.05):
                connection.sendall(b"0")
        else:
            connection.sendall(b"$%d\r\n" % (2**62 if self.behavior == "huge size" else 2**33))
            while not self.closing.is_set():
                connection.sendall(bytes(1 << 20))


@contextmanager
def hostile_redis(behavior: str = "hang") -> Iterator[HostileRedis]:
    """Run a server until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HostileRedis(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", behavior)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    threading.Thread(target=server.serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield server
        finally:
            server.closing.set()
            listener.shutdown(socket.SHUT_RDWR)
