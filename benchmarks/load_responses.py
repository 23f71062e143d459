"""Store large responses in a server until its bound is exceeded, and compare the memory with it.

    python benchmarks/load_responses.py MODEL

The requests have input items with many small JSON values, which take most memory as objects.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import urllib.request
from pathlib import Path

from server_process import Server, serving

from lmdeploy.serve.http.response_store import MAX_BYTES

NUM_VALUES = 400_000  # in a request
MAX_RATIO = 1.5
ITEM = {"role": "user", "content": "hello", "notes": [{"n": []}] * (NUM_VALUES // 2)}
BODY = json.dumps({"model": "m", "input": [ITEM], "max_output_tokens": 1}).encode()


def resident_bytes(server: Server) -> int:
    """Return the resident memory of the server."""
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    found = re.search(r"^VmRSS:\s*(\d+) kB", status, re.M)
    if found is None:
        raise RuntimeError("the status has no VmRSS")
    return int(found[1]) * 1024


def store(server: Server, *, key: int) -> int:
    """Store a response for a key. Return the bytes of its JSON."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{server.url}/v1/responses", BODY, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return len(BODY) + len(reply.read())


def main() -> int:
    """Run the load and print the result. Return 1 if the memory exceeds MAX_RATIO bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=float, default=1.5, help="sent bytes, in bounds")
    args = parser.parse_args()
    command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", args.model]
    command += ["--model-name", "m", "--server-port"]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(command, log=Path(folder, "log")) as server,
    ):
        store(server, key=0)
        before, sent, count = resident_bytes(server), 0, 0
        while sent < args.rounds * MAX_BYTES:
            sent += store(server, key=count % 3)
            count += 1
            if count % 20 == 0:
                grown = resident_bytes(server) - before
                print(
                    f"{count} responses of {sent >> 20} MiB: memory +{grown >> 20} MiB", flush=True
                )
        ratio = (resident_bytes(server) - before) / MAX_BYTES
    print(f"memory: {ratio:.2f} times the bound of {MAX_BYTES >> 20} MiB")
    return 0 if ratio <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
