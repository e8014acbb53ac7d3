"""The interface of a store backend: an SQLite file, or ConfigMaps."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from orchestrator.core.pauses import PauseLease
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import ServedName
from orchestrator.model.snapshot import RegisteredAdapter


@dataclass(frozen=True, slots=True)
class WorkerIntent:
    """An operator's order for a worker: cordoned or draining.

    until       Unix time at which a drain stops waiting for moves, at the earliest; None: not computed yet
    since       Unix time of the order; None in orders of older versions
    deadline_s  seconds for moves, as the operator named them; None: they follow what must be moved
    moves       adapters that had to be moved when the drain began, and their bytes; None: not counted yet
    """

    state: str
    until: float | None = None
    since: float | None = None
    deadline_s: float | None = None
    moves: int | None = None
    move_bytes: int = 0


class Tombstone(NamedTuple):
    """A deleted adapter: its digest, and when it was deleted (Unix time)."""

    digest: str
    at: float


def tombstone_key(lora_id: str, digest: str) -> str:
    """The key of the tombstone of one version of an adapter: a name may be deleted with several digests."""
    return f"{lora_id}@{digest}"


def tombstone_lora_id(key: str) -> str:
    """The lora_id of a tombstone with this key. Stores of older versions have the lora_id alone as key."""
    return key.rpartition("@")[0] or key


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredIntent:
    """The whole stored intent, as one read of the backend found it."""

    adapters: Mapping[str, RegisteredAdapter] = field(default_factory=dict)
    names: Mapping[str, ServedName] = field(default_factory=dict)
    workers: Mapping[str, WorkerIntent] = field(default_factory=dict)
    tombstones: Mapping[str, Tombstone] = field(default_factory=dict)
    pauses: Mapping[str, PauseLease] = field(default_factory=dict)
    rules: PlacementPolicy = field(default_factory=PlacementPolicy)
    counters: Mapping[str, int] = field(default_factory=dict)


Table = Literal["adapters", "names", "workers", "tombstones", "pauses", "policy", "counters"]

Subject = tuple[Table, str]
"""The (table, key) of a change."""


class StoreChange(NamedTuple):
    """One row that is written or, with value None, deleted. `value`: as in `StoredIntent`."""

    table: Table
    key: str
    value: RegisteredAdapter | ServedName | WorkerIntent | Tombstone | PauseLease | PlacementPolicy | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One entry of the history. `id` grows; 0 while it is not stored. `at`: Unix time; `actor`: who asked."""

    kind: str
    subject: str
    actor: str
    at: float
    body: Mapping[str, Any] = field(default_factory=dict)
    id: int = 0


class StoreBackend(Protocol):
    """Stores intent and its history. One process at a time writes; any may read."""

    def read(self) -> StoredIntent:
        """The stored intent as known here now. Raises StoreError when it cannot be parsed."""
        ...

    def write(self, changes: Sequence[StoreChange], entries: Sequence[HistoryEntry]) -> None:
        """Store changes and history in this order, all or nothing; durable once `wait_durable` returns.

        Raises StoreError, OrchestratorUnavailable.
        """
        ...

    async def wait_durable(self, about: Collection[Subject] | None = None) -> None:
        """Wait until all changes of these subjects (None: of all) are durable. History may follow seconds later.

        Raises OrchestratorError when one of them was refused; `read` then returns the state without it.
        """
        ...

    async def catch_up(self) -> None:
        """Prepare a term: `read` returns the stored counters from now on, and only this process writes.

        Raises OrchestratorError while the store cannot be reached.
        """
        ...

    @property
    def is_caught_up(self) -> bool:
        """Whether all writes before `catch_up` are known here; no placement is decided before."""
        ...

    @property
    def is_read(self) -> bool:
        """Whether the stored intent has been read at all."""
        ...

    @property
    def trouble(self) -> str:
        """Why no change is written now, and what to do, as far as known; empty: changes are written."""
        ...

    def check(self) -> str:
        """Look whether the store takes writes, and set `trouble`. Returns what was mended, in words; mostly ""."""
        ...

    def end_term(self) -> None:
        """End our term: give up writes that are not durable yet, and refuse further ones until `catch_up`."""
        ...

    def history(
        self, *, kinds: Sequence[str] = (), subject: str | None = None, before: int | None = None, limit: int
    ) -> list[HistoryEntry]:
        """History entries, newest first, with ids below `before`, of these kinds (empty: all)."""
        ...

    @property
    def backup_name(self) -> str:
        """Name for the file that `backup` makes, with its suffix."""
        ...

    def backup(self, path: Path) -> None:
        """Write a copy of the store to a new path while it is in use. Raises StoreError, also if the path exists."""
        ...

    def close(self) -> None:
        """Close the backend; writes that are not durable yet are given up."""
        ...
