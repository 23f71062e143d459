"""Prometheus metrics with LMDeploy's names, `lmdeploy:*`, and vLLM's, `vllm:*`.

Each server has its own registry, which contains every value once, under LMDeploy's name. A scrape
copies the values that routers and autoscalers read to vLLM's names.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmdeploy.response import FinishReason, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from lmdeploy._turbomind import EngineStats
    from lmdeploy.engine.async_engine import AsyncEngine
    from lmdeploy.engine.stream import RequestStream
    from lmdeploy.kv_store.traffic import StoreStats

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ERRORS = (400, 401, 403, 404, 408, 413, 415, 421, 500, 503)
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)
# LMDeploy's name → vLLM's current and older names with the same meaning. Counters lack `_total`.
VLLM_NAMES = {
    "num_requests_running": ("num_requests_running",),
    "num_requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_queried_tokens": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "cached_tokens": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "num_preemptions": ("num_preemptions",),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens",),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "request_success": ("request_success",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "iter_token_latency": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
}


T = TypeVar("T")
# Name without `_total`, kind, text, and the value: a field of the source, or a function of it.
_Row = tuple[str, type[GaugeMetricFamily | CounterMetricFamily], str, str | Callable[[T], float]]
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily


def _used_blocks(stats: EngineStats) -> float:
    return stats.blocks_active / max(stats.blocks_total, 1)


def _hit_rate(stats: EngineStats) -> float:
    return stats.prefix_hit_tokens / max(stats.prefix_queried_tokens, 1)


_ENGINE_METRICS: tuple[_Row[EngineStats], ...] = (
    ("num_requests_running", _GAUGE, "Running requests.", "num_running"),
    ("num_requests_waiting", _GAUGE, "Requests waiting in the queue.", "num_waiting"),
    ("gpu_cache_usage_perc", _GAUGE, "Share of KV blocks in use.", _used_blocks),
    ("kv_cache_usage_perc", _GAUGE, "Share of KV blocks in use.", _used_blocks),
    ("kv_cache_blocks_total", _GAUGE, "KV blocks.", "blocks_total"),
    ("kv_cache_blocks_active", _GAUGE, "KV blocks in use.", "blocks_active"),
    ("kv_cache_blocks_cached", _GAUGE, "KV blocks kept for prefix reuse.", "blocks_cached"),
    (
        "kv_cache_window_blocks_total",
        _GAUGE,
        "Blocks in the pools of the window.",
        "window16_blocks_total",
    ),
    (
        "kv_cache_window_blocks_active",
        _GAUGE,
        "Blocks of the window in use.",
        "window16_blocks_active",
    ),
    (
        "kv_cache_window_blocks_cached",
        _GAUGE,
        "Blocks of the window kept for prefix reuse.",
        "window16_blocks_cached",
    ),
    (
        "state_checkpoints_total",
        _GAUGE,
        "Slots for checkpoints of recurrent layers.",
        "checkpoints_total",
    ),
    (
        "state_checkpoints_kept",
        _GAUGE,
        "Checkpoints of recurrent layers that are kept.",
        "checkpoints_kept",
    ),
    (
        "prefix_cache_hit_rate",
        _GAUGE,
        "Share of prompt tokens found in the prefix cache.",
        _hit_rate,
    ),
    ("prompt_tokens", _COUNTER, "Prompt tokens processed.", "prompt_tokens"),
    ("generation_tokens", _COUNTER, "Tokens generated.", "generated_tokens"),
    (
        "spec_decode_num_draft_tokens",
        _COUNTER,
        "Tokens computed as drafts of speculative decoding.",
        "draft_tokens",
    ),
    (
        "spec_decode_num_accepted_tokens",
        _COUNTER,
        "Tokens of drafts that were right.",
        "accepted_tokens",
    ),
    ("cached_tokens", _COUNTER, "Prompt tokens reused from the prefix cache.", "prefix_hit_tokens"),
    (
        "prefix_queried_tokens",
        _COUNTER,
        "Prompt tokens looked up in the prefix cache.",
        "prefix_queried_tokens",
    ),
    (
        "prefix_cut_tokens",
        _COUNTER,
        "Prompt tokens found in the prefix cache but computed again, because their blocks have no "
        "copy in the window or no checkpoint follows them.",
        "prefix_cut_tokens",
    ),
    ("num_preemptions", _COUNTER, "Sequences preempted.", "num_preemptions"),
    ("num_nonfinite_kv", _COUNTER, "NaN and infinite values in K or V.", "num_nonfinite"),
)
_HEALTH: tuple[_Row[AsyncEngine], ...] = (
    ("engine_healthy", _GAUGE, "1 if the engine is healthy, else 0.", "healthy"),
)
_STORE_METRICS: tuple[_Row[StoreStats], ...] = (
    ("kv_store_hits", _COUNTER, "Blocks read from the KV store.", "hits"),
    ("kv_store_misses", _COUNTER, "Blocks that the KV store did not have.", "misses"),
    ("kv_store_rejected", _COUNTER, "Values of the KV store that were not authentic.", "rejected"),
    (
        "kv_store_errors",
        _COUNTER,
        "Errors of the KV store, after each of which it rests.",
        "errors",
    ),
    ("kv_store_written_blocks", _COUNTER, "Blocks written to the KV store.", "written_blocks"),
    ("kv_store_read_bytes", _COUNTER, "Bytes read from the KV store.", "read_bytes"),
    ("kv_store_written_bytes", _COUNTER, "Bytes written to the KV store.", "written_bytes"),
    ("kv_store_read_seconds", _COUNTER, "Seconds for which prompts waited.", "read_seconds"),
)


class _EngineCollector(Collector):
    """Reads the engine's counters at each scrape."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._values(_ENGINE_METRICS, stats)
        yield from self._values(_HEALTH, self._engine)
        yield self._clipped(stats)
        yield self._cache_info()
        yield self._gemm_info()
        yield self._vllm_cache_info(stats)
        traffic = self._engine.running.traffic
        if traffic is not None:
            yield from self._values(_STORE_METRICS, traffic.stats)

    def _values(self, rows: Iterable[_Row[T]], source: T) -> Iterator[Metric]:
        for name, kind, text, field in rows:
            value = getattr(source, field) if isinstance(field, str) else field(source)
            metric = kind(f"lmdeploy:{name}", text, labels=["model_name"])
            metric.add_metric(self._labels, value)
            yield metric

    def _clipped(self, stats: EngineStats) -> Metric:
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
        labels = self._engine.running.kv.labels()
        info = GaugeMetricFamily(
            "lmdeploy:kv_cache_info",
            "KV format and quality, as labels.",
            labels=["model_name", *labels],
        )
        info.add_metric([*self._labels, *labels.values()], 1)
        return info

    def _gemm_info(self) -> Metric:
        """Return a metric with the value 1 whose label is the type of activations."""
        info = GaugeMetricFamily(
            "lmdeploy:gemm_info",
            "Type of activations that are multiplied with quantized matrices, as a label.",
            labels=["model_name", "gemm_input_dtype"],
        )
        info.add_metric([*self._labels, self._engine.running.gemm_input_dtype], 1)
        return info

    def _vllm_cache_info(self, stats: EngineStats) -> Metric:
        """Return vLLM's metric whose labels are the format and the size of the KV cache."""
        running = self._engine.running
        labels = {
            "block_size": running.block_tokens,
            "num_gpu_blocks": stats.blocks_total,
            "kv_cache_size_tokens": self._engine.memory_plan().max_tokens,
            "cache_dtype": running.kv.format,
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Format and size of the KV cache, as labels.",
            labels=["model_name", *labels],
        )
        info.add_metric([*self._labels, *map(str, labels.values())], 1)
        return info


