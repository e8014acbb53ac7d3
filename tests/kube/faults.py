"""Faults of an API server, on demand."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from tests.kube.kinds import RESOURCES
from tests.kube.status import ApiError
from tests.kube.store import VersionedObjects


@dataclass(slots=True)
class ServerFaults:
    """Faults of the test server. Each lasts until it is taken back; none loses an object."""

    store: VersionedObjects
    stop_listening: Callable[[], Awaitable[None]]
    listen: Callable[[], Awaitable[None]]
    watches: list[web.Request] = field(default_factory=list)
    dropped: asyncio.Event = field(default_factory=asyncio.Event)
    _refusal: tuple[int, int, int | None] | None = None  # status, Retry-After, how many more times
    _thawed: asyncio.Event = field(default_factory=asyncio.Event)
    _answering: asyncio.Event = field(default_factory=asyncio.Event)
    _delays: tuple[float, float, float] = (0.0, 0.0, 0.0)  # seconds at most: to a request, its answer, a watch's event
    _rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._thawed.set()
        self._answering.set()

    def drop_watches(self, *, cleanly: bool = False) -> int:
        """End all open watches, cut off or in order; returns how many."""
        found = len(self.watches)
        if cleanly:
            self.dropped.set()
            self.dropped = asyncio.Event()
        else:
            for request in tuple(self.watches):
                if request.transport is not None:
                    request.transport.abort()
        return found

    def refuse(self, status: int | None, *, retry_after_s: int = 1, times: int | None = None) -> None:
        """Answer every request with this status; open watches go on. None: stop."""
        self._refusal = None if status is None else (status, retry_after_s, times)

    def freeze(self) -> None:
        """Accept connections and requests without answering; open watches fall silent without being closed."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Send all responses that were held back."""
        self._thawed.set()

    async def thawed(self) -> None:
        """Wait until the server is not frozen."""
        await self._thawed.wait()

    def hold_answers(self) -> None:
        """Execute requests and answer later, so that watches show a write before its response."""
        self._answering.clear()

    def give_answers(self) -> None:
        """Send all responses that were held back."""
        self._answering.set()

    async def answering(self) -> None:
        """Wait until responses are not held back."""
        await self._answering.wait()

    def slow_down(
        self, rng: random.Random, *, requests_s: float = 0.0, answers_s: float = 0.0, events_s: float = 0.0
    ) -> None:
        """Delay execution, response and watch events by up to so many seconds, at random."""
        self._rng, self._delays = rng, (requests_s, answers_s, events_s)

    async def request_delay(self) -> None:
        """Wait until a request may be executed."""
        await self._delay(self._delays[0])

    async def answer_delay(self) -> None:
        """Wait until a response may be sent."""
        await self._delay(self._delays[1])

    async def event_delay(self) -> None:
        """Wait until a watch may send its next event."""
        await self._delay(self._delays[2])

    async def _delay(self, longest_s: float) -> None:
        if longest_s:
            await asyncio.sleep(self._rng.uniform(0.0, longest_s))

    def compact(self) -> None:
        """Drop the history: watches and lists that resume from before get 410."""
        self.store.compact(RESOURCES)

    async def go_down(self) -> None:
        """Stop like a killed server: connections are cut, new ones refused. The port is kept."""
        await self.stop_listening()

    async def come_back(self, *, rewound: bool = False) -> None:
        """Start again with the same objects and no history; `rewound`: at lower versions, as from a backup."""
        if rewound:
            self.store.rewind(RESOURCES)
        else:
            self.store.compact(RESOURCES)
        await self.listen()

    def refusal(self) -> web.Response | None:
        """The status to answer instead, if any; counts the request."""
        if self._refusal is None:
            return None
        status, retry_after_s, times = self._refusal
        if times is not None:
            self._refusal = (status, retry_after_s, times - 1) if times > 1 else None
        headers = {"Retry-After": str(retry_after_s)} if status in (429, 503) else {}
        if status == 429:  # no Status: the filter in front of everything writes plain text
            return web.Response(status=429, text="Too many requests, please try again later.\n", headers=headers)
        reason, message = _REFUSALS.get(status, ("", "an error on the server"))
        return web.json_response(ApiError(status, reason, message).body(), status=status, headers=headers)


_REFUSALS = {
    500: ("InternalError", "Internal error occurred: etcdserver: request timed out"),
    503: ("ServiceUnavailable", "the server is currently unable to handle the request"),
    504: ("Timeout", "Timeout: request did not complete within the allotted timeout"),
}
