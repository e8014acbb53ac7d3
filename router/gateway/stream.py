"""One request at a gateway: the gRPC call in which Envoy shows it, and learns where to send it.

The call is both ends of the request: the client's exchange writes its answer here, and the engine's connection sends
its request and reads its answer here. Everything in between is the router's own.
"""

import asyncio
import functools
import ipaddress
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from lorafleet.http_server.connection import HIGH_WATER_BYTES
from lorafleet.http_server.exchange import HttpExchange
from lorafleet.http_server.framing import RefusedMessage, body_too_large, body_too_slow, checked_target
from lorafleet.http_server.intake import FindHandler, RequestIntake
from lorafleet.keys.roles import Caller
from lorafleet.service.http import error_headers
from lorafleet.service.network.urls import bracketed
from lorafleet.telemetry.request_log import ID_HEADER
from router.core.fleet import Excluded, RouterFleet
from router.gateway.messages import FULL_DUPLEX_STREAMED
from router.gateway.responses import (
    BodyKind,
    allowed_endpoints,
    answer_head,
    body_piece,
    engine_request,
    header_fields,
    own_answer,
    trailers_unchanged,
)
from router.http.engine_connection import EngineConnection, EngineLost, Origin, ResponseSink
from router.http.engine_pool import EnginePool

log = structlog.get_logger()

# Of a body in one message: some gateways take at most 64 KiB (Gateway API Inference Extension,
# pkg/common/envoy/chunking.go).
_PIECE_BYTES = 62_000
_NEVER = float("inf")
_WRONG_MODE = (
    "the gateway's ext_proc filter must have request_body_mode and response_body_mode FULL_DUPLEX_STREAMED, with"
    " request_trailer_mode and response_trailer_mode SEND; see docs/gateway.md"
)

_Phase = Literal["picking", "sent", "answering", "over"]
"""
picking    the request is being read, or no engine is chosen yet
sent       the gateway knows the engine, and sends it the request
answering  the engine's head has come
over       nothing is written any more but what waits: the answer is whole, or the gateway has gone
"""


class CallBroken(Exception):
    """The gateway does not keep to the protocol, or reads too slowly; the message says how."""


class GatewayExchange(HttpExchange):
    """A request that came by a gateway. Its response goes into the call's messages in place of a socket."""

    @property
    def stream(self) -> "GatewayStream":
        """The call. Only before the exchange is over."""
        return cast("GatewayStream", self.connection)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Send the whole response, and end the exchange. Does nothing if the client has left."""
        if self.connection is not None:
            self.status = status
            self.stream.respond(status, headers + self.extra_headers, body)

    def begin(self, status: int, headers: bytes) -> None:
        """Prepare the head of a response in pieces: it goes out with the first one. Not if the client has left."""
        if self.connection is not None:
            self.status = status
            self._head = headers + self.extra_headers

    def send(self, data: bytes) -> None:
        """Send one piece of the response, the first one behind its head; not if it is empty or the client has left."""
        if self.connection is not None and data:
            head, self._head = self._head, b""
            self.stream.send(head, data)

    def relay(self, data: bytes) -> None:
        """`send`."""
        self.send(data)

    def finish(self, last: bytes = b"") -> None:
        """End a response in pieces, and the exchange; not if the client has left."""
        if self.connection is not None:
            self.stream.finish(self._head, last)


class GatewayConnection(EngineConnection):
    """The engine of one request, as the gateway reaches it. The pool watches its deadlines as those of its own."""

    __slots__ = ("_endpoint", "_stream")

    def __init__(self, pool: EnginePool, origin: Origin, endpoint: str, stream: "GatewayStream") -> None:
        """endpoint  `ip:port` of the origin"""
        super().__init__(pool, origin, asyncio.get_running_loop())
        self._endpoint = endpoint
        self._parser = None  # type: ignore[assignment]  # a reference cycle; the gateway has parsed the answer
        self._stream = stream
        self.transport = stream  # type: ignore[assignment]  # it has the methods that a connection calls

    def send(self, request: bytes, sink: ResponseSink) -> None:
        """Have the gateway send the request; `sink` receives the answer."""
        self.sink = sink
        self._stream.send_to_engine(self._endpoint, request)

    def end(self) -> None:
        """The engine's answer is complete: leave the pool, and end it at the sink."""
        sink = self.sink
        self.close()
        if sink is not None:
            sink.end()


@dataclass(slots=True)
class _Piece:
    """A piece of a body that waits to be written."""

    kind: BodyKind
    data: bytes
    ends: bool


