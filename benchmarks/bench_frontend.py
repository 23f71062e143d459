"""The speed of the HTTP server alone: streams of an engine that costs nothing.

    python benchmarks/bench_frontend.py
    python benchmarks/bench_frontend.py --before OTHER_TREE --json benchmarks/results/frontend.jsonl

- `throughput`: 256 streams at --rate tokens per second. A server that keeps up takes as long as
  the engine. `us_per_token` is the CPU time of the server process, in which noise counts less.
- `gaps`: 16 streams with a step every 10 ms, and the times between events of one stream.
- `slow`: 256 clients that do not read, and the memory of the server before and after.

The clients are one process that only counts events and bytes. With --before, the package of another
worktree runs in turns with this one's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from results import ROOT, ResultsFile, commit_here, describe_machine
from server_process import Server, serving

Figures = dict[str, float]

MODEL_NAME = "measured"
ROW_KEY = ("name", "endpoint", "side")
GAP_INTERVAL = 0.01
GAP_STREAMS = 16
SLOW_SECONDS = 5.0  # after the last token, in which queues could still grow
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
USER = [{"role": "user", "content": "Count."}]
# Path, and the body without the number of tokens; then the name of that number.
ENDPOINTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": USER, "stream_options": {"include_usage": True}},
        "max_tokens",
    ),
    "completions": (
        "/v1/completions",
        {"prompt": "Count.", "stream_options": {"include_usage": True}},
        "max_tokens",
    ),
    "responses": ("/v1/responses", {"input": "Count."}, "max_output_tokens"),
    "messages": ("/v1/messages", {"messages": USER}, "max_tokens"),
    "generate": ("/generate", {"prompt": "Count."}, "max_tokens"),
}
_COUNTED = re.compile(rb'"(?:completion|output)_tokens":(\d+)')


@dataclass(frozen=True)
class Load:
    """Streams of one endpoint. `reads` false: the clients do not read."""

    endpoint: str
    streams: int
    tokens: int
    interval: float
    reads: bool = True

    def request(self) -> bytes:
        """Return the HTTP request of each stream."""
        path, fields, limit = ENDPOINTS[self.endpoint]
        shared = {"model": MODEL_NAME, "stream": True, limit: self.tokens}
        body = json.dumps({**shared, **fields}).encode()
        return (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body


class Client(asyncio.Protocol):
    """Counts the events of one stream and keeps the times at which they arrive."""

    def __init__(self, load: Load, ended: asyncio.Future[None]) -> None:
        self._load, self.ended = load, ended
        self.num_bytes = self.num_events = 0
        self.times: list[float] = []
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(self._load.request())
        if not self._load.reads:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        found = data.count(b"\ndata: ")
        self.num_events += found
        if found:
            self.times.append(time.perf_counter())
        self._tail = self._tail[-2048:] + data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def check(self) -> None:
        """Raise RuntimeError if the stream is not complete."""
        found = _COUNTED.findall(self._tail)
        if not found or int(found[-1]) != self._load.tokens:
            raise RuntimeError(f"a stream ended with {self._tail[-500:]!r}")


@dataclass
class Usage:
    """The CPU time of a process since its start, and its memory."""

    cpu_seconds: float
    rss_bytes: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Read /proc."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return cls(ticks / TICKS_PER_SECOND, pages * os.sysconf("SC_PAGE_SIZE"))


def measure(load: Load, tree: Path) -> Figures:
    """Run a load against the package of a worktree and return the figures."""
    command = [sys.executable, str(ROOT / "benchmarks/frontend_server.py")]
    command += ["--streams", str(load.streams), "--interval", str(load.interval)]
    command += [] if load.reads else ["--fresh"]
    with (
        tempfile.NamedTemporaryFile() as log,
        serving(["env", f"PYTHONPATH={tree}", *command], log=Path(log.name)) as server,
    ):
        return uvloop.run(_run(load, server))


async def _run(load: Load, server: Server) -> Figures:
    loop = asyncio.get_running_loop()
    pid = server.process.pid
    before = Usage.of(pid)
    clients: list[Client] = []
    for _ in range(load.streams):
        client = Client(load, loop.create_future())
        clients.append(client)
        await loop.create_connection(partial(clients.__getitem__, -1), "127.0.0.1", server.port)
    if not load.reads:
        return await _slow(load, pid, before=before)
    while not all(client.num_events for client in clients):  # the engine begins with the last one
        await asyncio.sleep(0.002)
    before, own = Usage.of(pid), time.process_time()
    await asyncio.gather(*(client.ended for client in clients))
    after, own = Usage.of(pid), time.process_time() - own
    for client in clients:
        client.check()
    return _figures(clients, load, used=after.cpu_seconds - before.cpu_seconds, own=own)


def _figures(clients: Sequence[Client], load: Load, *, used: float, own: float) -> Figures:
    total = load.streams * load.tokens
    begun, ended = min(c.times[0] for c in clients), max(c.times[-1] for c in clients)
    gaps = sorted(b - a for c in clients for a, b in zip(c.times, c.times[1:], strict=False))
    return {
        "tokens_per_s": total / (ended - begun),
        "us_per_token": 1e6 * used / total,
        "client_us_per_token": 1e6 * own / total,
        "events_per_token": sum(client.num_events for client in clients) / total,
        "bytes_per_token": sum(client.num_bytes for client in clients) / total,
        "p50_gap_ms": 1e3 * gaps[len(gaps) // 2],
        "p99_gap_ms": 1e3 * gaps[len(gaps) * 99 // 100],
    }


async def _slow(load: Load, pid: int, *, before: Usage) -> Figures:
    peak = 0
    end = time.monotonic() + load.tokens * load.interval + SLOW_SECONDS
    while time.monotonic() < end:
        await asyncio.sleep(0.25)
        peak = max(peak, Usage.of(pid).rss_bytes)
    grown = peak - before.rss_bytes
    return {
        "rss_mib": peak / 2**20,
        "grown_mib": grown / 2**20,
        "bytes_per_unread_token": grown / (load.streams * load.tokens),
    }


def loads(options: argparse.Namespace) -> dict[str, Load]:
    """Return the loads by name."""
    endpoint, streams = options.endpoint, options.streams
    interval = streams / options.rate
    return {
        "throughput": Load(endpoint, streams, options.tokens, interval),
        "gaps": Load(endpoint, GAP_STREAMS, 500, GAP_INTERVAL),
        "slow": Load(endpoint, streams, options.slow_tokens, interval, reads=False),
    }


def row_of(name: str, load: Load, *, runs: Sequence[Figures]) -> dict[str, Any]:
    """Return the median of each figure, and the lowest and highest."""
    figures = {
        key: [
            float(f"{value:.4g}")
            for value in (
                statistics.median(run[key] for run in runs),
                min(run[key] for run in runs),
                max(run[key] for run in runs),
            )
        ]
        for key in runs[0]
    }
    sizes = {"streams": load.streams, "tokens": load.tokens, "interval_s": load.interval}
    return {"name": name, "endpoint": load.endpoint, **sizes, "runs": len(runs), **figures}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("loads", nargs="*", default=["throughput", "gaps", "slow"], help="which loads to run")
    add("--before", type=Path, help="worktree of another commit, built")
    add("--endpoint", choices=ENDPOINTS, default="chat")
    add("--streams", type=int, default=256)
    add("--tokens", type=int, default=1024, help="of each stream in `throughput`")
    add("--slow-tokens", type=int, default=4096, help="of each stream in `slow`")
    add("--rate", type=float, default=60_000.0, help="tokens per second of the engine")
    add("--repeats", type=int, default=3)
    add("--json", type=Path, help="add the rows to this file of JSON Lines")
    options = parser.parse_args(arguments)
    sides = {"after": ROOT} if options.before is None else {"before": options.before, "after": ROOT}
    file = ResultsFile(options.json, machine=describe_machine(1), key=ROW_KEY)
    known = loads(options)
    for name in options.loads:
        runs: dict[str, list[Figures]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            for side, tree in sides.items():
                runs[side].append(measure(known[name], tree))
        for side, tree in sides.items():
            row = {**row_of(name, known[name], runs=runs[side]), "side": side}
            row["side_commit"] = commit_here(tree)
            file.add(row)
            print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
