"""One server process: started on a free port, watched, measured and stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL_NAME = "evaluated"
STOP_SECONDS = 15.0
TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1
_URL = re.compile(rb"^Serving .* at (http://\S+)", re.M)
_HISTOGRAMS = {
    "first_token": "lmdeploy:time_to_first_token_seconds",
    "per_token": "lmdeploy:time_per_output_token_seconds",
}


class ServerFailure(RuntimeError):
    """The server did not start, or ended by itself; the message ends with its log's last lines."""


@dataclass(frozen=True)
class Timing:
    """A sum of seconds over a number of requests."""

    seconds: float
    count: int

    @property
    def mean(self) -> float | None:
        """Seconds of one; None where there was none."""
        return self.seconds / self.count if self.count else None

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.seconds + other.seconds, self.count + other.count)

    def __sub__(self, other: Timing) -> Timing:
        return Timing(self.seconds - other.seconds, self.count - other.count)


@dataclass(frozen=True)
class Counters:
    """What the server has counted since its start."""

    first_token: Timing
    per_token: Timing
    finished: int
    truncated: int  # answers that ended at their length limit


class Server:
    """A running server; made by `serving`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self.log = log
        self.url = ""

    def wait_until_ready(self, timeout: float) -> None:
        """Until it answers. ServerFailure when it ends, or has not answered in `timeout` s."""
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
        raise ServerFailure(f"the server is not ready after {timeout:g} s{self._tail()}")

    def check(self) -> None:
        """ServerFailure when the process has ended."""
        status = self._process.poll()
        if status is not None:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise ServerFailure(f"the server has ended with {how}{self._tail()}")

    def counters(self) -> Counters:
        """From its /metrics. ServerFailure when it does not answer."""
        from prometheus_client.parser import text_string_to_metric_families

        try:
            text = self._get("/metrics")
        except OSError as error:
            self.check()
            raise ServerFailure(f"the server does not answer: {error}{self._tail()}") from error
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
        """The most memory that the process has had resident; None where /proc does not say."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        except OSError:
            return None
        found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.M)
        return int(found[1]) * 1024 if found else None

    def stop(self) -> None:
        """Ends the process; kills it when it does not end by itself."""
        end_process(self._process)

    def _get(self, path: str) -> str:
        # Our own address: never through a proxy of the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=30) as reply:
            body: bytes = reply.read()
        return body.decode()

    def _tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return f"; last lines of {self.log}:\n" + "\n".join(f"  {line}" for line in lines)


@contextlib.contextmanager
def serving(
    model_path: str, flags: Sequence[str], *, log: Path, timeout: float
) -> Iterator[Server]:
    """A server that is ready; it is stopped however the block ends."""
    command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", model_path]
    command += ["--server-name", "127.0.0.1", "--server-port", "0", "--model-name", MODEL_NAME]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent(),
        )
    server = Server(process, log)
    try:
        server.wait_until_ready(timeout)
        yield server
    finally:
        server.stop()


def end_with_parent() -> Callable[[], None] | None:
    """For Popen: the child gets SIGTERM when this process dies, even by SIGKILL (Linux only)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # died before it was asked for
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Asks a process to end, then kills it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
