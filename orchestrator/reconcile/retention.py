"""Retention of published names: versions that are too many, too old or unfinished are drained and deleted.

A pass retires them, so a trainer that died leaves nothing behind.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf

import structlog

from orchestrator.core.demand import DemandBook
from orchestrator.core.published_names import (
    PublishedName,
    after_deletion,
    is_trained,
    is_unused,
    last_used_at,
    retired_versions,
    taken_over,
    without_versions,
)
from orchestrator.model.snapshot import DemandSnapshot
from orchestrator.store.store import NOBODY, IntentStore

log = structlog.get_logger()

_USE_NOTED_PART = 0.1
"""A name's use is stored when the stored time is older than this part of `unused_name_s`: a write a day, not a pass."""
_LISTEN_S = 600.0
"""No name is deleted as unused before routers have had this long to report to the leader; a guess."""


class VersionRetention:
    """Deletes retired versions and unused names. Placement then drains and unloads them, as any deleted adapter.

    awaited  lora_ids of versions that publishes in progress wait for: they are loaded, and not retired
    """

    def __init__(
        self,
        store: IntentStore,
        demand: DemandBook,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._demand = demand
        self._clock = clock
        self._wall = wall
        self._term_began_at = clock()
        self.awaited: set[str] = set()

    def begin_term(self) -> None:
        """Note the begin of a term: a new leader knows nothing of requests before it."""
        self._term_began_at = self._clock()

    def last_asked_at(self, demand: DemandSnapshot) -> Mapping[str, float]:
        """Published name -> Unix time of the last request for one of its versions, as far as routers have reported."""
        return {name: at for name, record in self._store.published.items() if (at := self._asked_at(record, demand))}

    def idle_names(self, demand: DemandSnapshot, asked: Mapping[str, float]) -> frozenset[str]:
        """Published names that nobody has used in the policy's `scale_down_after_s`; none where that is not known.

        asked  `last_asked_at` of the same demand
        """
        after_s = self._store.rules.scale_down_after_s
        if not demand.hears_every_router or self._clock() - self._term_began_at < after_s:
            return frozenset()
        since, names = self._wall() - after_s, self._store.published
        return frozenset(name for name, record in names.items() if last_used_at(record, asked.get(name)) < since)

    def trained_names(self) -> frozenset[str]:
        """Published names of which another version is to be expected soon."""
        rules, now = self._store.rules, self._wall()
        return frozenset(name for name, record in self._store.published.items() if is_trained(record, rules, now))

    def _asked_at(self, record: PublishedName, demand: DemandSnapshot) -> float:
        """Unix time of the last request for a version of the name; 0.0 if none is known."""
        ids = [version.lora_id for version in record.versions]
        at = max(map(demand.asked_at, ids), default=-inf)
        return 0.0 if at == -inf else self._wall() - (self._clock() - at)

    def targeted_ids(self) -> frozenset[str]:
        """lora_ids that an alias points at, or is about to, or that a rollout leads from or to."""
        found = self.awaited | {lora_id for targets in self._store.aliases.values() for lora_id, _ in targets}
        for rollout in self._store.rollouts.values():
            if rollout.is_active:
                found |= rollout.old_ids | rollout.new_ids
        return frozenset(found)

    def busy_ids(self) -> frozenset[str]:
        """lora_ids with requests that wait in live routers, or run."""
        found: set[str] = set()
        for router in self._demand.live_routers(self._clock()):
            found |= router.waiting.keys()
            found |= {use.lora_id for use in router.uses.values() if use.in_flight}
        return frozenset(found)

    def retire(self) -> int:
        """Mark retired versions as to be deleted, and delete unused names; returns the number of versions marked."""
        if not self._store.published:
            return 0
        demand = self._demand.snapshot(self._clock())
        asked, targeted, busy = self.last_asked_at(demand), self.targeted_ids(), self.busy_ids()
        is_listening = self._clock() - self._term_began_at >= _LISTEN_S and not demand.has_unheard_routers
        gone = 0
        for record in list(self._store.published.values()):
            current = self._with_use(record, asked.get(record.name))
            is_idle = is_unused(current, asked.get(record.name), self._store.rules, self._wall())
            if is_listening and is_idle and current.deleted_at is None:
                self.drop_name(current, NOBODY, f"nobody asked for it in {self._store.rules.unused_name_s:.0f} s")
            else:
                gone += self._retire_versions(current, targeted, busy)
        return gone

    def _retire_versions(self, record: PublishedName, targeted: frozenset[str], busy: frozenset[str]) -> int:
        """Mark a name's retired versions as to be deleted, and drop them from its record; returns their number.

        A name without any version left, deleted or after a first publish that failed, is dropped.
        """
        retired = set(retired_versions(record, targeted, self._store.rules, self._wall(), busy))
        # Somebody may have deleted a version by hand.
        retired |= {version.lora_id for version in record.versions if version.lora_id not in self._store.adapters}
        if not retired and record.versions:
            return 0
        with self._store.together():
            left = without_versions(record, retired)
            is_empty = not left.versions and record.name not in self._store.aliases
            # Versions of a name that is gone leave tombstones: their numbers say nothing without the name.
            self._store.put_published(record.name, None if is_empty else left)
            self.delete_versions(retired)
        log.info("versions retired", name=record.name, lora_ids=sorted(retired), kept=len(left.versions))
        return len(retired)

    def drop_name(self, record: PublishedName, actor: str, why: str) -> None:
        """Delete a name with its alias, and record it in the history. Its versions go when no request needs them."""
        with self._store.together():
            if record.name in self._store.aliases:
                self._store.drop_alias(record.name)
            self._store.put_published(record.name, after_deletion(record, self._wall()))
            self._store.record("name_deleted", record.name, {"versions": len(record.versions), "why": why}, actor)
        log.info("published name deleted", name=record.name, why=why, asked_by=actor)

    def take_over(self, theirs: PublishedName, actor: str) -> None:
        """Store another fleet's published name with the versions that are registered here, and a history entry."""
        here, targets = self._store.published.get(theirs.name), self._store.aliases.get(theirs.name, ())
        record = taken_over(theirs, here, targets, self._store.adapters, self._wall())
        with self._store.together():
            self._store.put_published(theirs.name, record)
            body = {"versions": len(record.versions), "why": "taken over from a record"}
            self._store.record("name_published", theirs.name, body, actor)

    def delete_versions(self, lora_ids: Iterable[str]) -> None:
        """Mark the adapters as to be deleted; placement drains and unloads them."""
        for lora_id in lora_ids:
            adapter = self._store.adapters.get(lora_id)
            if adapter is not None and not adapter.is_deleting:
                self._store.put_adapter(replace(adapter, is_deleting=True))

    def _with_use(self, record: PublishedName, asked_at: float | None) -> PublishedName:
        """The record with its last use, stored where the stored one is old: a new leader has to know of it."""
        noted = max(record.used_at, record.published_at)
        if asked_at is None or asked_at - noted < self._store.rules.unused_name_s * _USE_NOTED_PART:
            return record
        used = replace(record, used_at=asked_at)
        self._store.put_published(record.name, used)
        return used
