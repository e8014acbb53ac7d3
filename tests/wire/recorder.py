"""An ASGI app in front of a service that keeps what its peers ask and what it answers."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.wire.session import Content, Exchange, field_paths, filled, parsed, route_of

OPERATOR = "wire-operator"
"""The user agent of a person's calls, which are no part of a conversation."""

SINCE = "${since}"
"""The place of a stream's start, a number that the service has just named."""

_PROBES = frozenset({"/ready", "/health", "/metrics"})
_KEPT_HEADERS = ("x-lorafleet-epoch",)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)")


def orchestrators_peer(_method: str, path: str, _headers: Mapping[str, str]) -> str:
    """The conversation of a call to the orchestrator."""
    return "agent-to-orchestrator" if path == "/v1/workers/register" else "router-to-orchestrator"


def agents_peer(_method: str, path: str, headers: Mapping[str, str]) -> str:
    """The conversation of a call to an agent.

    A router loads without an epoch, and its reads of metadata name no user agent.
    """
    is_orchestrator = path.startswith("/v1/admin/") and not path.endswith("/load_lora")
    is_read = path.startswith(("/metadata", "/v1/metadata/"))
    if is_orchestrator or "x-lorafleet-epoch" in headers or (is_read and "user-agent" in headers):
        return "orchestrator-to-agent"
    return "router-to-agent"


@dataclass(slots=True)
class _HeardCall:
    conversation: str
    at: int
    method: str
    path: str
    headers: dict[str, str]
    asked: bytearray = field(default_factory=bytearray)
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class WireRecorder:
    """Passes calls on to `app`. `calls`: those of conversations so far, whose bodies grow while they run."""

    app: ASGIApp
    conversation_of: Callable[[str, str, Mapping[str, str]], str]
    calls: list[_HeardCall] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope.get("headers", ())}
        if scope["type"] != "http" or scope["path"] in _PROBES or headers.get("user-agent") == OPERATOR:
            return await self.app(scope, receive, send)
        path = scope["path"] + (f"?{scope['query_string'].decode()}" if scope["query_string"] else "")
        conversation = self.conversation_of(scope["method"], scope["path"], headers)
        kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
        call = _HeardCall(conversation, next(self._numbers), scope["method"], path, kept)
        self.calls.append(call)

        async def read() -> Message:
            message = await receive()
            call.asked += message.get("body", b"")
            return message

        async def write(message: Message) -> None:
            call.status = message.get("status", call.status)
            call.answer += message.get("body", b"")
            await send(message)

        return await self.app(scope, read, write)

    def statuses(self, path: str) -> list[int]:
        """The statuses of the calls so far whose path is like this regular expression."""
        return [call.status for call in self.calls if re.fullmatch(path, call.path.partition("?")[0])]

    def exchanges(self, texts: Mapping[str, str]) -> list[Exchange]:
        """What is worth keeping: every change, and each reading with a field that was absent or null before.

        texts  volatile text -> what is written in its place
        """
        kept: list[Exchange] = []
        seen: set[object] = set()
        for call in self.calls:
            route = route_of(call.conversation, call.method, call.path)
            if not call.status or call.status == 304:
                continue
            exchange = Exchange(
                call.conversation,
                call.at,
                call.method,
                call.path,
                call.headers,
                parsed("json", bytes(call.asked)),
                call.status,
                parsed(route.media, bytes(call.answer)),
            )
            if route.is_stream:
                exchange.answer = _first_of_each_kind(exchange.answer)
            both = [exchange.answer, exchange.asked]
            paths = {("", "any"), *((path, "any") for path in field_paths(both))}
            paths |= {(path, "set") for path in field_paths(_without_nulls(both))}
            # With other parameters it is another reading: a whole catalog, or its changes.
            asked = frozenset(parse_qs(call.path.partition("?")[2]))
            news = {(call.conversation, route, asked, call.status, path) for path in paths}
            is_change = call.path.startswith("/v1/admin/") and call.method == "POST"
            if is_change or not news <= seen:
                kept.append(_scrubbed(exchange, texts))
            seen |= news
        return kept


def _without_nulls(value: Content) -> Content:
    """The value without the fields that are null."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _first_of_each_kind(items: list[Content]) -> list[Content]:
    """A stream's items without those that have the type and the fields of an earlier one."""
    kinds: dict[object, Content] = {}
    for item in items:
        kinds.setdefault((item.get("type"), frozenset(field_paths(item)), bool(item.get("changes"))), item)
    return list(kinds.values())


def _scrubbed(exchange: Exchange, texts: Mapping[str, str]) -> Exchange:
    """The exchange without volatile values: addresses, folders, ids of boots, times."""
    exchange.path = _clean(exchange.path, texts)
    if exchange.status == 200:
        exchange.path = re.sub(r"since=\d+", f"since={SINCE}", exchange.path)
    exchange.headers = {name: _clean(value, texts) for name, value in exchange.headers.items()}
    exchange.asked, exchange.answer = _clean(exchange.asked, texts), _clean(exchange.answer, texts)
    return exchange


def _clean(value: Any, texts: Mapping[str, str]) -> Any:
    """The value with these texts replaced, one time for all, and numbers of three digits."""
    value = filled(value, texts)
    if isinstance(value, str):
        return _TIME.sub("2026-01-01T00:00:00.000Z", value)
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {name: _clean(inner, {}) for name, inner in value.items()}
    return [_clean(inner, {}) for inner in value] if isinstance(value, list) else value
