"""The parts of uvicorn that are private to it, or may change without notice, and that this package uses.

tests/lorafleet/http_server/test_uvicorn_parts.py fails when one is gone. pyproject.toml has the versions of uvicorn
that have them.
"""

from collections.abc import Mapping

# The protocol class of each connection; ClientConnection is a subclass.
PROTOCOL_ATTRIBUTES = ("expect_100_continue", "flow", "headers", "loop", "parser", "tasks", "transport")
PROTOCOL_SET_LATER = ("client", "cycle", "url")
PROTOCOL_METHODS = (
    "connection_lost",
    "connection_made",
    "eof_received",
    "on_body",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "pause_writing",
    "resume_writing",
    "shutdown",
)
# The app's answer to one request, as the protocol's `cycle`.
CYCLE_ATTRIBUTES = ("disconnected", "keep_alive", "message_event", "response_complete", "response_started")
SERVER_METHODS = ("handle_exit", "serve", "shutdown", "startup")
SERVER_ATTRIBUTES = ("force_exit", "server_state", "should_exit")

# By class of uvicorn; test_uvicorn_parts.py has an instance of each.
PARTS: Mapping[str, tuple[str, ...]] = {
    "HttpToolsProtocol": (*PROTOCOL_ATTRIBUTES, *PROTOCOL_SET_LATER, *PROTOCOL_METHODS),
    "FlowControl": ("pause_reading", "read_paused", "resume_reading"),
    "RequestResponseCycle": CYCLE_ATTRIBUTES,
    "Server": (*SERVER_METHODS, *SERVER_ATTRIBUTES),
}
