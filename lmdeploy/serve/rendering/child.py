"""The process that renders: reads texts and writes replies, each a line of JSON.

A text that exceeds its time ends the process by SIGALRM, also within a regular expression.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

MAX_SECONDS = 5
_MEMORY = 1 << 30  # of addresses, the interpreter's included


def main() -> None:
    """Answer lines until stdin ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server's process
    from lmdeploy.serve.rendering.tree import TooManyNodesError, markdown_nodes

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
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
