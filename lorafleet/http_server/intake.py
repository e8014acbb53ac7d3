"""What the connections of one server ask of it: the handler of a request, its caller, room for its body."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

import structlog

from lorafleet.http_server.batches import Batches
from lorafleet.http_server.body_room import BodyRoom
from lorafleet.http_server.descriptors import NO_DESCRIPTORS, SHORT
from lorafleet.http_server.exchange import ErrorBody, Handler, HttpExchange, plain_error
from lorafleet.http_server.framing import RefusedMessage
from lorafleet.http_server.outbox import Outbox
from lorafleet.keys.roles import ANYONE, Caller
from lorafleet.telemetry.request_log import RequestLine, RequestLog

log = structlog.get_logger()

NOT_BEGUN = "this server stopped before this request was begun; send it again"
_NOT_DONE = "this server stopped before this request was done; send it again"

# (method, path) -> the handler of a hot route; None: the ASGI app answers. The path is as sent, without its query.
FindHandler = Callable[[str, str], Handler | None]
# (method, path) -> most bytes of a body that the app's route reads in pieces, as they come; 0 for any other route.
UploadBytes = Callable[[str, str], int]
# Headers -> the caller; or the error that the handler shall answer with, and the body is thrown away as it comes.
CallerOf = Callable[[Mapping[bytes, bytes]], Caller | Exception]
# Origin of a web page -> CORS header lines for the response to it.
CorsHeaders = Callable[[bytes], bytes]
# Code of a refusal -> the setting that it reached.
_LIMITS = {
    "head_too_large": "max_head_bytes",
    "body_too_large": "max_body_bytes",
    "saturated": "max_bodies_bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bytes, seconds and counts.

    head_bytes     request line and headers, and trailers; more: 431
    body_bytes     one request's body; more: 413
    held_bytes     all bodies of all connections that are not answered yet; more: 429 `saturated`
    tenant_bytes   of those, the bodies of one tenant; None: no bound
    head_s         to send a whole head, from its first byte (or from connecting); more: 408
    body_s         to send a whole body; more: 408
    send_stall_s   without reading anything of a response that waits
    idle_s         between two requests
    pipelined      requests that may wait behind the one being answered
    """

    head_bytes: int = 64 * 2**10
    body_bytes: int = 32 * 2**20
    held_bytes: int = 2**30
    tenant_bytes: int | None = None
    head_s: float = 15.0
    body_s: float = 60.0
    send_stall_s: float = 60.0
    idle_s: float = 75.0
    pipelined: int = 16


class BodyMeter(Protocol):
    """Charges what callers with limits send, whatever becomes of their requests."""

    def charge_read(self, caller: Caller, size_bytes: int) -> None:
        """Charge bytes of a body that were read."""

    def charge_incomplete_body(self, caller: Caller) -> None:
        """Charge a request whose body ended early: it was refused, came too slowly, or its client left."""


