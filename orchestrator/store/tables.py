"""The stored tables. The store is (table, key, JSON): a backend knows neither what a row is nor which tables there are.

A new field of a stored resource needs no change here. A new table is one entry of `TABLES`.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from sortedcontainers import SortedDict  # type: ignore[import-untyped]

from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.pauses import PauseLease
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import ServedName
from orchestrator.model.snapshot import WorkerIntent

R = TypeVar("R")


class Tombstone(NamedTuple):
    """A deleted adapter: its digest, and when it was deleted (Unix time)."""

    digest: str
    at: float


def tombstone_key(lora_id: str, digest: str) -> str:
    """The key of the tombstone of one version of an adapter: a name may be deleted with several digests."""
    return f"{lora_id}@{digest}"


def tombstone_lora_id(key: str) -> str:
    """The lora_id of a tombstone with this key."""
    return key.rpartition("@")[0]


@dataclass(frozen=True, slots=True)
class Table(Generic[R]):
    """One stored table.

    noun          what a row is, for messages
    row           type of a row, as msgspec decodes it
    is_backed_up  whether a backup has its rows: a restored store must not remove or shift anything
    """

    name: str
    noun: str
    row: Any
    is_backed_up: bool = True

    def encode(self, row: R) -> str:
        """The row as JSON text. Raises TypeError or ValueError for a value that is no JSON."""
        return msgspec.json.encode(row).decode()

    def decode(self, text: str, key: str) -> R:
        """The row from its JSON text; unknown fields are dropped. Raises ValueError, which names row and place."""
        try:
            row: R = msgspec.json.decode(text, type=self.row)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise ValueError(f"{self.noun} {key!r}: {exc}" if key else f"{self.noun}: {exc}") from exc
        return row


ADAPTERS: Table[RegisteredAdapter] = Table("adapters", "adapter", RegisteredAdapter)
NAMES: Table[ServedName] = Table("names", "name", ServedName)
WORKERS: Table[WorkerIntent] = Table("workers", "worker", WorkerIntent)
TOMBSTONES: Table[Tombstone] = Table("tombstones", "deletion of", Tombstone, is_backed_up=False)
PAUSES: Table[PauseLease] = Table("pauses", "pause", PauseLease, is_backed_up=False)
POLICY: Table[PlacementPolicy] = Table("policy", "policy", PlacementPolicy)
COUNTERS: Table[int] = Table("counters", "counter", int)

TABLES: Mapping[str, Table[Any]] = {
    table.name: table for table in (ADAPTERS, NAMES, WORKERS, TOMBSTONES, PAUSES, POLICY, COUNTERS)
}

Subject = tuple[str, str]
"""(table, key) of a row."""


class StoreChange(NamedTuple):
    """One row that is written or, with None, deleted. `row` has the type of its table."""

    table: str
    key: str
    row: Any


class StoredRows:
    """The rows of all tables, each by key and in the order of keys."""

    def __init__(self, tables: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._tables: dict[str, SortedDict] = {name: SortedDict(rows) for name, rows in (tables or {}).items()}

    def of(self, table: Table[R]) -> MutableMapping[str, R]:
        """The rows of a table: the ones kept here, no copy."""
        rows: MutableMapping[str, R] = self._tables.setdefault(table.name, SortedDict())
        return rows

    def replace(self, table: Table[R], rows: Mapping[str, R]) -> None:
        """Have these rows in the table, and no others."""
        self._tables[table.name] = SortedDict(rows)

    def apply(self, changes: Iterable[StoreChange]) -> None:
        """Write and delete rows."""
        for change in changes:
            rows = self._tables.setdefault(change.table, SortedDict())
            if change.row is None:
                rows.pop(change.key, None)
            else:
                rows[change.key] = change.row


def backup_rows(stored: StoredRows) -> StoredRows:
    """The rows of a backup, without deletions, drains, rollouts and pauses.

    A restored store must not remove or shift anything: an adapter deleted then may be registered again by now.
    """
    kept = StoredRows({name: stored.of(table) for name, table in TABLES.items() if table.is_backed_up})
    for lora_id, adapter in stored.of(ADAPTERS).items():
        if adapter.is_deleting:
            kept.of(ADAPTERS)[lora_id] = replace(adapter, is_deleting=False)
    for key, name in stored.of(NAMES).items():
        kept.of(NAMES)[key] = replace(name, rollout=None)
    for worker_id, intent in stored.of(WORKERS).items():
        if intent.state == "draining":
            del kept.of(WORKERS)[worker_id]
        if intent.state == "draining" and intent.kept_out:
            kept.of(WORKERS)[worker_id] = WorkerIntent(since=intent.since, kept_out=intent.kept_out)
    return kept