class GatewayStream:
    """One call of `Process`; `run` answers it.

    is_write_paused  the gateway reads too slowly
    among            endpoints (`ip:port`) from which the gateway has one picked; None: from all
    """

    def __init__(
        self, call: Any, intake: RequestIntake, find_handler: FindHandler, pool: EnginePool, *, max_answer_bytes: int
    ) -> None:
        """
        call              reads and writes messages
        find_handler      for the routes that a picker serves
        pool              watches the engine's deadlines
        max_answer_bytes  of an answer that the router itself makes in pieces, and the gateway gets as a whole
        """
        self._call = call
        self._intake = intake
        self._find_handler = find_handler
        self._pool = pool
        self._max_answer_bytes = max_answer_bytes
        self._loop = asyncio.get_running_loop()
        self._phase: _Phase = "picking"
        self._failure: Exception | None = None
        # The request.
        self._exchange: GatewayExchange | None = None
        self._work: asyncio.Task[None] | None = None
        self.among: frozenset[str] | None = None
        self._target = b""
        self._has_body = self._has_trailers = False
        # The engine's answer.
        self._engine: GatewayConnection | None = None
        self._status = 0
        self._is_engine_over = False
        self._has_answer_body = True
        self._has_answer_trailers = False
        self._may_read = asyncio.Event()
        self._may_read.set()
        # Our answer.
        self._has_begun = self._has_finished = False
        self._collected_head = b""
        self._collected = bytearray()
        # What waits to be written: messages, and pieces of bodies.
        self._waiting: deque[Any] = deque()
        self._unsent_bytes = 0
        self._wake = asyncio.Event()
        self.is_write_paused = False

    # --- the call -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the request, and return when its answer is written, or the gateway has gone."""
        reading = self._loop.create_task(self._read())
        try:
            await self._write()
        finally:
            self._phase = "over"
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            await self._end_work()
        if self._failure is not None:
            is_theirs = isinstance(self._failure, CallBroken)
            if not is_theirs:
                log.error("unexpected error in a gateway's call", exc_info=self._failure)
            code = grpc.StatusCode.INVALID_ARGUMENT if is_theirs else grpc.StatusCode.INTERNAL
            await self._call.abort(code, str(self._failure))

    async def _end_work(self) -> None:
        """End the handler where it still runs: its client has left. Closes the engine's connection."""
        exchange, work = self._exchange, self._work
        if exchange is not None and exchange.connection is not None:
            self.release(exchange)
        if work is not None and not work.done():
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
        if self._engine is not None:
            self._engine.close()

    async def _read(self) -> None:
        """Read the gateway's messages to their end. Nothing is raised: `_failure` is set, or the request refused."""
        try:
            exchange = await self._read_request()
            if exchange is None:
                return
            self._work = self._loop.create_task(self._intake.answer(exchange))
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._on_message(message)
                await self._may_read.wait()
        except DecodeError as exc:
            self._failure = CallBroken(f"not a ProcessingRequest of Envoy's external processing: {exc}")
        except Exception as exc:  # noqa: BLE001  (`run` ends the call with it)
            self._failure = exc
        if self._phase != "over":
            self._waiting.clear()
            self._end()

    async def _write(self) -> None:
        """Write what waits, until the call is over and nothing waits any more."""
        stall_s = self._intake.limits.send_stall_s
        while True:
            while self._waiting:
                message = self._take_message()
                try:
                    async with asyncio.timeout(stall_s):
                        await self._call.write(message)
                except TimeoutError:
                    self._failure = CallBroken(f"the gateway has read nothing for {stall_s:g} s (send_timeout_s)")
                    return
                if self.is_write_paused and self._unsent_bytes < HIGH_WATER_BYTES // 2:
                    self._resume_writing()
            if self._phase == "over":
                return
            self._wake.clear()
            await self._wake.wait()

    # --- the request ----------------------------------------------------------------------------------------------

    async def _read_request(self) -> GatewayExchange | None:
        """The request with its body; None: it was refused, or its client left. Raises CallBroken."""
        message = await self._call.read()
        if message is grpc.aio.EOF or message.WhichOneof("kind") != "request_headers":
            raise CallBroken("a call must begin with request_headers: set request_header_mode SEND")
        exchange = self._make_exchange(message)
        try:
            self._enter(exchange, message)
            if exchange.caller is not None and not message.request_headers.end_of_stream:
                async with asyncio.timeout(self._intake.limits.body_s):
                    exchange.body = await self._read_body(exchange, exchange.caller)
        except TimeoutError:
            self._refuse(exchange, body_too_slow(self._intake.limits.body_s))
        except RefusedMessage as exc:
            self._refuse(exchange, exc)
        if self._phase == "over":
            return None
        exchange.received_at = self._loop.time()
        return exchange

    def _enter(self, exchange: GatewayExchange, message: Any) -> None:
        """Give the exchange its path, handler and caller, or the caller's refusal. Raises RefusedMessage."""
        path, exchange.query = checked_target(self._target)
        exchange.path = path
        if message.HasField("protocol_config"):
            _check_modes(message.protocol_config)
        handler = self._find_handler(exchange.method, path)
        if handler is None:
            what = f"{exchange.method} {path} is no inference route, and a gateway's picker serves no other"
            raise RefusedMessage(404, "not_found", f"{what}: send it to the router's own Service")
        exchange.handler = handler
        caller = self._intake.caller_of(exchange.headers)
        if isinstance(caller, Exception):
            exchange.refusal = caller
        else:
            exchange.caller = caller

    async def _read_body(self, exchange: GatewayExchange, caller: Caller) -> bytes:
        """The request's body, which is held for its caller. Raises RefusedMessage for one too large, and CallBroken."""
        body = bytearray()
        is_whole = False
        try:
            while (piece := await self._next_piece()) is not None:
                body += piece
                self._check_room(caller, exchange, len(piece), len(body))
            is_whole = self._phase != "over"
        finally:
            if not is_whole:
                self._intake.drop_body(caller, len(body))
        return bytes(body) if is_whole else b""

    def _make_exchange(self, message: Any) -> GatewayExchange:
        """The exchange of the request that this first message shows."""
        fields = header_fields(message.request_headers)
        method = fields.pop(b":method", b"GET").decode("latin-1")
        self._target = fields.pop(b":path", b"/")
        fields[b"host"] = fields.pop(b":authority", b"")
        fields.pop(b":scheme", None)
        if not message.request_headers.end_of_stream and b"content-length" not in fields:
            fields[b"transfer-encoding"] = b"chunked"  # as a body of unknown length has it in HTTP/1.1
        self.among = allowed_endpoints(message.metadata_context)
        client = fields.get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
        self._exchange = exchange = GatewayExchange(
            method,
            "",
            b"",
            fields,
            self,  # type: ignore[arg-type]  # GatewayExchange calls what is here
            _unanswered,
            chunked=False,
            keeps_connection=True,
            caller=None,
            client=(client, 0) if client else None,
            received_at=self._loop.time(),
        )
        cors_headers = self._intake.cors_headers
        if cors_headers is not None and b"origin" in fields:
            exchange.extra_headers = cors_headers(fields[b"origin"])
        return exchange

    async def _next_piece(self) -> bytes | None:
        """The next piece of the request's body; None: it is whole, or the client has left. Raises CallBroken."""
        if self._has_body:
            return None
        message = await self._call.read()
        if message is grpc.aio.EOF:
            self._end()
            return None
        kind = message.WhichOneof("kind")
        if kind == "request_trailers":
            self._has_trailers = True
            return None
        if kind != "request_body":
            raise CallBroken(f"expected the request's body, found {kind}")
        self._has_body = message.request_body.end_of_stream
        piece: bytes = message.request_body.body
        return piece

    def _check_room(self, caller: Caller, exchange: GatewayExchange, piece_bytes: int, body_bytes: int) -> None:
        """Count a piece of the body as held. Raises RefusedMessage where it is too much."""
        has_room = self._intake.hold_body(caller, piece_bytes)
        if not has_room:
            raise self._intake.no_room(caller, exchange, body_bytes, self._loop.time())
        most = self._intake.limits.body_bytes
        if body_bytes > most:
            raise body_too_large(most)

    def _refuse(self, exchange: GatewayExchange, refusal: RefusedMessage) -> None:
        """Answer a request that no handler gets with an error, and count it."""
        intake, name = self._intake, exchange.name()
        intake.refusals[refusal.code] += 1
        intake.log_refusal(
            name,
            exchange.method,
            exchange.path,
            refusal.status,
            refusal.code,
            str(refusal),
            caller=exchange.caller,
            client=exchange.client,
        )
        headers = {"content-type": "application/json", ID_HEADER.decode(): name}
        headers |= error_headers(refusal.status, refusal.retry_after_s)
        lines = b"".join(b"%b: %b\r\n" % (key.encode(), value.encode()) for key, value in headers.items())
        body = intake.error_body(refusal.status, refusal.code, str(refusal), exchange.path)
        exchange.respond(refusal.status, lines, body)

    # --- the engine, as the router's stages see it ----------------------------------------------------------------

    def take_idle(self, _origin: Origin) -> None:
        """None: the gateway's connections are its own."""

    async def connect(self, origin: Origin) -> GatewayConnection:
        """The engine at this origin, once. Raises EngineLost where its name has no address."""
        if self._phase != "picking":
            raise EngineLost("connection", f"{origin.url}: the gateway has sent this request already")
        endpoint = await _resolved(origin, within_s=self._pool.connect_s)
        self._engine = engine = GatewayConnection(self._pool, origin, endpoint, self)
        self._pool.add(engine)
        engine.deadline = _NEVER
        return engine

    def barred(self, fleet: RouterFleet) -> Excluded:
        """The replicas whose endpoints the gateway does not allow."""
        among = self.among
        if among is None:
            return frozenset()
        return frozenset(
            replica.incarnation
            for replica in fleet.replicas.values()
            if endpoint_of_url(replica.engine_url) not in among
        )

    def send_to_engine(self, endpoint: str, request: bytes) -> None:
        """Have the gateway send this HTTP message to an endpoint."""
        exchange = self._exchange
        assert exchange is not None
        self._phase = "sent"
        message, body = engine_request(endpoint, request, exchange.headers, self._target)
        self._put(message)
        if self._has_body or self._has_trailers:
            self._put_piece("request_body", body, ends=not self._has_trailers)
        if self._has_trailers:
            self._put(trailers_unchanged("request_trailers"))

    def pause_reading(self) -> None:
        """Read no more of the engine's answer."""
        self._may_read.clear()

    def resume_reading(self) -> None:
        """Read on."""
        self._may_read.set()

    def is_closing(self) -> bool:
        """Whether nothing reaches the engine any more."""
        return self._phase == "over"

    def abort(self) -> None:
        """Read nothing more of the engine's answer: the gateway ends its request when ours is whole."""
        self._is_engine_over = True
        self._may_read.set()
        self._end_answer()

    def _on_message(self, message: Any) -> None:
        """Give a part of the engine's answer to its connection's sink."""
        engine, kind = self._engine, message.WhichOneof("kind")
        if engine is None or self._phase == "over":
            return
        if kind == "response_headers":
            head = message.response_headers
            fields = header_fields(head)
            self._phase, self._status = "answering", int(fields.pop(b":status", b"0"))
            self._has_answer_body = not head.end_of_stream
            if engine.sink is not None:
                engine.sink.head(self._status, fields)
            self._end_engine(engine, ends=head.end_of_stream)
        elif kind == "response_body":
            data = message.response_body.body
            if data and engine.sink is not None:
                engine.sink.data(data)
            self._end_engine(engine, ends=message.response_body.end_of_stream)
        elif kind == "response_trailers":
            self._has_answer_trailers = True
            self._end_engine(engine, ends=True)

    def _end_engine(self, engine: GatewayConnection, *, ends: bool) -> None:
        """With the end of its answer, let go of the engine."""
        if ends:
            self._is_engine_over = True
            engine.end()
            self._end_answer()

    # --- the client, as the exchange sees it ----------------------------------------------------------------------

    def respond(self, status: int, lines: bytes, body: bytes) -> None:
        """Send a whole answer: the engine's, rewritten, or one in its place where the status is another."""
        if self._phase == "answering" and status == self._status and self._has_answer_body and not self._has_begun:
            self._put_head(lines + b"content-length: %d\r\n" % len(body))
            self._put_piece("response_body", body, ends=False)
            self._has_finished = True
            self._end_answer()
        else:
            self._put(own_answer(status, lines, body))
            self._end()
        self._release_exchange()

    def send(self, lines: bytes, data: bytes) -> None:
        """Send a piece of an answer, the first one behind its header lines."""
        if self._phase == "answering":
            if not self._has_begun:
                self._put_head(lines)
            self._put_piece("response_body", data, ends=False)
            if self._unsent_bytes > HIGH_WATER_BYTES and not self.is_write_paused:
                self._pause_writing()
            return
        # The router itself makes this answer, of several engines' or of a stored one: the gateway takes it as a whole.
        self._collected_head = self._collected_head or lines
        self._collected += data
        if len(self._collected) > self._max_answer_bytes:
            self._failure = CallBroken(f"an answer of over {self._max_answer_bytes} bytes (max_answer_bytes)")
            self.hang_up()

    def finish(self, lines: bytes, last: bytes) -> None:
        """End an answer in pieces."""
        exchange = self._exchange
        if self._phase == "answering":
            if not self._has_begun:
                self._put_head(lines)
            self._put_piece("response_body", last, ends=False)
            self._has_finished = True
            self._end_answer()
        else:
            status = 200 if exchange is None or exchange.status is None else exchange.status
            self._put(own_answer(status, self._collected_head or lines, bytes(self._collected) + last))
            self._end()
        self._release_exchange()

    def release(self, exchange: HttpExchange) -> None:
        """End an exchange: it writes no more, and its body is no longer counted."""
        exchange.connection = None
        self._intake.release_body(exchange)

    def record_error(self, exchange: HttpExchange, status: int, code: str, message: str) -> bytes:
        """Log an error in place of a response; returns the error's body."""
        return self._intake.record_error(exchange, status, code, message)

    def hang_up(self) -> None:
        """Break the call off, so that the client cannot take a part for the whole response."""
        self._failure = self._failure or CallBroken("the router broke this answer off; see its log")
        self._waiting.clear()
        self._end()

    def _release_exchange(self) -> None:
        """End the exchange, of which the answer is written."""
        if self._exchange is not None:
            self.release(self._exchange)

    # --- what is written ------------------------------------------------------------------------------------------

    def _put_head(self, lines: bytes) -> None:
        """Queue the head of the engine's answer, with these lines."""
        self._has_begun = True
        self._put(answer_head(lines))

    def _end_answer(self) -> None:
        """Queue the end of an answer that is whole, once the engine's is: it keeps its connection to the gateway."""
        if not (self._has_finished and self._is_engine_over and self._phase == "answering"):
            return
        if self._has_answer_trailers:
            self._put(trailers_unchanged("response_trailers"))
        elif self._has_answer_body:
            self._put_piece("response_body", b"", ends=True)
        self._end()

    def _put_piece(self, kind: BodyKind, data: bytes, *, ends: bool) -> None:
        """Queue a piece of a body; joined to the last one where both fit into one message."""
        self._unsent_bytes += len(data)
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, _Piece) and last.kind == kind and len(last.data) + len(data) <= _PIECE_BYTES:
            last.data, last.ends = last.data + data, ends
        elif data or ends:
            self._waiting.append(_Piece(kind, data, ends))
        self._wake.set()

    def _put(self, message: Any) -> None:
        """Queue a message."""
        self._waiting.append(message)
        self._wake.set()

    def _take_message(self) -> Any:
        """The next message to write: of a long piece of a body its beginning."""
        first = self._waiting[0]
        if not isinstance(first, _Piece):
            return self._waiting.popleft()
        data, first.data = first.data[:_PIECE_BYTES], first.data[_PIECE_BYTES:]
        self._unsent_bytes -= len(data)
        if first.data:
            return body_piece(first.kind, data, ends=False)
        self._waiting.popleft()
        return body_piece(first.kind, data, ends=first.ends)

    def _pause_writing(self) -> None:
        """The gateway reads too slowly: call the exchange's `on_pause`."""
        self.is_write_paused = True
        if self._exchange is not None and self._exchange.on_pause is not None:
            self._exchange.on_pause()

    def _resume_writing(self) -> None:
        """The gateway has read on: call the exchange's `on_resume`."""
        self.is_write_paused = False
        if self._exchange is not None and self._exchange.on_resume is not None:
            self._exchange.on_resume()

    def _end(self) -> None:
        """End the call behind what waits to be written."""
        self._phase = "over"
        self._wake.set()


async def _unanswered(_exchange: HttpExchange) -> None:
    """The handler of an exchange whose route is not known yet: it answers nothing."""


def _check_modes(config: Any) -> None:
    """Raise RefusedMessage unless bodies go both ways in pieces."""
    modes = {config.request_body_mode, config.response_body_mode}
    if modes != {FULL_DUPLEX_STREAMED}:
        raise RefusedMessage(500, "gateway_misconfigured", _WRONG_MODE)


@functools.lru_cache(maxsize=4096)
def endpoint_of_url(url: str) -> str:
    """`host:port` of an engine's URL, an IPv6 address in brackets."""
    origin = Origin.parse(url)
    return f"{bracketed(origin.host)}:{origin.port}"


async def _resolved(origin: Origin, *, within_s: float) -> str:
    """`ip:port` of an origin: gateways take no names. Raises EngineLost where its name has no address."""
    with suppress(ValueError):
        ipaddress.ip_address(origin.host)
        return f"{bracketed(origin.host)}:{origin.port}"
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(within_s):
            found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as exc:
        raise EngineLost("connection", f"{origin.url}: its name has no address: {exc}") from exc
    return f"{bracketed(str(found[0][4][0]))}:{origin.port}"
