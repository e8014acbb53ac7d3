"""Lists objects and then watches their changes, through all failures of an API server.

Lists and events are raw objects. While the API server is unreachable no callback is made. After any failure everything
is listed again, so that no change is missed.
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
from lorafleet.kube.errors import KubeError, KubeGone, KubeUnreachable, error_of_answer
from lorafleet.service.decoding import DECODE_ERRORS
from lorafleet.service.loops import backoff_s

log = structlog.get_logger()

_MOST_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Times of one loop, in seconds.

    watch_s   range of the time that the API server is asked to keep a watch open; bookmarks show that it lives
    silent_s  after this further time without a byte a watch counts as broken
    pause_s   first and longest pause after a failure; jittered from half to all of it
    steady_s  a watch that lasted this long ends a row of failures
    """

    watch_s: tuple[float, float] = (25.0, 30.0)
    silent_s: float = 10.0
    pause_s: tuple[float, float] = (0.2, 5.0)
    steady_s: float = 5.0
    call_s: float = 10.0


TIMES = WatchTimes()


async def list_and_watch(
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

    page        objects in one answer; a longer list comes in several answers, all of one version
    on_list     called with all objects after each list: at first, and after each failure
    on_event    called with ADDED, MODIFIED or DELETED, and the object after the change, or its last state
    on_failure  called after a failure was logged, to count it; anything but a KubeError is our own fault
    on_answer   called for every sign of life of the API server, at least a bookmark: the known state is current

    A callback that raises is a failure as well: it is logged with its traceback, and everything is listed again.
    """
    loop = ListWatchLoop(
        kube, path, label_selector, page, on_list, on_event, on_failure, on_answer, times, clock, rng or random.Random()
    )
    while True:
        await loop.watch_then_back_off()


@dataclass(slots=True)
class ListWatchLoop:
    """State and callbacks of one `list_and_watch`."""

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
    list_reason: str = "first list"
    failures: int = 0
    away_since: float | None = None
    watching_since: float = 0.0

    async def watch_then_back_off(self) -> None:
        """List, if needed, and watch until the watch ends. Counts and logs a failure, never raises it, and pauses."""
        self.watching_since = self.clock()
        try:
            if not self.version:
                await self._list()
            self.watching_since = self.clock()
            await self._watch()
        except KubeError as exc:
            self._record_failure(exc)
            self._log_failure(exc)
            await self.sleep(max(self._pause_s(), min(exc.retry_after_s or 0.0, _MOST_RETRY_AFTER_S)))
            return
        except Exception as exc:  # the top of a loop: it logs, counts and continues
            self._record_failure(exc)
            if self._is_worth_logging():
                log.exception("objects not processed", path=self.path, failures=self.failures)
            await self.sleep(self._pause_s())
            return
        if self.clock() - self.watching_since >= min(self.times.steady_s, self.times.watch_s[0] / 2):
            self.failures = 0
            return
        # An orderly end, but far too soon: resuming at once could become a busy loop.
        self.failures += 1
        await self.sleep(self._pause_s())

    async def _list(self) -> None:
        """List all objects, page by page, call `on_list`, and keep the list's version; raises KubeError. Logged."""
        items: list[Json] = []
        page = await self._get_page("")
        items.extend(page.get("items") or [])
        while token := _metadata_or_empty(page).get("continue"):
            page = await self._get_page(str(token))
            items.extend(page.get("items") or [])
        self.on_list(items)
        self.version = str(_metadata_or_empty(page).get("resourceVersion") or "0")
        self._on_answer()
        log.info("objects listed", path=self.path, why=self.list_reason, objects=len(items), version=self.version)

    async def _get_page(self, token: str) -> Json:
        """GET one page of the list; `token` continues the list, "" begins it. Raises KubeError."""
        params: dict[str, str | int] = {"limit": self.page}
        if self.label_selector:
            params["labelSelector"] = self.label_selector
        if token:
            params["continue"] = token
        return await self.kube.get(self.path, timeout_s=self.times.call_s, **params)

    async def _watch(self) -> None:
        """Watch from the kept version and handle each event until the API server ends the watch in order.

        The next watch resumes at the last event's version. Raises KubeError.
        """
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
            self._on_answer()
            async for line in lines:
                self._handle_event(_parse_event(line))
                self.on_answer()

    def _handle_event(self, event: Json) -> None:
        """Pass an event to `on_event` and keep its version; raises KubeError for an error event."""
        kind, changed = event.get("type"), event.get("object")
        if not isinstance(changed, dict):
            raise KubeUnreachable(f"{self.path}: an event without an object: {event!r:.200}")
        if kind == "ERROR":
            raise error_of_answer(f"watch {self.path}", int(changed.get("code") or 0), changed)
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            self.on_event(kind, changed)
        self.version = str(_metadata_or_empty(changed).get("resourceVersion") or self.version)

    def _on_answer(self) -> None:
        """Call `on_answer`, and log the end of an outage."""
        self.on_answer()
        if self.away_since is not None:
            away_s = round(self.clock() - self.away_since, 1)
            log.info("API server answers again", path=self.path, away_s=away_s, failures=self.failures)
            self.away_since = None

    def _record_failure(self, exc: Exception) -> None:
        """Count a failure, call `on_failure`, and make the next round list again."""
        # A watch that lasted long and then broke starts a new row of failures.
        stood_s = self.clock() - self.watching_since
        self.failures = 1 if self.version and stood_s >= self.times.steady_s else self.failures + 1
        self.on_failure(exc)
        self.version, self.list_reason = "", _relist_reason(exc)

    def _log_failure(self, exc: KubeError) -> None:
        """Log an outage at its start, and the 1st, 10th and every 100th of other failures; never KubeGone.

        Sets `away_since` at an outage's start.
        """
        if isinstance(exc, KubeUnreachable) and self.away_since is None:
            self.away_since = self.clock()
            log.warning("API server away", path=self.path, error=str(exc))
        elif not isinstance(exc, KubeGone | KubeUnreachable) and self._is_worth_logging():
            log.warning("objects not followed", path=self.path, failures=self.failures, error=str(exc))

    def _is_worth_logging(self) -> bool:
        """Whether this failure is the 1st, 10th or a 100th in a row."""
        return self.failures in (1, 10) or self.failures % 100 == 0

    def _pause_s(self) -> float:
        """Seconds to pause after this many failures in a row, jittered."""
        return backoff_s(self.failures, *self.times.pause_s, self.rng)


def _metadata_or_empty(value: Json) -> Json:
    """The metadata of an object or list; empty if missing."""
    metadata = value.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _parse_event(line: bytes) -> dict[str, Any]:
    """One line of a watch as an event; raises KubeUnreachable."""
    try:
        event = msgspec.json.decode(line)
    except DECODE_ERRORS as exc:
        raise KubeUnreachable(f"an event that is no JSON: {line[:200]!r}") from exc
    if not isinstance(event, dict):
        raise KubeUnreachable(f"an event that is no object: {line[:200]!r}")
    return event


def _relist_reason(exc: Exception) -> str:
    """Why everything is listed again, for the log."""
    return "version no longer kept" if isinstance(exc, KubeGone) else f"after a failure: {exc}"[:200]
