"""read: what a client asks for, parsed no deeper than routing needs."""

from collections.abc import Mapping
from math import inf
from typing import Any

import msgspec
from xxhash import xxh3_128

from lorafleet.http_server.exchange import HttpExchange
from lorafleet.service.decoding import DECODE_ERRORS
from lorafleet.telemetry.request_log import request_id
from router.core.errors import BadBody
from router.core.sessions.session import NO_SESSION, Session
from router.protocols.adapter_fields import (
    ADAPTER_HEADERS,
    EXTRA_BODY,
    LORA_ID,
    chosen_adapter,
    prompt_adapters,
    refuse_adapter_headers,
    with_extra_body,
)
from router.protocols.bodies import BOM, bad_json_error, check_items
from router.protocols.routes import COMPLETIONS, Route, sequence_count
from router.protocols.sessions import SessionReader, body_session, engine_header, own_session
from router.request.engine_body import (
    FORWARDED_HEADERS,
    NVEXT,
    Body,
    asks_for_usage,
    drop_nvext,
    refuse_steering,
    sampling_fields,
)
from router.request.services import Services
from router.telemetry.trace import Trace

# Seconds that the client waits for the whole answer.
TIMEOUT_HEADER = "x-lorafleet-timeout-s"
TIMEOUT_NAME = TIMEOUT_HEADER.encode()
FINGERPRINT_NAME = b"x-lorafleet-fingerprint"

_decode_body = msgspec.json.Decoder(Body).decode
_decode_any = msgspec.json.Decoder().decode


NativeBody = Mapping[str, Any] | None


class ParsedRequest(msgspec.Struct, frozen=True):
    """One request as read: raw fields to send on, and decoded ones to decide on.

    target       path and query at the engine
    hides_usage  the engine is asked for a stream's usage that the client did not ask for, and does not see
    sequences    sequences that an engine makes of it, see `sequence_count`
    size_bytes   of the body: memory that the request holds while it waits
    session      by names that no other tenant's sessions have
    deadline_at  by Services.clock: the client waits no longer; None: no deadline
    forwarded    header lines for the engine: the trace and the session that the request belongs to
    lora_id      the adapter's name, as it came; None: the body has none. A list: a completion's prompts have
                 different ones, see `completion_batch`
    adapter_field  the body's field that has it: `lora_id` or `lora_path`
    names_weights  the answer names the weights that made it, as its `system_fingerprint`
    native       an item of `/generate` in SGLang's own form, without its prompt and adapter; None: another request
    """

    request_id: str
    route: Route
    target: bytes
    fields: Body
    decoded: Mapping[str, Any]
    streamed: bool
    hides_usage: bool
    read_at: float
    sequences: int = 1
    size_bytes: int = 0
    session: Session = NO_SESSION
    priority: float = 0.0
    deadline_at: float | None = None
    forwarded: bytes = b""
    lora_id: Any = None
    adapter_field: str = LORA_ID
    names_weights: bool = False
    native: NativeBody = None


def parse_request(
    services: Services,
    name: str,
    route: Route,
    raw: bytes,
    *,
    target: bytes = b"",
    session: Session = NO_SESSION,
    tenant: str = "",
    timeout: str | None = None,
    forwarded: bytes = b"",
    names_weights: bool = False,
) -> ParsedRequest:
    """The request, with those fields of its body decoded that its route names; steering fields are refused or dropped.

    name     the request's id
    target   path and query; empty: the route's own
    session  the session named by headers; the body's `session_id` goes before it, and its `user` behind it
    tenant   of the caller, within which sessions have their names
    timeout  value of TIMEOUT_HEADER
    raises   BadBody
    """
    read_at = services.clock()
    fields: Body = {}
    decoded: dict[str, Any] = {}
    lora_id, adapter_field = None, LORA_ID
    if route.has_body:
        check_items(raw, services.config.max_body_items)
        try:
            fields = _decode_body(raw.removeprefix(BOM))
            if EXTRA_BODY in fields:
                fields = with_extra_body(fields)
            decoded = {name: _decode_any(fields[name]) for name in route.fields.intersection(fields)}
            if NVEXT in fields and drop_nvext(fields):
                services.metrics.dropped_fields.labels(NVEXT).inc()
            refuse_steering(fields, decoded.get("vllm_xargs"))
        except DECODE_ERRORS as exc:
            raise bad_json_error(raw, exc) from exc
        if route.prompt == "token_ids":
            decoded |= sampling_fields(fields, decoded.get("sampling_params"))
        adapter_field, lora_id = chosen_adapter(decoded)
        if isinstance(lora_id, list) and route.path == COMPLETIONS:
            lora_id = prompt_adapters(adapter_field, lora_id, decoded.get("prompt"))
    sequences = 1
    if route.lists or "n" in decoded:
        sequences = sequence_count(route, decoded)
        if route.generates and sequences > services.config.max_sequences:
            raise BadBody(
                f"this asks for {sequences} answers at once (n, for each of its prompts), and at most"
                f" {services.config.max_sequences} may be asked for: send several requests",
                param="n" if "n" in decoded else route.lists[0],
            )
        if decoded.get("use_beam_search"):
            sequences = 1  # vLLM 0.32 runs a request for each token of each beam, and counts none of them
    streamed = route.streams and decoded.get("stream") is True
    priority = decoded.get("priority")
    own = own_session(tenant, body_session(decoded, session))
    return ParsedRequest(
        name,
        route,
        target or route.path.encode(),
        fields,
        decoded,
        streamed,
        # Cache predictions are compared with the usage, which a stream has only on request.
        streamed and route.hides_usage and not asks_for_usage(decoded.get("stream_options")),
        read_at,
        sequences,
        len(raw),
        own,
        priority if isinstance(priority, int | float) else 0.0,
        None if timeout is None else read_at + _timeout_s(timeout),
        forwarded + engine_header(own.name) if own.name else forwarded,
        lora_id,
        adapter_field,
        names_weights,
    )


