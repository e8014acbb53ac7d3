"""The inference routes: which handler answers a path, and one request's stages from its caller to its answer."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from lorafleet.http_server.batches import leave_batch, next_stage
from lorafleet.http_server.cross_site import site_check
from lorafleet.http_server.exchange import Handler, HttpExchange
from lorafleet.http_server.guard import trimmed
from lorafleet.keys.auth import authorization_of, host_check
from lorafleet.keys.roles import Caller, check_scope
from lorafleet.keys.runs import RUNS, caller_in_run, split_run
from lorafleet.service.http import HttpError
from orchestrator.model.limits import LimitedAccount
from router.core.errors import RateLimited
from router.items.item_batch import GENERATE, serve_completion_batch, serve_generate_batch
from router.items.stored import serve_stored
from router.protocols import sglang_generate
from router.protocols.routes import COMPLETIONS, ROUTES, Route, find_route
from router.request.engine_attempt import AttemptLimits
from router.request.parsed_request import InferenceRequestReader
from router.request.response import ClientResponse
from router.request.run import RequestRun
from router.request.services import Services
from router.telemetry.trace import Trace

_PATHS = {path for _, path in ROUTES} | {sglang_generate.PATH}
# The router's own routes, which FastAPI answers, at paths that are inference routes with another method.
_OWN = frozenset({("GET", "/v1/decisions")})
# Bytes of JSON that are read in 50 ms at worst.
_QUICKLY_READ_BYTES = 2**19


class InferenceHandler:
    """Answers the inference routes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        config = services.config
        self._limits = AttemptLimits(config.first_data_timeout_s, config.idle_timeout_s, config.max_answer_bytes)
        self._keep_alive_s = config.stream_keep_alive_s
        self._reader = InferenceRequestReader(services)
        self._check_host = host_check(services.keys, allow_open=config.allow_open)
        self._check_site = site_check(config.allowed_origins, trusts_preflight=True)
        self._handlers: dict[tuple[str, str], Handler] = {
            key: partial(self._handle, route) for key, route in ROUTES.items()
        }
        self._handlers["POST", sglang_generate.PATH] = partial(self._handle, GENERATE)

    def caller_of(self, headers: Mapping[bytes, bytes]) -> Caller | HttpError | RateLimited:
        """The caller by these headers; an error: it may not send inference requests, or not this body now."""
        try:
            if self._check_host is not None:
                self._check_host(headers.get(b"host", b""))
            authorization = authorization_of(headers.get(b"authorization"), headers.get(b"x-api-key"))
            caller = self._services.keys.caller(authorization)
            if "infer" not in caller.scopes:
                check_scope(caller, "infer")  # another scope may include it
            if limited := caller.limited:
                self._check_body(caller, limited, headers)
        except (HttpError, RateLimited) as exc:
            return exc.with_traceback(None)
        return caller

    def charge_read(self, caller: Caller, size_bytes: int) -> None:
        """Charge bytes of a body that were read to the caller's key and tenant."""
        self._services.quotas.charge_bytes(caller.limited, self._services.clock(), size_bytes)

    def charge_incomplete_body(self, caller: Caller) -> None:
        """Charge a request whose body ended early to the caller's key and tenant."""
        self._services.quotas.charge_incomplete_body(caller.limited, self._services.clock())

    def _check_body(self, caller: Caller, limited: Iterable[LimitedAccount], headers: Mapping[bytes, bytes]) -> None:
        """Raise RateLimited where limits of the caller forbid to read this request's body, if it has one."""
        is_chunked = b"transfer-encoding" in headers
        size_bytes = int(headers.get(b"content-length", b"0"))
        if is_chunked or size_bytes:
            services = self._services
            try:
                services.budgets.check(limited, services.clock())
                services.quotas.check_body(limited, services.clock(), size_bytes=None if is_chunked else size_bytes)
            except RateLimited as exc:
                exc.key_id, exc.tenant = caller.key_id, caller.tenant or ""
                raise

    def find_handler(self, method: str, path: str) -> Handler | None:
        """The handler of this method and path, or of a known path's wrong method; None: it is no inference route.

        Trailing slashes are ignored.
        """
        handler = self._handlers.get((method, path))
        if handler is not None:
            return handler
        route = find_route(method, path)
        if route is not None:
            return self._handlers[route.method, route.path]
        if path.startswith(RUNS):
            return self._find_handler_in_run(method, path)
        if path.endswith("/") and path != "/":
            handler = self.find_handler(method, trimmed(path))
            return None if handler is None else partial(_answer_at, trimmed(path), handler)
        if ("GET" if method == "HEAD" else method, path) in _OWN:
            return None
        return self._answer_wrong_method if self._offered(path) else None

    def _find_handler_in_run(self, method: str, path: str) -> Handler | None:
        """The handler of a path below a run's base URL; None: it is no inference route there, or no run."""
        try:
            run, rest = split_run(path)
        except HttpError:  # the app answers it
            return None
        handler = None if rest.startswith(RUNS) else self.find_handler(method, rest)
        return None if handler is None else partial(_answer_in_run, run, rest, handler)

    def _offered(self, path: str) -> dict[str, str]:
        """The methods that this path takes, each with the path of its route."""
        if path in _PATHS:
            return {method: known for method, known in (*self._handlers, *_OWN) if known == path}
        found = {method: find_route(method, path) for method in ("GET", "POST")}
        return {method: route.path for method, route in found.items() if route is not None}

    async def _handle(self, route: Route, exchange: HttpExchange) -> None:
        """Answer one request, with an error where a stage raises one; `close` records it, however it ended.

        Begins its trace. Raises only when cancelled, after the client got an error.
        """
        trace = None
        if self._services.tracer is not None:
            traceparent = exchange.headers.get(b"traceparent")
            trace = self._services.tracer.begin(route.path, exchange.received_at, traceparent, method=route.method)
        exchange.name()
        response = ClientResponse(self._services, exchange, route, trace)
        try:
            caller = self._authenticate(exchange, trace)
            # Before the body is parsed: a large one takes a fifth of a second, and a wrong one counts, too. A batch
            # needs quota for all its items, which are in its body: that is parsed first where it is short.
            if caller.limited and route.has_body and not _is_quickly_read_batch(route, exchange.body):
                response.take_quota(caller)
            if route.state == "needs":
                await leave_batch()
                await serve_stored(self._services, self._limits, caller, response)
            elif route is GENERATE:
                await leave_batch()
                await serve_generate_batch(self._services, self._limits, self._reader, caller, response)
            else:
                run = self._read(caller, response)
                request = run.request
                if isinstance(request.lora_id, list) and route.path == COMPLETIONS:
                    await leave_batch()
                    await serve_completion_batch(self._services, self._limits, self._reader, caller, response, request)
                else:
                    await next_stage()
                    await response.serve(run)
        except (asyncio.CancelledError, GeneratorExit):
            response.send_stopping()  # where the client has left this writes nothing
            raise
        except Exception as exc:  # noqa: BLE001  (answered as an error, and logged)
            response.send_failure(exc)
        finally:
            response.close()

    def _authenticate(self, exchange: HttpExchange, trace: Trace | None) -> Caller:
        """authenticate: the caller, who may send this from its site.

        Raises HttpError; RateLimited for a body that was not read.
        """
        headers = exchange.headers
        if trace is not None:
            trace.begin_stage("authenticate")
        if b"origin" in headers or b"sec-fetch-site" in headers:
            self._check_site(exchange.method, headers)
        if exchange.refusal is not None:
            raise exchange.refusal
        assert exchange.caller is not None, "`caller_of` gives a caller or a refusal"
        return exchange.caller

    def _read(self, caller: Caller, response: ClientResponse) -> RequestRun:
        """read: parse the request, and return the run of its further stages. Starts a stream's keep-alives.

        Raises BadBody.
        """
        trace = response.trace
        if trace is not None:
            trace.begin_stage("read")
        request = self._reader.read(response.exchange, response.route, trace)
        run = RequestRun(self._services, self._limits, caller, request, trace, granted=response.granted)
        if self._keep_alive_s and request.streamed:
            response.keep_alive(self._keep_alive_s)
        return run

    async def _answer_wrong_method(self, exchange: HttpExchange) -> None:
        """Answer 405 with the methods that the path takes, in the form of its errors."""
        offered = self._offered(exchange.path)
        methods = " or ".join(sorted(offered))
        known = find_route("POST", exchange.path)
        route = Route(path=min(offered.values()), summary="", errors="openai" if known is None else known.errors)
        exchange.name()
        allow = f"allow: {methods}\r\n"
        response = ClientResponse(self._services, exchange, route, extra_headers=allow)
        message = f"{route.path} takes {methods}, found {exchange.method}"
        response.send_failure(HttpError(405, "method_not_allowed", message))
        response.close()


def _answer_at(path: str, handler: Handler, exchange: HttpExchange) -> Coroutine[Any, Any, None]:
    """Answer as if the request had this path: sets `exchange.path`."""
    exchange.path = path
    return handler(exchange)


def _answer_in_run(run: str, path: str, handler: Handler, exchange: HttpExchange) -> Coroutine[Any, Any, None]:
    """Answer as if the request had this path, and its caller the run's namespace: sets both at the exchange."""
    if exchange.caller is not None:
        exchange.caller = caller_in_run(exchange.caller, run)
    return _answer_at(path, handler, exchange)


def _is_quickly_read_batch(route: Route, body: bytes) -> bool:
    """Whether this is a `/generate` body so short that it is read in 50 ms at worst."""
    return route is GENERATE and len(body) < _QUICKLY_READ_BYTES
