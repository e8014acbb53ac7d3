"""Refusals as Kubernetes' Status objects, in its wording.

source  k8s.io/apimachinery pkg/api/errors/errors.go; FACTS measured on kube-apiserver 1.36
"""

from collections.abc import Sequence
from typing import Any

from tests.kube.kinds import ResourceKind


class ApiError(Exception):
    """A refusal. `details` as clients read them; `retry_after_s` is a header too; `resume`: see `expired`."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: dict[str, Any] | None = None,
        *,
        retry_after_s: int | None = None,
        resume: str = "",
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message
        self.details, self.retry_after_s, self.resume = details, retry_after_s, resume

    def body(self) -> dict[str, Any]:
        details = dict(self.details or {})
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        status: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {"continue": self.resume} if self.resume else {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        return status | ({"details": details} if details else {})


def success(resource: ResourceKind, name: str, uid: str) -> dict[str, Any]:
    """The response to most DELETEs."""
    details = _named(resource, name) | {"uid": uid}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def forbidden(user: str, verb: str, resource: ResourceKind, subresource: str, namespace: str, name: str) -> ApiError:
    what = f"{resource.plural}/{subresource}" if subresource else resource.plural
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    named = f'{resource.qualified} "{name}"' if name else resource.qualified
    message = (
        f'{named} is forbidden: User "{user}" cannot {verb} resource "{what}" in API group "{resource.group}" {where}'
    )
    return ApiError(403, "Forbidden", message, _named(resource, name))


def not_found(resource: ResourceKind, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{resource.qualified} "{name}" not found', _named(resource, name))


def already_exists(resource: ResourceKind, name: str) -> ApiError:
    return ApiError(409, "AlreadyExists", f'{resource.qualified} "{name}" already exists', _named(resource, name))


def conflict(resource: ResourceKind, name: str, why: str = "") -> ApiError:
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return ApiError(409, "Conflict", message, _named(resource, name))


def invalid(resource: ResourceKind, name: str, causes: Sequence[tuple[str, str]]) -> ApiError:
    """causes  (field, what is wrong with it), as kube-apiserver lists them"""
    listed = [f"{field}: {what}" for field, what in causes]
    said = listed[0] if len(listed) == 1 else f"[{', '.join(listed)}]"
    details = _named(resource, name) | {
        "kind": resource.kind,
        "causes": [{"reason": "FieldValueInvalid", "message": what, "field": field} for field, what in causes],
    }
    qualified = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    return ApiError(422, "Invalid", f'{qualified} "{name}" is invalid: {said}', details)


def expired(message: str, *, resume: str = "") -> ApiError:
    """410. `resume`: the token by which a broken list may go on, inconsistently."""
    return ApiError(410, "Expired", message, resume=resume)


def too_large_version(asked: int, now: int) -> ApiError:
    """410 for a version from before the history, or ahead of this server."""
    message = f"Timeout: Too large resource version: {asked}, current: {now}"
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    return ApiError(504, "Timeout", message, {"causes": causes}, retry_after_s=1)


def method_not_allowed() -> ApiError:
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def unsupported_media_type(given: str) -> ApiError:
    message = (
        "the body of the request was in an unknown format - accepted media types include: "
        "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
    )
    return ApiError(415, "UnsupportedMediaType", f"{message} (given: {given or 'none'})")


def _named(resource: ResourceKind, name: str) -> dict[str, Any]:
    found = {"name": name, "group": resource.group, "kind": resource.plural}
    return {key: value for key, value in found.items() if value}
