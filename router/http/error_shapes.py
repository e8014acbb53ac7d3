"""Error bodies, the router's and an engine's, in the form that clients of a route know."""

from typing import Any

import msgspec

from lorafleet.http_server.guard import trimmed
from lorafleet.service.decoding import DECODE_ERRORS
from lorafleet.service.http import envelope
from router.protocols.routes import ErrorShape, find_route

# Error types of Anthropic's API, by status (vLLM 0.33 entrypoints/anthropic/protocol.py translate_error_type).
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Below it, and behind any prefix, Anthropic's clients call.
_ANTHROPIC_PATHS = "/v1/messages/"
_STATUS_OF_TYPE = {error_type: status for status, error_type in _ANTHROPIC_TYPES.items()}


def shaped(body: dict[str, Any], status: int, errors: ErrorShape) -> dict[str, Any]:
    """The router's error body, converted to a route's form: `openai` (as it is) or `anthropic`."""
    if errors != "anthropic":
        return body
    error_type = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": body["error"] | {"type": error_type}}


def shape_of(path: str) -> ErrorShape:
    """The form of errors that clients of this path know, also of one that is no route."""
    route = find_route("POST", trimmed(path))
    if route is not None:
        return route.errors
    return "anthropic" if _ANTHROPIC_PATHS in f"{path}/" else "openai"


def error_body(status: int, code: str, message: str, path: str) -> bytes:
    """An error body as JSON, in the form that clients of this path know."""
    return msgspec.json.encode(shaped(envelope(status, code, message), status, shape_of(path)))


def status_of_type(error_type: object) -> int | None:
    """The status of an error type of Anthropic's API; None: unknown."""
    return _STATUS_OF_TYPE.get(error_type) if isinstance(error_type, str) else None


def enveloped(status: int, body: bytes, errors: ErrorShape) -> bytes:
    """An engine's error in its route's form; unchanged where it has that, or no known form.

    vLLM 0.32 refuses a body that lacks a field in OpenAI's form on every route (entrypoints/serve/exception_handling).
    SGLang 0.5.23 says `{"object": "error", "message", "type", "param", "code"}` (entrypoints/openai/protocol.py),
    FastAPI `{"detail": ...}`. Missing types and codes are those of the status, as in vLLM.
    """
    try:
        error = msgspec.json.decode(body, type=dict[str, Any])
    except DECODE_ERRORS:
        return body
    if errors == "anthropic" and isinstance(error.get("error"), dict) and "type" not in error:
        return msgspec.json.encode(shaped(error, status, errors))
    message = error.get("message", error.get("detail"))
    if "error" in error or message is None:
        return body
    text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
    defaults = envelope(status, "", text)["error"] | {"code": status}
    filled = {"error": {name: error.get(name, value) for name, value in defaults.items()} | {"message": text}}
    return msgspec.json.encode(shaped(filled, status, errors))
