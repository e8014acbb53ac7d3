"""A service's OpenAPI document and its pages: `/openapi.json`, `/docs` (Swagger UI), `/redoc`.

The document that FastAPI generates gets our error envelope in place of its own, and our keys. It is changed once, when
it is generated; FastAPI keeps it. Scripts and styles of the pages come from an installed package, not from the network.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

Json = dict[str, Any]

DOCS_ASSETS = "/docs-assets"
"""The path of the scripts and styles of `/docs` and `/redoc`."""

# The envelope of every error answer; see `lorafleet.service.http.envelope`.
ERROR_SCHEMA: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string", "description": "what was wrong, what was expected, and what to do"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field that was wrong"},
                "code": {"type": ["string", "integer", "null"], "description": "one of docs/protocol.md's error codes"},
            },
        }
    },
}
UPLOAD_SCHEMA: Json = {"type": "string", "format": "binary"}
"""The schema of a body that is a file."""
_FASTAPI_SCHEMAS = ("HTTPValidationError", "ValidationError")
_KEYS = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "A key of the key file. Without a key file no key is needed.",
    },
    "api_key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The same, as Anthropic's clients send it.",
    },
}


def documented_app(**options: Any) -> FastAPI:
    """A FastAPI app whose `/docs` and `/redoc` need no network. `options`: FastAPI's own."""
    # Swagger UI would send the document's address to a validator of its own on the internet.
    return FastAPIOffline(static_url=DOCS_ASSETS, swagger_ui_parameters={"validatorUrl": None}, **options)


def change_document(app: FastAPI, change: Callable[[Json], None]) -> None:
    """Replace the app's `openapi` by one that also applies `change` to the document, in place.

    Several changes apply in the order of these calls.
    """
    generate = app.openapi

    def openapi() -> Json:
        """The app's OpenAPI document with the change; generated at the first call."""
        if app.openapi_schema is None:
            change(generate())
        assert app.openapi_schema is not None, "FastAPI keeps the document that it generated"
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def describe_errors(document: Json) -> None:
    """Give every operation our error answers, and the document its keys. Removes FastAPI's 422, which nobody sends."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in _FASTAPI_SCHEMAS:
        schemas.pop(name, None)
    schemas["ErrorAnswer"] = ERROR_SCHEMA
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
    for methods in document["paths"].values():
        for operation in methods.values():
            responses = operation["responses"]
            if responses.pop("422", None) is not None:
                invalid = {"description": "A parameter or the body is not valid; the message says which field"}
                responses.setdefault("400", invalid | {"content": content})
            responses.setdefault("default", {"description": "Any other error", "content": content})
    components["securitySchemes"] = _KEYS
    document["security"] = [*({name: []} for name in _KEYS), {}]
