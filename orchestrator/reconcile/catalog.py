"""What routers follow: the catalog at one revision, and the events between revisions.

Every event makes a new revision, so an event's id says exactly which changes a follower knows.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from functools import partialmethod
from types import MappingProxyType
from typing import Literal, NamedTuple

from sortedcontainers import SortedDict  # type: ignore[import-untyped]

from lorafleet.service.numbered_log import NumberedLog
from lorafleet.service.times import utc_text
from orchestrator.core.errors import EventsExpired
from orchestrator.model.catalog import (
    Catalog,
    CatalogAdapter,
    CatalogAlias,
    CatalogWorker,
    Draining,
    FleetEvent,
)
from orchestrator.model.changes import reader_of
from orchestrator.model.pauses import PauseLease
from orchestrator.model.policy import PlacementPolicy, acceptance_mode
from orchestrator.store.store import IntentStore

_Kind = Literal["adapter", "alias"]
Tenants = tuple[str, ...] | None
"""The tenants of an adapter; None: everyone."""


class LoggedEvent(NamedTuple):
    """An event, the tenants of its adapter, and whether the catalog reads otherwise since."""

    event: FleetEvent
    tenants: Tenants
    is_change: bool


class CatalogBook:
    """The current catalog and the recent events. One writer: the event loop."""

    def __init__(self, store: IntentStore, *, wall: Callable[[], float], buffer: int) -> None:
        self._store = store
        self._wall = wall
        self._events = NumberedLog[LoggedEvent](buffer, last=store.revision)
        self._most_changes = buffer
        self._adapters: dict[str, CatalogAdapter] = SortedDict()
        self._aliases: dict[str, CatalogAlias] = SortedDict()
        self._workers: dict[str, CatalogWorker] = SortedDict()
        self._draining: tuple[Draining, ...] = ()
        self._pauses: dict[str, PauseLease] = SortedDict()
        self._cache = PlacementPolicy().cache
        self.pause_revisions: dict[str, int] = {}
        """Key of a pause's scope -> the revision since which the catalog has it as it is."""
        self._body: tuple[int, bytes] = (-1, b"")
        self._unchanged: tuple[int, int] = (-1, -1)  # revisions between which the catalog has read the same
        # (kind, name) -> revision of its last change or removal, the latest last; and from where on all are in it.
        self._last_changes: dict[tuple[_Kind, str], int] = {}
        self._changes_from = store.revision
        self.changed = self._events.changed

    @property
    def revision(self) -> int:
        """The revision since which the catalog reads as it does now. Later events have changed nothing in it."""
        since, until = self._unchanged
        return since if until == self._store.revision else self._store.revision

    @property
    def last_event_id(self) -> int:
        """The revision of the last event."""
        return self._store.revision

    def begin_term(self) -> None:
        """Drop the events, as those of a leader before us are not known here: followers must read the catalog again."""
        self._unchanged = -1, -1
        self._events.restart(self.last_event_id)
        self._last_changes.clear()
        self._changes_from = self.last_event_id

    def emit_event(
        self,
        kind: str,
        *,
        lora_id: str | None = None,
        worker_id: str | None = None,
        message: str = "",
        tenants: Tenants = (),
        is_change: bool = False,
    ) -> int:
        """Add an event under the store's next revision and notify followers; returns the revision.

        tenants    of an adapter that is not registered any more; else they are those that it has
        is_change  whether the catalog reads otherwise from then on
        """
        adapter = None if lora_id is None else self._store.adapters.get(lora_id)
        before, revision = self.revision, self._store.next_revision()
        if not is_change:
            self._unchanged = before, revision
        at = utc_text(datetime.fromtimestamp(self._wall(), UTC))
        event = FleetEvent(id=revision, type=kind, at=at, lora_id=lora_id, worker_id=worker_id, message=message)
        logged = LoggedEvent(event, tenants if adapter is None else adapter.tenants, is_change)
        return self._events.add(logged, revision)

    _emit_change = partialmethod(emit_event, is_change=True)

    def refresh(
        self,
        errors: Mapping[str, str | None],
        workers: Mapping[str, CatalogWorker],
        draining: tuple[Draining, ...],
        pauses: Mapping[str, PauseLease] = MappingProxyType({}),
    ) -> None:
        """Update the catalog from the store and these arguments, with one event for each difference.

        Now and then an event needs a write. If that fails, this difference and later ones are left to the next call.

        errors   lora_id -> why no worker can use the adapter, None if one can; at least of those that have changed
        """
        if (cache := self._store.rules.cache) != self._cache:
            self._emit_change("policy_changed", message=f"cache: {cache}")
            self._cache = cache
        self._refresh_adapters(errors)
        self._refresh_aliases()
        for name in sorted(self._workers.keys() | workers.keys()):
            old, new = self._workers.get(name), workers.get(name)
            if old != new:
                self._emit_change("worker_changed", worker_id=name, message="forgotten" if new is None else new.state)
                if new is None:
                    del self._workers[name]
                else:
                    self._workers[name] = new
        if draining != self._draining:
            before = set(self._draining)
            for mark in sorted(before.symmetric_difference(draining), key=lambda d: (d.worker_id, d.lora_id)):
                kind = "drain_ended" if mark in before else "drain_began"
                self._emit_change(kind, lora_id=mark.lora_id, worker_id=mark.worker_id)
            self._draining = draining
        self._refresh_pauses(pauses)

    def _refresh_adapters(self, errors: Mapping[str, str | None]) -> None:
        """Update the catalog's adapters from the store, with one event for each difference, deletions included."""
        for lora_id in sorted(self._store.changed_adapters - self._store.adapters.keys()):
            if lora_id in self._adapters:
                deleted = self._emit_change("adapter_deleted", lora_id=lora_id, tenants=self._adapters[lora_id].tenants)
                del self._adapters[lora_id]
                self._note_change("adapter", lora_id, deleted)
            self._store.changed_adapters.discard(lora_id)
        for lora_id, error in errors.items():
            adapter = self._store.adapters[lora_id]
            item = CatalogAdapter(
                lora_id=lora_id,
                digest=adapter.digest,
                base_model=adapter.base_model,
                source=adapter.fetched_from,
                rank=adapter.rank or 0,
                tenants=adapter.tenants,
                is_deleting=adapter.is_deleting,
                error=error,
                priority=adapter.policy.priority,
                cache=adapter.policy.cache,
                secret=adapter.secret,
                published_as=self._store.published_as(lora_id),
                acceptance=acceptance_mode(adapter.policy, self._store.rules),
                ignored_modules=adapter.policy.ignored_modules,
            )
            if self._adapters.get(lora_id) != item:
                kind = "adapter_changed" if lora_id in self._adapters else "adapter_registered"
                message = "deleting" if item.is_deleting else error or ""
                changed = self._emit_change(kind, lora_id=lora_id, message=message)
                self._adapters[lora_id] = item
                self._note_change("adapter", lora_id, changed)
            self._store.changed_adapters.discard(lora_id)

    def _refresh_pauses(self, pauses: Mapping[str, PauseLease]) -> None:
        """Update the catalog's pauses, with one event for each difference."""
        for key in [key for key in self._pauses if key not in pauses]:
            self._emit_change("pause_ended", message=key)
            del self._pauses[key], self.pause_revisions[key]
        for key, pause in pauses.items():
            known = self._pauses.get(key)
            if known != pause:
                is_new = known is None or known.began_at != pause.began_at
                self.pause_revisions[key] = self._emit_change("pause_began" if is_new else "pause_renewed", message=key)
                self._pauses[key] = pause

    def _refresh_aliases(self) -> None:
        """Update the catalog's aliases from the store, with one event for each difference."""
        for name in [name for name in self._aliases if not self._store.targets_of(name)]:
            deleted = self._emit_change("alias_deleted", message=name)
            del self._aliases[name]
            self._note_change("alias", name, deleted)
        for name, found in self._store.names.items():
            if not found.targets:
                continue
            item = CatalogAlias(name=name, targets=found.targets)
            if self._aliases.get(name) != item:
                changed = self._emit_change("alias_changed", message=name)
                self._aliases[name] = item
                self._note_change("alias", name, changed)

    def _note_change(self, kind: _Kind, name: str, revision: int) -> None:
        """Record the revision of an entry's last change, and forget the oldest one where there are too many."""
        self._last_changes.pop((kind, name), None)
        self._last_changes[kind, name] = revision
        if len(self._last_changes) > self._most_changes:
            oldest = next(iter(self._last_changes))
            self._changes_from = self._last_changes.pop(oldest)

    def catalog_json(self) -> tuple[int, bytes]:
        """The revision, and the catalog as JSON, which is rendered once a revision and kept."""
        if self._body[0] != self.revision:
            catalog = Catalog(
                revision=self.revision,
                adapters=tuple(self._adapters.values()),
                aliases=tuple(self._aliases.values()),
                draining=self._draining,
                workers=tuple(self._workers.values()),
                pauses=tuple(self._pauses.values()),
                cache=self._cache,
            )
            self._body = (self.revision, reader_of(Catalog).dump_json(catalog))
        return self._body

    def changes_json(self, since: int) -> bytes:
        """The changes after a revision as JSON; the whole catalog where they are not all known any more."""
        if not self._changes_from <= since <= self.revision:
            return self.catalog_json()[1]
        changed: dict[_Kind, list[str]] = {"adapter": [], "alias": []}
        for (kind, name), revision in reversed(self._last_changes.items()):
            if revision <= since:
                break
            changed[kind].append(name)
        adapters, aliases = sorted(changed["adapter"]), sorted(changed["alias"])
        changes = Catalog(
            revision=self.revision,
            since=since,
            adapters=tuple(self._adapters[name] for name in adapters if name in self._adapters),
            aliases=tuple(self._aliases[name] for name in aliases if name in self._aliases),
            gone_adapters=tuple(name for name in adapters if name not in self._adapters),
            gone_aliases=tuple(name for name in aliases if name not in self._aliases),
            draining=self._draining,
            workers=tuple(self._workers.values()),
            pauses=tuple(self._pauses.values()),
            cache=self._cache,
        )
        return reader_of(Catalog).dump_json(changes)

    def position_of(self, revision: int | None) -> int:
        """The event after which a reader goes on that has read the catalog at this revision; None: after the last one.

        Of events that are no longer kept and have changed nothing in the catalog it has missed nothing.
        """
        if revision is None:
            return self.last_event_id
        return max(revision, self._events.oldest) if self.revision <= revision <= self.last_event_id else revision

    def events_since(self, revision: int) -> list[LoggedEvent]:
        """Events after this revision.

        Raises EventsExpired when the buffer does not hold all of them.
        """
        if not self._events.oldest <= revision <= self.last_event_id:
            raise EventsExpired(
                f"events since {revision} are not kept (from {self._events.oldest} on they are): fetch /v1/catalog"
            )
        return self._events.after(revision)

    async def event_stream(
        self,
        revision: int,
        *,
        keep_alive_s: float,
        is_stopping: Callable[[], bool],
        shown: Callable[[FleetEvent, Tenants], FleetEvent | None] = lambda event, _: event,
        only_changes: bool = False,
    ) -> AsyncIterator[str]:
        """SSE text: the events after `revision` as they happen, and a comment after `keep_alive_s` without an event.

        Ends when the service stops, or when the buffer no longer has the reader's next event.

        shown         an event as the reader may see it, by its adapter's tenants; None: not at all
        only_changes  pass over events that have changed nothing in the catalog
        """
        yield f": following from {revision}\n\n"
        async for events in self._events.follow(revision, idle_s=keep_alive_s, is_over=is_stopping):
            for event, tenants, is_change in events:
                if (is_change or not only_changes) and (visible := shown(event, tenants)) is not None:
                    data = reader_of(FleetEvent).dump_json(visible).decode()
                    yield f"id: {event.id}\nevent: {event.type}\ndata: {data}\n\n"
            if not events:
                yield ": still here\n\n"
