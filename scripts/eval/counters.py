"""The counters of a server, read from /metrics."""

from __future__ import annotations

from collections import defaultdict

from server_process import Server, ServerFailure, last_lines

# Sums of seconds and numbers of requests since the start of the server.
_METRICS = {
    "first_token_seconds": "lmdeploy:time_to_first_token_seconds_sum",
    "first_tokens": "lmdeploy:time_to_first_token_seconds_count",
    "per_token_seconds": "lmdeploy:time_per_output_token_seconds_sum",
    "per_tokens": "lmdeploy:time_per_output_token_seconds_count",
}


def read_counters(server: Server) -> dict[str, float]:
    """Return _METRICS and the number of answers that were `truncated` at their length limit.

    Raise ServerFailure if the server does not answer.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        text = server.get("/metrics")
    except OSError as error:
        server.check()
        end = last_lines(server.log)
        raise ServerFailure(f"the server does not answer: {error}{end}") from error
    values: defaultdict[str, float] = defaultdict(float)
    truncated = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += sample.value
            if sample.labels.get("finished_reason") == "length" and sample.name.endswith("_total"):
                truncated += sample.value
    return {key: values[name] for key, name in _METRICS.items()} | {"truncated": truncated}
