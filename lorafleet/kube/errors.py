"""Errors of calls to the API server.

KubeError
    KubeConflict    409: another client changed the object first
    KubeNotFound    404
    KubeGone        410: the version is no longer kept; list again
    KubeForbidden   401 and 403: no valid token, or a missing Role
    KubeUnreachable no answer in time, or an invalid one; status 0
"""

from collections.abc import Mapping
from typing import Any


class KubeError(Exception):
    """`status` is the HTTP status, `reason` the API's reason (AlreadyExists, Expired, ...), "" if it gave none."""

    def __init__(self, status: int, reason: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class KubeConflict(KubeError):
    pass


class KubeNotFound(KubeError):
    pass


class KubeGone(KubeError):
    pass


class KubeForbidden(KubeError):
    pass


class KubeUnreachable(KubeError):
    def __init__(self, message: str) -> None:
        super().__init__(0, "Unreachable", message)


class KubeConfigError(Exception):
    """No API server is configured, or its configuration cannot be read. The message says what was searched."""


_BY_STATUS: Mapping[int, type[KubeError]] = {
    401: KubeForbidden,
    403: KubeForbidden,
    404: KubeNotFound,
    409: KubeConflict,
    410: KubeGone,
}


def error_of_answer(call: str, status: int, body: Any, *, retry_after_s: float | None = None) -> KubeError:
    """The error for an answer to `call`; `body` is a Status object, or any other body."""
    fields = body if isinstance(body, Mapping) else {}
    reason, message = str(fields.get("reason") or ""), str(fields.get("message") or "")
    text = message or (body[:200] if isinstance(body, str) else "") or "no message"
    return _BY_STATUS.get(status, KubeError)(
        status, reason, f"{call}: HTTP {status} {reason}: {text}", retry_after_s=retry_after_s
    )
