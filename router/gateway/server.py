"""The gRPC server of a picker: external processing for gateways, and gRPC's health for their probes."""

import asyncio
from typing import Any

import grpc
import structlog

from lorafleet.http_server.intake import RequestIntake
from lorafleet.keys.roles import Caller
from lorafleet.service.network.urls import bracketed
from router.api.inference import InferenceHandler
from router.core.errors import NoReplica
from router.gateway.messages import (
    HEALTH_SERVICE,
    NOT_SERVING,
    SERVICE,
    SERVICE_UNKNOWN,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from router.gateway.stream import GatewayExchange, GatewayStream
from router.request.response import ClientResponse
from router.request.run import RequestRun
from router.request.services import Services

log = structlog.get_logger()

# Calls at once, each a request in flight with some 20 KB of gRPC's own; further ones are refused by gRPC.
MOST_CALLS = 16_384
# Names of health checks (Gateway API Inference Extension, endpoint-picker protocol): the process runs; it can pick.
_LIVENESS = "liveness"
_READINESS = frozenset({"", "readiness", SERVICE})


class PickingHandler(InferenceHandler):
    """Answers the inference routes of a gateway's requests: a gateway sends them to the engine that is picked."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._keep_alive_s = 0.0  # a comment would begin an answer before an engine is picked

    def _read(self, caller: Caller, response: ClientResponse) -> RequestRun:
        """read: as for the router's own front. Raises BadBody, and NoReplica where the gateway allows no engine."""
        run, exchange = super()._read(caller, response), response.exchange
        assert isinstance(exchange, GatewayExchange)
        run.gateway = stream = exchange.stream
        if stream.among is not None:
            fleet = self._services.discovery.fleet
            if len(stream.barred(fleet)) == len(fleet.replicas):
                allowed = ", ".join(sorted(stream.among)) or "none"
                message = f"the gateway allows these endpoints, and no worker has one of them: {allowed}"
                raise NoReplica(message, retry_after_s=1.0)
        return run


class PickerServer:
    """The gRPC server of one router process."""

    def __init__(
        self,
        services: Services,
        intake: RequestIntake,
        *,
        host: str,
        port: int,
        is_shared: bool = False,
        credentials: Any = None,
    ) -> None:
        """
        intake       of the router's own front: limits, callers and the room for bodies are the same
        is_shared    other processes of this router listen on the port, too
        credentials  gRPC's, for TLS; None: plain text
        """
        self._services = services
        self._intake = intake
        self._find_handler = PickingHandler(services).find_handler
        self._host, self._port = host, port
        self._is_shared = is_shared
        self._credentials = credentials
        self._server: Any = None
        self._end_at = 0.0  # by the event loop's clock

    async def start(self) -> None:
        """Listen. Raises OSError where it cannot be had."""
        options = [("grpc.so_reuseport", int(self._is_shared)), ("grpc.max_receive_message_length", 2**24)]
        self._server = server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MOST_CALLS)
        server.add_generic_rpc_handlers((self._process_handler(), self._health_handler()))
        at = f"{bracketed(self._host)}:{self._port}"
        try:
            if self._credentials is None:
                port = server.add_insecure_port(at)
            else:
                port = server.add_secure_port(at, self._credentials)
        except RuntimeError as exc:
            raise OSError(f"ext_proc: {at} cannot be had; choose another port") from exc
        await server.start()
        log.info("serving gateways", host=self._host, port=port, tls=self._credentials is not None)
        self._port = port

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._port

    def end_within(self, seconds: float) -> None:
        """The router stops: calls in flight have this long, at most."""
        self._end_at = asyncio.get_running_loop().time() + seconds

    async def close(self) -> None:
        """Take no further calls, and end those in flight: in time, or at once without `end_within`."""
        if self._server is not None:
            await self._server.stop(max(0.0, self._end_at - asyncio.get_running_loop().time()))

    def _process_handler(self) -> Any:
        """gRPC's handler of external processing."""
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    def _health_handler(self) -> Any:
        """gRPC's handler of health checks."""
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=HealthCheckRequest.FromString,
            response_serializer=HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Check": check})

    async def _process(self, _messages: Any, call: Any) -> None:
        """Answer one call: one HTTP request at the gateway."""
        services = self._services
        stream = GatewayStream(
            call,
            self._intake,
            self._find_handler,
            services.pool,
            max_answer_bytes=services.config.max_answer_bytes,
        )
        await stream.run()

    async def _check(self, request: Any, _call: Any) -> Any:
        """The health of the service that is asked for."""
        await asyncio.sleep(0)
        return HealthCheckResponse(status=self._health(request.service))

    def _health(self, name: str) -> int:
        """SERVING while the process runs, or, for all but `liveness`, while `/ready` says so."""
        services = self._services
        if name == _LIVENESS:
            return SERVING
        if name not in _READINESS:
            return SERVICE_UNKNOWN
        return SERVING if not services.stopping and services.discovery.is_synced() else NOT_SERVING
