"""What a picker tells its gateway: where a request goes, its new head and body, the answer's, or an answer of our own.

Source: Gateway API Inference Extension, docs/proposals/004-endpoint-picker-protocol, v1.0.0.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from router.gateway.messages import OVERWRITE_OR_ADD, ProcessingResponse

DESTINATION = "x-gateway-destination-endpoint"
_NAMESPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
# Headers that a gateway needs for itself: those of HTTP/2, and Envoy's own.
_GATEWAYS_OWN = (":", "x-envoy-", "x-forwarded-", "x-gateway-")
_KEPT = frozenset({"host", "te", "transfer-encoding"})
# Envoy lets nobody change the name of the host that was asked.
_UNCHANGED = b"host"

BodyKind = Literal["request_body", "response_body"]


def engine_request(endpoint: str, request: bytes, given: Mapping[bytes, bytes], path: bytes) -> tuple[Any, bytes]:
    """The message that sends a request to this endpoint (`ip:port`) with its new head, and the new body.

    A header of the client's that is not in the new head is removed: an engine gets neither its key nor its cookies.

    request  the HTTP message for the engine
    given    the headers that came
    path     path and query that came
    """
    head, _, body = request.partition(b"\r\n\r\n")
    line, *lines = head.split(b"\r\n")
    target = line.split(b" ")[1]
    fields = [(name, value) for name, value in map(_field, lines) if name != _UNCHANGED]
    message = ProcessingResponse()
    mutation = message.request_headers.response.header_mutation
    if target != path:
        _set(mutation, ((b":path", target),))
    _set(mutation, fields)
    _set(mutation, ((DESTINATION.encode(), endpoint.encode()),))
    kept = {name for name, _ in fields}
    mutation.remove_headers.extend(
        name.decode("latin-1") for name in given if name not in kept and not _is_gateways(name.decode("latin-1"))
    )
    message.dynamic_metadata.update({_NAMESPACE: {DESTINATION: endpoint}})
    return message, body


def answer_head(lines: bytes) -> Any:
    """The message that gives an engine's answer these header lines."""
    message = ProcessingResponse()
    mutation = message.response_headers.response.header_mutation
    fields = _fields(lines)
    _set(mutation, fields)
    if all(name != b"content-length" for name, _ in fields):
        mutation.remove_headers.append("content-length")
    return message


def own_answer(status: int, lines: bytes, body: bytes) -> Any:
    """The message that answers in the engine's place: no engine gets the request, or the client gets none of its."""
    message = ProcessingResponse()
    answer = message.immediate_response
    answer.status.code = status
    answer.body = body
    _set(answer.headers, _fields(lines))
    return message


def body_piece(kind: BodyKind, data: bytes, *, ends: bool) -> Any:
    """The message with one piece of a body."""
    message = ProcessingResponse()
    piece = getattr(message, kind).response.body_mutation.streamed_response
    piece.body, piece.end_of_stream = data, ends
    return message


def trailers_unchanged(kind: Literal["request_trailers", "response_trailers"]) -> Any:
    """The message that lets trailers pass."""
    message = ProcessingResponse()
    getattr(message, kind).SetInParent()
    return message


def allowed_endpoints(metadata: Any) -> frozenset[str] | None:
    """The endpoints from which the gateway has one picked, of a request's metadata; None: it names none."""
    for entry in metadata.filter_metadata:
        if entry.key == _SUBSET_NAMESPACE and SUBSET in entry.value.fields:
            value = entry.value.fields[SUBSET]
            if value.WhichOneof("kind") == "list_value":
                return frozenset(each.string_value.strip() for each in value.list_value.values)
            return frozenset(filter(None, map(str.strip, value.string_value.split(","))))
    return None


def header_fields(head: Any) -> dict[bytes, bytes]:
    """The headers in a message: of a name that came twice, the first value."""
    fields: dict[bytes, bytes] = {}
    for header in head.headers.headers:
        fields.setdefault(header.key.lower().encode(), header.raw_value or header.value.encode())
    return fields


def _fields(lines: bytes) -> list[tuple[bytes, bytes]]:
    """Name and value of each header line."""
    return [_field(line) for line in lines.split(b"\r\n") if line]


def _field(line: bytes) -> tuple[bytes, bytes]:
    """Name, in lower case, and value of one header line."""
    name, _, value = line.partition(b":")
    return name.lower(), value.strip()


def _set(mutation: Any, fields: Iterable[tuple[bytes, bytes]]) -> None:
    """Add headers to those that a message sets, each in place of its former values."""
    for name, value in fields:
        option = mutation.set_headers.add()
        option.header.key = name.decode("latin-1")
        option.header.raw_value = value
        option.append_action = OVERWRITE_OR_ADD


def _is_gateways(name: str) -> bool:
    """Whether the gateway needs this header for itself."""
    return name in _KEPT or name.startswith(_GATEWAYS_OWN)
