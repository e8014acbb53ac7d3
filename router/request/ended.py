"""record: what a request's end counts as in the router's traffic, which the console shows."""

from http import HTTPStatus
from typing import TYPE_CHECKING

from lorafleet.http_server.exchange import HttpExchange
from router.core.errors import RateLimited
from router.fleet.traffic import EndedRequest
from router.request.services import Services

if TYPE_CHECKING:
    from router.request.run import RequestRun

_CLIENT_GONE = 499


def count_refusal(services: Services, exchange: HttpExchange, status: int, code: str, limit: str) -> None:
    """Count an answer to a request that had no run: it was refused before its model was known."""
    key, tenant = sender_of(exchange)
    ended = EndedRequest(code=_code_text(status, code, limit), tenant=tenant, key=key)
    services.usage.traffic.record_end(ended, services.clock())


def sender_of(exchange: HttpExchange) -> tuple[str, str]:
    """(key id, tenant) of the caller, also where its body was not read; empty: none."""
    caller, refusal = exchange.caller, exchange.refusal
    if caller is not None:
        return caller.key_id, caller.tenant or ""
    return (refusal.key_id, refusal.tenant) if isinstance(refusal, RateLimited) else ("", "")


def count_run(services: Services, run: "RequestRun", status: int, code: str, limit: str = "") -> None:
    """Count a request that was recorded, with its times and tokens; `status` and `code` are those of its answer."""
    caller, target, dispatched, usage = run.caller, run.target, run.dispatched, run.usage
    now, read_at = services.clock(), run.request.read_at
    ended = EndedRequest(tenant=caller.tenant or "", key=caller.key_id, cold_s=run.cold_s)
    if status >= 400 or code:
        ended.code = _code_text(status, code, limit)
    else:
        ended.whole_s = now - read_at
    if target is not None:
        ended.base_model = target.base_model
        if target.adapter is not None:
            ended.adapter = target.adapter.lora_id
    if dispatched is None:
        ended.worker = run.last_worker
    else:
        record = dispatched.record
        ended.worker, ended.waited_s = dispatched.replica.id, record.waited_s
        if record.first_data_s is not None and run.attempt is not None and run.attempt.streamed:
            ended.first_token_s = dispatched.load.began_at + record.first_data_s - read_at
    if usage is not None:
        ended.prompt_tokens, ended.output_tokens = usage.prompt_tokens, usage.completion_tokens or 0
        # Of several sequences the first tokens are not counted one by one: roughly one each.
        ended.decode_tokens = max(0, ended.output_tokens - run.request.sequences)
        if dispatched is not None and dispatched.record.cached_tokens is not None:
            ended.predicted_tokens, ended.cached_tokens = dispatched.predicted_tokens, dispatched.record.cached_tokens
    services.usage.traffic.record_end(ended, now)


def _code_text(status: int, code: str, limit: str) -> str:
    """`<status> <code>`; of an engine's own error without one `<status> engine`; of a client that left `499`.

    Of 429 with the limit that was reached: `429 rate_limited concurrent_requests`.
    """
    if status == _CLIENT_GONE:
        return str(status)
    text = f"{status} {code or 'engine'}"
    return f"{text} {limit}" if limit and status == HTTPStatus.TOO_MANY_REQUESTS else text
