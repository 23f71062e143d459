"""Open more connections to a server than it may have open files, and count what is answered.

    python benchmarks/load_connections.py MODEL
    python benchmarks/load_connections.py MODEL --unfinished 1100

The server starts with `ulimit -n 1024`, soft and hard. Streams of chat completions open at the same
moment. A refused stream (503) is sent again after its `Retry-After`. With --unfinished, other
connections send heads whose bodies never arrive, and the streams come while those are open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from server_process import Server, peak_bytes, serving

STREAM_SECONDS = 300.0  # until a stream counts as lost
PAUSE_SECONDS = 2.0  # between the unfinished bodies and the streams
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "Count."}],
    "stream": True,
    "max_tokens": 16,
    "ignore_eos": True,
}


@dataclass
class Tally:
    """The outcomes of the streams."""

    complete: int = 0
    retries: int = 0
    lost: Counter[str] = field(default_factory=Counter)


def head(length: int, *more: str) -> bytes:
    """Return the head of a request with a body of `length` bytes."""
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: 127.0.0.1"]
    lines += ["Content-Type: application/json", f"Content-Length: {length}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


async def exchange(port: int) -> bytes:
    """Send one stream on its own connection, and return the whole response."""
    body = json.dumps(BODY).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head(len(body), "Connection: close") + body)
        return await reader.read()
    finally:
        writer.close()


async def stream(port: int, tally: Tally) -> None:
    """Send a stream until it is not refused any more."""
    while True:
        reply = await exchange(port)
        top, _, rest = reply.partition(b"\r\n\r\n")
        status = top.partition(b"\r\n")[0].split(b" ")[1:2]
        if status != [b"503"] or b"retry-after" not in top.lower():
            break
        tally.retries += 1
        await asyncio.sleep(1)
    if status == [b"200"] and b"data: [DONE]" in rest:
        tally.complete += 1
    else:
        tally.lost[top.partition(b"\r\n")[0].decode() or "no response"] += 1


async def counted(port: int, tally: Tally) -> None:
    """Count a stream that fails or takes too long as lost."""
    try:
        await asyncio.wait_for(stream(port, tally), STREAM_SECONDS)
    except (OSError, asyncio.TimeoutError) as error:
        tally.lost[type(error).__name__] += 1


async def hold(port: int) -> None:
    """Send a head without its body, again when the server closes the connection."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(1000))
            await reader.read()
            writer.close()
        await asyncio.sleep(0.1)


async def load(port: int, *, streams: int, unfinished: int) -> Tally:
    """Open the connections and wait for the streams."""
    tally = Tally()
    holders = [asyncio.create_task(hold(port)) for _ in range(unfinished)]
    if holders:
        await asyncio.sleep(PAUSE_SECONDS)
    await asyncio.gather(*(counted(port, tally) for _ in range(streams)))
    for task in holders:
        task.cancel()
    return tally


def report(server: Server, tally: Tally, *, streams: int, seconds: float) -> str:
    """Return the result in one line each."""
    log = server.log.read_text(encoding="utf-8", errors="replace")
    lost = ", ".join(f"{count} {kind}" for kind, count in tally.lost.most_common()) or "none"
    peak = peak_bytes(server.process.pid) or 0
    return "\n".join(
        [
            f"complete: {tally.complete} of {streams} streams in {seconds:.1f} s",
            f"lost: {lost}",
            f"refused with 503 and sent again: {tally.retries}",
            f"log: {len(log):,} bytes, {len(log.splitlines()):,} lines, "
            f"{log.count('Traceback'):,} tracebacks",
            f"peak memory: {peak >> 20} MiB",
        ]
    )


def main() -> int:
    """Run the load and print the result. Return 1 if a stream is lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=1100)
    parser.add_argument("--unfinished", type=int, default=0, help="bodies that never arrive")
    parser.add_argument("--open-files", type=int, default=1024, help="`ulimit -n` of the server")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", args.model]
    command += ["--model-name", "m"]
    limited = ["bash", "-c", f'ulimit -n {args.open_files} && exec "$@"', "bash", *command]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving([*limited, "--server-port"], log=Path(folder, "log")) as server,
    ):
        start = time.monotonic()
        tally = asyncio.run(load(server.port, streams=args.streams, unfinished=args.unfinished))
        seconds = time.monotonic() - start
        print(report(server, tally, streams=args.streams, seconds=seconds))
    return 0 if tally.complete == args.streams else 1


if __name__ == "__main__":
    sys.exit(main())
