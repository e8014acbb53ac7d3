"""Every error that the router raises on purpose.

RouterError
├── RequestError            theirs: 4xx, never retried, never a replica's fault
│   ├── BadBody             400 invalid_request_body
│   ├── BodyTooLarge        413 body_too_large
│   ├── ModelNotFound       404 model_not_found
│   ├── AdapterFailed       409 adapter_failed
│   ├── AnswerTooLarge      400 answer_too_large: it was computed, and is more than may be held
│   ├── Saturated           429 saturated, with Retry-After: too much waits here already
│   └── RateLimited         429 rate_limited, with Retry-After: this key has had its share
├── TemporarilyUnavailable  ours: 503 with Retry-After
│   ├── NoReplica           no_replica: nothing serves this base model now
│   ├── NoCapacity          no_capacity: no worker has room for this adapter
│   ├── ColdStartTimeout    adapter_loading: it was not there in time
│   ├── CatalogUnavailable  catalog_unavailable: we never heard what exists
│   └── PoisonRequestHeld   deadly_request: engines died of it, or of its adapter
├── DeadlineExceeded        504 deadline_exceeded: the request's own deadline passed before an answer began
├── NoAnswerInTime          504 no_answer_in_time: its engine took too long; sent again it would take as long
├── ReplicaUnreachable      no byte was sent to the client: another replica may be tried
└── StreamBroken            tokens are out: never retried
"""

import re
from collections.abc import Mapping

# What a foreign message may quote of our network: addresses of engines, agents and control calls.
_ADDRESS = re.compile(
    r"\b(?:https?|tcp|ipc|inproc|unix)://[^\s'\"<>,;)\]}]+"
    r"|\[[0-9A-Fa-f:]*:[0-9A-Fa-f:]+\](?::\d+)?"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|\b(?:localhost|[A-Za-z][\w-]*(?:\.[\w-]+)*):\d{4,5}\b"
)


def without_addresses(text: str) -> str:
    """A message as it may go to a client, who has no use for where our engines are; the log has the whole."""
    return _ADDRESS.sub("<address>", text)


class RouterError(Exception):
    """Carries what its HTTP answer needs: `status`, `code`, `param`, `retry_after_s`."""

    status = 500
    code = "router_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(RouterError):
    """The request cannot be served as it is; the same bytes would fail anywhere."""

    status = 400
    code = "invalid_request"


class BadBody(RequestError):
    code = "invalid_request_body"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class ModelNotFound(RequestError):
    """Unknown, or not for this caller: the two answer alike, so that names cannot be probed."""

    status = 404
    code = "model_not_found"


class AdapterFailed(RequestError):
    status = 409
    code = "adapter_failed"


class AnswerTooLarge(RequestError):
    code = "answer_too_large"


class Saturated(RequestError):
    status = 429
    code = "saturated"


class RateLimited(RequestError):
    """`limit` is the field of the key's limits that was reached; `headers` tell where all of them stand."""

    status = 429
    code = "rate_limited"

    def __init__(self, message: str, *, retry_after_s: float, limit: str, headers: Mapping[str, str]) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit
        self.headers = headers


class TemporarilyUnavailable(RouterError):
    """Not now; coming back after `retry_after_s` may help."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class NoReplica(TemporarilyUnavailable):
    code = "no_replica"


class NoCapacity(TemporarilyUnavailable):
    code = "no_capacity"


class ColdStartTimeout(TemporarilyUnavailable):
    code = "adapter_loading"


class CatalogUnavailable(TemporarilyUnavailable):
    code = "catalog_unavailable"


NO_CATALOG = "this router has not heard from the orchestrator yet; is it up, where the router's orchestrator_url says?"
NOBODY_HEARD = "this router has not asked each of its workers yet, or none has answered: what they serve is not known"


class PoisonRequestHeld(TemporarilyUnavailable):
    code = "deadly_request"


class DeadlineExceeded(RouterError):
    """The client said until when it wants an answer, and that is over."""

    status = 504
    code = "deadline_exceeded"


class NoAnswerInTime(RouterError):
    """No first token, or no whole answer, came within the time for it."""

    status = 504
    code = "no_answer_in_time"


class ReplicaUnreachable(RouterError):
    """A replica failed before anything reached the client; `reason` is a word for the metric."""

    status = 502
    code = "replica_unreachable"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class StreamBroken(RouterError):
    """A replica failed after the client had seen tokens."""

    status = 502
    code = "stream_broken"
