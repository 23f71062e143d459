"""The process that renders: reads texts and writes replies, each a line of JSON.

A text that exceeds its time ends the process by SIGALRM, also within a regular expression.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

MAX_SECONDS = 5
_MEMORY = 512 << 20  # beside the interpreter and the modules


def main() -> None:
    """Answer lines until stdin ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server's process
    from lmdeploy.serve.rendering.tree import TooManyNodesError, markdown_nodes

    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    for line in sys.stdin.buffer:
        signal.alarm(MAX_SECONDS)
        try:
            reply = json.dumps({"nodes": markdown_nodes(json.loads(line))})
        except TooManyNodesError:
            reply = json.dumps({"nodes": None})
        signal.alarm(0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
