"""Stored intent: adapters, served names, pauses, policy, workers' cordons, tombstones, history, three counters.

Observed state is not stored. All but the history is also in memory: reads never touch the backend, and writes are
visible at once. Await `wait_durable` before you promise a caller that a write is durable, and before you act on it.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from sortedcontainers import SortedDict  # type: ignore[import-untyped]

from orchestrator.core.errors import OrchestratorUnavailable
from orchestrator.core.incidents import KINDS_OF_INCIDENTS
from orchestrator.core.pauses import PauseLease
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import Publication, ServedName, Targets, is_retired_version
from orchestrator.model.snapshot import Intent, RegisteredAdapter
from orchestrator.store.backend import (
    HistoryEntry,
    StoreBackend,
    StoreChange,
    StoredIntent,
    Subject,
    Tombstone,
    WorkerIntent,
    tombstone_key,
    tombstone_lora_id,
)
from orchestrator.store.sqlite import SqliteBackend

MOST_TOMBSTONES = 20_000
"""Tombstones kept; of more the oldest go, some at a time. A trainer that names each step anew deletes one a step."""
_TOMBSTONES_SPARE = 500

_RESERVED = 1000
"""Revisions reserved in the backend at a time; unused ones are skipped after a crash."""

NOBODY = "lorafleet"
"""The actor of the orchestrator's own actions."""

KINDS = (
    "adapter_registered", "adapter_adopted", "adapter_changed", "adapter_deleted", "adapter_retried",
    "alias_set", "alias_deleted", "alias_rollout", "name_published", "name_deleted", "policy_changed",
    "worker_cordoned", "worker_draining", "worker_uncordoned", "load", "drain", "unload", *KINDS_OF_INCIDENTS,
)  # fmt: skip
"""The kinds of history entries."""


