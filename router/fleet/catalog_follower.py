"""Follows the orchestrator's catalog: reads what changed, at events and on demand, and confirms what is in force."""

import asyncio
from collections.abc import Callable
from math import inf

import httpx

from lorafleet.service.loops import ChangeSignal
from router.fleet.catalog import RouterCatalog, read_catalog, router_catalog, with_changes
from router.fleet.saved_catalog import SavedCatalog

# Requests for unknown names make the router read the catalog: at most this often, waiting at most this long.
_READ_SPACING_S = 0.1
_REFRESH_TIMEOUT_S = 1.0


class CatalogFollower:
    """Owns the catalog in force, `current`, and replaces it whole at every change.

    is_known      whether a catalog has ever been in force: read, or saved on disk
    has_asked     whether a read has ended, well or not: a saved catalog may be older than the orchestrator's
    confirmed_at  when the orchestrator last confirmed it; None before the first time
    wake          set it to have the catalog read at once
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        url: str,
        router_id: str,
        saved: SavedCatalog | None,
        clock: Callable[[], float],
        changes: ChangeSignal,
        on_change: Callable[[RouterCatalog], None],
    ) -> None:
        """
        url        of the orchestrator
        router_id  by which it knows this router
        saved      the copy on disk, if one is kept
        changes    notified after each read, also a failed one
        on_change  called with the catalog before, when another is in force
        """
        self.current = RouterCatalog()
        self.is_known = False
        self.has_asked = False
        self.confirmed_at: float | None = None
        self.wake = asyncio.Event()
        self._client = client
        self._url = url
        self._router_id = router_id
        self._saved = saved
        self._clock = clock
        self._changes = changes
        self._on_change = on_change
        self._etag: str | None = None
        self._read_began_at = self._asked_at = -inf
        self._is_orchestrator_away = False
        self._read_timer: asyncio.TimerHandle | None = None

    def load_saved(self) -> None:
        """Put the catalog saved on disk in force, if there is one."""
        saved = None if self._saved is None else self._saved.load()
        if saved is not None:
            self._adopt(saved)

    def cancel_read(self) -> None:
        """Cancel the read that is scheduled, if any."""
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    @property
    def can_refresh(self) -> bool:
        """Whether the orchestrator answered the last read, so that it can be asked for a newer catalog."""
        return not self._is_orchestrator_away

    def age_s(self) -> float | None:
        """Seconds since the orchestrator last confirmed the catalog in force; None before the first time."""
        return None if self.confirmed_at is None else self._clock() - self.confirmed_at

    async def refresh(self) -> bool:
        """Have the catalog read, and wait for it; whether one that was asked for after this call is now in force.

        Such a catalog has everything that was registered before the request came. Callers share a read, and reads are
        `_READ_SPACING_S` apart, however many unknown names are asked for. False if the orchestrator is unreachable or
        does not answer soon.
        """
        if not self.can_refresh:
            return False
        called_at = self._clock()
        self._schedule_read(called_at)
        await self._changes.until(
            lambda: self._asked_at >= called_at or not self.can_refresh, timeout_s=_REFRESH_TIMEOUT_S
        )
        return self._asked_at >= called_at

    def _schedule_read(self, now: float) -> None:
        """Have the catalog read now, or by one timer as soon as the spacing between reads allows."""
        wait_s = self._read_began_at + _READ_SPACING_S - now
        if wait_s <= 0:
            self.wake.set()
        elif self._read_timer is None:
            self._read_timer = asyncio.get_running_loop().call_later(wait_s, self._start_read)

    def _start_read(self) -> None:
        """Have the catalog read; the timer calls this."""
        self._read_timer = None
        self.wake.set()

    async def read(self) -> None:
        """Read the catalog, adopt a new one, and record whether the orchestrator is reachable; raises what it raises.

        Wakes the next read when the revision has changed: that confirms it to the orchestrator, which may be holding
        the answer to the change until then.
        """
        self.cancel_read()  # this is that read, where the loop was late for its timer
        self._read_began_at = began_at = self._clock()
        before = self.current.revision
        try:
            await self._fetch()
        except BaseException:
            self._is_orchestrator_away = True
            raise
        else:
            self._is_orchestrator_away, self._asked_at = False, began_at
            if self.current.revision != before:
                self.wake.set()
        finally:
            self.has_asked = True
            self._changes.notify()

    async def _fetch(self) -> None:
        """GET what has changed in the catalog; a new one is adopted and saved. Records when it was confirmed.

        Raises httpx.HTTPError, or ValueError for an invalid one.
        """
        # By its ETag we know that the catalog in force is this orchestrator's, and not one from disk or of a test.
        wants_whole = self._etag is None or (self._saved is not None and self._saved.wants_whole)
        query: dict[str, str | int] = {"router_id": self._router_id}
        headers = {}
        if self.is_known:
            query["revision_seen"] = self.current.revision
        if not wants_whole and self._etag is not None:
            query["since"] = self.current.revision
            headers["if-none-match"] = self._etag
        answer = await self._client.get(f"{self._url}/v1/catalog", params=query, headers=headers)
        if answer.status_code != 304:
            answer.raise_for_status()
            self._adopt_answer(answer.content)
            self._etag = answer.headers.get("etag")
        self.confirmed_at = self._clock()

    def _adopt_answer(self, content: bytes) -> None:
        """Put a catalog or its changes in force, and save them. Raises ValueError for invalid ones."""
        answer = read_catalog(content)
        if answer.since is None:
            self._adopt(router_catalog(answer))
            if self._saved is not None:
                self._saved.save_whole(content)
            return
        changed = with_changes(self.current, answer)
        if changed is None:
            self._etag = None  # the next read gets it whole
            raise ValueError(f"the catalog's changes begin at revision {answer.since}, ours is {self.current.revision}")
        self._adopt(changed)
        if self._saved is not None:
            self._saved.add_changes(content)

    def _adopt(self, catalog: RouterCatalog) -> None:
        """Put a catalog in force."""
        before, self.current, self.is_known = self.current, catalog, True
        self._on_change(before)
