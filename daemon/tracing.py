"""Traces of requests for OpenTelemetry: one span for each request, its five stages below it.

Made from a request's timeline when it has ended: while it runs nothing is done for its trace. A
client's W3C `traceparent` is the parent, and says whether the trace is wanted. Needs the extra
`otel`, and is loaded only where an endpoint is configured (see `trace_export`).
"""

import time

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from daemon.request import Request
from daemon.timelines import RequestTimeline, Span

_EXPORT_S = 2.0  # for one attempt, and so for the last one at the end
_PATH = "/v1/traces"


class RequestTracer:
    """Told of each ended request. Times of timelines are CLOCK_MONOTONIC, those of spans UTC."""

    def __init__(self, processor: SpanProcessor, model: str, version: str) -> None:
        about = {"service.name": "distserved", "service.version": version}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("distserved", version)
        self._model = model
        self._from_monotonic_ns = time.time_ns() - time.monotonic_ns()

    def ended(self, request: Request, timeline: RequestTimeline) -> None:
        carrier = {"traceparent": request.traceparent} if request.traceparent else {}
        span = self._tracer.start_span(
            "request",
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            start_time=self._ns(timeline.arrived_s),
            attributes=self._attributes(timeline),
        )
        if span.is_recording():
            within = trace.set_span_in_context(span)
            for stage in timeline.spans:
                self._stage(stage, within, timeline)
        if timeline.state == "failed":
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(_end_s(timeline)))

    def close(self) -> None:
        """What was not sent yet is, if there is somebody to take it."""
        self._provider.shutdown()

    def _stage(self, stage: Span, within: Context, timeline: RequestTimeline) -> None:
        attributes = {"distserve.instance": stage.instance} if stage.instance else {}
        span = self._tracer.start_span(
            stage.stage,
            context=within,
            start_time=self._ns(stage.started_s),
            attributes=attributes,
        )
        span.end(self._ns(_end_s(timeline) if stage.ended_s is None else stage.ended_s))

    def _attributes(self, timeline: RequestTimeline) -> dict[str, str | int | float]:
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.choice.count": timeline.num_choices,
            "gen_ai.usage.input_tokens": timeline.num_prompt,
            "gen_ai.usage.output_tokens": timeline.num_output,
            "distserve.request_id": timeline.label,
            "distserve.ending": timeline.state,
            "distserve.retries": timeline.num_retries,
        }
        if timeline.first_token_s is not None:
            ttft_s = timeline.first_token_s - timeline.arrived_s
            attributes["gen_ai.server.time_to_first_token"] = ttft_s
        return attributes

    def _ns(self, monotonic_s: float) -> int:
        return round(monotonic_s * 1e9) + self._from_monotonic_ns


def batching_exporter(endpoint: str) -> SpanProcessor:
    """Sends spans in a thread of its own; what an endpoint does not take in time is dropped."""
    rest = endpoint.partition("://")[2]
    url = endpoint if "/" in rest.rstrip("/") else endpoint.rstrip("/") + _PATH
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_S))


def _end_s(timeline: RequestTimeline) -> float:
    return timeline.arrived_s if timeline.ended_s is None else timeline.ended_s
