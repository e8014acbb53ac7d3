"""What was asked for: adapters, aliases, rollouts, policy, workers' cordons, tombstones, history, and two counters.

Nothing that was observed is stored. All but the history is also kept in memory, so reads never touch the backend, and
writes are known here at once. Whoever promises somebody that a write stands awaits `saved` first; so does whoever acts.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from sortedcontainers import SortedDict  # type: ignore[import-untyped]

from orchestrator.core.errors import OrchestratorUnavailable
from orchestrator.core.rollout import Rollout, Targets
from orchestrator.core.state import Intent, PlacementPolicy, RegisteredAdapter
from orchestrator.store.backend import (
    HistoryEntry,
    StoreBackend,
    StoreChange,
    StoredIntent,
    Subject,
    Tombstone,
    WorkerIntent,
)
from orchestrator.store.sqlite import SqliteBackend

_RESERVED = 1000
"""Revisions taken from the backend at a time; what is not used by the time of a crash is skipped."""

NOBODY = "lorafleet"
"""The actor of what the orchestrator does on its own."""

KINDS = (
    "adapter_registered", "adapter_adopted", "adapter_changed", "adapter_deleted", "adapter_retried",
    "alias_set", "alias_deleted", "alias_rollout", "policy_changed",
    "worker_cordoned", "worker_draining", "worker_uncordoned", "load", "drain", "unload",
)  # fmt: skip
"""What a line of history may be about."""


class IntentStore:
    """The intent. Raises StoreError when the backend is no store of ours, damaged, or of a newer version."""

    def __init__(self, where: Path | str | StoreBackend, *, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._backend: StoreBackend = SqliteBackend(where) if isinstance(where, Path | str) else where
        self._depth = 0
        self._changes: list[StoreChange] = []
        self._entries: list[HistoryEntry] = []
        self.adapters: MutableMapping[str, RegisteredAdapter] = SortedDict()
        self.aliases: MutableMapping[str, Targets] = SortedDict()
        self.rollouts: dict[str, Rollout] = {}
        self.workers: dict[str, WorkerIntent] = {}
        self.tombstones: dict[str, str] = {}
        self._deleted_at: dict[str, float] = {}
        self.rules = PlacementPolicy()
        self.writes = 0  # how often intent was written here
        self.epoch = self.revision = self._reserved = 0
        try:
            stored = self._backend.read()
        except BaseException:
            self._backend.close()
            raise
        self._take(stored)
        self._count_on(stored)

    def close(self) -> None:
        self._backend.close()

    async def catch_up(self) -> None:
        """Before a term begins: what another process may have written is there to be read. Raises OrchestratorError."""
        await self._backend.catch_up()

    def reload(self) -> None:
        """Read again what another process may have written, as a standby does before it leads. Raises StoreError.

        The epoch is then at least the stored one; whoever takes the lead raises it above that.
        """
        stored = self._backend.read()
        self._take(stored)
        self._count_on(stored)

    def refresh(self) -> None:
        """Read the stored intent again and write nothing. Raises StoreError, OrchestratorUnavailable."""
        if not self._backend.is_read:
            raise OrchestratorUnavailable("the store has not been read yet", code="starting")
        self._take(self._backend.read())

    async def saved(self, about: Collection[Subject] | None = None) -> None:
        """Until all that was written up to now about these (None: about anything) is durable.

        Raises OrchestratorError when something of that was not to be.
        """
        await self._backend.saved(about)

    def end_term(self) -> None:
        """End our term: give up writes that are not durable yet."""
        self._backend.end_term()

    @property
    def is_read(self) -> bool:
        """Whether the backend has been read at all."""
        return self._backend.is_read

    @property
    def is_caught_up(self) -> bool:
        """Whether all is known that was written before our term; until then nothing may be decided."""
        return self._backend.is_caught_up

    @property
    def backup_name(self) -> str:
        return self._backend.backup_name

    def backup(self, path: Path) -> None:
        """A copy at a new path, without what would take anything from a fleet. Raises StoreError."""
        self._backend.backup(path)

    @property
    def intent(self) -> Intent:
        return Intent(adapters=self.adapters, tombstones=self.tombstones)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Writes in here go to the backend together. None of them is known to anybody if this raises. May be nested."""
        self._depth += 1
        try:
            yield
            if self._depth == 1 and (self._changes or self._entries):
                self._backend.write(self._changes, self._entries)
                self.writes += any(change.table != "counters" for change in self._changes)
        except BaseException:
            self._changes, self._entries = [], []
            self._take(self._backend.read())  # memory must not know what the backend does not
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._changes, self._entries = [], []

    def record(self, kind: str, subject: str, body: Mapping[str, Any] | None = None, actor: str = NOBODY) -> None:
        """A line of history: what happened to what, and who asked. `body` is JSON."""
        assert kind in KINDS, kind
        with self.together():
            self._entries.append(
                HistoryEntry(kind=kind, subject=subject, actor=actor, at=self._wall(), body=dict(body or {}))
            )

    def history(
        self, *, kinds: Sequence[str] = (), subject: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[HistoryEntry]:
        """Newest first, below the id `before`; of these kinds (none named: all)."""
        return self._backend.history(kinds=kinds, subject=subject, before=before, limit=limit)

    @property
    def adapter_ids(self) -> Sequence[str]:
        """All lora_ids in order; indexing and bisecting it copies nothing."""
        return cast("Sequence[str]", self.adapters.keys())

    @property
    def alias_names(self) -> Sequence[str]:
        return cast("Sequence[str]", self.aliases.keys())

    def next_revision(self) -> int:
        """One more than ever before, over restarts too."""
        self.revision += 1
        if self.revision >= self._reserved:
            self._reserved = self.revision + _RESERVED
            with self.together():
                self._put("counters", "revision", self._reserved)
        return self.revision

    def raise_epoch(self, above: int) -> None:
        """Some agent has obeyed this epoch, so ours must be higher."""
        if above >= self.epoch:
            self.epoch = above + 1
            with self.together():
                self._put("counters", "epoch", self.epoch)

    def put_adapter(self, adapter: RegisteredAdapter) -> None:
        """Insert or replace. A registration takes back an earlier deletion of the same name."""
        with self.together():
            self._put("adapters", adapter.lora_id, adapter)
            self.adapters[adapter.lora_id] = adapter
            if not adapter.is_deleting and self.tombstones.pop(adapter.lora_id, None) is not None:
                self._put("tombstones", adapter.lora_id, None)

    def compare_and_set(self, seen: RegisteredAdapter, adapter: RegisteredAdapter) -> bool:
        """Replace the adapter only if nobody has changed it since it was seen."""
        if self.adapters.get(seen.lora_id) is not seen:
            return False
        self.put_adapter(adapter)
        return True

    def drop_adapter(self, lora_id: str) -> None:
        """The row goes, a tombstone stays: a worker that comes back with this adapter still has to give it up."""
        with self.together():
            adapter = self.adapters.pop(lora_id)
            self._put("adapters", lora_id, None)
            if adapter.digest is not None:
                stone = Tombstone(adapter.digest, self._wall())
                self._put("tombstones", lora_id, stone)
                self.tombstones[lora_id], self._deleted_at[lora_id] = stone

    def bury(self, lora_id: str, digest: str | None, actor: str) -> None:
        """Somebody deleted it where it is kept, and nobody saw that: whoever still holds these bytes gives them up."""
        with self.together():
            if digest is not None:
                stone = Tombstone(digest, self._wall())
                self._put("tombstones", lora_id, stone)
                self.tombstones[lora_id], self._deleted_at[lora_id] = stone
            self.record("adapter_deleted", lora_id, {"digest": digest}, actor)

    def absorb(self, change: StoreChange) -> None:
        """The backend has this from somebody who led before us: known from now on, and written already."""
        match change.value:
            case RegisteredAdapter() as adapter:
                self.adapters[change.key] = adapter
            case PlacementPolicy() as rules:
                self.rules = rules
            case Rollout() as rollout:
                self.rollouts[change.key] = rollout
            case targets:
                self.aliases[change.key] = cast("Targets", targets)
        self.writes += 1

    def expire_tombstones(self, kept_s: float) -> None:
        oldest = self._wall() - kept_s
        with self.together():
            for lora_id in [name for name in self.tombstones if self._deleted_at[name] < oldest]:
                self._put("tombstones", lora_id, None)
                del self.tombstones[lora_id]

    def put_alias(self, name: str, targets: Targets) -> None:
        with self.together():
            self._put("aliases", name, targets)
            self.aliases[name] = targets

    def drop_alias(self, name: str) -> None:
        with self.together():
            self._put("aliases", name, None)
            del self.aliases[name]
            self.put_rollout(name, None)

    def put_rollout(self, alias: str, rollout: Rollout | None) -> None:
        """Where an alias's rollout stands; None forgets it."""
        with self.together():
            if rollout is None:
                if self.rollouts.pop(alias, None) is not None:
                    self._put("rollouts", alias, None)
            else:
                self._put("rollouts", alias, rollout)
                self.rollouts[alias] = rollout

    def put_rules(self, rules: PlacementPolicy) -> None:
        with self.together():
            self._put("policy", "", rules)
            self.rules = rules

    def put_worker(self, worker_id: str, intent: WorkerIntent | None) -> None:
        """Cordon or drain; None takes that back."""
        with self.together():
            self._put("workers", worker_id, intent)
            if intent is None:
                self.workers.pop(worker_id, None)
            else:
                self.workers[worker_id] = intent

    def _put(self, *change: Any) -> None:
        self._changes.append(StoreChange(*change))

    def _take(self, stored: StoredIntent) -> None:
        self.adapters = SortedDict(stored.adapters)
        self.aliases = SortedDict(stored.aliases)
        self.rollouts = dict(stored.rollouts)
        self.workers = dict(stored.workers)
        self.tombstones = {lora_id: stone.digest for lora_id, stone in stored.tombstones.items()}
        self._deleted_at = {lora_id: stone.at for lora_id, stone in stored.tombstones.items()}
        self.rules = stored.rules

    def _count_on(self, stored: StoredIntent) -> None:
        # The clock lifts the revision above everything routers saw, even when the backend is an old copy put back.
        self.revision = max(self.revision, stored.counters.get("revision", 0) + 1, int(self._wall() * 1000))
        self._reserved = self.revision  # the first that is needed reserves, and writes that down
        self.epoch = max(self.epoch, stored.counters.get("epoch", 0))
