"""What the store's tables hold, read and written as text within one transaction."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from orchestrator.model.history import HistoryEntry
from orchestrator.postgres.database import Connection
from orchestrator.store.backend import HistoryText, StoreText
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
    fence = "SELECT 1 FROM lorafleet_lease WHERE term = %s FOR KEY SHARE"
    if await (await connection.execute(fence, (term,))).fetchone() is None:
        raise TermOver
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


async def write_all(connection: Connection, text: StoreText) -> None:
    """Write all that another store held into empty tables."""
    async with connection.cursor() as cursor:
        await cursor.executemany(_PUT, text.rows or ())
        await cursor.executemany(_ADD, text.history)
        await cursor.execute("UPDATE lorafleet_store SET writes = writes + 1")


def history_text(entry: HistoryEntry) -> HistoryText:
    """The entry as it is stored."""
    body = msgspec.json.encode(entry.body).decode()
    return HistoryText(entry.id, entry.at, entry.kind, entry.subject, entry.actor, body)
