"""A gateway as a test needs it: it speaks Envoy's own messages to a picker, and sends requests to engines itself."""

import asyncio
import contextlib
import json
import warnings
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from tests.patience import patience

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its validators are written for an older pydantic
    from envoy_data_plane.envoy.config.core.v3 import HeaderMap, HeaderValue, Metadata
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode as BodyMode
    from envoy_data_plane.envoy.service.ext_proc.v3 import (
        HeaderMutation,
        HttpBody,
        HttpHeaders,
        HttpTrailers,
        ProcessingRequest,
        ProcessingResponse,
        ProtocolConfiguration,
    )
    from envoy_data_plane.google.protobuf import Struct

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
_PIECE_BYTES = 1000
# Of an engine's answer, as HTTP alone needs them.
_HOP = {"transfer-encoding", "connection", "content-length"}


@dataclass
class PickedRequest:
    """The request as the picker has it sent: to which endpoint, with which head and body."""

    endpoint: str
    headers: dict[str, str]
    body: bytes


@dataclass
class GatewayAnswer:
    """What the gateway's client gets; `picked` is None where no engine got the request."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    picked: PickedRequest | None = None

    def json(self) -> Any:
        return json.loads(self.body)


class GatewayCall:
    """One call of `Process`, step by step."""

    def __init__(self, call) -> None:
        self._call = call
        self._headers: dict[str, str] = {}

    async def send(self, **message) -> None:
        await asyncio.wait_for(self._call.write(ProcessingRequest(**message)), patience(20))

    async def read(self) -> ProcessingResponse:
        message = await asyncio.wait_for(self._call.read(), patience(20))
        assert message is not grpc.aio.EOF, f"the call has ended: {await self._call.details()}"
        return message

    async def ended(self) -> grpc.StatusCode:
        """The call's status, when the picker has ended it."""
        assert await asyncio.wait_for(self._call.read(), patience(20)) is grpc.aio.EOF
        return await self._call.code()

    def cancel(self) -> None:
        """The gateway's client has left."""
        self._call.cancel()

    async def send_head(
        self, method: str, path: str, headers: dict[str, str], *, ends: bool, among: Iterable[str] | None = None,
        mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED,
    ) -> None:  # fmt: skip
        self._headers = {":method": method, ":path": path, ":authority": "localhost", ":scheme": "http", **headers}
        metadata = None
        if among is not None:
            hint = Struct.from_dict({"x-gateway-destination-endpoint-subset": list(among)})
            metadata = Metadata(filter_metadata={"envoy.lb.subset_hint": hint})
        await self.send(
            request_headers=HttpHeaders(headers=_header_map(self._headers), end_of_stream=ends),
            metadata_context=metadata,
            protocol_config=ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode),
        )

    async def send_part(self, data: bytes) -> None:
        """A piece of the request's body that is not the last."""
        await self.send(request_body=HttpBody(body=data))

    async def send_answer_trailers(self) -> None:
        await self.send(response_trailers=HttpTrailers(trailers=_header_map({"x-end": "1"})))

    async def send_body(self, body: bytes, *, has_trailers: bool = False) -> None:
        pieces = [body[at : at + _PIECE_BYTES] for at in range(0, len(body), _PIECE_BYTES)] or [b""]
        for n, piece in enumerate(pieces, 1):
            await self.send(request_body=HttpBody(body=piece, end_of_stream=n == len(pieces) and not has_trailers))
        if has_trailers:
            await self.send(request_trailers=HttpTrailers(trailers=_header_map({"x-end": "1"})))

    async def read_decision(self, *, has_body: bool = True) -> PickedRequest | GatewayAnswer:
        """Where the request goes, or the answer in an engine's place."""
        message = await self.read()
        if message.immediate_response is not None:
            return _own_answer(message)
        assert message.request_headers is not None, message
        headers = _changed(self._headers, message.request_headers.response.header_mutation)
        told = message.dynamic_metadata.to_dict()["envoy.lb"][DESTINATION]
        assert told == headers[DESTINATION]
        body = await self._read_body("request_body") if has_body else b""
        return PickedRequest(headers.pop(DESTINATION), headers, body)

    async def send_answer_head(self, status: int, headers: dict[str, str], *, ends: bool = False) -> None:
        fields = {":status": str(status), **headers}
        self._headers = fields
        await self.send(response_headers=HttpHeaders(headers=_header_map(fields), end_of_stream=ends))

    async def send_answer(self, data: bytes, *, ends: bool) -> None:
        await self.send(response_body=HttpBody(body=data, end_of_stream=ends))

    async def read_answer_head(self) -> GatewayAnswer:
        """The engine's answer with its new head, without its body; or the answer in its place."""
        message = await self.read()
        if message.immediate_response is not None:
            return _own_answer(message)
        assert message.response_headers is not None, message
        headers = _changed(self._headers, message.response_headers.response.header_mutation)
        return GatewayAnswer(int(headers.pop(":status")), headers)

    async def read_piece(self) -> tuple[bytes, bool]:
        """The next piece of the answer's body, and whether it is the last."""
        message = await self.read()
        assert message.response_body is not None, message
        piece = message.response_body.response.body_mutation.streamed_response
        return piece.body, piece.end_of_stream

    async def _read_body(self, kind: str) -> bytes:
        body, ends = b"", False
        while not ends:
            message = await self.read()
            piece = getattr(message, kind).response.body_mutation.streamed_response
            assert len(piece.body) <= 62_000
            body += piece.body
            ends = piece.end_of_stream
        return body

    async def read_answer(self) -> GatewayAnswer:
        """The engine's answer, whole, as the client gets it; or the answer in its place."""
        answer = await self.read_answer_head()
        if ":own" not in answer.headers:
            answer.body = await self._read_body("response_body")
        answer.headers.pop(":own", None)
        return answer


