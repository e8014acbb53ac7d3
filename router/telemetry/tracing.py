"""OpenTelemetry traces: one span a request, one for each of its stages, sent as OTLP over HTTP.

A request only notes times, and is handed over when it ends; spans are made and sent by a thread of their own. The
SDK's own BatchSpanProcessor is not used: it makes spans where requests are served, and logs a line for each one that
finds its queue full.
"""

import asyncio
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import structlog

log = structlog.get_logger()

Outcome = Literal["sent", "failed", "queue_full"]
AttributeValue = str | int | float | bool

# Requests that wait to be sent, about 3 KB each; what comes when it is full is dropped and counted.
_MOST_WAITING = 4096
# The thread holds the interpreter while it makes and encodes a batch, 1.2 ms for 8. At 450 traced requests/s the loop's
# lag p99 was 0.5 ms so, and 3.4 ms with 32; the smaller batches cost a third more CPU.
_BATCH = 8
_EVERY_S = 1.0
_CLOSE_WITHIN_S = 3.0
_SAMPLED = 1
# W3C Trace Context, level 1, section 3.2: lower case only, no id of zeros, version ff invalid; a later version may
# have more after the flags.
_TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TracingUnavailable(Exception):
    """Tracing is asked for and cannot be; the message says what to do."""


class Trace:
    """One sampled request: its ids, its attributes, and when each stage began."""

    __slots__ = (
        "_handed_over",
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
        done: Callable[["Trace"], None],
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
        self._handed_over: Callable[[Trace], None] | None = done

    def stage(self, name: str, **about: AttributeValue) -> None:
        """The stage before this one ends, and this one begins; a stage may come again, as in a second attempt."""
        self.marks.append((name, time.monotonic(), about or None))

    def stage_failed(self, reason: str) -> None:
        """The stage that runs now failed; the request may go on."""
        if self.marks:
            name, at, about = self.marks[-1]
            self.marks[-1] = name, at, {**(about or {}), "error.type": reason}

    def headers(self, tracestate: bytes | None) -> bytes:
        """Header lines for the engine: its spans become children of this request's. `tracestate` is the client's."""
        line = b"traceparent: 00-%032x-%016x-01\r\n" % (self.trace_id, self.span_id)
        if tracestate is None or self.parent_id is None:  # somebody else's state, of a trace that is not this one
            return line
        return line + b"tracestate: " + tracestate + b"\r\n"

    def wall_ns(self, at: float) -> int:
        """A time of this request's clock as wall time; only after its end."""
        return self.ended_wall_ns - int((self.ended_at - at) * 1e9)

    def end(self, status: int, code: str = "") -> None:
        """Over, with this HTTP status and error code; repeats change nothing."""
        if self._handed_over is None:
            return
        handed_over, self._handed_over = self._handed_over, None
        self.ended_at, self.ended_wall_ns = time.monotonic(), time.time_ns()
        # OpenTelemetry's rule for servers: what the client did wrong is no error of this span.
        self.is_error = status >= 500
        self.attributes["http.response.status_code"] = status
        if status >= 400 or code:
            self.attributes["error.type"] = code or str(status)
        handed_over(self)


class TraceSender(Protocol):
    """Takes traces to a collector; both are called on the sending thread or after it."""

    def send(self, traces: Sequence[Trace]) -> bool: ...

    def close(self) -> None: ...


class Tracer:
    """Begins traces, and sends those that ended. Its owner is the event loop; one thread sends."""

    def __init__(
        self,
        sender: TraceSender,
        *,
        ratio: float,
        counted: Callable[[Outcome, int], object],
        rng: random.Random | None = None,
    ) -> None:
        """
        ratio    share of requests traced, of those whose client has not decided it
        counted  is told of traces by what became of them, also from the sending thread
        """
        self._sender = sender
        self._below = round(ratio * 2**64)
        self._counted = counted
        self._rng = rng or random.Random()
        self._ended: deque[Trace] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._send_all, name="traces", daemon=True)
        self._thread.start()

    def begin(self, path: str, received_at: float, traceparent: bytes | None, *, method: str = "POST") -> Trace | None:
        """A trace of a request that came at `received_at` (monotonic clock); None when it is not sampled.

        path   as the route has it, so that there are few: `/v1/responses/{id}`

        A valid `traceparent` decides: its trace goes on, or is not to be recorded. Else a share of all is traced.
        """
        found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
        if found is not None and (found[1] != b"00" or found[5] is None):
            if not int(found[4], 16) & _SAMPLED:
                return None
            trace_id, parent_id = int(found[2], 16), int(found[3], 16)
            return Trace(method, path, received_at, trace_id=trace_id, parent_id=parent_id, done=self._take)
        trace_id = self._rng.getrandbits(128) or 1
        # As the SDK's TraceIdRatioBased: by the lower half, so that all who ask by the same ratio agree.
        if trace_id & (2**64 - 1) >= self._below:
            return None
        return Trace(method, path, received_at, trace_id=trace_id, parent_id=None, done=self._take)

    async def close(self, within_s: float = _CLOSE_WITHIN_S) -> None:
        """Send what has ended, for so long at most."""
        self._closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, within_s)
        if self._thread.is_alive():
            log.warning("traces are not all sent", left=len(self._ended), within_s=within_s)
        self._sender.close()

    def _take(self, trace: Trace) -> None:
        if len(self._ended) >= _MOST_WAITING or self._closing:
            self._counted("queue_full", 1)
            return
        self._ended.append(trace)
        if len(self._ended) >= _BATCH and not self._wake.is_set():
            self._wake.set()

    def _send_all(self) -> None:
        while not self._closing:
            self._wake.wait(_EVERY_S)
            self._wake.clear()
            self._send_ended()
        self._send_ended()

    def _send_ended(self) -> None:
        while self._ended:
            batch = [self._ended.popleft() for _ in range(min(_BATCH, len(self._ended)))]
            self._counted("sent" if self._is_sent(batch) else "failed", len(batch))

    def _is_sent(self, batch: Sequence[Trace]) -> bool:
        try:
            return self._sender.send(batch)
        except Exception:  # the top of a thread: traces never stop the router, nor each other
            log.exception("traces not sent")
            return False


