"""Every error the orchestrator raises on purpose.

OrchestratorError
├── OrchestratorRequestError the caller's: 4xx, nothing was changed
│   ├── NotFound             404
│   ├── Conflict             409: immutable, adapter_failed, name_taken, worker_id_taken, in_use, …
│   ├── Stale                412: somebody else wrote in between (If-Match)
│   ├── Unconditional        428: a whole replacement that does not say which version it replaces
│   └── Expired              410: the event buffer no longer reaches back that far
├── Unavailable              503: nobody is there who could answer now; with Retry-After
├── Transient                a worker could not do it now; tried again after `retry_after_s`, perhaps elsewhere
├── Permanent                the adapter's bytes or source are wrong, as a worker found them; kept as data
├── LeaseLost                another orchestrator leads: nothing more may be done here
├── LeaseUnreachable         the lease can be neither read nor written now; tried again at the next renewal
└── StoreError               the store cannot be used; the process refuses to start, the file is left as it is
"""


class OrchestratorError(Exception):
    """The root. `status` and `code` are what a REST caller sees."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.param = param


class OrchestratorRequestError(OrchestratorError):
    status = 400
    code = "invalid_request"


class NotFound(OrchestratorRequestError):
    status = 404
    code = "adapter_not_found"


class Conflict(OrchestratorRequestError):
    status = 409
    code = "conflict"


class Stale(OrchestratorRequestError):
    status = 412
    code = "precondition_failed"


class Unconditional(OrchestratorRequestError):
    status = 428
    code = "precondition_required"


class Expired(OrchestratorRequestError):
    status = 410
    code = "events_expired"


class Unavailable(OrchestratorError):
    status = 503
    code = "no_worker"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class Transient(OrchestratorError):
    status = 503
    code = "worker_failed"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class Permanent(OrchestratorError):
    status = 422
    code = "adapter_refused"


class LeaseLost(OrchestratorError):
    status = 503
    code = "not_leading"


class LeaseUnreachable(OrchestratorError):
    status = 503
    code = "lease_unreachable"


class StoreError(OrchestratorError):
    code = "store_unusable"
