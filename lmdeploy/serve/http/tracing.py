"""OpenTelemetry traces: one span for each request that generates (--otlp-traces-endpoint).

The attributes have vLLM's names. No span contains text of a prompt, a response or an error message.
A thread sends the spans. If the collector does not take them, they are dropped after some time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lmdeploy.base.checks import OptionError, flag_of, refuse
from lmdeploy.base.installed import install_command
from lmdeploy.serve.errors import ApiError

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from starlette.requests import Request

    from lmdeploy.serve.jobs import Job, PreparedRequest

_DEFAULT_PATH = "/v1/traces"
_EXPORT_SECONDS = 5  # for one batch of spans, with retries
_CLOSE_SECONDS = 2  # for the last spans when the server stops


def check_endpoint(endpoint: str) -> str:
    """Return the URL to which spans are sent: `endpoint`, with the default path if it has none.

    Raises ValueError if it is no HTTP address or OpenTelemetry is not installed.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        wanted = "an address such as http://localhost:4318/v1/traces"
        raise refuse(
            "otlp_traces_endpoint", endpoint, wanted=wanted, flag=flag_of("otlp_traces_endpoint")
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise ValueError(
            "--otlp-traces-endpoint needs packages that are not installed. Run: "
            f"{install_command('otlp')}"
        ) from None
    return endpoint if url.path.strip("/") else url._replace(path=_DEFAULT_PATH).geturl()


class RequestTracer:
    """Makes the spans of one server and sends them to a collector."""

    def __init__(self, endpoint: str, *, model_name: str) -> None:
        """Start the thread that sends spans. Raises ValueError as `check_endpoint` does."""
        url = check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # The variables OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES replace the name.
        resource = Resource({"service.name": "lmdeploy"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lmdeploy.serve")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    @contextmanager
    def span(self, request: Request) -> Iterator[RequestSpan]:
        """Record a span until the context ends. The header `traceparent` names its parent."""
        from opentelemetry.trace import SpanKind, StatusCode

        parent = self._propagator.extract(request.headers)
        span = self._tracer.start_span("llm_request", context=parent, kind=SpanKind.SERVER)
        model = dict.fromkeys(("gen_ai.request.model", "gen_ai.response.model"), self._model_name)
        span.set_attributes({"http.route": request.url.path, **model})
        recorded = RequestSpan(span)
        try:
            yield recorded
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            if not _is_client_fault(error):
                span.set_status(StatusCode.ERROR)
            raise
        finally:
            recorded.end()

    def close(self) -> None:
        """Send the last spans if the collector takes them soon."""
        # The library's shutdown waits up to 30 s for a collector that does not answer.
        thread = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)


class RequestSpan:
    """The span of one request while the request runs."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._begin = time.monotonic()
        self._jobs: Sequence[Job] = ()

    def follow(
        self, prepared: PreparedRequest, jobs: Sequence[Job], *, response_id: str | None
    ) -> None:
        """Add the options of the request. `end` reads its choices from `jobs`, which may grow."""
        self._jobs = jobs
        config = prepared.config
        self._span.set_attributes(
            {
                "gen_ai.request.n": config.n,
                "gen_ai.request.max_tokens": config.max_new_tokens,
                "gen_ai.request.temperature": config.temperature if config.do_sample else 0.0,
                "gen_ai.request.top_p": config.top_p,
                "gen_ai.usage.prompt_tokens": sum(map(len, prepared.prompts)),
            }
        )
        if response_id is not None:
            self._span.set_attribute("gen_ai.request.id", response_id)

    def end(self) -> None:
        """Add what came of the request, and end the span."""
        from opentelemetry.trace import StatusCode

        seen = [job.progress for job in self._jobs]
        reasons = [progress.finish_reason for progress in seen]
        first = [progress.first_token for progress in seen if progress.first_token is not None]
        generated = sum(p.chunk.generate_token_len for p in seen if p.chunk is not None)
        if self._jobs:
            self._span.set_attribute("gen_ai.usage.completion_tokens", generated)
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if first:
            delay = min(first) - self._begin
            self._span.set_attribute("gen_ai.latency.time_to_first_token", delay)
        if "error" in reasons:
            self._span.set_status(StatusCode.ERROR)
        self._span.set_attribute("gen_ai.latency.e2e", time.monotonic() - self._begin)
        self._span.end()


def _is_client_fault(error: BaseException) -> bool:
    return isinstance(error, OptionError) or (isinstance(error, ApiError) and error.status < 500)