def request_digest(request: ParsedRequest) -> int:
    """A hash of path and body without the request id: equal when a client sends the same request again."""
    found = xxh3_128(request.route.path.encode())
    for name, raw in request.fields.items():
        if name != "request_id":
            found.update(name.encode())
            found.update(raw)
    return found.intdigest()


def reads_prefix_cache(request: ParsedRequest) -> bool:
    """Whether an engine uses its prefix cache for this request.

    For log probabilities of the prompt vLLM 0.32 computes all of it (sampling_params.py skip_reading_prefix_cache).
    """
    decoded = request.decoded
    if decoded.get("prompt_logprobs") is not None or decoded.get("skip_reading_prefix_cache"):
        return False
    if not decoded.get("echo"):
        return True
    # With `echo` vLLM takes the answer's log probabilities for the prompt's, too. A chat that names none has 0.
    return request.route.prompt == "completion" and decoded.get("logprobs") is None


def makes_many_sequences(request: ParsedRequest) -> bool:
    """Whether an engine prefills the prompt several times, and reports the cached tokens of one of them."""
    return request.sequences > 1 or bool(request.decoded.get("use_beam_search"))


def _timeout_s(named: str) -> float:
    """Seconds in a TIMEOUT_HEADER. Raises BadBody."""
    try:
        timeout_s = float(named)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < inf:
        raise BadBody(f"{TIMEOUT_HEADER} must be seconds above 0, such as 30 or 2.5; found {named!r}")
    return timeout_s


class InferenceRequestReader:
    """Reads requests by the router's settings."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._names_weights = services.config.fingerprint == "adapter"
        self._sessions = SessionReader(services.config.session_header)

    def read(self, exchange: HttpExchange, route: Route, trace: Trace | None) -> ParsedRequest:
        """Parse a client's request; its id is the body's valid `request_id`, unless the head has one.

        The body's id is also set on the exchange. Raises BadBody.
        """
        request = self._parse(exchange, route, trace, exchange.body, exchange.request_id)
        own_id = request.decoded.get("request_id")
        if own_id is None or route.state != "none" or b"x-request-id" in exchange.headers:
            return request
        # vLLM names its answer by the header first, and the router always sends that header.
        if isinstance(own_id, str) and request_id(own_id) == own_id:
            exchange.request_id = own_id
        return msgspec.structs.replace(request, request_id=exchange.request_id)

    def read_item(
        self,
        exchange: HttpExchange,
        route: Route,
        trace: Trace | None,
        body: bytes,
        item: int,
        native: NativeBody = None,
    ) -> ParsedRequest:
        """Parse one item of a batch as a separate request with the batch's head. Raises BadBody.

        native  the item in SGLang's own form, for engines that speak it
        """
        request = self._parse(exchange, route, trace, body, f"{exchange.request_id}-{item}")
        return request if native is None else msgspec.structs.replace(request, native=native)

    def _parse(
        self, exchange: HttpExchange, route: Route, trace: Trace | None, body: bytes, name: str
    ) -> ParsedRequest:
        """Parse the head of this exchange, and a body. Raises BadBody."""
        headers = exchange.headers
        if b"content-encoding" in headers:
            check_coding(headers, exchange.body)
        if headers.get(b"content-type") != b"application/json":
            _check_media_type(headers)
        if exchange.query or not ADAPTER_HEADERS.isdisjoint(headers):
            refuse_adapter_headers(headers, exchange.query)
        names_weights = self._names_weights
        if FINGERPRINT_NAME in headers:
            names_weights = _names_weights(headers[FINGERPRINT_NAME])
        return parse_request(
            self._services,
            name,
            route,
            body,
            session=self._sessions.read(headers),
            tenant=(exchange.caller.tenant or "") if exchange.caller is not None else "",
            timeout=text_header(headers, TIMEOUT_NAME) if TIMEOUT_NAME in headers else None,
            forwarded=b""
            if trace is None and FORWARDED_HEADERS.isdisjoint(headers)
            else _forwarded_headers(headers, trace),
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


def _forwarded_headers(headers: Mapping[bytes, bytes], trace: Trace | None) -> bytes:
    """Header lines for the engine: the trace's, or the client's own where the router traces nothing."""
    if trace is not None:
        return trace.headers(headers.get(b"tracestate"))
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
