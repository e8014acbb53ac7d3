"""Where intent is kept: the one interface that a file, or a cluster's own objects, has to offer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from orchestrator.core.rollout import Rollout, Targets
from orchestrator.core.state import Adapter, Rules


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
class Stored:
    """Everything that was asked for, as one reading of the backend found it."""

    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    aliases: Mapping[str, Targets] = field(default_factory=dict)
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    workers: Mapping[str, WorkerIntent] = field(default_factory=dict)
    tombstones: Mapping[str, Tombstone] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    counters: Mapping[str, int] = field(default_factory=dict)


Table = Literal["adapters", "aliases", "rollouts", "workers", "tombstones", "policy", "counters"]


class Change(NamedTuple):
    """One thing written, or with None taken away. `value` is what `Stored` has under that name and key."""

    table: Table
    key: str
    value: Adapter | Targets | Rollout | WorkerIntent | Tombstone | Rules | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the history. `id` grows; 0 while it is not stored. `at` is Unix time, `actor` who asked."""

    kind: str
    subject: str
    actor: str
    at: float
    body: Mapping[str, Any] = field(default_factory=dict)
    id: int = 0


class Backend(Protocol):
    """Keeps intent and its history. Only one process at a time writes; any may read."""

    def read(self) -> Stored:
        """Everything. Raises StoreError when it cannot be understood."""
        ...

    def write(self, changes: Sequence[Change], entries: Sequence[Entry]) -> None:
        """All of it or none; durable when the call returns. Raises StoreError."""
        ...

    def history(
        self, *, kinds: Sequence[str] = (), subject: str | None = None, before: int | None = None, limit: int
    ) -> list[Entry]:
        """Newest first, below the id `before`; of these kinds (none named: all)."""
        ...

    def backup(self, path: Path) -> None:
        """A whole copy at a new path, made while it is in use. Raises StoreError, also when something is there."""
        ...

    def close(self) -> None: ...
