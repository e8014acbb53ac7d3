"""The store backend in a PostgreSQL database: reads come from a copy in memory, writes go over the network in order."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import structlog

from lorafleet.service.loops import backoff_s
from orchestrator.core.errors import OrchestratorError, OrchestratorUnavailable, StoreError
from orchestrator.core.ledger import hour_of
from orchestrator.model.history import HistoryEntry
from orchestrator.model.ledger import UsageBatch, UsageQuery, UsageRows
from orchestrator.postgres.database import DatabaseFault, DatabaseSession
from orchestrator.postgres.rows import (
    TRIM_EVERY,
    DatabaseState,
    TermOver,
    add_usage,
    read_state,
    read_usage,
    write_changes,
)
from orchestrator.store.ledger_rows import USAGE_KEPT_DAYS
from orchestrator.store.sqlite import SqliteBackend
from orchestrator.store.tables import StoreChange, StoredRows, Subject

log = structlog.get_logger()

_FOLLOW_S = 5.0
"""Between a standby's looks at the leader's writes: it reads again before it leads, so only its own reads are older."""
_AGAIN_S = (0.1, 2.0)  # between tries while the database does not answer: the first, the longest
_MOST_TOGETHER = 1000  # changes and history entries in one transaction
_NOT_LEADING = "this orchestrator does not lead, so it writes nothing"
_FINISH_S = 2.0  # a guess: less than a lease and than a pod's grace period


class _QueuedWrite:
    """The changes and history of one `write`, until they are durable or refused."""

    def __init__(self, changes: Sequence[StoreChange], entries: Sequence[HistoryEntry], at: float) -> None:
        self.changes = {(change.table, change.key): change for change in changes}
        self.entries = entries
        self.at = at
        self.error: OrchestratorError | None = None
        self.over = asyncio.Event()

    def settle(self, error: OrchestratorError | None = None) -> None:
        """Record the result, and wake who waits for it."""
        self.error = error
        self.over.set()


@dataclass(slots=True)
class _Term:
    """A term in which this process writes.

    number   the lease's term, which each transaction names
    pending  batches in their order, the oldest first
    refusal  why a batch was refused, until the intent in memory is again what the database holds
    """

    number: int
    pending: list[_QueuedWrite] = field(default_factory=list)
    refusal: OrchestratorError | None = None

    def refuse_all(self, error: OrchestratorError) -> None:
        """Give up what is pending."""
        for batch in self.pending:
            batch.settle(error)
        self.pending.clear()


class PostgresBackend:
    """A `StoreBackend`. `run` sends what is written; without a term it follows what the leader writes.

    A write that the database refuses, or takes no notice of for `give_up_s`, is taken back with all that came after it.

    holder     our name in the lease: only its holder writes
    on_undone  called when writes were taken back: `read` returns the state without them
    trouble    why no change is written now, and what to do; empty: changes are written
    """

    backup_name = "lorafleet.db"

    def __init__(
        self,
        session: DatabaseSession,
        *,
        holder: str,
        on_undone: Callable[[], None],
        give_up_s: float = 30.0,
        history_kept: int = 10_000,
        usage_kept_days: int = USAGE_KEPT_DAYS,
        follow_s: float = _FOLLOW_S,
    ) -> None:
        self._session = session
        self._holder = holder
        self._on_undone = on_undone
        self._give_up_s = give_up_s
        self._history_kept = history_kept
        self._usage_kept_days = usage_kept_days
        self._trimmed_hour = 0  # of the ledger
        self._follow_s = follow_s
        self.trouble = ""
        self.is_read = False
        self._term: _Term | None = None
        self._has_work = asyncio.Event()
        self._counts: Counter[str] = Counter()  # kind -> history entries sent, to trim now and then
        self._copy = SqliteBackend(":memory:", history_kept=history_kept)
        self._writes, self._last_id = -1, 0  # of what the copy holds; -1: all is to be read

    def _forget(self) -> None:
        """Have the next look read all that the database holds."""
        self._writes, self._last_id = -1, 0

    # -- StoreBackend ---------------------------------------------------------------------------------------------

    def read(self) -> StoredRows:
        """The stored intent, with what is pending; nothing before the database was read."""
        return self._copy.read()

    def write(self, changes: Sequence[StoreChange], entries: Sequence[HistoryEntry]) -> None:
        """Apply the changes to the copy at once, and queue them for the database.

        Raises OrchestratorUnavailable unless we lead, and while a refused write is being taken back; StoreError for a
        text that PostgreSQL cannot store.
        """
        term = self._term
        if term is None:
            raise OrchestratorUnavailable(_NOT_LEADING, code="not_leading")
        if term.refusal is not None:
            message = f"the change before this one was refused ({term.refusal}); look, and ask again"
            raise OrchestratorUnavailable(message, code="store_unreachable")
        texts = [change.key for change in changes]
        texts += [text for entry in entries for text in (entry.kind, entry.subject, entry.actor)]
        if bad := next((text for text in texts if "\0" in text), None):
            raise StoreError(f"{bad!r} has a NUL character, which the store cannot hold: name it without")
        numbered = [replace(entry, id=self._last_id + number) for number, entry in enumerate(entries, start=1)]
        self._copy.write(changes, numbered)
        self._last_id += len(numbered)
        term.pending.append(_QueuedWrite(changes, numbered, asyncio.get_running_loop().time()))
        self._has_work.set()

    async def wait_durable(self, about: Collection[Subject] | None = None) -> None:
        """Wait until the writes of these subjects (None: all) are committed. Raises the error of a refused one."""
        term = self._term
        if term is None:
            return
        if term.refusal is not None:
            raise term.refusal
        waited_for = [b for b in term.pending if about is None or not b.changes.keys().isdisjoint(about)]
        for batch in waited_for:
            await batch.over.wait()
            if batch.error is not None:
                raise batch.error

    async def catch_up(self) -> None:
        """Begin a term as the writer: read all that the terms before have written. Raises OrchestratorError.

        The lease is ours by now, so the database refuses what they still send.
        """
        self.end_term()
        try:
            state = await self._look()
        except DatabaseFault as exc:
            self.trouble = str(exc)
            raise _store_error(exc) from exc
        if state.holder is None or state.holder.holder != self._holder:
            raise OrchestratorUnavailable("another orchestrator has taken the lease", code="not_leading")
        await self._copy.catch_up()  # or it would refuse our new epoch, as that of a term after the last one in it
        self._term = _Term(state.holder.term)

    is_caught_up = True
    """What earlier terms wrote is read before a term begins, and the database refuses what they send later."""

    has_ledger = True

    async def add_usage(self, batches: Sequence[UsageBatch], now: float) -> UsageRows:
        """Add batches to the ledger, each once; committed on return. The rows added. Raises OrchestratorError."""
        term, hour = self._term, hour_of(now)
        if term is None:
            raise OrchestratorUnavailable(_NOT_LEADING, code="not_leading")
        trimmed = self._usage_kept_days if hour > self._trimmed_hour else None
        try:
            added = await self._session.call(
                partial(add_usage, term=term.number, batches=batches, now=now, trimmed_to_days=trimmed)
            )
        except TermOver:
            raise OrchestratorUnavailable(_NOT_LEADING, code="not_leading") from None
        except DatabaseFault as exc:
            raise _store_error(exc) from exc
        self._trimmed_hour = hour
        return added

    async def usage(self, query: UsageQuery) -> UsageRows:
        """The database's rows of the ledger, added up as the query says. Raises OrchestratorError."""
        try:
            return await self._session.call(partial(read_usage, query=query))
        except DatabaseFault as exc:
            raise _store_error(exc) from exc

    def end_term(self) -> None:
        """End our term: give up pending writes. Where there are any, the database is read anew before we answer."""
        term, self._term = self._term, None
        if term is not None and (term.pending or term.refusal is not None):
            error = OrchestratorUnavailable(
                "this orchestrator does not lead any more; it may or may not be written", code="not_leading"
            )
            term.refuse_all(error)
            self.is_read = False
            self._forget()
            self._has_work.set()

    def check(self) -> str:
        """Return "": `run` looks whether the database answers, and sets `trouble`."""
        return ""

    def history(
        self, *, kinds: Sequence[str] = (), subject: str | None = None, before: int | None = None, limit: int
    ) -> list[HistoryEntry]:
        """History entries of the copy, newest first, with ids below `before`, of these kinds (empty: all)."""
        return self._copy.history(kinds=kinds, subject=subject, before=before, limit=limit)

    def backup(self, path: Path) -> None:
        """Write the copy as an SQLite file, on which an orchestrator can be started. Raises StoreError."""
        self._copy.backup(path)

    async def write_remaining(self) -> None:
        """Write everything pending, within `_FINISH_S` seconds. For an orderly end of a term."""
        with contextlib.suppress(TimeoutError, OrchestratorError):
            async with asyncio.timeout(_FINISH_S):
                await self.wait_durable()

    def close(self) -> None:
        """End the term and close the connection: pending writes are given up."""
        self.end_term()
        self._session.close()
        self._copy.close()

    # -- beside it ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Read the database once before serving. Raises StoreError for a fault that does not pass by itself."""
        try:
            await self._look()
        except DatabaseFault as exc:
            if not exc.may_pass:
                raise StoreError(f"store: {exc}") from exc
            self.trouble = f"store: {exc}"
            log.warning("store not reached", error=str(exc))

    async def run(self) -> None:
        """Send pending writes, follow a leader's, and try again what failed, until cancelled. Errors are logged."""
        failures = 0
        while True:
            try:
                await self._step()
                failures = 0
            except DatabaseFault as exc:
                failures += 1
                if self.trouble != (trouble := f"store: {exc}"):  # once a problem, not once a try
                    log.warning("store not reached", error=str(exc))
                self.trouble = trouble
            except Exception:
                failures += 1
                log.exception("store step failed")
            if failures:
                await asyncio.sleep(backoff_s(failures, *_AGAIN_S))
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._follow_s):
                    await self._has_work.wait()
            self._has_work.clear()

    async def _step(self) -> None:
        """Send what is pending; without a term, or after a refusal, read the database. Raises DatabaseFault."""
        while (term := self._term) is not None and term.pending:
            await self._send(term)
        if term is not None and term.refusal is not None:
            await self._take_back(term)
        elif term is None or self.trouble:
            await self._look()

    async def _send(self, term: _Term) -> None:
        """Send the oldest batches in one transaction, and settle them. Raises DatabaseFault when that may pass."""
        batches = _first_batches(term.pending)
        changes = {subject: change for batch in batches for subject, change in batch.changes.items()}
        entries = [entry for batch in batches for entry in batch.entries]
        work = partial(
            write_changes,
            term=term.number,
            changes=changes,
            entries=entries,
            trimmed=self._kinds_to_trim(entries),
            history_kept=self._history_kept,
        )
        try:
            await self._session.call(work)
        except TermOver:
            error = "another orchestrator leads; this change was not written: ask again"
            self._refuse(term, OrchestratorUnavailable(error, code="not_leading"))
        except DatabaseFault as exc:
            waited_s = asyncio.get_running_loop().time() - batches[0].at
            if exc.may_pass and waited_s < self._give_up_s:
                raise
            self._refuse(term, _store_error(exc))
        else:
            self.trouble = ""
            for batch in batches:
                batch.settle()
            if self._term is term:
                del term.pending[: len(batches)]
                self._writes += bool(changes)

    def _kinds_to_trim(self, entries: Sequence[HistoryEntry]) -> list[str]:
        """The kinds of these entries that have had `TRIM_EVERY` since they were trimmed."""
        self._counts.update(entry.kind for entry in entries)
        due = [kind for kind in {entry.kind for entry in entries} if self._counts[kind] >= TRIM_EVERY]
        for kind in due:
            self._counts[kind] = 0
        return due

    def _refuse(self, term: _Term, error: OrchestratorError) -> None:
        """Give up what is pending in this term; `_take_back` then reads what the database holds."""
        log.warning("not written", error=str(error), batches=len(term.pending))
        term.refusal = error
        term.refuse_all(error)

    async def _take_back(self, term: _Term) -> None:
        """Replace the copy by what the database holds, and go on writing if the term is still the lease's."""
        self._forget()
        state = await self._look()
        if self._term is not term:
            return
        if state.holder is not None and state.holder == (term.number, self._holder):
            term.refusal = None
        self._on_undone()

    async def _look(self) -> DatabaseState:
        """Bring the copy up to what the database holds, unless we write. Returns its state. Raises DatabaseFault."""
        term = self._term
        while True:
            state = await self._session.call(
                # What is known when the session's turn comes, which may be after another look.
                lambda connection: read_state(connection, known_writes=self._writes, last_id=self._last_id)
            )
            self.trouble = ""
            if self._term is not term or (term is not None and term.refusal is None):
                return state
            self._take_over(state)
            if state.is_rest:
                self.is_read = True
                return state

    def _take_over(self, state: DatabaseState) -> None:
        """Bring what was read into the copy: into a new one, if all was to be read."""
        if self._writes < 0:
            self._copy.close()
            self._copy = SqliteBackend(":memory:", history_kept=self._history_kept)
        self._copy.load(state.text)
        self._writes = state.writes
        self._last_id = max([self._last_id, *(entry.id for entry in state.text.history[-1:])])


def _first_batches(pending: Sequence[_QueuedWrite]) -> list[_QueuedWrite]:
    """The oldest batches that fit into one transaction: at least one."""
    found: list[_QueuedWrite] = []
    size = 0
    for batch in pending:
        size += len(batch.changes) + len(batch.entries)
        if found and size > _MOST_TOGETHER:
            break
        found.append(batch)
    return found


def _store_error(exc: DatabaseFault) -> OrchestratorError:
    """The store's error for a fault of the database."""
    if exc.may_pass:
        return OrchestratorUnavailable(f"store: {exc}", code="store_unreachable", retry_after_s=5.0)
    return StoreError(f"store: {exc}")
