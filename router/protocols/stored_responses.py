"""Which engine holds a stored response: its id says so, so that no router needs to remember.

vLLM 0.32 keeps responses in the memory of the engine that made them (with VLLM_ENABLE_RESPONSES_API_STORE=1), under
the `request_id` of the body, which is also the answer's `id` (openai/responses/protocol.py, seen running; X-Request-Id
has no part in it). So the router writes that field: `<prefix>.<tenant>.<worker>`. Any router, and any process of one,
reads the worker back from an id. And the id of another tenant is not found: a tenant's mark is part of the id that the
engine knows, so it cannot be swapped for another.
"""

import base64
import binascii
import re
from dataclasses import dataclass

from xxhash import xxh3_64_hexdigest

from router.core.errors import RequestError

_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,128}")
_TAGGED = re.compile(r"[A-Za-z0-9_-]{1,128}\.([0-9a-f]{16})\.([A-Za-z0-9_-]{1,400})")


class ResponseNotFound(RequestError):
    """No such stored response, or not this caller's: the two answer alike."""

    status = 404
    code = "response_not_found"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """What an id tells. `tenant` is a mark, not a name."""

    tenant: str
    worker: str


def tagged_response_id(given: object, fresh: str, *, tenant: str | None, worker: str) -> str:
    """The `request_id` to send, and so the answer's id.

    given  the body's own `request_id`: kept as the prefix where it can be, so that a client still knows its own
    fresh  a new random name, unguessable; used where none was given
    """
    prefix = given if isinstance(given, str) and _PREFIX.fullmatch(given) else f"resp_{fresh}"
    return f"{prefix}.{_mark(tenant)}.{_packed(worker)}"


def stored_at(response_id: object) -> StoredResponse | None:
    """Where an id of ours says that its response is; None for any other."""
    found = _TAGGED.fullmatch(response_id) if isinstance(response_id, str) else None
    worker = _unpacked(found.group(2)) if found else None
    return StoredResponse(found.group(1), worker) if found and worker else None


def worker_of(response_id: object, *, tenant: str | None, param: str) -> str:
    """The worker to ask for a stored response.

    raises  ResponseNotFound for an id that no router made, and for one of another tenant
    """
    at = stored_at(response_id)
    if at is None or at.tenant != _mark(tenant):
        raise ResponseNotFound(
            f"Response with id {response_id!r} not found; ids are those that POST /v1/responses answered with",
            param=param,
        )
    return at.worker


def gone(response_id: str, worker: str, *, param: str) -> ResponseNotFound:
    """The error for a response whose worker is no more, or has another engine now."""
    return ResponseNotFound(
        f"Response with id {response_id!r} was kept by worker {worker!r}, which is gone, and its stored responses with "
        "it; send the whole conversation as input",
        param=param,
    )


def left(response_id: str, worker: str, lora_id: str, *, param: str) -> ResponseNotFound:
    """The error for a response that its worker keeps, but cannot go on with: its adapter has left that worker."""
    return ResponseNotFound(
        f"Response with id {response_id!r} is kept by worker {worker!r}, where adapter {lora_id!r} is not any more; "
        "send the whole conversation as input",
        param=param,
    )


def _mark(tenant: str | None) -> str:
    return xxh3_64_hexdigest(b"" if tenant is None else b"\0" + tenant.encode())


def _packed(worker: str) -> str:
    return base64.urlsafe_b64encode(worker.encode()).rstrip(b"=").decode()


def _unpacked(packed: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
