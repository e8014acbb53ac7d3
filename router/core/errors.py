"""The router's errors, with the HTTP status and code that each is answered with.

RouterError
├── RequestError            the client's: 4xx, never retried, never counts against a replica
│   ├── BadBody             400 invalid_request_body
│   ├── BodyTooLarge        413 body_too_large
│   ├── ModelNotFound       404 model_not_found
│   ├── AdapterFailed       409 adapter_failed
│   ├── AnswerTooLarge      400 answer_too_large: a whole answer exceeds max_answer_bytes, or a first event 8 MiB
│   ├── Saturated           429 saturated, with Retry-After: the queue is full, or the wait too long
│   └── RateLimited         429 rate_limited, with Retry-After: the API key reached a limit
│       └── BudgetExhausted     429 budget_exhausted, with Retry-After: its budget of a day or month is spent
├── TemporarilyUnavailable  ours: 503 with Retry-After
│   ├── NoReplica           no_replica: no replica can serve this now
│   │   └── AdapterInspecting   the adapter's base model is not known yet: the request waits for that
│   ├── NoCapacity          no_capacity: no worker has room for this adapter
│   ├── ColdStartTimeout    adapter_loading: the adapter was not loaded in time
│   │   └── LoadFailed      load_failed: each worker that takes the adapter failed to load it
│   ├── CatalogUnavailable  catalog_unavailable: no catalog was read yet
│   ├── PoisonRequestHeld   deadly_request: engines died of this request, or of its adapter
│   └── EndedByPause        ended_by_pause: a pause ended it, and its format has no word for that
├── DeadlineExceeded        504 deadline_exceeded: the request's own deadline passed before an answer began
├── NoAnswerInTime          504 no_answer_in_time: the engine took too long; a retry would take as long
├── ReplicaUnreachable      an attempt failed before any byte reached the client: another replica may be tried
└── StreamBroken            an attempt failed after tokens reached the client: never retried
"""

import re
from collections.abc import Mapping
from typing import Literal

from lorafleet.identity import PATH_IN_TEXT

RoutingOutcome = Literal["success", "not_loaded", "error"]

# Addresses in our network that a foreign message may quote.
_ADDRESS = re.compile(
    r"\b(?:https?|tcp|ipc|inproc|unix)://[^\s'\"<>,;)\]}]+"
    r"|\[[0-9A-Fa-f:]*:[0-9A-Fa-f:]+\](?::\d+)?"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|\b(?:localhost|[A-Za-z][\w-]*(?:\.[\w-]+)*):\d{4,5}\b"
)


def without_addresses(text: str) -> str:
    """The message without addresses of our network, for clients; the log has the whole message."""
    return _ADDRESS.sub("<address>", text)


_PLACE = re.compile(rf"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>,;)\]}}]*[^\s'\"<>,;)\]}}:.]|{PATH_IN_TEXT}")


def without_places(text: str) -> str:
    """The message of another service without addresses, URLs of sources and paths of hosts, for clients."""
    return without_addresses(_PLACE.sub(lambda match: "<path>" if match[0].startswith("/") else "<address>", text))


class RouterError(Exception):
    """An error with the fields of its HTTP answer: `status`, `code`, `param`, `retry_after_s`.

    `limit` is the setting, the limit of the key or the client's header that was reached; empty: none.
    `outcome` is what the metrics of the request's adapter count; None: nothing, because the request itself was wrong.
    """

    status = 500
    code = "router_error"
    limit = ""
    outcome: RoutingOutcome | None = "error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(RouterError):
    """The request cannot be served as it is; the same bytes would fail anywhere."""

    status = 400
    code = "invalid_request"
    outcome: RoutingOutcome | None = None


class BadBody(RequestError):
    code = "invalid_request_body"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"
    limit = "max_body_bytes"


class ModelNotFound(RequestError):
    """The model is unknown, or not for this caller: both answer alike, so that names cannot be probed."""

    status = 404
    code = "model_not_found"


class AdapterFailed(RequestError):
    """`lora_id` is the adapter that the request names."""

    status = 409
    code = "adapter_failed"
    outcome = "error"

    def __init__(self, message: str, *, lora_id: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.lora_id = lora_id


class AnswerTooLarge(RequestError):
    code = "answer_too_large"
    limit = "max_answer_bytes"


class Saturated(RequestError):
    status = 429
    code = "saturated"
    outcome = "error"

    def __init__(self, message: str, *, limit: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit


class RateLimited(RequestError):
    """`headers` are the x-ratelimit headers of the key.

    key_id, tenant  of the key, where the request was refused before it was read
    """

    status = 429
    code = "rate_limited"
    key_id = ""
    tenant = ""

    def __init__(self, message: str, *, retry_after_s: float, limit: str, headers: Mapping[str, str]) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit
        self.headers = headers


class BudgetExhausted(RateLimited):
    """The key's or tenant's budget of the day or month is spent; `retry_after_s` is until it is reset."""

    code = "budget_exhausted"

    def __init__(self, message: str, *, retry_after_s: float, limit: str) -> None:
        super().__init__(message, retry_after_s=retry_after_s, limit=limit, headers={})


class TemporarilyUnavailable(RouterError):
    """The service cannot answer now; a retry after `retry_after_s` may succeed."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class NoReplica(TemporarilyUnavailable):
    code = "no_replica"


class AdapterInspecting(NoReplica):
    """An adapter's base model is not known yet: it was registered without one, and a worker inspects it.

    Of several base models none can be chosen. The request may wait for the inspection.
    """

    def __init__(self, lora_id: str) -> None:
        super().__init__(f"the base model of adapter {lora_id!r} is not known yet; it is being inspected")
        self.lora_id = lora_id


class NoCapacity(TemporarilyUnavailable):
    code = "no_capacity"
    outcome = "not_loaded"


class ColdStartTimeout(TemporarilyUnavailable):
    code = "adapter_loading"
    limit = "cold_start_timeout_s"
    outcome = "not_loaded"


class LoadFailed(ColdStartTimeout):
    code = "load_failed"


class CatalogUnavailable(TemporarilyUnavailable):
    code = "catalog_unavailable"


NO_CATALOG = "this router has not heard from the orchestrator yet; is it up, where the router's orchestrator_url says?"
NOBODY_HEARD = "this router has not asked each of its workers yet, or none has answered: what they serve is not known"


class PoisonRequestHeld(TemporarilyUnavailable):
    code = "deadly_request"


class EndedByPause(TemporarilyUnavailable):
    """A pause with mode `abort` ended this request, in a format that has no word for that."""

    code = "ended_by_pause"


class DeadlineExceeded(RouterError):
    """The client's own deadline passed before an answer began."""

    status = 504
    code = "deadline_exceeded"
    limit = "x-lorafleet-timeout-s"


class NoAnswerInTime(RouterError):
    """No first token, or no whole unstreamed answer, within the timeout."""

    status = 504
    code = "no_answer_in_time"
    limit = "first_data_timeout_s"


class ReplicaUnreachable(RouterError):
    """An attempt failed before anything reached the client; `reason` is a key of failover.verdict.VERDICTS."""

    status = 502
    code = "replica_unreachable"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class StreamBroken(RouterError):
    """An attempt failed after tokens had reached the client."""

    status = 502
    code = "stream_broken"
