"""Where intent is kept: the one interface that a file, or a cluster's own objects, has to offer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from orchestrator.core.rollout import Rollout, Targets
from orchestrator.core.state import PlacementPolicy, RegisteredAdapter


@dataclass(frozen=True, slots=True)
class WorkerIntent:
    """cordoned or draining; `until`: Unix time at which a drain stops waiting for moves."""

    state: str
    until: float | None = None


class Tombstone(NamedTuple):
    """An adapter that was deleted: its bytes, and when (Unix time)."""

    digest: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredIntent:
    """Everything that was asked for, as one reading of the backend found it."""

    adapters: Mapping[str, RegisteredAdapter] = field(default_factory=dict)
    aliases: Mapping[str, Targets] = field(default_factory=dict)
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    workers: Mapping[str, WorkerIntent] = field(default_factory=dict)
    tombstones: Mapping[str, Tombstone] = field(default_factory=dict)
    rules: PlacementPolicy = field(default_factory=PlacementPolicy)
    counters: Mapping[str, int] = field(default_factory=dict)


Table = Literal["adapters", "aliases", "rollouts", "workers", "tombstones", "policy", "counters"]

Subject = tuple[Table, str]
"""What a change is about: a table, and a key in it as `StoreChange` has it."""


class StoreChange(NamedTuple):
    """One thing written, or with None taken away. `value` is what `StoredIntent` has under that name and key."""

    table: Table
    key: str
    value: RegisteredAdapter | Targets | Rollout | WorkerIntent | Tombstone | PlacementPolicy | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One line of the history. `id` grows; 0 while it is not stored. `at` is Unix time, `actor` who asked."""

    kind: str
    subject: str
    actor: str
    at: float
    body: Mapping[str, Any] = field(default_factory=dict)
    id: int = 0


class StoreBackend(Protocol):
    """Keeps intent and its history. Only one process at a time writes; any may read."""

    def read(self) -> StoredIntent:
        """Everything, as far as it is known here now. Raises StoreError when it cannot be understood."""
        ...

    def write(self, changes: Sequence[StoreChange], entries: Sequence[HistoryEntry]) -> None:
        """Store changes and history in this order, all or nothing; durable once `saved` returns.

        Raises StoreError, OrchestratorUnavailable.
        """
        ...

    async def saved(self, about: Collection[Subject] | None = None) -> None:
        """Until all that was written about these (None: about anything) is durable, one by one or all together.

        Raises OrchestratorError when something of that was not to be: `read` then knows nothing of it any more. The
        history may follow some seconds later.
        """
        ...

    async def catch_up(self) -> None:
        """Before a term: from now on `read` knows the counters as they are stored, and `write` is ours alone.

        Raises OrchestratorError while the store cannot be reached.
        """
        ...

    @property
    def is_caught_up(self) -> bool:
        """Whether everything that anybody wrote before `catch_up` is known: before that nothing may be decided."""
        ...

    @property
    def is_read(self) -> bool:
        """Whether `read` has anything to say yet."""
        ...

    def end_term(self) -> None:
        """End our term: give up writes that are not durable yet."""
        ...

    def history(
        self, *, kinds: Sequence[str] = (), subject: str | None = None, before: int | None = None, limit: int
    ) -> list[HistoryEntry]:
        """Newest first, below the id `before`; of these kinds (none named: all)."""
        ...

    @property
    def backup_name(self) -> str:
        """Of the file that `backup` makes; its ending says what it is."""
        ...

    def backup(self, path: Path) -> None:
        """A whole copy at a new path, made while it is in use. Raises StoreError, also when something is there."""
        ...

    def close(self) -> None: ...
