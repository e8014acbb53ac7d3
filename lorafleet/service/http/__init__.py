"""The REST API of every service: error answers, JSON bodies, event streams, and what OpenAPI says of them.

Names of `answers` and `bodies` are imported from here, those of the other modules from there.
"""

from lorafleet.service.http.answers import (
    STREAM_HEADERS,
    ErrorResponse,
    EventStream,
    HostCheckMiddleware,
    HttpError,
    add_routes,
    envelope,
    error_headers,
    error_response,
    install_error_handlers,
    no_route,
    shown_path,
    validation_message,
)
from lorafleet.service.http.bodies import JSON_BODY, JsonBodyMiddleware

__all__ = [
    "JSON_BODY",
    "STREAM_HEADERS",
    "ErrorResponse",
    "EventStream",
    "HostCheckMiddleware",
    "HttpError",
    "JsonBodyMiddleware",
    "add_routes",
    "envelope",
    "error_headers",
    "error_response",
    "install_error_handlers",
    "no_route",
    "shown_path",
    "validation_message",
]
