"""The trace of one request: its ids, its stages and its outcome, before it becomes OpenTelemetry spans."""

import random
import time
from collections.abc import Callable
from typing import Literal

Outcome = Literal["sent", "failed", "queue_full"]
AttributeValue = str | int | float | bool


class Trace:
    """One sampled request: its ids, its attributes, and when each stage began."""

    __slots__ = (
        "_on_end",
        "attributes",
        "began_at",
        "ended_at",
        "ended_wall_ns",
        "is_error",
        "marks",
        "method",
        "parent_id",
        "path",
        "span_id",
        "trace_id",
    )

    def __init__(
        self,
        method: str,
        path: str,
        began_at: float,
        *,
        trace_id: int,
        parent_id: int | None,
        on_end: Callable[["Trace"], None],
    ) -> None:
        self.method = method
        self.path = path
        self.began_at = began_at
        self.ended_at = began_at
        self.ended_wall_ns = 0
        self.is_error = False
        self.trace_id = trace_id
        self.span_id = random.getrandbits(64) or 1
        self.parent_id = parent_id
        self.attributes: dict[str, AttributeValue] = {}
        self.marks: list[tuple[str, float, dict[str, AttributeValue] | None]] = []
        self._on_end: Callable[[Trace], None] | None = on_end

    def begin_stage(self, name: str, **attributes: AttributeValue) -> None:
        """Record the begin of a stage, now; that ends the stage before. A stage may repeat, as in a second attempt."""
        self.marks.append((name, time.monotonic(), attributes or None))

    def fail_stage(self, reason: str) -> None:
        """Mark the current stage as failed, if there is one; the request may continue."""
        if self.marks:
            name, at, attributes = self.marks[-1]
            self.marks[-1] = name, at, {**(attributes or {}), "error.type": reason}

    def headers(self, tracestate: bytes | None) -> bytes:
        """Header lines that make the engine's spans children of this request's span.

        tracestate  the client's header; sent on only if this request continues the client's trace
        """
        line = b"traceparent: 00-%032x-%016x-01\r\n" % (self.trace_id, self.span_id)
        if tracestate is None or self.parent_id is None:
            return line
        return line + b"tracestate: " + tracestate + b"\r\n"

    def wall_ns(self, at: float) -> int:
        """A monotonic time as wall time in ns; valid only after `end`."""
        return self.ended_wall_ns - int((self.ended_at - at) * 1e9)

    def end(self, status: int, code: str = "") -> None:
        """End the trace with an HTTP status and error code, and pass it to `on_end`. Repeated calls do nothing."""
        if self._on_end is None:
            return
        on_end, self._on_end = self._on_end, None
        self.ended_at, self.ended_wall_ns = time.monotonic(), time.time_ns()
        # OpenTelemetry's rule for server spans: a 4xx is not an error.
        self.is_error = status >= 500
        self.attributes["http.response.status_code"] = status
        if status >= 400 or code:
            self.attributes["error.type"] = code or str(status)
        on_end(self)
