"""Tests of traces with a collector that reads the spans as protobuf."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from fake_engine import make_engine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from serving import CHAT, post, serving

from lmdeploy.cli.main import main
from lmdeploy.serve.http.tracing import check_endpoint

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SECRET = "the words of the prompt"
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 4}),
    ("/v1/responses", {"model": "m", "input": "a"}),
    ("/v1/messages", {**CHAT, "max_tokens": 4}),
    ("/generate", {"prompt": "a", "max_tokens": 4}),
)


@dataclass
class Collector:
    """A collector of OpenTelemetry, and the spans that it has received."""

    address: str
    spans: list[Span] = field(default_factory=list)
    service_names: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    status: int = 200
    hangs: bool = False
    released: threading.Event = field(default_factory=threading.Event)

    def receive(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.service_names |= {
                a.value.string_value
                for a in resource.resource.attributes
                if a.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans


@contextmanager
def collecting(**options: Any) -> Iterator[Collector]:
    """Run a collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.hangs:
                collector.released.wait(60)
            if collector.status == 200:
                collector.receive(self.path, body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}", **options)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Span) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(item) for item in value.array_value.values]
        return getattr(value, kind)

    return {attribute.key: plain(attribute.value) for attribute in span.attributes}


def trace(*requests: tuple[str, dict[str, Any]], **headers: str) -> list[Span]:
    """Send requests to a server and return the spans that a collector has received."""
    with collecting() as collector:
        with serving(make_engine(), otlp_traces_endpoint=collector.address) as url:
            for path, body in requests:
                post(url, path, body, headers=headers)
        assert collector.paths <= {"/v1/traces"}
        assert collector.service_names <= {"lmdeploy"}
        return collector.spans


def test_every_generating_endpoint_sends_a_span() -> None:
    begin = time.time_ns()
    spans = trace(*REQUESTS, traceparent=TRACEPARENT)
    assert [attributes(span)["http.route"] for span in spans] == [path for path, _ in REQUESTS]
    for span in spans:
        values = attributes(span)
        assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
        assert begin <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
        assert values["gen_ai.request.model"] == values["gen_ai.response.model"] == "m"
        assert values["gen_ai.response.finish_reasons"] in (["stop"], ["length"])
        assert 0 < values["gen_ai.latency.time_to_first_token"] <= values["gen_ai.latency.e2e"]
        assert span.status.code == Status.STATUS_CODE_UNSET


def test_span_has_the_options_and_the_usage_of_the_response() -> None:
    body = {**CHAT, "n": 2, "max_tokens": 5, "temperature": 0.25, "top_p": 0.5}
    with collecting() as collector:
        with serving(make_engine(), otlp_traces_endpoint=f"{collector.address}/v1/traces") as url:
            response = post(url, "/v1/chat/completions", body).json()
        (span,) = collector.spans
    values = attributes(span)
    assert span.parent_span_id == b""
    assert values["gen_ai.request.id"] == response["id"]
    assert values["gen_ai.request.n"] == 2
    assert values["gen_ai.request.max_tokens"] == 5
    assert values["gen_ai.request.temperature"] == 0.25
    assert values["gen_ai.request.top_p"] == 0.5
    assert values["gen_ai.usage.prompt_tokens"] == response["usage"]["prompt_tokens"]
    assert values["gen_ai.usage.completion_tokens"] == response["usage"]["completion_tokens"]
    assert values["gen_ai.response.finish_reasons"] == ["length", "length"]


def test_no_span_contains_text_of_a_request() -> None:
    ask = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
    refused = {**ask, "response_format": {"type": SECRET}}
    spans = trace(
        ("/v1/chat/completions", ask),
        ("/v1/chat/completions", refused),
        ("/v1/chat/completions", {**ask, "messages": [{"role": "user", "content": SECRET * 99}]}),
    )
    assert len(spans) == 3
    for span in spans:
        assert SECRET.encode() not in span.SerializeToString()
        assert SECRET.upper().encode() not in span.SerializeToString()
    errors = [attributes(span).get("error.type") for span in spans]
    assert errors == [None, "OptionError", "ContextLengthError"]
    assert all(span.status.code == Status.STATUS_CODE_UNSET for span in spans)


def test_failure_of_the_engine_is_an_error_of_the_span() -> None:
    engine = make_engine(step_seconds=0.01)
    with collecting() as collector:
        with serving(engine, otlp_traces_endpoint=collector.address) as url:
            engine.running.core.fail("broken")
            assert post(url, "/v1/chat/completions", CHAT).status_code == 503
        (span,) = collector.spans
    assert attributes(span)["error.type"] == "EngineFailure"
    assert span.status.code == Status.STATUS_CODE_ERROR


def test_stream_that_the_client_leaves_has_a_span() -> None:
    engine = make_engine(lambda _: "x" * 400, step_seconds=0.01)
    with collecting() as collector:
        with serving(engine, otlp_traces_endpoint=collector.address) as url:
            body = {**CHAT, "stream": True}
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                next(response.iter_lines())
        (span,) = collector.spans
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["abort"]


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": ""},
        {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
        {"traceparent": "ff-" + "x" * 4000},
        {"traceparent": TRACEPARENT, "tracestate": "=,=;" * 1000},
        {"traceparent": TRACEPARENT, "tracestate": ",".join(f"k{i}=v" for i in range(1000))},
    ],
)
def test_hostile_trace_headers_do_not_change_a_response(headers: dict[str, str]) -> None:
    with collecting() as collector:
        with serving(make_engine(), otlp_traces_endpoint=collector.address) as url:
            assert post(url, "/v1/chat/completions", CHAT, headers=headers).status_code == 200
        assert len(collector.spans) == 1


def test_trace_that_its_parent_does_not_sample_has_no_span() -> None:
    assert trace(REQUESTS[0], traceparent=TRACEPARENT.removesuffix("01") + "00") == []


@pytest.mark.parametrize("fault", ["refuses", "fails", "hangs"])
def test_requests_do_not_wait_for_a_bad_collector(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="opentelemetry")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")  # so that most spans find it full
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    with collecting(hangs=fault == "hangs", status=503) as collector:
        address = collector.address
        if fault == "refuses":
            with socket.create_server(("127.0.0.1", 0)) as unused:
                address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with serving(make_engine(), otlp_traces_endpoint=address) as url:
            for path, body in REQUESTS:
                assert post(url, path, body).status_code == 200
        # All requests and the server have ended, and the collector still hangs.
        assert not collector.released.is_set()


def test_server_without_the_flag_does_not_import_opentelemetry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with serving(make_engine()) as url:
        response = post(url, *REQUESTS[0], headers={"traceparent": TRACEPARENT})
        assert response.status_code == 200


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    command = ["serve", "api_server", "smollm2", "--otlp-traces-endpoint", "http://127.0.0.1:4318"]
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "Run: pip install 'opentelemetry-exporter-otlp-proto-http>=" in error
    assert error.count("\n") == 1


def test_endpoint_gets_a_path_or_is_refused() -> None:
    assert check_endpoint("http://a:4318") == "http://a:4318/v1/traces"
    assert check_endpoint("http://a:4318/") == "http://a:4318/v1/traces"
    assert check_endpoint("https://a/b/v1/traces") == "https://a/b/v1/traces"
    for endpoint in ("", "a:4317", "grpc://a:4317", "http://"):
        with pytest.raises(ValueError, match=r"\(--otlp-traces-endpoint\)"):
            check_endpoint(endpoint)
