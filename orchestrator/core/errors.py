"""Every error the orchestrator raises on purpose.

OrchestratorError
├── OrchestratorRequestError the caller's mistake: 4xx, nothing was changed
│   ├── Forbidden            403: another tenant's name or object
│   ├── NotFound             404
│   ├── StateConflict        409: immutable, adapter_failed, name_taken, worker_id_taken, in_use, …
│   ├── UploadTooLarge       413: more bytes than an upload may have
│   ├── PreconditionFailed   412: another change came in between (If-Match)
│   ├── PreconditionRequired 428: a whole replacement without the version that it replaces (If-Match)
│   └── EventsExpired        410: the event buffer no longer reaches back that far
├── OrchestratorUnavailable  503 with Retry-After: no worker, store or leader can answer now
│   └── TooManyUploads       429: as much is being uploaded for the caller's tenant as one may
├── WorkerFailed             a worker failed for the moment; retried after `retry_after_s`, perhaps on another worker
├── InvalidAdapter           a worker found the adapter's bytes or source wrong; kept as data until something changes
├── PublishUnfinished        504: a publish was not done in its time; the same call goes on where it ended
├── LeaseLost                another orchestrator leads: this one must stop acting at once
├── LeaseUnreachable         the lease can be neither read nor written now; retried at the next renewal
└── StoreError               503: the store cannot be used; a process refuses to start, a running one takes no changes
"""

# Retry-After of an error that ends with the next leader, where no lease's times are at hand: a guess.
NOT_LEADING_RETRY_S = 1.0


class OrchestratorError(Exception):
    """The root. `status` and `code` are what a REST caller sees."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        """`code`: instead of the class's code. `param`: the request field that is wrong."""
        super().__init__(message)
        self.code = code or type(self).code
        self.param = param


class OrchestratorRequestError(OrchestratorError):
    status = 400
    code = "invalid_request"


class Forbidden(OrchestratorRequestError):
    status = 403
    code = "not_yours"


class NotFound(OrchestratorRequestError):
    status = 404
    code = "adapter_not_found"


class StateConflict(OrchestratorRequestError):
    status = 409
    code = "conflict"


class UploadTooLarge(OrchestratorRequestError):
    status = 413
    code = "upload_too_large"


class PreconditionFailed(OrchestratorRequestError):
    status = 412
    code = "precondition_failed"


class PreconditionRequired(OrchestratorRequestError):
    status = 428
    code = "precondition_required"


class EventsExpired(OrchestratorRequestError):
    status = 410
    code = "events_expired"


class OrchestratorUnavailable(OrchestratorError):
    status = 503
    code = "no_worker"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class TooManyUploads(OrchestratorUnavailable):
    status = 429
    code = "too_many_uploads"


class WorkerFailed(OrchestratorError):
    status = 503
    code = "worker_failed"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class InvalidAdapter(OrchestratorError):
    status = 422
    code = "adapter_refused"


class PublishUnfinished(OrchestratorError):
    status = 504
    code = "publish_unfinished"


class LeaseLost(OrchestratorError):
    status = 503
    code = "not_leading"
    retry_after_s = NOT_LEADING_RETRY_S


class LeaseUnreachable(OrchestratorError):
    status = 503
    code = "lease_unreachable"
    retry_after_s = NOT_LEADING_RETRY_S


class StoreError(OrchestratorError):
    status = 503
    code = "store_unusable"
    retry_after_s = 5.0
