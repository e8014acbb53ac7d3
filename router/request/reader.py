"""read: a client's head and body as a ParsedRequest."""

from collections.abc import Mapping

import msgspec

from lorafleet.telemetry.request_log import request_id
from router.core.errors import BadBody
from router.protocols.adapter_fields import refuse_adapter_headers
from router.protocols.bodies import BOM
from router.protocols.routes import Route
from router.request.engine_body import FORWARDED_HEADERS
from router.request.parsed_request import TIMEOUT_HEADER, NativeBody, ParsedRequest, parse_request
from router.request.response import ClientResponse
from router.request.services import Services
from router.telemetry.trace import Trace

FINGERPRINT_NAME = b"x-lorafleet-fingerprint"
TIMEOUT_NAME = TIMEOUT_HEADER.encode()


class InferenceRequestReader:
    """Reads requests by the router's settings."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._names_weights = services.config.fingerprint == "adapter"
        self._session_header = services.config.session_header.lower().encode()

    def read(self, response: ClientResponse, body: bytes) -> ParsedRequest:
        """Parse the request of this response; its id is the body's valid `request_id`, unless the head has one.

        The body's id is also set on the response. Raises BadBody.
        """
        headers = response.exchange.headers
        request = self._parse(response, response.route, body, response.request_id)
        own_id = request.decoded.get("request_id")
        if own_id is None or request.route.state != "none" or b"x-request-id" in headers:
            return request
        # vLLM names its answer by the header first, and the router always sends that header.
        if isinstance(own_id, str) and request_id(own_id) == own_id:
            response.exchange.request_id = own_id
        return msgspec.structs.replace(request, request_id=response.request_id)

    def read_item(
        self, response: ClientResponse, route: Route, body: bytes, item: int, native: NativeBody = None
    ) -> ParsedRequest:
        """Parse one item of a batch as a separate request with the batch's head. Raises BadBody.

        native  the item in SGLang's own form, for engines that speak it
        """
        request = self._parse(response, route, body, f"{response.request_id}-{item}")
        return request if native is None else msgspec.structs.replace(request, native=native)

    def _parse(self, response: ClientResponse, route: Route, body: bytes, name: str) -> ParsedRequest:
        """Parse head and body of this response's request. Raises BadBody."""
        headers = response.exchange.headers
        if b"content-encoding" in headers:
            check_coding(headers, response.exchange.body)
        if headers.get(b"content-type") != b"application/json":
            _check_media_type(headers)
        refuse_adapter_headers(headers, response.exchange.query)
        names_weights = self._names_weights
        if FINGERPRINT_NAME in headers:
            names_weights = _names_weights(headers[FINGERPRINT_NAME])
        return parse_request(
            self._services,
            name,
            route,
            body,
            session=text_header(headers, self._session_header),
            timeout=text_header(headers, TIMEOUT_NAME),
            forwarded=_forwarded(headers, response.trace),
            names_weights=names_weights,
        )


def text_header(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    """One header's value as text; None where there is none."""
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


def _names_weights(asked: bytes) -> bool:
    """Whether this value of the fingerprint's header asks for the weights. Raises BadBody."""
    if asked not in (b"adapter", b"engine"):
        name = FINGERPRINT_NAME.decode()
        raise BadBody(f"{name} must be adapter or engine, found {asked.decode('latin-1')!r}", param=name)
    return asked == b"adapter"


def _forwarded(headers: Mapping[bytes, bytes], trace: Trace | None) -> bytes:
    """Header lines for the engine: the trace's, or the client's own where the router traces nothing."""
    if trace is not None:
        return trace.headers(headers.get(b"tracestate"))
    if FORWARDED_HEADERS.isdisjoint(headers):
        return b""
    names = sorted(FORWARDED_HEADERS.intersection(headers))
    return b"".join([name + b": " + headers[name] + b"\r\n" for name in names])


def check_coding(headers: Mapping[bytes, bytes], body: bytes) -> None:
    """Raise BadBody for a compressed body, which engines do not take either.

    A body that begins as JSON is taken: some clients send `content-encoding: utf-8`.
    """
    coding = text_header(headers, b"content-encoding")
    if coding is not None and not body[:16].removeprefix(BOM).lstrip().startswith(b"{"):
        raise BadBody(f"content-encoding is {coding!r}; send the body as it is, not compressed")


def _check_media_type(headers: Mapping[bytes, bytes]) -> None:
    """Raise BadBody unless the body is JSON by its content-type, as vLLM does.

    A browser sends other types (forms, plain text) across origins without asking first.
    """
    given = text_header(headers, b"content-type") or ""
    if given.partition(";")[0].strip().lower() != "application/json":
        found = f"content-type is {given!r}" if given else "no content-type is given"
        raise BadBody(f"{found}; a body is taken as application/json only")
