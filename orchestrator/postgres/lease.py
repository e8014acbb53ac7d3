"""The lease as one row of the store's database. A new holder's new term fences the writes of earlier ones."""

from dataclasses import asdict
from typing import Any, TypeVar

from orchestrator.core.errors import LeaseUnreachable
from orchestrator.core.lease import LeaseRecord
from orchestrator.postgres.database import Connection, DatabaseFault, DatabaseSession, Work

T = TypeVar("T")

_FIELDS = "holder, url, beat, duration_s, is_released"
_SEEN = "holder = %(seen_holder)s AND beat = %(seen_beat)s AND is_released = %(seen_is_released)s"
_INSERT = f"""
    INSERT INTO lorafleet_lease (id, {_FIELDS})
    VALUES (1, %(holder)s, %(url)s, %(beat)s, %(duration_s)s, %(is_released)s) ON CONFLICT (id) DO NOTHING
"""  # noqa: S608  (constants)
_UPDATE = f"""
    UPDATE lorafleet_lease SET
        term = CASE WHEN holder = %(holder)s AND NOT is_released THEN term ELSE nextval('lorafleet_terms') END,
        holder = %(holder)s, url = %(url)s, beat = %(beat)s, duration_s = %(duration_s)s, is_released = %(is_released)s
    WHERE {_SEEN}
"""  # noqa: S608  (constants)


class PostgresLease:
    """A lease in the table `lorafleet_lease`, over a connection of its own: no write of the store delays a renewal.

    It closes the session with itself.
    """

    place = "the store's database"
    is_absence_new = True  # only a leader writes the row, and a deleted one's holder is fenced by its term

    def __init__(self, session: DatabaseSession) -> None:
        self._session = session

    async def read(self) -> LeaseRecord | None:
        """The record; None when there is none. Raises LeaseUnreachable."""
        return await self._call(_read_record)

    async def write(self, new: LeaseRecord, seen: LeaseRecord | None) -> bool:
        """Store `new` if the record is still `seen`; False when it has changed since. Raises LeaseUnreachable."""
        values: dict[str, Any] = asdict(new)
        if seen is not None:
            values |= {f"seen_{name}": value for name, value in asdict(seen).items()}

        async def write_record(connection: Connection) -> bool:
            return (await connection.execute(_INSERT if seen is None else _UPDATE, values)).rowcount == 1

        return await self._call(write_record)

    async def is_gone(self, hold: LeaseRecord) -> bool:  # noqa: ARG002  (the interface's)
        """False: a process whose connection ended may still act."""
        return False

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    async def _call(self, work: Work[T]) -> T:
        """The result of this work in one transaction. Raises LeaseUnreachable."""
        try:
            return await self._session.call(work)
        except DatabaseFault as exc:
            raise LeaseUnreachable(f"lease: {exc}") from exc


async def _read_record(connection: Connection) -> LeaseRecord | None:
    """The record in the table; None when there is none."""
    row = await (await connection.execute(f"SELECT {_FIELDS} FROM lorafleet_lease")).fetchone()  # noqa: S608
    if row is None:
        return None
    holder, url, beat, duration_s, is_released = row
    return LeaseRecord(holder=holder, url=url, beat=beat, duration_s=duration_s, is_released=is_released)
