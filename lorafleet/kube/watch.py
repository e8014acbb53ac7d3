"""List, then watch: what there is, then each change, through everything that an API server can do to its clients.

Lists and events are raw objects. What was last known stays in force while the API server is away: a follower is told
nothing then. After a failure of any kind it lists again, so that whoever follows sees the whole, whatever was missed.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import structlog

from lorafleet.kube.client import Json, KubeClient
from lorafleet.kube.errors import KubeError, KubeGone, KubeUnreachable, refusal
from lorafleet.service.loops import backoff_s

log = structlog.get_logger()

_MOST_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Of one loop, in seconds.

    watch_s     how long the API server is to keep a watch open, between these two; bookmarks show that it lives
    silent_s    beyond that: a watch that said nothing for so long is broken, though no end of it was seen
    pause_s     the first and the longest pause after a failure; what is slept is half to all of it
    steady_s    a watch that stood for so long was none of a row of failures
    """

    watch_s: tuple[float, float] = (25.0, 30.0)
    silent_s: float = 10.0
    pause_s: tuple[float, float] = (0.2, 5.0)
    steady_s: float = 5.0
    call_s: float = 10.0


TIMES = WatchTimes()


async def follow(
    kube: KubeClient,
    path: str,
    *,
    label_selector: str = "",
    page: int = 500,
    on_list: Callable[[list[Json]], object],
    on_event: Callable[[str, Json], object],
    on_failure: Callable[[Exception], object] = lambda _: None,
    on_answer: Callable[[], object] = lambda: None,
    times: WatchTimes = TIMES,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
) -> NoReturn:
    """Follow the objects at `path` until cancelled.

    page        objects asked for at once; a list of many comes in several answers, all as of one version
    on_list     all objects, whenever they were listed: at first, and after each failure
    on_event    ADDED, MODIFIED or DELETED, and the object as it is after it (as it last was, when deleted)
    on_failure  whatever went wrong has been logged; for a count of it. No KubeError: a fault of ours
    on_answer   the API server said anything, a bookmark at least: what is known is as it should be

    A callback that raises is a failure too: it is logged with its traceback, and everything is listed again.
    """
    loop = _ListWatchLoop(
        kube, path, label_selector, page, on_list, on_event, on_failure, on_answer, times, clock, rng or random.Random()
    )
    while True:
        await loop.round()


@dataclass(slots=True)
class _ListWatchLoop:
    kube: KubeClient
    path: str
    label_selector: str
    page: int
    on_list: Callable[[list[Json]], object]
    on_event: Callable[[str, Json], object]
    on_failure: Callable[[Exception], object]
    on_answer: Callable[[], object]
    times: WatchTimes
    clock: Callable[[], float]
    rng: random.Random
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    version: str = ""  # "": to be listed
    why: str = "first look"
    failures: int = 0
    away_since: float | None = None
    watching_since: float = 0.0

    async def round(self) -> None:
        """One list where one is due, and one watch to its end."""
        self.watching_since = self.clock()
        try:
            if not self.version:
                await self._list()
            self.watching_since = self.clock()
            await self._watch()
        except KubeError as exc:
            self._failed(exc)
            self._tell(exc)
            await self.sleep(max(self._pause_s(), min(exc.retry_after_s or 0.0, _MOST_RETRY_AFTER_S)))
            return
        except Exception as exc:  # the top of a loop: it logs, counts and goes on
            self._failed(exc)
            if self._is_worth_telling():
                log.exception("objects not taken in", path=self.path, failures=self.failures)
            await self.sleep(self._pause_s())
            return
        if self.clock() - self.watching_since >= min(self.times.steady_s, self.times.watch_s[0] / 2):
            self.failures = 0
            return
        # An orderly end, yet far too soon. Resumed at once, and always cut off, this would be a hot loop.
        self.failures += 1
        await self.sleep(self._pause_s())

    async def _list(self) -> None:
        items: list[Json] = []
        page = await self._page("")
        items.extend(page.get("items") or [])
        while token := _metadata(page).get("continue"):
            page = await self._page(str(token))
            items.extend(page.get("items") or [])
        self.on_list(items)
        self.version = str(_metadata(page).get("resourceVersion") or "0")
        self._answers()
        log.info("objects listed", path=self.path, why=self.why, objects=len(items), version=self.version)

    async def _page(self, token: str) -> Json:
        params: dict[str, str | int] = {"limit": self.page}
        if self.label_selector:
            params["labelSelector"] = self.label_selector
        if token:
            params["continue"] = token
        return await self.kube.get(self.path, timeout_s=self.times.call_s, **params)

    async def _watch(self) -> None:
        """Until the API server ends it in good order; resumed from there, nothing is missed."""
        keep_s = self.rng.uniform(*self.times.watch_s)
        params: dict[str, str | int] = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self.version,
            "timeoutSeconds": max(1, round(keep_s)),
        }
        if self.label_selector:
            params["labelSelector"] = self.label_selector
        async with self.kube.stream(
            self.path, head_timeout_s=self.times.call_s, read_timeout_s=keep_s + self.times.silent_s, **params
        ) as lines:
            self._answers()
            async for line in lines:
                self._take(_event(line))
                self.on_answer()

    def _take(self, event: Json) -> None:
        kind, changed = event.get("type"), event.get("object")
        if not isinstance(changed, dict):
            raise KubeUnreachable(f"{self.path}: an event without an object: {event!r:.200}")
        if kind == "ERROR":
            raise refusal(f"watch {self.path}", int(changed.get("code") or 0), changed)
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            self.on_event(kind, changed)
        self.version = str(_metadata(changed).get("resourceVersion") or self.version)

    def _answers(self) -> None:
        self.on_answer()
        if self.away_since is not None:
            away_s = round(self.clock() - self.away_since, 1)
            log.info("API server answers again", path=self.path, away_s=away_s, failures=self.failures)
            self.away_since = None

    def _failed(self, exc: Exception) -> None:
        # A watch that stood for long and then broke is the first failure of its row, however many there were before.
        stood_s = self.clock() - self.watching_since
        self.failures = 1 if self.version and stood_s >= self.times.steady_s else self.failures + 1
        self.on_failure(exc)
        self.version, self.why = "", _why(exc)

    def _tell(self, exc: KubeError) -> None:
        if isinstance(exc, KubeUnreachable) and self.away_since is None:
            self.away_since = self.clock()
            log.warning("API server away", path=self.path, error=str(exc))
        elif not isinstance(exc, KubeGone | KubeUnreachable) and self._is_worth_telling():
            log.warning("objects not followed", path=self.path, failures=self.failures, error=str(exc))

    def _is_worth_telling(self) -> bool:
        return self.failures in (1, 10) or self.failures % 100 == 0

    def _pause_s(self) -> float:
        return backoff_s(self.failures, *self.times.pause_s, self.rng)


def _metadata(found: Json) -> Json:
    metadata = found.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError as exc:
        raise KubeUnreachable(f"an event that is no JSON: {line[:200]!r}") from exc
    if not isinstance(event, dict):
        raise KubeUnreachable(f"an event that is no object: {line[:200]!r}")
    return event


def _why(exc: Exception) -> str:
    return "version no longer kept" if isinstance(exc, KubeGone) else f"after a failure: {exc}"[:200]
