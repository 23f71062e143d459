"""The two servers as child processes on the loopback interface."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MODEL_NAME = "measured"
START_SECONDS = 600.0
STOP_SECONDS = 15.0
POLL_SECONDS = 0.05
TAIL_BYTES = 1500


@dataclass(frozen=True)
class ServerShape:
    """Slots and their length, the same for both servers."""

    slots: int
    session_len: int
    threads: int


@dataclass(frozen=True)
class PeerServerSetting:
    """KV types and flash attention of llama.cpp's server."""

    k: str
    v: str
    flash_attention: bool

    @property
    def name(self) -> str:
        """As PeerSetting has it."""
        types = self.k if self.k == self.v else f"{self.k} keys, {self.v} values"
        return types + (", flash attention" if self.flash_attention else "")


# The types that llama-server accepts; quantised values need flash attention.
PEER_KV_TYPES = ("f16", "bf16", "q8_0", "q5_1", "q5_0", "iq4_nl", "q4_1", "q4_0", "f32")
EVERY_PEER_SETTING = tuple(
    [PeerServerSetting(kind, kind, True) for kind in PEER_KV_TYPES]
    + [
        PeerServerSetting(kind, kind if kind in ("f16", "bf16", "f32") else "f16", False)
        for kind in PEER_KV_TYPES
    ]
)


def our_command(model: str, mode: str, *, shape: ServerShape) -> list[str]:
    """`lmdeploy serve api_server`, options by default but for the room of the load."""
    return [
        *(sys.executable, "-m", "lmdeploy", "serve", "api_server", model),
        *("--server-name", "127.0.0.1", "--model-name", MODEL_NAME, "--log-level", "ERROR"),
        *("--quant-policy", mode, "--max-batch-size", str(shape.slots)),
        *("--session-len", str(shape.session_len), "--num-threads", str(shape.threads)),
        "--server-port",
    ]


def llama_server_command(
    binary: Path, model: str, *, setting: PeerServerSetting, shape: ServerShape
) -> list[str]:
    """llama.cpp's own server: a slot per client, continuous batching, no cache of old prompts."""
    return [
        *(str(binary), "--model", model, "--host", "127.0.0.1", "--alias", MODEL_NAME),
        *("--parallel", str(shape.slots), "--ctx-size", str(shape.slots * shape.session_len)),
        *("--threads", str(shape.threads), "--threads-batch", str(shape.threads)),
        *("--cache-type-k", setting.k, "--cache-type-v", setting.v),
        *("--flash-attn", "on" if setting.flash_attention else "off", "--cont-batching"),
        *("--no-kv-unified", "--cache-ram", "0", "--no-webui", "--log-disable", "--port"),
    ]


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str]) -> Iterator[int]:
    """Starts a server, waits until /health answers 200 and yields the port; stops it at the end.

    Raises RuntimeError with the end of the log when it does not start.
    """
    port = free_port()
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [*command, str(port)], stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", log=log)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, *, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}: {_tail(log)}")
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"{url}: no answer within {START_SECONDS:.0f} s: {_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - TAIL_BYTES))
    return log.read().decode(errors="replace")
