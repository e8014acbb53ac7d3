"""Stored intent: adapters, served names, pauses, policy, workers' cordons, tombstones, history, three counters.

Observed state is not stored. All but the history is also in memory: reads never touch the backend, and writes are
visible at once. Await `wait_durable` before you promise a caller that a write is durable, and before you act on it.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from orchestrator.core.errors import OrchestratorUnavailable
from orchestrator.core.incidents import KINDS_OF_INCIDENTS
from orchestrator.model.adapter_index import adapter_index
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.history import HistoryEntry
from orchestrator.model.pauses import PauseLease
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import Publication, ServedName, Targets, is_retired_version
from orchestrator.model.snapshot import Intent, WorkerIntent
from orchestrator.store.backend import StoreBackend
from orchestrator.store.sqlite import SqliteBackend
from orchestrator.store.tables import (
    ADAPTERS,
    COUNTERS,
    NAMES,
    PAUSES,
    POLICY,
    TABLES,
    TOMBSTONES,
    WORKERS,
    StoreChange,
    StoredRows,
    Subject,
    Table,
    Tombstone,
    tombstone_key,
    tombstone_lora_id,
)

R = TypeVar("R")

MOST_TOMBSTONES = 20_000
"""Tombstones kept; of more the oldest go, some at a time. A trainer that names each step anew deletes one a step."""
_TOMBSTONES_SPARE = 500

_TOMBSTONE_RENEWED_S = 86_400.0

_RESERVED = 1000
"""Revisions reserved in the backend at a time; unused ones are skipped after a crash."""

NOBODY = "lorafleet"
"""The actor of the orchestrator's own actions."""

_USUAL_RULES = PlacementPolicy()

KINDS = (
    "adapter_registered", "adapter_adopted", "adapter_changed", "adapter_deleted", "adapter_retried",
    "alias_set", "alias_deleted", "alias_rollout", "name_published", "name_deleted", "policy_changed",
    "worker_cordoned", "worker_draining", "worker_uncordoned", "copy_kept_out", "copy_allowed",
    "load", "drain", "unload", *KINDS_OF_INCIDENTS,
)  # fmt: skip
"""The kinds of history entries."""