class RequestIntake:
    """The routes, the limits and the accounts that all connections of one server share.

    refusals     requests that were refused before any handler had them, or not begun at a stop, by error code
    is_draining  every response closes its connection: clients and proxies have moved to another router by the time this
                 one closes its socket, and send nothing into that moment
    has_stopped  no request is begun any more
    room         the bodies of all requests
    outbox       writes of this tick
    batches      the requests that are being worked on
    short_until  loop.time() until which `/ready` says that clients are refused for want of descriptors
    """

    def __init__(
        self,
        find_handler: FindHandler,
        limits: ClientLimits,
        caller_of: CallerOf = lambda _: ANYONE,
        cors_headers: CorsHeaders | None = None,
        outbox: Outbox | None = None,
        error_body: ErrorBody = plain_error,
        *,
        requests: RequestLog | None = None,
        meter: BodyMeter | None = None,
        upload_bytes: UploadBytes = lambda _method, _path: 0,
    ) -> None:
        """
        cors_headers  None: no CORS. Preflight requests (OPTIONS) go to the ASGI app
        outbox        shared with other writers of the same event loop
        error_body    makes the body of a refusal, by the path
        meter         charges bodies of callers with limits; None: they cost nothing
        requests      logs the requests that no handler had; None: nothing does
        upload_bytes  such bodies may be larger than `body_bytes`; each piece must come within `body_s`
        """
        self._find_handler = find_handler
        self.limits = limits
        self.caller_of = caller_of
        self.cors_headers = cors_headers
        self.outbox = outbox or Outbox()
        self.error_body = error_body
        self.upload_bytes = upload_bytes
        self.batches = Batches(self.outbox)
        self.room = BodyRoom(limits.held_bytes, limits.tenant_bytes)
        self.refusals: Counter[str] = Counter()
        self.is_draining = False
        self.has_stopped = False
        self.short_until = -inf
        self._requests = requests
        self._meter = meter

    def find_handler(self, method: str, path: str) -> Handler | None:
        """The handler of a hot route; None: the ASGI app answers. `/ready` is refused while clients are."""
        if path == "/ready" and self.short_until > -inf:
            if asyncio.get_running_loop().time() < self.short_until:
                return _answer_not_ready
            self.short_until = -inf
        return self._find_handler(method, path)

    def hold_body(self, caller: Caller, size_bytes: int) -> bool:
        """Count bytes of a body in `room`, and charge them to a caller with limits; whether there is room for them."""
        if self._meter is not None and caller.limited:
            self._meter.charge_read(caller, size_bytes)
        return self.room.hold(caller.tenant or "", size_bytes)

    def drop_body(self, caller: Caller, size_bytes: int) -> None:
        """Count bytes no longer of a body that ended early, and charge its request to a caller with limits."""
        self.room.release(caller.tenant or "", size_bytes, is_answered=False)
        if self._meter is not None and caller.limited:
            self._meter.charge_incomplete_body(caller)

    def no_room(self, caller: Caller, exchange: HttpExchange, body_bytes: int, now: float) -> RefusedMessage:
        """The 429 for a body beyond what the server may hold, with the seconds until there should be room for it.

        body_bytes  of the body that have come, and are held
        """
        declared = int(exchange.headers.get(b"content-length", b"0"))
        message, retry_s = self.room.refusal(caller.tenant or "", body_bytes, max(body_bytes, declared), now)
        return RefusedMessage(429, "saturated", message, retry_after_s=retry_s)

    async def answer(self, exchange: HttpExchange) -> None:
        """Run the request's handler.

        Send an error where it fails or does not answer, and 503 where the server has stopped or cancels it. A
        cancellation is raised on.
        """
        if self.has_stopped:
            exchange.send_error(503, "stopping", NOT_BEGUN)
            return
        try:
            await exchange.handler(exchange)
            if exchange.connection is not None:
                log.error("a handler ended without an answer", path=exchange.path, status=exchange.status)
                exchange.send_error(500, "internal_error", "internal error: the request was not answered")
        except (asyncio.CancelledError, GeneratorExit):
            if exchange.connection is not None:  # the client is still there: the time to finish is over
                exchange.send_error(503, "stopping", _NOT_DONE)
            raise
        except Exception as exc:  # noqa: BLE001  (answered with a 500, and logged)
            exchange.send_unexpected(exc)

    def release_body(self, exchange: HttpExchange) -> None:
        """Count the body of an exchange that is over no longer."""
        if exchange.body:
            assert exchange.caller is not None
            self.room.release(exchange.caller.tenant or "", len(exchange.body), is_answered=True)

    def record_error(self, exchange: HttpExchange, status: int, code: str, message: str) -> bytes:
        """Log and keep a request that its handler left unanswered, and count a 503; returns the error's body."""
        if status == 503:
            self.refusals[code] += 1
        self.log_refusal(
            exchange.name(),
            exchange.method,
            exchange.path,
            status,
            code,
            message,
            caller=exchange.caller,
            client=exchange.client,
        )
        return self.error_body(status, code, message, exchange.path)

    def log_refusal(
        self,
        request_id: str,
        method: str,
        path: str,
        status: int,
        code: str,
        message: str,
        *,
        caller: Caller | None = None,
        client: tuple[str, int] | None = None,
    ) -> None:
        """Log and keep a request that was refused before a handler had it, or that its handler left unanswered."""
        if self._requests is None:
            return
        line = RequestLine(
            request_id=request_id,
            method=method,
            path=path,
            status=status,
            duration_s=0.0,
            code=code,
            cause=message,
            client=client[0] if client else "",
            key=caller.key_id if caller is not None else "",
            tenant=(caller.tenant or "") if caller is not None else "",
            limit=_LIMITS.get(code, ""),
            stage="read",
        )
        self._requests.record(line, is_failure=True)
        self._requests.keep(line)


async def _answer_not_ready(exchange: HttpExchange) -> None:
    """Answer `/ready` while clients are refused for want of descriptors."""
    exchange.send_error(503, NO_DESCRIPTORS, SHORT)
