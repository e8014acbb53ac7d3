"""What the store's tables hold, read and written as text within one transaction."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from orchestrator.core.ledger import new_rows
from orchestrator.model.history import HistoryEntry
from orchestrator.model.ledger import UsageBatch, UsageQuery, UsageRows
from orchestrator.postgres.database import Connection
from orchestrator.postgres.schema import LEDGER
from orchestrator.store.backend import HistoryText, StoreText
from orchestrator.store.ledger_rows import LedgerText, read_rows, row_values
from orchestrator.store.tables import TABLES, StoreChange, Subject

TRIM_EVERY = 64
MOST_READ = 20_000

_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_READ_HISTORY = """
    SELECT id, at, kind, subject, actor, body FROM lorafleet_history WHERE id > %s ORDER BY id LIMIT %s
"""
_PUT = """
    INSERT INTO lorafleet_intent (table_name, key, json) VALUES (%s, %s, %s)
    ON CONFLICT (table_name, key) DO UPDATE SET json = EXCLUDED.json
"""
_DELETE = "DELETE FROM lorafleet_intent WHERE table_name = %s AND key = %s"
_ADD = """
    INSERT INTO lorafleet_history (id, at, kind, subject, actor, body) VALUES (%s, %s, %s, %s, %s, %s)
    ON CONFLICT (id) DO NOTHING
"""
_TRIM = """
    DELETE FROM lorafleet_history WHERE kind = %(kind)s AND id <= (
        SELECT id FROM lorafleet_history WHERE kind = %(kind)s ORDER BY id DESC LIMIT 1 OFFSET %(kept)s
    )
"""


class TermOver(Exception):
    """The lease has another term than the writes: another process leads, or has led."""


class TermHolder(NamedTuple):
    """The term of the lease, and who holds it; "" after a release."""

    term: int
    holder: str


class DatabaseState(NamedTuple):
    """What the database holds, in one snapshot, beside what is known.

    writes   the number of transactions that had changed intent
    is_rest  whether it is all; else the next read goes on behind the last history entry
    """

    holder: TermHolder | None
    writes: int
    text: StoreText
    is_rest: bool


async def read_state(connection: Connection, *, known_writes: int, last_id: int) -> DatabaseState:
    """The lease's term, the intent unless it is known by its number of writes, and the history after `last_id`.

    At most `MOST_READ` history entries: a call has a deadline, however many there are.

    known_writes  -1: read the intent, whatever is known
    """
    await connection.execute(_SNAPSHOT)
    lease = "SELECT term, CASE WHEN is_released THEN '' ELSE holder END FROM lorafleet_lease"
    found = await (await connection.execute(lease)).fetchone()
    row = await (await connection.execute("SELECT writes FROM lorafleet_store")).fetchone()
    assert row is not None, "the schema's check has read it"
    rows = None
    if row[0] != known_writes:
        intent = await connection.execute("SELECT table_name, key, json FROM lorafleet_intent")
        rows = [(table, key, text) for table, key, text in await intent.fetchall()]
    entries = await connection.execute(_READ_HISTORY, (last_id, MOST_READ))
    history = [HistoryText(*entry) for entry in await entries.fetchall()]
    holder = None if found is None else TermHolder(*found)
    return DatabaseState(holder, row[0], StoreText(rows, history), is_rest=len(history) < MOST_READ)


async def write_changes(
    connection: Connection,
    term: int,
    changes: Mapping[Subject, StoreChange],
    entries: Sequence[HistoryEntry],
    *,
    trimmed: Iterable[str],
    history_kept: int,
) -> None:
    """Write changes and history, if the lease's term is still this one. Raises TermOver; then nothing is written.

    The term is locked until the commit: a takeover comes before these writes, which are refused, or after them.

    trimmed  kinds of which entries beyond `history_kept` are deleted
    """
    await _require_term(connection, term)
    texts = [
        (change.table, change.key, TABLES[change.table].encode(change.row))
        for change in changes.values()
        if change.row is not None
    ]
    deleted = [subject for subject, change in changes.items() if change.row is None]
    async with connection.cursor() as cursor:
        if texts:
            await cursor.executemany(_PUT, texts)
        if deleted:
            await cursor.executemany(_DELETE, deleted)
        if entries:
            await cursor.executemany(_ADD, map(history_text, entries))
        for kind in trimmed:
            await cursor.execute(_TRIM, {"kind": kind, "kept": history_kept})
        if changes:
            await cursor.execute("UPDATE lorafleet_store SET writes = writes + 1")


async def _require_term(connection: Connection, term: int) -> None:
    """Lock the lease's term until the commit, if it is still this one. Raises TermOver."""
    fence = "SELECT 1 FROM lorafleet_lease WHERE term = %s FOR KEY SHARE"
    if await (await connection.execute(fence, (term,))).fetchone() is None:
        raise TermOver


async def add_usage(
    connection: Connection, term: int, batches: Sequence[UsageBatch], *, now: float, trimmed_to_days: int | None
) -> UsageRows:
    """Add batches to the ledger, each once, if the lease's term is still this one; the rows added. Raises TermOver.

    A source's row is locked before its number is read: a call before this one, whose answer was lost, may be in the
    middle of its commit.

    trimmed_to_days  rows older than so many days are deleted; None: none are
    """
    await _require_term(connection, term)
    counted: dict[str, int] = {}
    async with connection.cursor() as cursor:
        for source in sorted({batch.source for batch in batches}):
            await cursor.execute(LEDGER.hold_source, (source, now))
            (counted[source],) = await cursor.fetchone() or (-1,)
        found = new_rows(batches, counted)
        if found.rows:
            await cursor.executemany(LEDGER.add_row, row_values(found.rows))
        if found.numbers:
            await cursor.executemany(LEDGER.set_number, [(number, source) for source, number in found.numbers.items()])
        if trimmed_to_days is not None:
            for statement, before in LEDGER.trims(now, trimmed_to_days):
                await cursor.execute(statement, (before,))
    return found.rows


async def read_usage(connection: Connection, query: UsageQuery) -> UsageRows:
    """The ledger's rows, added up as the query says. Raises OrchestratorRequestError for too many."""
    text, values = LEDGER.read(query)
    return read_rows(await (await connection.execute(text, values)).fetchall(), query)


async def read_ledger(connection: Connection) -> LedgerText:
    """All that the ledger holds."""
    rows, sources = [await (await connection.execute(query)).fetchall() for query in LEDGER.copied()]
    return LedgerText(tuple(rows), tuple(sources))


async def write_all(connection: Connection, text: StoreText) -> None:
    """Write all that another store held into empty tables."""
    async with connection.cursor() as cursor:
        await cursor.executemany(_PUT, text.rows or ())
        await cursor.executemany(_ADD, text.history)
        await cursor.executemany(LEDGER.add_row, text.ledger.rows)
        await cursor.executemany(LEDGER.copy_source, text.ledger.sources)
        await cursor.execute("UPDATE lorafleet_store SET writes = writes + 1")


def history_text(entry: HistoryEntry) -> HistoryText:
    """The entry as it is stored."""
    body = msgspec.json.encode(entry.body).decode()
    return HistoryText(entry.id, entry.at, entry.kind, entry.subject, entry.actor, body)
