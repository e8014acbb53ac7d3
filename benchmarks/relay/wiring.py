"""The least HTTP/1.1 that a stub can answer with: one protocol class on httptools, no headers kept."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httptools

Answer = Callable[["Answering"], None]


class Answering(asyncio.Protocol):
    """One connection. Each request is handed to `answer` when its body is whole; that writes to `transport`.

    path, body  of the request at hand; `condition` is its If-None-Match
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)
        self._parts: list[bytes] = []
        self.transport: Any = None
        self.path = b""
        self.body = b""
        self.condition = b""
        self.is_gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router that tries out whether we speak HTTP/2
            self.transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        self.is_gone = True

    def on_url(self, url: bytes) -> None:
        self.path = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == 13 and name.lower() == b"if-none-match":
            self.condition = value

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self._answer(self)
        self.condition = b""


def whole(body: bytes, *, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    """An answer that is complete."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def streamed(kind: str) -> bytes:
    """The head of one that comes in pieces."""
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()


def piece(data: bytes) -> bytes:
    """One of its pieces; that of no data ends it."""
    return b"%x\r\n%s\r\n" % (len(data), data)


NOT_FOUND = whole(b'{"error":{"message":"not here"}}', status="404 Not Found")


def free_port() -> int:
    """One that nobody listens on, most likely until it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
