"""What an API server refuses, or does not answer, as one tree.

KubeError
    KubeConflict    409: somebody else was there first
    KubeNotFound    404
    KubeGone        410: that version is no longer kept, list again
    KubeForbidden   401 and 403: no valid token, or a Role is missing
    KubeUnreachable no answer in time, or none that can be understood; status 0
"""

from collections.abc import Mapping
from typing import Any


class KubeError(Exception):
    """`status` is HTTP's, `reason` the API's own word (AlreadyExists, Expired, ...), "" where it gave none."""

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
    """No API server is configured, or what is configured cannot be read; the message says what was looked for."""


_BY_STATUS: Mapping[int, type[KubeError]] = {
    401: KubeForbidden,
    403: KubeForbidden,
    404: KubeNotFound,
    409: KubeConflict,
    410: KubeGone,
}


def refusal(what: str, status: int, body: Any, *, retry_after_s: float | None = None) -> KubeError:
    """The error for an answer. `what` was asked; `body` is a Status object, or whatever else came in its place."""
    told = body if isinstance(body, Mapping) else {}
    reason, message = str(told.get("reason") or ""), str(told.get("message") or "")
    said = message or (body[:200] if isinstance(body, str) else "") or "no message"
    return _BY_STATUS.get(status, KubeError)(
        status, reason, f"{what}: HTTP {status} {reason}: {said}", retry_after_s=retry_after_s
    )
