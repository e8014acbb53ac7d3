"""The interface of a store backend: an SQLite file, a PostgreSQL database, or ConfigMaps."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from orchestrator.model.history import HistoryEntry
from orchestrator.model.ledger import UsageBatch, UsageQuery, UsageRows
from orchestrator.store.ledger_rows import LedgerText
from orchestrator.store.tables import StoreChange, StoredRows, Subject


class HistoryText(NamedTuple):
    """A history entry as it is stored; `body` is JSON."""

    id: int
    at: float
    kind: str
    subject: str
    actor: str
    body: str


class StoreText(NamedTuple):
    """What a store holds, as text: one store hands it to another.

    rows     table, key and JSON of each row, with those of unknown tables; None: as they are known
    history  in the order of their ids
    ledger   its rows and sources
    """

    rows: Sequence[tuple[str, str, str]] | None
    history: Sequence[HistoryText]
    ledger: LedgerText = LedgerText()


class StoreBackend(Protocol):
    """Stores intent and its history. One process at a time writes; any may read."""

    def read(self) -> StoredRows:
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

    async def write_remaining(self) -> None:
        """Write everything pending, history included, within seconds. For an orderly end of a term."""
        ...

    def history(
        self, *, kinds: Sequence[str] = (), subject: str | None = None, before: int | None = None, limit: int
    ) -> list[HistoryEntry]:
        """History entries, newest first, with ids below `before`, of these kinds (empty: all)."""
        ...

    @property
    def has_ledger(self) -> bool:
        """Whether it keeps usage; else `add_usage` drops it, and `usage` raises StateConflict."""
        ...

    async def add_usage(self, batches: Sequence[UsageBatch], now: float) -> UsageRows:
        """Add batches to the ledger, each once; durable on return. Those of one source come in their order.

        Returns the rows that were added: without batches that the ledger had. Raises OrchestratorError; then all or
        none are written, and they come again.
        """
        ...

    async def usage(self, query: UsageQuery) -> UsageRows:
        """The ledger's rows, added up as the query says. Raises OrchestratorError, also for too many rows."""
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
