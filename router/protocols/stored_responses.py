"""Ids of stored responses: an id names the worker whose engine stores the response, so routers keep no state.

vLLM 0.32 stores responses in the memory of the engine that made them (with VLLM_ENABLE_RESPONSES_API_STORE=1), under
the body's `request_id`, which is also the answer's `id` (openai/responses/protocol.py, seen running). The router sets
that field to `<prefix>.<tenant>.<worker>`, and any router reads the worker back from it. The tenant's mark is part of
the id that the engine knows, so another tenant cannot replace it by its own.
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
    """There is no such stored response, or it is another tenant's: the answer is the same."""

    status = 404
    code = "response_not_found"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The tenant's mark (a hash of its name) and the worker in a response id."""

    tenant: str
    worker: str


def tagged_response_id(given: object, fresh: str, *, tenant: str | None, worker: str) -> str:
    """The `request_id` to send, which becomes the answer's id.

    given  the body's own `request_id`; kept as the prefix if it is valid
    fresh  a new random name, used otherwise
    """
    prefix = given if isinstance(given, str) and _PREFIX.fullmatch(given) else f"resp_{fresh}"
    return f"{prefix}.{_tenant_mark(tenant)}.{_encode_worker(worker)}"


def decode_response_id(response_id: object) -> StoredResponse | None:
    """The parts of a response id; None if no router made it."""
    found = _TAGGED.fullmatch(response_id) if isinstance(response_id, str) else None
    worker = _decode_worker(found.group(2)) if found else None
    return StoredResponse(found.group(1), worker) if found and worker else None


def worker_of_response(response_id: object, *, tenant: str | None, param: str) -> str:
    """The worker that stores a response.

    raises  ResponseNotFound for an id that no router made, or of another tenant
    """
    at = decode_response_id(response_id)
    if at is None or at.tenant != _tenant_mark(tenant):
        raise ResponseNotFound(
            f"Response with id {response_id!r} not found; ids are those that POST /v1/responses answered with",
            param=param,
        )
    return at.worker


def worker_gone_error(response_id: str, worker: str, *, param: str) -> ResponseNotFound:
    """The error for a response whose worker is gone or has restarted its engine."""
    return ResponseNotFound(
        f"Response with id {response_id!r} was kept by worker {worker!r}, which is gone, and its stored responses with "
        "it; send the whole conversation as input",
        param=param,
    )


def adapter_gone_error(response_id: str, worker: str, lora_id: str, *, param: str) -> ResponseNotFound:
    """The error for a response whose adapter is no longer on the worker that stores it."""
    return ResponseNotFound(
        f"Response with id {response_id!r} is kept by worker {worker!r}, where adapter {lora_id!r} is not any more; "
        "send the whole conversation as input",
        param=param,
    )


def _tenant_mark(tenant: str | None) -> str:
    """The tenant's mark in an id: a hash of its name, or of nothing."""
    return xxh3_64_hexdigest(b"" if tenant is None else b"\0" + tenant.encode())


def _encode_worker(worker: str) -> str:
    """The worker's name in base64url, without padding."""
    return base64.urlsafe_b64encode(worker.encode()).rstrip(b"=").decode()


def _decode_worker(packed: str) -> str | None:
    """The worker's name from base64url; None: it is not valid."""
    try:
        return base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
