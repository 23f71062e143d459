"""The counters of a server, read from /metrics."""

from __future__ import annotations

import re

from server_process import Server, ServerFailure, last_lines

# Sums of seconds and numbers of requests since the start of the server, and the answers that were
# cut off at their length limit.
_METRICS = {
    "first_token_seconds": r"lmdeploy:time_to_first_token_seconds_sum",
    "first_tokens": r"lmdeploy:time_to_first_token_seconds_count",
    "per_token_seconds": r"lmdeploy:time_per_output_token_seconds_sum",
    "per_tokens": r"lmdeploy:time_per_output_token_seconds_count",
    "truncated": r'\S+_total\{[^}]*finished_reason="length"',
}


def read_counters(server: Server) -> dict[str, float]:
    """Return the sums of _METRICS. Raise ServerFailure if the server does not answer."""
    try:
        text = server.get("/metrics")
    except OSError as error:
        server.check()
        end = last_lines(server.log)
        raise ServerFailure(f"the server does not answer: {error}{end}") from error
    return {
        key: sum(map(float, re.findall(rf"^{name}\S* (\S+)", text, re.M)))
        for key, name in _METRICS.items()
    }
