"""Converts traces to OpenTelemetry spans and exports them over OTLP.

Needs the extra `tracing`; imported only if tracing is on.
"""

from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from router.telemetry.trace import Trace

_SCOPE = InstrumentationScope("lorafleet.router")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_ERROR = Status(StatusCode.ERROR)
_FINE = Status(StatusCode.UNSET)


class OtlpSender:
    """Exports traces to one collector; blocks while exporting."""

    def __init__(self, url: str | None, resource: Mapping[str, str]) -> None:
        """url  ends with /v1/traces; None takes it from the environment, as headers, certificates and timeouts are"""
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._resource = Resource.create(dict(resource))

    def send(self, traces: Sequence[Trace]) -> bool:
        """Export traces; whether the collector accepted them. Blocks, for OTEL_EXPORTER_OTLP_TIMEOUT (10 s) at most."""
        spans = [span for trace in traces for span in self._spans(trace)]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Shut the exporter down, which also ends a send in progress."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _spans(self, trace: Trace) -> Iterator[ReadableSpan]:
        """The spans of a trace: one for the request, and one for each stage."""
        root = _span_context(trace.trace_id, trace.span_id)
        yield ReadableSpan(
            f"{trace.method} {trace.path}",
            context=root,
            parent=None if trace.parent_id is None else _span_context(trace.trace_id, trace.parent_id, is_remote=True),
            resource=self._resource,
            attributes={"http.request.method": trace.method, "http.route": trace.path, **trace.attributes},
            kind=SpanKind.SERVER,
            status=_ERROR if trace.is_error else _FINE,
            start_time=trace.wall_ns(trace.began_at),
            end_time=trace.ended_wall_ns,
            instrumentation_scope=_SCOPE,
        )
        begins = [at for _name, at, _attributes in trace.marks]
        for number, ((name, at, attributes), until) in enumerate(
            zip(trace.marks, [*begins[1:], trace.ended_at], strict=False), start=1
        ):
            yield ReadableSpan(
                name,
                # Any id that is unique in the trace: nothing outside refers to a stage's span.
                context=_span_context(trace.trace_id, (trace.span_id + number) % 2**64 or 1),
                parent=root,
                resource=self._resource,
                attributes=attributes,
                status=_ERROR if attributes and "error.type" in attributes else _FINE,
                # A request's arrival is read from a coarser clock, and may be a little late.
                start_time=trace.wall_ns(max(at, trace.began_at)),
                end_time=trace.wall_ns(max(until, trace.began_at)),
                instrumentation_scope=_SCOPE,
            )


def _span_context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    """A span context of a sampled trace."""
    return SpanContext(trace_id, span_id, is_remote=is_remote, trace_flags=_SAMPLED)
