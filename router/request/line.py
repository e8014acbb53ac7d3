"""record: a request's line, which is logged and kept: what was asked, where it went, what it waited for, why it failed.

It is made of what the stages have left, when the request is over.
"""

from typing import TYPE_CHECKING

import msgspec

from lorafleet.service.decoding import DECODE_ERRORS
from lorafleet.telemetry.request_log import RequestLine
from router.request.ended import sender_of

if TYPE_CHECKING:
    from router.request.response import ClientResponse
    from router.request.run import RequestRun


class _EngineError(msgspec.Struct):
    type: str | None = None


class _EngineAnswer(msgspec.Struct):
    error: _EngineError = msgspec.field(default_factory=_EngineError)


class _Named(msgspec.Struct):
    model: str = ""
    lora_id: str = ""


_CLIENT_GONE = 499
# A longer body of a refused request is not read for its model's name: a flood of them must stay cheap.
_SHORT_BYTES = 2**14
_MOST_NAME_CHARS = 300
_decode_names = msgspec.json.Decoder(_Named).decode
_decode = msgspec.json.Decoder(_EngineAnswer).decode


def record_line(response: "ClientResponse", run: "RequestRun | None", status: int) -> None:
    """Log and keep the line of a request that is over, and was recorded. A client that left has not failed.

    run  its stages; None: it did not come so far, or it is a batch or a stored response
    """
    exchange, services = response.exchange, response.services
    now, requests, (key, tenant) = services.clock(), services.requests, sender_of(exchange)
    line = RequestLine(
        request_id=response.request_id,
        method=exchange.method,
        path=response.route.path,
        status=status,
        duration_s=max(0.0, now - exchange.received_at),
        code=response.code,
        cause=response.cause,
        client=exchange.client[0] if exchange.client else "",
        key=key,
        tenant=tenant,
        limit=response.limit,
        body_bytes=len(exchange.body),
    )
    is_failure = status != _CLIENT_GONE and (status >= 400 or bool(response.code))
    if run is not None:
        _add_stages(line, run, exchange.received_at, now)
    if is_failure or status == _CLIENT_GONE:
        line.stage = "read" if run is None else _stage(run)
        if run is None and len(exchange.body) <= _SHORT_BYTES:
            line.asked = _asked_for(exchange.body)
    if is_failure or requests.has_all:
        requests.record(line, is_failure=is_failure)
    if requests.keeps:
        requests.keep(line, None if run is None or run.dispatched is None else run.dispatched.decision.score)


def _add_stages(line: RequestLine, run: "RequestRun", received_at: float, now: float) -> None:
    """Add what the stages found: adapter, worker, attempts, times and tokens; the cause of an engine's own error."""
    target, dispatched, attempt, usage = run.target, run.dispatched, run.attempt, run.usage
    line.read_s, line.streamed = max(0.0, run.request.read_at - received_at), run.request.streamed
    line.paused_s, line.queued_s, line.failed_s = run.paused_s, run.queued_s, run.failed_s
    line.held_s = run.cold_s + run.away_s
    if line.held_s:
        line.held_for = _held_for(run)
    if run.failures:
        line.failures = tuple([(worker, failed.reason) for (worker, _), failed in run.failures.items()])
    if target is not None:
        adapter, named = target.adapter, run.request.lora_id
        line.asked, line.base_model = named if isinstance(named, str) and named else target.asked, target.base_model
        line.adapter = "base" if adapter is None else adapter.engine_name or adapter.lora_id
    line.attempts = run.attempts
    line.worker = run.last_worker if dispatched is None else dispatched.replica.id
    sent_at = now if dispatched is None else dispatched.load.began_at
    line.waited_s = max(0.0, sent_at - run.request.read_at)
    if dispatched is not None:
        line.first_data_s, line.queued_for = dispatched.record.first_data_s, dispatched.record.queued_for
        line.queued_s += dispatched.record.waited_s
    if attempt is not None and attempt.status >= 400 and not line.code:
        line.cause = f"the engine answered {attempt.status}{error_type(attempt.first)}"
    if usage is not None:
        line.prompt_tokens, line.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        line.cached_tokens = usage.cached_tokens


def _asked_for(body: bytes) -> str:
    """The name of the model in the body of a request that was refused before it was read; empty: it has none."""
    try:
        named = _decode_names(body)
    except DECODE_ERRORS:
        return ""
    return (named.lora_id or named.model)[:_MOST_NAME_CHARS]


def _stage(run: "RequestRun") -> str:
    """The stage in which a request ended, by what it has: the names are those of `router.request`."""
    if run.target is None:
        return "hold" if run.is_held else "resolve"
    if run.tokens is None:
        return "tokenize"
    if run.attempt is not None:
        return "relay"
    if run.dispatched is not None:
        return "open"
    return "hold" if run.is_held or (run.away_s and not run.queued_s) else "decide"


def _held_for(run: "RequestRun") -> str:
    """What a request was held for: its adapter, or a replica that has not failed it."""
    if run.failures:
        return "another worker than those that failed it"
    if not run.cold_s:
        return "a worker of the base model: each was starting, or had gone away"
    return "its adapter: no worker had it loaded, or could take this request"


def error_type(body: bytes) -> str:
    """` (BadRequestError)`: the type in an engine's error. Its message may quote the prompt, and is left out."""
    try:
        error_type = _decode(body).error.type
    except DECODE_ERRORS:
        return ""
    return f" ({error_type[:80]})" if error_type else ""