class IntentStore:
    """The stored intent. Raises StoreError when the backend is no store of ours, damaged, or of a newer version."""

    def __init__(self, where: Path | str | StoreBackend, *, wall: Callable[[], float] = time.time) -> None:
        """Open the backend (a path: an SQLite file) and read the stored intent. Raises StoreError."""
        self._wall = wall
        self._backend: StoreBackend = SqliteBackend(where) if isinstance(where, Path | str) else where
        self._depth = 0
        self._changes: list[StoreChange] = []
        self._entries: list[HistoryEntry] = []
        self._is_undone = False
        self.adapters: MutableMapping[str, RegisteredAdapter] = SortedDict()
        self.names: MutableMapping[str, ServedName] = SortedDict()
        self.next_numbers: dict[str, int] = {}  # published name -> number of its next version
        self._version_names: dict[str, str] = {}  # lora_id of a version -> its published name
        self.workers: dict[str, WorkerIntent] = {}
        self.tombstones: dict[str, frozenset[str]] = {}  # lora_id -> digests of its deleted versions
        self._stones: dict[str, Tombstone] = {}
        self.pauses: dict[str, PauseLease] = {}  # by the key of their scope
        self.rules = PlacementPolicy()
        self.writes = 0  # number of changes of intent
        self._tenants: tuple[int, frozenset[str]] = (-1, frozenset())  # `writes` then, and `tenants`
        self.epoch = self.revision = self.routers = self._reserved = 0
        try:
            stored = self._backend.read()
        except BaseException:
            self._backend.close()
            raise
        self._replace_intent(stored)
        self._raise_counters(stored)

    def close(self) -> None:
        """Close the backend; writes that are not durable yet are given up."""
        self._backend.close()

    async def catch_up(self) -> None:
        """Prepare a term: make writes of other processes readable. Raises OrchestratorError."""
        await self._backend.catch_up()

    def reload(self) -> None:
        """Replace intent and counters in memory by the stored ones, before this process leads. Raises StoreError.

        The epoch is then at least the stored one; the caller raises it above that.
        """
        stored = self._backend.read()
        self._replace_intent(stored)
        self._raise_counters(stored)

    def refresh(self) -> None:
        """Replace the intent in memory by the stored one. Raises StoreError, OrchestratorUnavailable."""
        if not self._backend.is_read:
            raise OrchestratorUnavailable("the store has not been read yet", code="starting")
        self._replace_intent(self._backend.read())

    async def wait_durable(self, about: Collection[Subject] | None = None) -> None:
        """Wait until all changes of these subjects (None: of all) are durable.

        Raises OrchestratorError when one of them was refused.
        """
        await self._backend.wait_durable(about)

    def end_term(self) -> None:
        """End our term: give up writes that are not durable yet."""
        self._backend.end_term()

    @property
    def is_read(self) -> bool:
        """Whether the backend has been read at all."""
        return self._backend.is_read

    @property
    def trouble(self) -> str:
        """Why no change is written now, and what to do, as far as known; empty: changes are written."""
        return self._backend.trouble

    def check(self) -> str:
        """Look whether the store takes writes, and set `trouble`. Returns what was mended, in words; mostly ""."""
        return self._backend.check()

    @property
    def is_caught_up(self) -> bool:
        """Whether all writes before our term are known; no placement is decided before."""
        return self._backend.is_caught_up

    @property
    def backup_name(self) -> str:
        """Name for the file that `backup` makes, with its suffix."""
        return self._backend.backup_name

    def backup(self, path: Path) -> None:
        """Write a copy to a new path, without deletions, drains, rollouts and pauses. Raises StoreError."""
        self._backend.backup(path)

    @property
    def intent(self) -> Intent:
        """The part of the stored intent that placement needs: views, not copies."""
        return Intent(adapters=self.adapters, tombstones=self.tombstones, next_numbers=self.next_numbers)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send all writes of the block to the backend together. May be nested; the outermost block sends.

        If the block or the backend raises, none of the writes is made, the intent in memory is read again, and the
        error is raised. That includes the writes of the outer blocks, which must raise too.
        """
        self._depth += 1
        try:
            yield
            assert not self._is_undone, "an error of a nested block was caught; writes before it are lost"
            if self._depth == 1 and (self._changes or self._entries):
                self._backend.write(self._changes, self._entries)
                self.writes += any(change.table != "counters" for change in self._changes)
        except BaseException:
            self._changes, self._entries, self._is_undone = [], [], True
            self._replace_intent(self._backend.read())  # memory must agree with the backend
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._changes, self._entries, self._is_undone = [], [], False

    def record(self, kind: str, subject: str, body: Mapping[str, Any] | None = None, actor: str = NOBODY) -> None:
        """Add a history entry. `body` is JSON."""
        assert kind in KINDS, kind
        with self.together():
            self._entries.append(
                HistoryEntry(kind=kind, subject=subject, actor=actor, at=self._wall(), body=dict(body or {}))
            )

    def history(
        self, *, kinds: Sequence[str] = (), subject: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[HistoryEntry]:
        """History entries, newest first, with ids below `before`, of these kinds (empty: all)."""
        return self._backend.history(kinds=kinds, subject=subject, before=before, limit=limit)

    @property
    def adapter_ids(self) -> Sequence[str]:
        """All lora_ids in order, as a view: indexing and bisecting copy nothing."""
        return cast("Sequence[str]", self.adapters.keys())

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants of all registered adapters; collected once a change of intent."""
        if self._tenants[0] != self.writes:
            named = {tenant for adapter in self.adapters.values() for tenant in adapter.tenants or ()}
            self._tenants = self.writes, frozenset(named)
        return self._tenants[1]

    def targets_of(self, name: str) -> Targets:
        """What the name points at; empty: nothing has the name, or it points at nothing yet or any more."""
        found = self.names.get(name)
        return () if found is None else found.targets

    def publication_of(self, name: str) -> Publication | None:
        """The versions and retention of a published name; None for any other name."""
        found = self.names.get(name)
        return None if found is None else found.published

    def next_revision(self) -> int:
        """Raise the revision by one and return it. It is above all earlier ones, over restarts too.

        Now and then it stores a reservation. Raises StoreError, OrchestratorUnavailable.
        """
        self.revision += 1
        if self.revision >= self._reserved:
            self._reserved = self.revision + _RESERVED
            with self.together():
                self._queue_change("counters", "revision", self._reserved)
        return self.revision

    def raise_epoch(self, above: int) -> None:
        """Raise our epoch above this one, which an agent has obeyed, and store it; unchanged if it is above already."""
        if above >= self.epoch:
            self.epoch = above + 1
            with self.together():
                self._queue_change("counters", "epoch", self.epoch)

    def put_routers(self, count: int) -> None:
        """Store how many routers follow this leader, for the next one. No-op for the stored number."""
        if count != self.routers:
            with self.together():
                self._queue_change("counters", "routers", count)
            self.routers = count

    def put_adapter(self, adapter: RegisteredAdapter) -> None:
        """Insert or replace the adapter, and drop the tombstone of its bytes. Those of its other versions stay."""
        with self.together():
            self._queue_change("adapters", adapter.lora_id, adapter)
            self.adapters[adapter.lora_id] = adapter
            if not adapter.is_deleting and adapter.digest is not None:
                self._drop_tombstone(tombstone_key(adapter.lora_id, adapter.digest))
                older = self._stones.get(adapter.lora_id)
                if older is not None and older.digest == adapter.digest:
                    self._drop_tombstone(adapter.lora_id)

    def compare_and_set(self, seen: RegisteredAdapter, adapter: RegisteredAdapter) -> bool:
        """Replace the adapter if it is unchanged since it was read as `seen`; returns whether it was."""
        if self.adapters.get(seen.lora_id) is not seen:
            return False
        self.put_adapter(adapter)
        return True

    def drop_adapter(self, lora_id: str) -> None:
        """Delete the adapter and leave a tombstone, so that a worker that comes back with it unloads it.

        Without a known digest there is no tombstone, nor for a version of a published name, whose number is used.
        """
        with self.together():
            adapter = self.adapters.pop(lora_id)
            self._queue_change("adapters", lora_id, None)
            if adapter.digest is not None and not is_retired_version(lora_id, self.next_numbers, self.adapters):
                self.put_tombstone(lora_id, adapter.digest)

    def put_tombstone(self, lora_id: str, digest: str) -> None:
        """Store that workers must unload this version of the adapter, also those that are away now."""
        with self.together():
            key, stone = tombstone_key(lora_id, digest), Tombstone(digest, self._wall())
            self._queue_change("tombstones", key, stone)
            self._stones[key] = stone
            self.tombstones[lora_id] = self.tombstones.get(lora_id, frozenset()) | {digest}
            if len(self._stones) >= MOST_TOMBSTONES + _TOMBSTONES_SPARE:
                oldest = sorted(self._stones, key=lambda key: self._stones[key].at)[:-MOST_TOMBSTONES]
                for old in oldest:
                    self._drop_tombstone(old)

    def _drop_tombstone(self, key: str) -> None:
        """Delete the tombstone with this key, if there is one."""
        stone = self._stones.pop(key, None)
        if stone is not None:
            self._queue_change("tombstones", key, None)
            lora_id = tombstone_lora_id(key)
            left = self.tombstones.pop(lora_id, frozenset()) - {stone.digest}
            if left:
                self.tombstones[lora_id] = left

    def record_deletion(self, lora_id: str, digest: str | None, actor: str) -> None:
        """Leave a tombstone and a history entry for an adapter whose object was deleted while no orchestrator led."""
        with self.together():
            if digest is not None:
                self.put_tombstone(lora_id, digest)
            self.record("adapter_deleted", lora_id, {"digest": digest}, actor)

    def absorb(self, change: StoreChange) -> None:
        """Take a change of an earlier leader into memory, and count it as a write; the backend has it already."""
        match change.value:
            case RegisteredAdapter() as adapter:
                self.adapters[change.key] = adapter
            case PlacementPolicy() as rules:
                self.rules = rules
            case name:
                self._set_name(change.key, cast("ServedName", name))
        self.writes += 1

    def expire_tombstones(self, kept_s: float) -> None:
        """Delete tombstones older than `kept_s` seconds: workers that return later keep those adapters as orphans."""
        oldest = self._wall() - kept_s
        with self.together():
            for key in [key for key, stone in self._stones.items() if stone.at < oldest]:
                self._drop_tombstone(key)

    def put_name(self, name: ServedName) -> None:
        """Store a served name: its targets, rollout, versions and retention."""
        with self.together():
            self._queue_change("names", name.name, name)
            self._set_name(name.name, name)

    def drop_name(self, name: str) -> None:
        """Delete the name with all that belongs to it. No-op for a name that is not there."""
        with self.together():
            if name in self.names:
                self._queue_change("names", name, None)
                self._set_name(name, None)

    def published_as(self, lora_id: str) -> str | None:
        """The published name that the adapter is a version of; None for any other adapter."""
        return self._version_names.get(lora_id)

    def dropped_digests(self) -> frozenset[str]:
        """Digests of deleted adapters and retired versions that no registered adapter has."""
        retired = (name.published.dropped for name in self.names.values() if name.published is not None)
        found = frozenset().union(*self.tombstones.values(), *retired)
        return found - {adapter.digest for adapter in self.adapters.values() if not adapter.is_deleting}

    def _set_name(self, name: str, found: ServedName | None) -> None:
        """Set or drop a name in memory, with the indices of its versions."""
        before = self.names.pop(name, None)
        for version in before.published.versions if before is not None and before.published is not None else ():
            self._version_names.pop(version.lora_id, None)
        self.next_numbers.pop(name, None)
        if found is not None:
            self.names[name] = found
        if found is not None and found.published is not None:
            self.next_numbers[name] = found.published.next_number
            self._version_names |= dict.fromkeys(found.published.lora_ids, name)

    def put_rules(self, rules: PlacementPolicy) -> None:
        """Store the global policy."""
        with self.together():
            self._queue_change("policy", "", rules)
            self.rules = rules

    def put_worker(self, worker_id: str, intent: WorkerIntent | None) -> None:
        """Store an operator's order for a worker; None takes it back."""
        with self.together():
            self._queue_change("workers", worker_id, intent)
            if intent is None:
                self.workers.pop(worker_id, None)
            else:
                self.workers[worker_id] = intent

    def put_pause(self, key: str, lease: PauseLease | None) -> None:
        """Store a pause under the key of its scope; None ends it."""
        with self.together():
            self._queue_change("pauses", key, lease)
            if lease is None:
                self.pauses.pop(key, None)
            else:
                self.pauses[key] = lease

    def _queue_change(self, *change: Any) -> None:
        """Add a change to those that the outermost `together` block sends to the backend."""
        self._changes.append(StoreChange(*change))

    def _replace_intent(self, stored: StoredIntent) -> None:
        """Replace the intent in memory by the stored one; counters stay."""
        self._tenants = (-1, frozenset())
        self.adapters = SortedDict(stored.adapters)
        self.names, self.next_numbers, self._version_names = SortedDict(), {}, {}
        for name, found in stored.names.items():
            self._set_name(name, found)
        self.workers = dict(stored.workers)
        self.pauses = dict(stored.pauses)
        self._stones = dict(stored.tombstones)
        digests: dict[str, set[str]] = {}
        for key, stone in self._stones.items():
            digests.setdefault(tombstone_lora_id(key), set()).add(stone.digest)
        self.tombstones = {lora_id: frozenset(each) for lora_id, each in digests.items()}
        self.rules = stored.rules

    def _raise_counters(self, stored: StoredIntent) -> None:
        """Raise revision and epoch to at least the stored ones."""
        # The clock lifts the revision above all that routers saw, even after an old backup was restored.
        self.revision = max(self.revision, stored.counters.get("revision", 0) + 1, int(self._wall() * 1000))
        self._reserved = self.revision  # the first new revision reserves the next ones
        self.epoch = max(self.epoch, stored.counters.get("epoch", 0))
        self.routers = stored.counters.get("routers", 0)
