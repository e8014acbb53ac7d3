"""Sends a recorded session to a service of today, in its order, and checks the answers."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from tests.patience import patience, within
from tests.wire.recorder import SINCE
from tests.wire.session import AnswerCheck, Content, Exchange, field_paths, filled, parsed, written


@dataclass(slots=True)
class WireReplay:
    """Replays exchanges at one service.

    texts   placeholder or recorded text -> today's; grows by what answers name: digests, ids, the KV ledger's epoch
    before  called before each exchange, to bring the service into the state that the recorded answer shows
    """

    client: httpx.AsyncClient
    check: AnswerCheck
    texts: dict[str, str]
    before: Callable[[Exchange], Awaitable[None]]
    _streams: "list[tuple[Exchange, _FollowedStream]]" = field(default_factory=list)

    async def run(self, session: Sequence[Exchange], *, at_end: Callable[[], Awaitable[object]] | None = None) -> None:
        """Send all requests; then call `at_end`, and wait until each stream has had every field that was recorded."""
        async with contextlib.AsyncExitStack() as stack:
            for exchange in session:
                await self.before(exchange)
                if exchange.route.is_stream and exchange.status == 200:
                    followed = _FollowedStream(exchange.route.media)
                    await stack.enter_async_context(followed.opened(self.client, filled(exchange.path, self.texts)))
                    self._streams.append((exchange, followed))
                else:
                    await self._send(exchange)
            if at_end is not None:
                await at_end()
            for exchange, followed in self._streams:
                await followed.until_fields(field_paths(exchange.answer))
                self.check.compare(exchange, followed.status, followed.items)

    async def _send(self, exchange: Exchange) -> None:
        """Send one request, compare its answer, and learn from it."""
        headers = {"content-type": "application/json", **exchange.headers}
        body = written("json", filled(exchange.asked, self.texts))
        path = filled(exchange.path, self.texts)
        answer = await self.client.request(exchange.method, path, content=body, headers=headers)
        media = exchange.route.media if answer.is_success and not exchange.route.is_stream else "json"
        content = parsed(media, answer.content) if exchange.answer is not None or not answer.is_success else None
        if exchange.route.is_stream and answer.status_code == exchange.status:
            return  # a refused stream: the envelope of errors has tests of its own
        self.check.compare(exchange, answer.status_code, content)
        if isinstance(content, dict):
            self._learn(exchange.answer, content)

    def _learn(self, recorded: Content, content: Content) -> None:
        """Later requests name what today's answers named: digests, ids, where a stream starts."""
        for name in ("epoch", "digest"):
            if isinstance(recorded.get(name), str) and isinstance(content.get(name), str):
                self.texts[recorded[name]] = content[name]
                self.texts[recorded[name][:12]] = content[name][:12]
        for ours, theirs in zip(recorded.get("data", ()), content.get("data", ()), strict=False):
            if "id" in ours:
                self.texts[ours["id"]] = theirs["id"]
        if "seq" in content:
            self.texts[SINCE] = str(content["seq"])
        elif "revision" in content:
            # The first one: what a recorded change shows may have come about here before.
            self.texts.setdefault(SINCE, str(content["revision"]))


@dataclass(slots=True)
class _FollowedStream:
    media: str
    status: int = 0
    received: bytearray = field(default_factory=bytearray)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def opened(self, client: httpx.AsyncClient, path: str):
        """Follow the stream from its head on."""
        async with client.stream("GET", path, timeout=patience(20)) as answer:
            self.status = answer.status_code
            reading = asyncio.create_task(self._read(answer))
            try:
                yield
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, answer: httpx.Response) -> None:
        async for data in answer.aiter_bytes():
            self.received += data
            self.news.set()

    @property
    def items(self) -> list[Content]:
        return parsed(self.media, bytes(self.received)) if self.status == 200 else []

    async def until_fields(self, paths: set[str]) -> None:
        """Wait until all of these fields have come; after a while it is for `compare` to say which have not."""
        with contextlib.suppress(TimeoutError):
            async with within(5):
                while not paths <= field_paths(self.items):
                    self.news.clear()
                    await self.news.wait()
