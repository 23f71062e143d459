"""One server process: started on a free port, watched and stopped."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS, STOP_SECONDS, POLL_SECONDS = 600.0, 15.0, 0.05
TAIL_LINES = 20


class ServerFailure(RuntimeError):
    """The server did not start or ended; the message has the last lines of its log."""


@dataclass(frozen=True)
class Server:
    """A running server; made by `serving`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        """Return the address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> str:
        """Return the body of a GET request."""
        # A local address must not go through a proxy of the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=30) as reply:
            body: bytes = reply.read()
        return body.decode()

    def check(self) -> None:
        """Raise ServerFailure if the process has ended."""
        status = self.process.poll()
        if status is not None:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise ServerFailure(f"the server has ended with {how}{last_lines(self.log)}")

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server answers on /health."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.check()
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(POLL_SECONDS)
        raise ServerFailure(f"the server is not ready after {timeout:g} s{last_lines(self.log)}")


def peak_bytes(process: int | str = "self") -> int | None:
    """Return the peak of a process's resident memory, or None if /proc does not have it.

    VmHWM, unlike ru_maxrss, does not begin with the peak of the parent process.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.M)
    return int(found[1]) * 1024 if found else None


@contextmanager
def serving(
    command: Sequence[str], *, log: Path, timeout: float = START_SECONDS
) -> Iterator[Server]:
    """Start a server, wait until it is ready, and stop it at the end of the block.

    The port is added to the end of the command.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, str(port)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    server = Server(process, port, log)
    try:
        server.wait_until_ready(timeout)
        yield server
    finally:
        end_process(process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, and kill it if it does not end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_lines(log: Path) -> str:
    """Return the last lines of a log, as the end of an error message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return f"; last lines of {log}:\n" + "\n".join(f"  {line}" for line in lines)
