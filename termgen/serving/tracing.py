"""Traces of requests for OpenTelemetry: one span each, made when the request is over.

Needs the extra `otel`, and is imported only when `--otlp-traces-endpoint` is set. Names follow
OpenTelemetry's conventions for generative AI. A thread of the library sends the spans in batches;
spans that cannot be sent are dropped.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

from termgen import __version__
from termgen.errors import ConfigError
from termgen.serving.request_metrics import RequestReport

INSTALL_HINT = "traces need OpenTelemetry: pip install 'termgen[otel]'"


class TraceExporter:
    """A `ReportSink`."""

    def __init__(self, endpoint: str, *, exporter: Any = None) -> None:
        """`exporter` takes the place of the one that sends to `endpoint`."""
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import (
                TraceContextTextMapPropagator,
            )
        except ImportError:
            raise ConfigError(INSTALL_HINT, param="otlp_traces_endpoint") from None
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        resource = Resource.create({"service.name": "termgen", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _exporter(endpoint)))
        self._tracer = self._provider.get_tracer("termgen.server", __version__)

    def add(self, report: RequestReport) -> None:
        parent = {"traceparent": report.traceparent} if report.traceparent else {}
        offset_ns = time.time_ns() - time.perf_counter_ns()
        span = self._tracer.start_span(
            f"{report.operation} {report.model}",
            context=self._propagator.extract(parent),
            kind=self._trace.SpanKind.SERVER,
            start_time=report.began_ns + offset_ns,
            attributes=_attributes(report),
        )
        for timing in report.timings:
            for name, at_ns in (
                ("scheduled", timing.first_scheduled_ns),
                ("first_token", timing.first_token_ns),
            ):
                if at_ns:
                    span.add_event(name, timestamp=at_ns + offset_ns)
        if report.outcome != "ok":
            span.set_attribute("error.type", report.outcome)
            span.set_status(self._trace.StatusCode.ERROR, report.outcome)
        span.end(report.ended_ns + offset_ns)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _exporter(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(INSTALL_HINT, param="otlp_traces_endpoint") from None
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise ConfigError(
            f"otlp_traces_endpoint must be an http URL, not {endpoint!r}",
            param="otlp_traces_endpoint",
        )
    return OTLPSpanExporter(endpoint=endpoint)


def _attributes(report: RequestReport) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": report.operation,
        "gen_ai.provider.name": "termgen",
        "gen_ai.request.model": report.model,
        "gen_ai.response.model": report.model,
        "gen_ai.response.id": report.answer_id,
        "gen_ai.request.choice.count": report.num_choices,
        "gen_ai.usage.input_tokens": report.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.num_cached_tokens,
        "gen_ai.usage.output_tokens": report.num_output_tokens,
        "gen_ai.response.finish_reasons": list(report.finish_reasons),
        "http.route": report.path,
        "termgen.request_id": report.request_id,
    }
    for name, seconds in (
        ("gen_ai.server.time_to_first_token", report.ttft_s),
        ("termgen.queue_time", report.queue_s),
    ):
        if seconds is not None:
            attributes[name] = seconds
    return attributes
