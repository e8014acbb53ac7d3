"""OpenTelemetry tracing: one span a request and one for each of its stages, sent as OTLP over HTTP.

A request only records times. A separate thread builds and sends the spans after the request has ended. The SDK's
BatchSpanProcessor is not used: it builds spans on the event loop, and logs a line for each span that finds its queue
full.
"""

import asyncio
import os
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import structlog

from router.telemetry.trace import Outcome, Trace

log = structlog.get_logger()


# Traces in the queue, about 3 KB each. Traces that find it full are dropped and counted.
MAX_QUEUED = 4096
# Traces a batch. Building and encoding 8 holds the interpreter for 1.2 ms; larger batches delay the event loop.
BATCH = 8
_SEND_INTERVAL_S = 1.0
_CLOSE_WITHIN_S = 3.0
_SAMPLED = 1
# W3C Trace Context, level 1, section 3.2: lower case only, no id of zeros, version ff invalid; a later version may
# have more after the flags.
_TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TracingUnavailable(Exception):
    """Tracing is configured but cannot run; the message says what to do."""


class TraceSender(Protocol):
    """Sends traces to a collector. Called on the sending thread, or after it has ended."""

    def send(self, traces: Sequence[Trace]) -> bool:
        """Send traces, and block until they are sent; whether the collector accepted them."""

    def close(self) -> None:
        """Free what the sender holds; ends a send in progress."""


class Tracer:
    """Begins traces on the event loop and sends the ended ones from one thread."""

    def __init__(
        self,
        sender: TraceSender,
        *,
        ratio: float,
        on_outcome: Callable[[Outcome, int], object],
        rng: random.Random | None = None,
    ) -> None:
        """
        ratio       share of requests traced, of those without a `traceparent`
        on_outcome  called with an outcome and a number of traces, also from the sending thread
        """
        self._sender = sender
        self._sampled_below = round(ratio * 2**64)
        self._on_outcome = on_outcome
        self._rng = rng or random.Random()
        self._ended: deque[Trace] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._send_all, name="traces", daemon=True)
        self._thread.start()

    def begin(self, path: str, received_at: float, traceparent: bytes | None, *, method: str = "POST") -> Trace | None:
        """A trace of a request received at `received_at` (monotonic clock); None if the request is not sampled.

        path  the route's template, such as `/v1/responses/{id}`, so that there are few

        A valid `traceparent` decides whether its trace is continued. Without one, a share of all requests is traced.
        """
        found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
        if found is not None and (found[1] != b"00" or found[5] is None):
            if not int(found[4], 16) & _SAMPLED:
                return None
            trace_id, parent_id = int(found[2], 16), int(found[3], 16)
            return Trace(method, path, received_at, trace_id=trace_id, parent_id=parent_id, on_end=self._enqueue)
        trace_id = self._rng.getrandbits(128) or 1
        # As the SDK's TraceIdRatioBased: by the lower half, so that all services with the same ratio agree.
        if trace_id & (2**64 - 1) >= self._sampled_below:
            return None
        return Trace(method, path, received_at, trace_id=trace_id, parent_id=None, on_end=self._enqueue)

    async def close(self, within_s: float = _CLOSE_WITHIN_S) -> None:
        """Send the ended traces, for at most `within_s`, end the thread and close the sender.

        What is left is logged.
        """
        self._closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, within_s)
        if self._thread.is_alive():
            log.warning("traces are not all sent", left=len(self._ended), within_s=within_s)
        self._sender.close()

    def _enqueue(self, trace: Trace) -> None:
        """Queue an ended trace; count it as dropped if the queue is full."""
        if len(self._ended) >= MAX_QUEUED or self._closing:
            self._on_outcome("queue_full", 1)
            return
        self._ended.append(trace)
        if len(self._ended) >= BATCH and not self._wake.is_set():
            self._wake.set()

    def _send_all(self) -> None:
        """The sending thread: send queued traces until `close`."""
        while not self._closing:
            self._wake.wait(_SEND_INTERVAL_S)
            self._wake.clear()
            self._send_ended()
        self._send_ended()

    def _send_ended(self) -> None:
        """Send all queued traces in batches, and count their outcomes."""
        while self._ended:
            batch = [self._ended.popleft() for _ in range(min(BATCH, len(self._ended)))]
            self._on_outcome("sent" if self._send_batch(batch) else "failed", len(batch))

    def _send_batch(self, batch: Sequence[Trace]) -> bool:
        """Send one batch; whether the collector accepted it. An error is logged."""
        try:
            return self._sender.send(batch)
        except Exception:  # the top of a thread: a failed send stops neither the router nor later traces
            log.exception("traces not sent")
            return False


def make_tracer(
    endpoint: str,
    *,
    ratio: float,
    instance: str,
    on_outcome: Callable[[Outcome, int], object],
    environment: Mapping[str, str] | None = None,
) -> Tracer | None:
    """A tracer, whose thread runs; None if no endpoint is configured or tracing is disabled.

    Also None, with a warning, if only the environment names an endpoint and OpenTelemetry is not installed.

    endpoint  of an OTLP collector, such as http://127.0.0.1:4318; empty takes OTEL_EXPORTER_OTLP_ENDPOINT
    instance  this process's name, `service.instance.id`
    raises    TracingUnavailable if `endpoint` is given and OpenTelemetry is not installed
    """
    env = os.environ if environment is None else environment
    is_disabled = env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER") == "none"
    env_endpoint = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if is_disabled or not (endpoint or env_endpoint):
        return None
    try:
        from router.telemetry.otlp import OtlpSender  # noqa: PLC0415  (needs an optional extra)
    except ImportError as exc:
        missing = f"OpenTelemetry is not installed ({exc}): pip install 'lorafleet[tracing]'"
        if endpoint:
            raise TracingUnavailable(f"otlp_endpoint is {endpoint}, but {missing}, or unset it") from exc
        # A platform may set that variable for every process on it, so a missing package is no error.
        log.warning("no traces", endpoint=env_endpoint, why=missing)
        return None
    resource = {"service.instance.id": instance}
    if not env.get("OTEL_SERVICE_NAME") and "service.name=" not in env.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        resource["service.name"] = "lorafleet-router"
    return Tracer(OtlpSender(_traces_url(endpoint), resource), ratio=ratio, on_outcome=on_outcome)


def _traces_url(endpoint: str) -> str | None:
    """The collector's URL for traces; None for an empty endpoint."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") or not base else f"{base}/v1/traces"
