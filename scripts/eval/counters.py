"""The counters of a server, read from /metrics."""

from __future__ import annotations

from dataclasses import dataclass

from server_process import Server, ServerFailure, last_lines

_HISTOGRAMS = {
    "first_token": "lmdeploy:time_to_first_token_seconds",
    "per_token": "lmdeploy:time_per_output_token_seconds",
}


@dataclass(frozen=True)
class Timing:
    """A sum of seconds over a number of requests."""

    seconds: float
    count: int

    @property
    def mean(self) -> float | None:
        """Return the seconds of one request, or None without requests."""
        return self.seconds / self.count if self.count else None

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.seconds + other.seconds, self.count + other.count)

    def __sub__(self, other: Timing) -> Timing:
        return Timing(self.seconds - other.seconds, self.count - other.count)


@dataclass(frozen=True)
class Counters:
    """The counters since the start of a server. `truncated` answers reached their limit."""

    first_token: Timing
    per_token: Timing
    truncated: int


def read_counters(server: Server) -> Counters:
    """Read /metrics. ServerFailure is raised if the server does not answer."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        text = server.get("/metrics")
    except OSError as error:
        server.check()
        end = last_lines(server.log)
        raise ServerFailure(f"the server does not answer: {error}{end}") from error
    values: dict[str, float] = {}
    truncated = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
            if sample.labels.get("finished_reason") == "length" and sample.name.endswith("_total"):
                truncated += sample.value
    timings = {
        key: Timing(values.get(f"{name}_sum", 0.0), int(values.get(f"{name}_count", 0)))
        for key, name in _HISTOGRAMS.items()
    }
    return Counters(truncated=int(truncated), **timings)