class PickingGateway:
    """A gateway in front of engines, which asks a picker on loopback."""

    def __init__(self, channel: grpc.aio.Channel, engines: httpx.AsyncClient) -> None:
        self._process = channel.stream_stream(PROCESS, ProcessingRequest.__bytes__, ProcessingResponse.parse)
        self._engines = engines

    def call(self) -> GatewayCall:
        return GatewayCall(self._process())

    async def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None, **head) -> GatewayAnswer:
        """What a client gets that sends this request to the gateway."""
        call = self.call()
        content = None if body is None else json.dumps(body).encode()
        kept = {"content-type": "application/json"} | (headers or {})
        await call.send_head("GET" if content is None else "POST", path, kept, ends=content is None, **head)
        if content is not None:
            with contextlib.suppress(grpc.aio.AioRpcError):  # the answer may come before the body
                await call.send_body(content)
        picked = await call.read_decision(has_body=content is not None)
        if isinstance(picked, GatewayAnswer):
            picked.headers.pop(":own")
            return picked
        sent = {name: value for name, value in picked.headers.items() if not name.startswith(":")}
        url = f"http://{picked.endpoint}{picked.headers[':path']}"
        async with self._engines.stream(picked.headers[":method"], url, content=picked.body, headers=sent) as answer:
            left = {name: value for name, value in answer.headers.items() if name not in _HOP}
            await call.send_answer_head(answer.status_code, left)
            async for data in answer.aiter_bytes():
                await call.send_answer(data, ends=False)
            await call.send_answer(b"", ends=True)
        got = await call.read_answer()
        got.picked = picked
        assert await call.ended() is grpc.StatusCode.OK
        return got


@contextlib.asynccontextmanager
async def gateway_of(port: int, credentials: grpc.ChannelCredentials | None = None) -> AsyncIterator[PickingGateway]:
    """A gateway that asks the picker at this port."""
    at = f"localhost:{port}" if credentials else f"127.0.0.1:{port}"
    channel = grpc.aio.secure_channel(at, credentials) if credentials else grpc.aio.insecure_channel(at)
    async with channel, httpx.AsyncClient(trust_env=False, verify=False) as engines:
        yield PickingGateway(channel, engines)


def _header_map(headers: dict[str, str]) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()])


def _changed(headers: dict[str, str], mutation: HeaderMutation) -> dict[str, str]:
    """These headers with what the picker sets and removes."""
    left = {name: value for name, value in headers.items() if name not in mutation.remove_headers}
    for option in mutation.set_headers:
        left[option.header.key] = option.header.raw_value.decode()
    return left


def _own_answer(message: ProcessingResponse) -> GatewayAnswer:
    own = message.immediate_response
    return GatewayAnswer(int(own.status.code), _changed({":own": "1"}, own.headers), own.body)