class IntentStore:
    """The stored intent. Raises StoreError when the backend is no store of ours, damaged, or of another layout."""

    def __init__(self, where: Path | str | StoreBackend, *, wall: Callable[[], float] = time.time) -> None:
        """Open the backend (a path: an SQLite file) and read the stored intent. Raises StoreError."""
        self._wall = wall
        self._backend: StoreBackend = SqliteBackend(where) if isinstance(where, Path | str) else where
        self._depth = 0
        self._changes: list[StoreChange] = []
        self._entries: list[HistoryEntry] = []
        self._is_undone = False
        self.writes = 0  # number of changes of intent
        self.adapters: MutableMapping[str, RegisteredAdapter] = {}
        self.changed_adapters: set[str] = set()
        """Adapters that were written, deleted or concerned by a policy since the catalog took them over, which takes
        them out."""
        self._tenants: tuple[int, frozenset[str]] = (-1, frozenset())  # `writes` then, and `tenants`
        self.epoch = self.revision = self.routers = self._reserved = 0
        try:
            self.reload()
        except BaseException:
            self._backend.close()
            raise

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
        self._use_rows(stored)
        self._raise_counters(stored.of(COUNTERS))

    def refresh(self) -> None:
        """Replace the intent in memory by the stored one. Raises StoreError, OrchestratorUnavailable."""
        if not self._backend.is_read:
            raise OrchestratorUnavailable("the store has not been read yet", code="starting")
        self._use_rows(self._backend.read())

    async def wait_durable(self, about: Collection[Subject] | None = None) -> None:
        """Wait until all changes of these subjects (None: of all) are durable.

        Raises OrchestratorError when one of them was refused.
        """
        await self._backend.wait_durable(about)

    def end_term(self) -> None:
        """End our term: give up writes that are not durable yet."""
        self._backend.end_term()

    async def write_remaining(self) -> None:
        """Write everything pending, history included, within seconds. For an orderly end of a term."""
        await self._backend.write_remaining()

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
        return Intent(
            adapters=self.adapters,
            tombstones=self.tombstones,
            next_numbers=self.next_numbers,
            known_index=self._adapter_index,
        )

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
                self.writes += any(change.table != COUNTERS.name for change in self._changes)
        except BaseException:
            self._changes, self._entries, self._is_undone = [], [], True
            self._use_rows(self._backend.read())  # memory must agree with the backend
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
    def rules(self) -> PlacementPolicy:
        """The global policy."""
        return self._rows.of(POLICY).get("", _USUAL_RULES)

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
            self._put(COUNTERS, "revision", self._reserved)
        return self.revision

    def raise_epoch(self, above: int) -> None:
        """Raise our epoch above this one, which an agent has obeyed, and store it; unchanged if it is above already."""
        if above >= self.epoch:
            self.epoch = above + 1
            self._put(COUNTERS, "epoch", self.epoch)

    def put_routers(self, count: int) -> None:
        """Store how many routers follow this leader, for the next one. No-op for the stored number."""
        if count != self.routers:
            self._put(COUNTERS, "routers", count)
            self.routers = count

    def put_adapter(self, adapter: RegisteredAdapter) -> None:
        """Insert or replace the adapter, and drop the tombstone of its bytes. Those of its other versions stay."""
        with self.together():
            self._put(ADAPTERS, adapter.lora_id, adapter)
            if not adapter.is_deleting and adapter.digest is not None:
                self._put(TOMBSTONES, tombstone_key(adapter.lora_id, adapter.digest), None)

    def compare_and_set(self, seen: RegisteredAdapter, adapter: RegisteredAdapter) -> bool:
        """Replace the adapter if it is unchanged since it was read as `seen`; returns whether it was."""
        if self.adapters.get(seen.lora_id) is not seen:
            return False
        self.put_adapter(adapter)
        return True

    def drop_adapter(self, lora_id: str) -> None:
        """Delete the adapter and leave a tombstone, so that a worker that comes back with it unloads it.

        Without a known digest there is no tombstone, but for an adopted adapter, which its worker still names. Nor is
        there one for a version of a published name, whose number is used.
        """
        with self.together():
            adapter = self.adapters[lora_id]
            self._put(ADAPTERS, lora_id, None)
            for worker_id, order in list(self.workers.items()):
                if lora_id in order.kept_out:  # the name may be registered again, for other bytes
                    self.put_worker(worker_id, order.with_kept_out({*order.kept_out} - {lora_id}))
            digest = "" if adapter.is_adopted and adapter.digest is None else adapter.digest
            if digest is not None and not is_retired_version(lora_id, self.next_numbers, self.adapters):
                self.put_tombstone(lora_id, digest)

    def forget_adapter(self, lora_id: str, why: str) -> None:
        """Delete an adapter that is left nowhere, with a history entry. No tombstone: its worker may come back."""
        with self.together():
            self.record("adapter_deleted", lora_id, {"digest": self.adapters[lora_id].digest, "why": why}, NOBODY)
            self._put(ADAPTERS, lora_id, None)

    def put_tombstone(self, lora_id: str, digest: str) -> None:
        """Store that workers must unload this version of the adapter, also those that are away now."""
        with self.together():
            self._put(TOMBSTONES, tombstone_key(lora_id, digest), Tombstone(digest, self._wall()))
            stones = self._rows.of(TOMBSTONES)
            if len(stones) >= MOST_TOMBSTONES + _TOMBSTONES_SPARE:
                oldest = sorted(stones, key=lambda key: stones[key].at)[:-MOST_TOMBSTONES]
                for old in oldest:
                    self._put(TOMBSTONES, old, None)

    def renew_tombstone(self, lora_id: str, digest: str) -> None:
        """Remember a deletion longer, because a worker still names the deleted version. Once a day; else a no-op."""
        stone = self._rows.of(TOMBSTONES).get(tombstone_key(lora_id, digest))
        if stone is not None and self._wall() - stone.at >= _TOMBSTONE_RENEWED_S:
            self.put_tombstone(lora_id, digest)

    def record_deletion(self, lora_id: str, digest: str | None, actor: str) -> None:
        """Leave a tombstone and a history entry for an adapter whose object was deleted while no orchestrator led."""
        with self.together():
            if digest is not None:
                self.put_tombstone(lora_id, digest)
            self.record("adapter_deleted", lora_id, {"digest": digest}, actor)

    def absorb(self, change: StoreChange) -> None:
        """Take a change of an earlier leader into memory, and count it as a write; the backend has it already."""
        self._set_row(TABLES[change.table], change.key, change.row)
        self.writes += 1

    def expire_tombstones(self, kept_s: float) -> None:
        """Delete tombstones older than `kept_s` seconds: workers that return later keep those adapters as orphans."""
        oldest = self._wall() - kept_s
        with self.together():
            for key in [key for key, stone in self._rows.of(TOMBSTONES).items() if stone.at < oldest]:
                self._put(TOMBSTONES, key, None)

    def put_name(self, name: ServedName) -> None:
        """Store a served name: its targets, rollout, versions and retention."""
        self._put(NAMES, name.name, name)

    def drop_name(self, name: str) -> None:
        """Delete the name with all that belongs to it. No-op for a name that is not there."""
        self._put(NAMES, name, None)

    def put_rules(self, rules: PlacementPolicy) -> None:
        """Store the global policy."""
        self._put(POLICY, "", rules)

    def put_worker(self, worker_id: str, intent: WorkerIntent | None) -> None:
        """Store an operator's order for a worker; None takes it back."""
        self._put(WORKERS, worker_id, intent)

    def put_pause(self, key: str, lease: PauseLease | None) -> None:
        """Store a pause under the key of its scope; None ends it."""
        self._put(PAUSES, key, lease)

    def published_as(self, lora_id: str) -> str | None:
        """The published name that the adapter is a version of; None for any other adapter."""
        return self._version_names.get(lora_id)

    def dropped_digests(self) -> frozenset[str]:
        """Digests of deleted adapters and retired versions that no registered adapter has."""
        retired = (name.published.dropped for name in self.names.values() if name.published is not None)
        found = frozenset().union(*self.tombstones.values(), *retired)
        return found - {adapter.digest for adapter in self.adapters.values() if not adapter.is_deleting}

    def _put(self, table: Table[R], key: str, row: R | None) -> None:
        """Write a row in memory, and with the outermost `together` block in the backend; None deletes it."""
        with self.together():
            if row is not None or key in self._rows.of(table):
                self._changes.append(StoreChange(table.name, key, row))
                self._set_row(table, key, row)

    def _set_row(self, table: Table[R], key: str, row: R | None) -> None:
        """Write or delete a row in memory, with the indices of its table."""
        before = self._rows.of(table).get(key)
        self._rows.apply([StoreChange(table.name, key, row)])
        for each in (before, row):
            if isinstance(each, ServedName) and each.published is not None:
                self._index_versions(key, each.published, is_there=each is row)
            elif isinstance(each, Tombstone):
                self._index_tombstone(key, each, is_there=each is row)
        if isinstance(row, PlacementPolicy):
            self.changed_adapters.update(self.adapters)  # acceptance
        if isinstance(before, RegisteredAdapter):
            self._adapter_index.remove(before)
            self.changed_adapters.add(key)
        if isinstance(row, RegisteredAdapter):
            self._adapter_index.add(row)
            self.changed_adapters.add(key)

    def _index_versions(self, name: str, published: Publication, *, is_there: bool) -> None:
        """Add the versions of a published name to the indices, or take them out."""
        if is_there:
            self.next_numbers[name] = published.next_number
            self._version_names |= dict.fromkeys(published.lora_ids, name)
        else:
            self.next_numbers.pop(name, None)
            for lora_id in published.lora_ids:
                self._version_names.pop(lora_id, None)

    def _index_tombstone(self, key: str, stone: Tombstone, *, is_there: bool) -> None:
        """Add the digest of a deleted version to the index, or take it out."""
        lora_id = tombstone_lora_id(key)
        digests = self.tombstones.pop(lora_id, frozenset())
        digests = digests | {stone.digest} if is_there else digests - {stone.digest}
        if digests:
            self.tombstones[lora_id] = digests

    def _use_rows(self, stored: StoredRows) -> None:
        """Replace the intent in memory by the stored one; counters stay."""
        self._rows = stored
        self.changed_adapters.update(self.adapters)
        self.adapters = stored.of(ADAPTERS)
        self.changed_adapters.update(self.adapters)
        self.names: MutableMapping[str, ServedName] = stored.of(NAMES)
        self.workers: MutableMapping[str, WorkerIntent] = stored.of(WORKERS)
        self.pauses: MutableMapping[str, PauseLease] = stored.of(PAUSES)  # by the key of their scope
        self._adapter_index = adapter_index(self.adapters)
        self._tenants = (-1, frozenset())
        self.next_numbers: dict[str, int] = {}  # published name -> number of its next version
        self._version_names: dict[str, str] = {}  # lora_id of a version -> its published name
        for key, name in self.names.items():
            if name.published is not None:
                self._index_versions(key, name.published, is_there=True)
        self.tombstones: dict[str, frozenset[str]] = {}  # lora_id -> digests of its deleted versions
        for key, stone in stored.of(TOMBSTONES).items():
            self._index_tombstone(key, stone, is_there=True)

    def _raise_counters(self, counters: Mapping[str, int]) -> None:
        """Raise revision and epoch to at least the stored ones."""
        # The clock lifts the revision above all that routers saw, even after an old backup was restored.
        self.revision = max(self.revision, counters.get("revision", 0) + 1, int(self._wall() * 1000))
        self._reserved = self.revision  # the first new revision reserves the next ones
        self.epoch = max(self.epoch, counters.get("epoch", 0))
        self.routers = counters.get("routers", 0)
