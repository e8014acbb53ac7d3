"""Errors, ours and an engine's, in the form that clients of a route know."""

from typing import Any

import msgspec

from lorafleet.http_server.lenient import trimmed
from lorafleet.service.http import envelope
from router.protocols.routes import find_route

# By which Anthropic's clients tell errors apart (vLLM 0.33 entrypoints/anthropic/protocol.py translate_error_type).
_ANTHROPICS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STATUSES = {word: status for status, word in _ANTHROPICS.items()}


def shaped(body: dict[str, Any], status: int, errors: str) -> dict[str, Any]:
    """An error of ours as a route's clients have it: `openai` or `anthropic`."""
    if errors != "anthropic":
        return body
    word = _ANTHROPICS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": body["error"] | {"type": word}}


def error_body(status: int, code: str, message: str, path: str) -> bytes:
    """The body of an error, in the form that clients of this path know."""
    route = find_route("POST", trimmed(path))
    errors = "openai" if route is None else route.errors
    return msgspec.json.encode(shaped(envelope(status, code, message), status, errors))


def status_of(word: object) -> int | None:
    """What an error means that has only Anthropic's word for its kind; None: it is not one of a known status."""
    return _STATUSES.get(word) if isinstance(word, str) else None


def enveloped(status: int, body: bytes) -> bytes:
    """An engine's error as OpenAI's `{"error": {...}}`; unchanged where it is that already, or is nothing we know.

    SGLang 0.5.23 says `{"object": "error", "message", "type", "param", "code"}` (entrypoints/openai/protocol.py),
    FastAPI `{"detail": ...}`: then type and code are the status', as vLLM has them.
    """
    try:
        told = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return body
    message = told.get("message", told.get("detail"))
    if "error" in told or message is None:
        return body
    text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
    usual = envelope(status, "", text)["error"] | {"code": status}
    return msgspec.json.encode(
        {"error": {name: told.get(name, value) for name, value in usual.items()} | {"message": text}}
    )