def tracer(
    endpoint: str,
    *,
    ratio: float,
    instance: str,
    counted: Callable[[Outcome, int], object],
    environment: Mapping[str, str] | None = None,
) -> Tracer | None:
    """A tracer, or None when nobody asked for one; raises TracingUnavailable when a setting asks for what is not there.

    endpoint   of an OTLP collector, such as http://127.0.0.1:4318; empty: what OTEL_EXPORTER_OTLP_ENDPOINT says
    instance   this process's name, `service.instance.id`
    """
    env = os.environ if environment is None else environment
    is_disabled = env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER") == "none"
    named = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if is_disabled or not (endpoint or named):
        return None
    try:
        from router.telemetry.otlp import OtlpSender  # noqa: PLC0415  (needs an optional extra)
    except ImportError as exc:
        missing = f"OpenTelemetry is not installed ({exc}): pip install 'lorafleet[tracing]'"
        if endpoint:
            raise TracingUnavailable(f"otlp_endpoint is {endpoint}, but {missing}, or unset it") from exc
        # A platform may set that variable for everything that runs on it; nobody asked this router.
        log.warning("no traces", endpoint=named, why=missing)
        return None
    resource = {"service.instance.id": instance}
    if not env.get("OTEL_SERVICE_NAME") and "service.name=" not in env.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        resource["service.name"] = "lorafleet-router"
    return Tracer(OtlpSender(_traces_url(endpoint), resource), ratio=ratio, counted=counted)


def _traces_url(endpoint: str) -> str | None:
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") or not base else f"{base}/v1/traces"
