"""Prometheus metrics with LMDeploy's names, `lmdeploy:*`. Each server has its own registry."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from lmdeploy import _turbomind
    from lmdeploy.engine.async_engine import AsyncEngine
    from lmdeploy.engine.stream import RequestStream
    from lmdeploy.response import Response

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


class _EngineCollector(Collector):
    """Reads the engine's counters at each scrape."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        total = max(stats.blocks_total, 1)
        queried = max(stats.prefix_queried_tokens, 1)
        gauges = {
            "num_requests_running": ("Running requests.", stats.num_running),
            "num_requests_waiting": ("Requests waiting in the queue.", stats.num_waiting),
            "gpu_cache_usage_perc": ("Share of KV blocks in use.", stats.blocks_active / total),
            "kv_cache_usage_perc": ("Share of KV blocks in use.", stats.blocks_active / total),
            "kv_cache_blocks_total": ("KV blocks.", stats.blocks_total),
            "kv_cache_blocks_cached": ("KV blocks kept for prefix reuse.", stats.blocks_cached),
            "kv_cache_window_blocks_total": (
                "Blocks in the 16-bit pools.",
                stats.window16_blocks_total,
            ),
            "kv_cache_window_blocks_active": (
                "16-bit blocks in use.",
                stats.window16_blocks_active,
            ),
            "kv_cache_window_blocks_cached": (
                "16-bit blocks kept for prefix reuse.",
                stats.window16_blocks_cached,
            ),
            "prefix_cache_hit_rate": (
                "Share of prompt tokens found in the prefix cache.",
                stats.prefix_hit_tokens / queried,
            ),
            "engine_healthy": ("1 if the engine is healthy, else 0.", int(self._engine.healthy)),
        }
        # Dashboards may still read the names with "hot".
        gauges |= {n.replace("_window_", "_hot_"): g for n, g in gauges.items() if "_window_" in n}
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"lmdeploy:{name}", text, labels=["model_name"])
            gauge.add_metric(self._labels, value)
            yield gauge
        counters = {
            "prompt_tokens_total": ("Prompt tokens processed.", stats.prompt_tokens),
            "generation_tokens_total": ("Tokens generated.", stats.generated_tokens),
            "cached_tokens_total": (
                "Prompt tokens reused from the prefix cache.",
                stats.prefix_hit_tokens,
            ),
            "prefix_cut_tokens_total": (
                "Prompt tokens found in the prefix cache but computed again, because their blocks "
                "have no 16-bit copy.",
                stats.prefix_cut_tokens,
            ),
            "num_preemptions_total": ("Sequences preempted.", stats.num_preemptions),
            "num_nonfinite_kv_total": ("NaN and infinite values in K or V.", stats.num_nonfinite),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"lmdeploy:{name}", text, labels=["model_name"])
            counter.add_metric(self._labels, value)
            yield counter
        yield self._clipped(stats)
        yield self._cache_info()

    def _clipped(self, stats: _turbomind.EngineStats) -> Metric:
        """Return the number of clipped values for each kind of attention (label `group`)."""
        counter = CounterMetricFamily(
            "lmdeploy:kv_clipped_values_total",
            "Values of K or V clipped to the range of their KV format.",
            labels=["model_name", "group"],
        )
        by_group: dict[str, int] = {}
        for window, num_values in stats.clipped:
            group = f"window_{window}" if window else "full"
            by_group[group] = by_group.get(group, 0) + num_values
        for group, num_values in by_group.items():
            counter.add_metric([*self._labels, group], num_values)
        return counter

    def _cache_info(self) -> Metric:
        """Return a metric with the value 1 whose labels are the KV format and quality."""
        labels = self._engine.loaded.kv.labels()
        info = GaugeMetricFamily(
            "lmdeploy:kv_cache_info",
            "KV format and quality, as labels.",
            labels=["model_name", *labels],
        )
        info.add_metric([*self._labels, *labels.values()], 1)
        return info


class ServerMetrics:
    """Counts and times the requests of one server. Only the server's event loop may use it."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model_name))
        self._model_name = model_name
        self._success = Counter(
            "lmdeploy:request_success_total",
            "Finished requests, by finish reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        # The names of unknown fields are not labels: clients choose them, so they are unlimited.
        self._unknown_fields = Counter(
            "lmdeploy:request_unknown_fields_total",
            "Unknown fields of requests, which are ignored. DEBUG messages name them.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self._broken_calls = Counter(
            "lmdeploy:broken_tool_calls_total",
            "Tool calls in responses that could not be parsed. Their text is content.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds until the first token.", buckets=_SECONDS
        )
        self._iteration = self._histogram(
            "iter_token_latency", "Seconds between chunks.", buckets=_SECONDS
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean seconds per token after the first.",
            buckets=_SECONDS,
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Seconds per request.", buckets=_SECONDS
        )
        self._prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request.", buckets=_TOKENS
        )
        self._generated = self._histogram(
            "request_generation_tokens", "Generated tokens per request.", buckets=_TOKENS
        )
        self._cached = self._histogram(
            "request_cached_tokens", "Reused prompt tokens per request.", buckets=_TOKENS
        )

    def _histogram(self, name: str, text: str, *, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            f"lmdeploy:{name}", text, ["model_name"], registry=self.registry, buckets=buckets
        )
        child: Histogram = family.labels(self._model_name)
        return child

    def text(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return generate_latest(self.registry)

    def count_unknown_fields(self, number: int) -> None:
        """Count the unknown fields of a request."""
        self._unknown_fields.inc(number)

    async def observe(self, stream: RequestStream) -> AsyncGenerator[Response, None]:
        """Yield the chunks of `stream` and time them. Closing the generator cancels the request."""
        begin = last = stream.created
        first: float | None = None
        chunk: Response | None = None
        try:
            async for chunk in stream:
                now = time.monotonic()
                if chunk.token_ids and first is None:
                    first = now
                    self._first_token.observe(now - begin)
                elif chunk.token_ids:
                    self._iteration.observe(now - last)
                last = now
                yield chunk
        finally:
            stream.close()
            self._broken_calls.inc(stream.num_broken_calls)
            self._end(chunk, begin, first=first)

    def _end(self, chunk: Response | None, begin: float, *, first: float | None) -> None:
        now = time.monotonic()
        reason = (chunk.finish_reason if chunk is not None else None) or "abort"
        self._success.labels(self._model_name, reason).inc()
        self._latency.observe(now - begin)
        if chunk is None:
            return
        self._prompt.observe(chunk.input_token_len)
        self._generated.observe(chunk.generate_token_len)
        self._cached.observe(chunk.cached_tokens)
        if first is not None and chunk.generate_token_len > 1:
            self._per_token.observe((now - first) / (chunk.generate_token_len - 1))
