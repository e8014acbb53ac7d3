"""A request's line in the log and the access log: what was asked, where it went, and why it failed."""

from typing import TYPE_CHECKING

import msgspec

from lorafleet.service.decoding import DECODE_ERRORS
from lorafleet.service.request_log import RequestLine

if TYPE_CHECKING:
    from router.request.response import ClientResponse
    from router.request.run import RequestRun


class _EngineError(msgspec.Struct):
    type: str | None = None


class _EngineAnswer(msgspec.Struct):
    error: _EngineError = msgspec.field(default_factory=_EngineError)


_decode = msgspec.json.Decoder(_EngineAnswer).decode


def record_line(response: "ClientResponse", run: "RequestRun | None", status: int) -> None:
    """Record the line of a request that is over, and was recorded. A client that left has not failed.

    run  its stages; None: it did not come so far, or it is a batch or a stored response
    """
    exchange, services = response.exchange, response.services
    now, caller = services.clock(), exchange.caller
    line = RequestLine(
        request_id=response.request_id,
        method=exchange.method,
        path=response.route.path,
        status=status,
        duration_s=round(max(0.0, now - exchange.received_at), 6),
        code=response.code,
        cause=response.cause,
        client=exchange.client[0] if exchange.client else "",
        key=caller.key_id if caller is not None else "",
        tenant=(caller.tenant or "") if caller is not None else "",
        body_bytes=len(exchange.body),
    )
    if run is not None:
        _add_stages(line, run, now)
    services.requests.record(line, is_failure=status != 499 and (status >= 400 or bool(response.code)))


def _add_stages(line: RequestLine, run: "RequestRun", now: float) -> None:
    """Add what the stages found: adapter, worker, attempts, times and tokens; the cause of an engine's own error."""
    target, dispatched, attempt, usage = run.target, run.dispatched, run.attempt, run.usage
    if target is not None:
        adapter = target.adapter
        line.adapter = "base" if adapter is None else adapter.engine_name or adapter.lora_id
    line.attempts = run.attempts
    line.worker = run.last_worker if dispatched is None else dispatched.replica.id
    sent_at = now if dispatched is None else dispatched.load.began_at
    line.waited_s = round(max(0.0, sent_at - run.request.read_at), 6)
    if dispatched is not None and dispatched.record.first_data_s is not None:
        line.first_data_s = round(dispatched.record.first_data_s, 6)
    if attempt is not None and attempt.status >= 400 and not line.code:
        line.cause = f"the engine answered {attempt.status}{error_type(attempt.first)}"
    if usage is not None:
        line.prompt_tokens, line.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        line.cached_tokens = usage.cached_tokens


def error_type(body: bytes) -> str:
    """` (BadRequestError)`: the type in an engine's error. Its message may quote the prompt, and is left out."""
    try:
        error_type = _decode(body).error.type
    except DECODE_ERRORS:
        return ""
    return f" ({error_type[:80]})" if error_type else ""
