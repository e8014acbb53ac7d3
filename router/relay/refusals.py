"""What an engine answers when it refuses, in the form that every error of ours has."""

from typing import Any

import msgspec

from lorafleet.http import envelope


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