class _WithVllmNames(Collector):
    """Repeats the metrics of a registry under vLLM's names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            yield metric
            for name in VLLM_NAMES.get(metric.name.removeprefix("lmdeploy:"), ()):
                copy = Metric(f"vllm:{name}", metric.documentation, metric.type)
                copy.samples = [
                    sample._replace(name=copy.name + sample.name.removeprefix(metric.name))
                    for sample in metric.samples
                ]
                yield copy


@dataclass
class Progress:
    """What the server has received of one response: its newest chunk, and when it began.

    `first_token` is a time of `time.monotonic()`.
    """

    first_token: float | None = None
    chunk: Response | None = None

    @property
    def finish_reason(self) -> str:
        """Return why the response ended: `abort` if it ended before its last chunk."""
        return (self.chunk.finish_reason if self.chunk is not None else None) or "abort"


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
        self.skipped_tools = Counter(
            "lmdeploy:request_skipped_tools_total",
            "Tools of requests, and calls of such tools in conversations, that the server cannot "
            "run. DEBUG messages name their types.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self._broken_calls = Counter(
            "lmdeploy:broken_tool_calls_total",
            "Tool calls in responses that could not be parsed. Their text is content.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self._errors = Counter(
            "lmdeploy:http_errors_total",
            "Refused and failed requests, by HTTP status. Errors within a stream are in "
            "request_success_total.",
            ["model_name", "status"],
            registry=self.registry,
        )
        # Prometheus sees an increase only if the counter was 0 before.
        for reason in get_args(FinishReason):
            self._success.labels(model_name, reason)
        for status in _ERRORS:
            self._errors.labels(model_name, status)
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
        return generate_latest(_WithVllmNames(self.registry))

    def count_unknown_fields(self, number: int) -> None:
        """Count the unknown fields of a request."""
        self._unknown_fields.inc(number)

    def count_error(self, status: int) -> None:
        """Count a response with an HTTP error status."""
        self._errors.labels(self._model_name, status).inc()

    async def observe(
        self, stream: RequestStream, progress: Progress
    ) -> AsyncGenerator[Response, None]:
        """Yield the chunks of `stream`, time them and keep `progress` up to date.

        Closing the generator cancels the request.
        """
        last = stream.created
        try:
            async for chunk in stream:
                now = time.monotonic()
                if chunk.token_ids and progress.first_token is None:
                    progress.first_token = now
                    self._first_token.observe(now - stream.created)
                elif chunk.token_ids:
                    self._iteration.observe(now - last)
                last = now
                progress.chunk = chunk
                yield chunk
        finally:
            stream.close()
            self._broken_calls.inc(stream.num_broken_calls)
            self._end(progress, created=stream.created)

    def _end(self, progress: Progress, *, created: float) -> None:
        now = time.monotonic()
        self._success.labels(self._model_name, progress.finish_reason).inc()
        self._latency.observe(now - created)
        chunk, first = progress.chunk, progress.first_token
        if chunk is None:
            return
        self._prompt.observe(chunk.input_token_len)
        self._generated.observe(chunk.generate_token_len)
        self._cached.observe(chunk.cached_tokens)
        if first is not None and chunk.generate_token_len > 1:
            self._per_token.observe((now - first) / (chunk.generate_token_len - 1))


class ErrorCounter:
    """ASGI middleware that counts the responses with an error status."""

    def __init__(self, app: ASGIApp, *, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._metrics.count_error(message["status"])
            await send(message)

        await self._app(scope, receive, counted)
