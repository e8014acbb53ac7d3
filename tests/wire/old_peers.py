"""Peers of the last release: small servers that give the recorded answers to today's clients."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.wire.session import Content, Exchange, WireRoute, field_paths, filled, load_session, route_of, written

UNKNOWN_FIELD = "added_by_a_later_release"
_MEDIA = {"json": "application/json", "sse": "text/event-stream"}
_MAPS = frozenset({"files", "uses", "waits_s"})


def with_unknown_fields(content: Content) -> Content:
    """The content with a further field in each object, as a later release may send it."""
    if isinstance(content, dict):
        known = {name: inner if name in _MAPS else with_unknown_fields(inner) for name, inner in content.items()}
        return {**known, UNKNOWN_FIELD: {"a": [1]}}
    return [with_unknown_fields(inner) for inner in content] if isinstance(content, list) else content


@dataclass(slots=True)
class OldPeer:
    """Plays one side of recorded conversations.

    texts     placeholder -> what stands in its place
    is_newer  answers have unknown fields, as those of a later release do
    asked     the paths and bodies of all calls so far
    """

    texts: dict[str, str]
    conversations: tuple[str, ...] = ()
    is_newer: bool = False
    asked: list[tuple[str, Any]] = field(default_factory=list)
    _session: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._session = [one for one in load_session(*self.conversations) if one.status in (200, 204)]

    @property
    def app(self) -> Starlette:
        """The server; every path is looked up in the session."""
        return Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])

    def serves(self, path: str) -> bool:
        """Whether this release has such a call."""
        return any(one.path.partition("?")[0] == path for one in self._session)

    def calls(self, path: str) -> list[Any]:
        """The bodies of the calls of this path so far."""
        return [body for called, body in self.asked if called == path]

    async def answer(self, request: Request) -> Response:
        """The recorded answer, or 404 for a call that no session has."""
        path = request.url.path
        found = [one for one in self._session if one.route.matches(request.method, path)]
        if not found:
            return JSONResponse({"error": {"message": "no such route", "code": "not_found"}}, 404)
        route = route_of(found[0].conversation, request.method, path)
        body = await request.body()
        asked = await request.json() if body else None
        self.asked.append((path, asked))
        content = filled(self.choose(route, asked, found), self.texts)
        return self._response(route, with_unknown_fields(content) if self.is_newer else content, request)

    def choose(self, route: WireRoute, asked: Any, found: list[Exchange]) -> Content:
        """Which of the recorded answers to give: about the same adapter, and with the most fields."""
        lora_id = (asked or {}).get("lora_id")
        same = [one for one in found if lora_id is None or one.asked.get("lora_id") == lora_id] or found
        return max(same, key=lambda one: len(field_paths(one.answer))).answer

    def _response(self, route: WireRoute, content: Content, request: Request) -> Response:
        if not route.is_stream:
            media = _MEDIA.get(route.media, "application/vnd.msgpack")
            return Response(written(route.media, content), 200 if content is not None else 204, media_type=media)
        since = int(request.query_params.get("since", 0))
        items = content if route.media == "sse" else [item for item in content if item["seq"] > since]

        async def played():
            yield b": connected\n\n" if route.media == "sse" else b""
            yield written(route.media, items)
            await asyncio.Event().wait()

        return StreamingResponse(played(), media_type=_MEDIA.get(route.media, "application/vnd.msgpack"))


@dataclass(slots=True)
class OldAgent(OldPeer):
    """An agent of the last release, whose reports have the adapters that were loaded by its calls.

    is_drained  it was drained, and not used again since
    epoch       the highest that it was called with
    """

    conversations: tuple[str, ...] = ("orchestrator-to-agent", "router-to-agent")
    loaded: set[str] = field(default_factory=set)
    is_drained: bool = False
    epoch: int = 0

    async def answer(self, request: Request) -> Response:
        """The recorded answer, under the caller's epoch from now on."""
        self.epoch = max(self.epoch, int(request.headers.get("x-lorafleet-epoch", 0)))
        return await OldPeer.answer(self, request)

    def choose(self, route: WireRoute, asked: Any, found: list[Exchange]) -> Content:
        """The recorded answer, after the call's effect."""
        content = OldPeer.choose(self, route, asked, found)
        if route.path.endswith("/load_lora"):
            self.loaded.add(asked["lora_id"])
        elif route.path.endswith("/unload_lora"):
            self.loaded.discard(asked["lora_id"])
        elif route.path.endswith("drain"):
            self.is_drained = route.path.endswith("/drain")
        return self.metadata() if route.answers == "Metadata" else content

    def metadata(self) -> dict[str, Any]:
        """The recorded report with the most fields, about what is loaded now."""
        reports = [one.answer for one in self._session if one.route.answers == "Metadata"]
        report = max(reports, key=lambda answer: len(field_paths(answer)))
        loaded = [answer for lora_id in sorted(self.loaded) if (answer := self._loaded(lora_id))]
        state = "draining" if self.is_drained else "ready"
        return {**report, "state": state, "epoch": self.epoch, "lora": {**report["lora"], "loaded_loras": loaded}}

    def _loaded(self, lora_id: str) -> Mapping[str, Any] | None:
        """The recorded entry of a loaded adapter: its load's answer without the answer's own fields."""
        entry = next(self._loads(lora_id), None)
        return entry and {name: value for name, value in entry.items() if name not in ("status", "message")}

    def _loads(self, lora_id: str) -> Iterator[dict[str, Any]]:
        for one in self._session:
            if one.route.answers == "LoadAnswer" and one.answer["lora_id"] == lora_id:
                yield one.answer


@dataclass(slots=True)
class OldOrchestrator(OldPeer):
    """An orchestrator of the last release.

    agent    which it has load what is asked for
    is_away  it refuses to have anything loaded
    """

    conversations: tuple[str, ...] = ("agent-to-orchestrator", "router-to-orchestrator")
    agent: OldAgent | None = None
    is_away: bool = False

    async def answer(self, request: Request) -> Response:
        """The recorded answer; 503 to `ensure` while it is away. It has the recorded questions for a router once."""
        path = request.url.path
        if path == "/v1/routers/questions" and self.calls(path):
            while (await request.receive())["type"] != "http.disconnect":
                pass
        if path.endswith("/ensure"):
            if self.is_away:
                return JSONResponse({"error": {"message": "no leader", "code": "not_leading"}}, 503)
            if self.agent is not None:
                self.agent.loaded.add(path.removeprefix("/v1/adapters/").removesuffix("/ensure"))
        return await OldPeer.answer(self, request)

    def choose(self, route: WireRoute, asked: Any, found: list[Exchange]) -> Content:
        """The recorded answer; the catalog has all adapters that were ever in it, as they were at their best."""
        content = OldPeer.choose(self, route, asked, found)
        if route.answers != "Catalog":
            return content
        adapters = {
            adapter["lora_id"]: adapter
            for one in found
            for adapter in one.answer["adapters"]
            if adapter["digest"] is not None and not adapter["is_deleting"]
        }
        aliases = [alias for one in found for alias in one.answer["aliases"]][:1]
        whole = {**content, "adapters": list(adapters.values()), "aliases": aliases, "draining": []}
        # Also where it was recorded as changes, what is given is a whole catalog.
        empty = {"since": None, "gone_adapters": [], "gone_aliases": []}
        return {**whole, **{name: value for name, value in empty.items() if name in whole}}
