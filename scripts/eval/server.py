"""One server process: started on a free port, watched, measured and stopped."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL_NAME = "evaluated"
STOP_SECONDS = 15.0
TAIL_LINES = 20
_URL = re.compile(rb"^Serving .* at (http://\S+)", re.M)
_HISTOGRAMS = {
    "first_token": "lmdeploy:time_to_first_token_seconds",
    "per_token": "lmdeploy:time_per_output_token_seconds",
}


class ServerFailure(RuntimeError):
    """The server did not start or ended; the message has the last lines of its log."""


@dataclass(frozen=True)
class Timing:
    """A sum of seconds over a number of requests."""

    seconds: float
    count: int

    @property
    def mean(self) -> float | None:
        """The seconds of one request, or None without requests."""
        return self.seconds / self.count if self.count else None

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.seconds + other.seconds, self.count + other.count)

    def __sub__(self, other: Timing) -> Timing:
        return Timing(self.seconds - other.seconds, self.count - other.count)


@dataclass(frozen=True)
class Counters:
    """The counters of the server since its start. `truncated` answers reached their limit."""

    first_token: Timing
    per_token: Timing
    finished: int
    truncated: int


class Server:
    """A running server; made by `serving`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self.log = log
        self.url = ""

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server answers on /health."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.check()
            found = _URL.search(self.log.read_bytes())
            if found:
                self.url = found[1].decode()
                with contextlib.suppress(OSError):
                    self._get("/health")
                    return
            time.sleep(0.1)
        raise ServerFailure(f"the server is not ready after {timeout:g} s{last_lines(self.log)}")

    def check(self) -> None:
        """Raise ServerFailure if the process has ended."""
        status = self._process.poll()
        if status is not None:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise ServerFailure(f"the server has ended with {how}{last_lines(self.log)}")

    def counters(self) -> Counters:
        """Read /metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        try:
            text = self._get("/metrics")
        except OSError as error:
            self.check()
            end = last_lines(self.log)
            raise ServerFailure(f"the server does not answer: {error}{end}") from error
        values: dict[str, float] = {}
        truncated = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
                if sample.labels.get("finished_reason") == "length":
                    truncated += sample.value if sample.name.endswith("_total") else 0.0
        timings = {
            key: Timing(values.get(f"{name}_sum", 0.0), int(values.get(f"{name}_count", 0)))
            for key, name in _HISTOGRAMS.items()
        }
        finished = int(values.get("lmdeploy:request_success_total", 0))
        return Counters(finished=finished, truncated=int(truncated), **timings)

    def peak_bytes(self) -> int | None:
        """Return the peak of resident memory, or None if /proc does not have it."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        except OSError:
            return None
        found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.M)
        return int(found[1]) * 1024 if found else None

    def _get(self, path: str) -> str:
        # A local address must not go through a proxy of the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=30) as reply:
            body: bytes = reply.read()
        return body.decode()


@contextlib.contextmanager
def serving(
    model_path: str, flags: Sequence[str], *, log: Path, timeout: float
) -> Iterator[Server]:
    """Start a server, wait until it is ready, and stop it at the end of the block."""
    command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", model_path]
    command += ["--server-name", "127.0.0.1", "--server-port", "0", "--model-name", MODEL_NAME]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *flags], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    server = Server(process, log)
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
