"""The tables of the store in PostgreSQL: created once, with their layout's number, and checked at each connection.

They lie in the first schema of `search_path`, so that fleets in one database each have a schema of their own.
"""

from typing import Any

import psycopg

from orchestrator.store.ledger_rows import LedgerTables

LAYOUT = 2
"""The number in `lorafleet_store`. New stored tables and new fields of their rows leave it as it is."""
OLDEST_SERVER = 13
_LOCK = 0x4C6F5241
"""Advisory lock while tables are created; "LoRA" in ASCII."""

LEDGER = LedgerTables(prefix="lorafleet_", mark="%s", whole="BIGINT", real="DOUBLE PRECISION")
_CREATE = (
    *LEDGER.create,
    # One row. `writes`: number of transactions that changed intent.
    """
    CREATE TABLE lorafleet_store (
        id SMALLINT PRIMARY KEY CHECK (id = 1), layout INTEGER NOT NULL, writes BIGINT NOT NULL DEFAULT 0
    )
    """,
    """
    CREATE TABLE lorafleet_intent (
        table_name TEXT NOT NULL, key TEXT NOT NULL, json TEXT NOT NULL, PRIMARY KEY (table_name, key)
    )
    """,
    # The ids are the leader's: a transaction that is sent again adds nothing twice.
    """
    CREATE TABLE lorafleet_history (
        id BIGINT PRIMARY KEY, at DOUBLE PRECISION NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL,
        actor TEXT NOT NULL, body TEXT NOT NULL
    )
    """,
    "CREATE INDEX lorafleet_history_by_kind ON lorafleet_history (kind, id)",
    "CREATE SEQUENCE lorafleet_terms",
    # One row. The term is a key: a takeover, which changes it, waits for the writes of the term before, which hold it
    # FOR KEY SHARE; a renewal, which leaves it as it is, does not.
    """
    CREATE TABLE lorafleet_lease (
        term BIGINT PRIMARY KEY DEFAULT nextval('lorafleet_terms'), id SMALLINT NOT NULL UNIQUE CHECK (id = 1),
        holder TEXT NOT NULL, url TEXT NOT NULL, beat BIGINT NOT NULL, duration_s DOUBLE PRECISION NOT NULL,
        is_released BOOLEAN NOT NULL
    )
    """,
)


class SchemaFault(Exception):
    """The database is none that this version can use. The message says what was expected and what to do."""


async def prepare_schema(connection: psycopg.AsyncConnection[Any]) -> None:
    """Create the tables unless they are there, in the open transaction. Raises SchemaFault, psycopg.Error.

    An advisory lock makes orchestrators that start together wait for one another.
    """
    found = connection.info.server_version // 10_000
    if found < OLDEST_SERVER:
        raise SchemaFault(version_text(found))
    if not await _is_created(connection):
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        if not await _is_created(connection):  # another orchestrator may have created them meanwhile
            for statement in _CREATE:
                await connection.execute(statement)
            await connection.execute("INSERT INTO lorafleet_store (id, layout) VALUES (1, %s)", (LAYOUT,))
    row = await (await connection.execute("SELECT layout FROM lorafleet_store")).fetchone()
    if row is None or row[0] != LAYOUT:
        raise SchemaFault(layout_text(None if row is None else row[0]))


async def _is_created(connection: psycopg.AsyncConnection[Any]) -> bool:
    """Whether our tables are in a schema of `search_path`.

    By a query of the catalog: `to_regclass` may remember from before the lock that there are none.
    """
    query = "SELECT 1 FROM pg_tables WHERE tablename = 'lorafleet_store' AND schemaname = ANY (current_schemas(false))"
    return await (await connection.execute(query)).fetchone() is not None


def version_text(found: int) -> str:
    """What is wrong with a server of this major version."""
    return f"the server is PostgreSQL {found}; expected {OLDEST_SERVER} or newer: upgrade it, or name another server"


def layout_text(found: int | None) -> str:
    """What is wrong with tables of this layout; None: they have no number."""
    return (
        f"the tables have layout {'of no number' if found is None else found}, and this version reads layout {LAYOUT}:"
        " start the version that wrote them; or save the fleet with that version's `lorafleet export FILE`, name"
        " another database or schema here, and run `lorafleet import FILE`. The tables were not changed"
    )
