"""`python -m orchestrator.store_copy FROM TO`: a store's intent and history into an empty one, of either kind.

`lorafleet store copy` runs it. No orchestrator may lead on one of the two meanwhile.
"""

import asyncio
import re
import secrets
import sys
from functools import partial
from pathlib import Path

from orchestrator.core.errors import LeaseUnreachable, StoreError
from orchestrator.leadership.file_lease import FileLease, Lease, lease_path
from orchestrator.postgres.database import Connection, DatabaseFault, DatabaseSession
from orchestrator.postgres.lease import PostgresLease
from orchestrator.postgres.rows import read_ledger, read_state, write_all
from orchestrator.store.backend import HistoryText, StoreText
from orchestrator.store.sqlite import SqliteBackend

_CALL_S = 300.0


def is_database(place: str) -> bool:
    """Whether a store's name is the address of a database, and no path."""
    return re.match("postgres(ql)?://", place) is not None


async def copy_store(source: str, target: str) -> StoreText:
    """Copy all rows and the history, and return them. Raises StoreError; then nothing was written.

    source, target  the path of an SQLite file, or an address
    """
    try:
        await _require_no_leader(source)
        text = await read_database(source) if is_database(source) else _read_file(source)
        if is_database(target):
            session = DatabaseSession(lambda: target, call_s=_CALL_S)
            try:
                await session.call(partial(_fill_database, text=text))
            finally:
                session.close()
        else:
            _fill_file(target, text)
    except DatabaseFault as exc:
        raise StoreError(f"store: {exc}") from exc
    return text


async def _require_no_leader(place: str) -> None:
    """Raise StoreError while an orchestrator leads on the store: what it writes later would be missing in the copy.

    Takes as long as the lease's duration, where its last holder did not release it. Raises DatabaseFault.
    """
    lease: Lease
    if is_database(place):
        lease = PostgresLease(DatabaseSession(lambda: place, call_s=_CALL_S))
    elif lease_path(Path(place)).exists():
        lease = FileLease(lease_path(Path(place)), holder=f"store-copy-{secrets.token_hex(4)}")
    else:
        return
    try:
        seen = await lease.read()
        if seen is None or seen.is_released or await lease.is_gone(seen):
            return
        await asyncio.sleep(seen.duration_s)
        if await lease.read() != seen:
            message = (
                f"an orchestrator leads on the source ({seen.url or seen.holder}); expected none: stop all of them"
            )
            raise StoreError(f"store: {message}")
    except LeaseUnreachable as exc:
        raise StoreError(f"store: {exc}") from exc
    finally:
        lease.close()


def _read_file(path: str) -> StoreText:
    """All that an SQLite store holds. Raises StoreError."""
    if not Path(path).exists():
        raise StoreError(f"store {path}: there is no such file; expected an SQLite store or postgresql://...")
    store = SqliteBackend(path)
    try:
        return store.dump()
    finally:
        store.close()


async def read_database(address: str) -> StoreText:
    """All that a database holds. Raises DatabaseFault, StoreError."""
    session = DatabaseSession(lambda: address, call_s=_CALL_S)
    history: list[HistoryText] = []
    try:
        while True:
            last_id = history[-1].id if history else 0
            state = await session.call(partial(read_state, known_writes=-1, last_id=last_id))
            history += state.text.history
            if state.is_rest:
                return StoreText(state.text.rows, history, await session.call(read_ledger))
    finally:
        session.close()


def _fill_file(path: str, text: StoreText) -> None:
    """Write all into a new SQLite store. Raises StoreError."""
    if Path(path).exists():
        raise StoreError(f"store {path}: the file exists; expected an empty target: name a new file")
    store = SqliteBackend(path)
    try:
        store.load(text)
    finally:
        store.close()


async def _fill_database(connection: Connection, text: StoreText) -> None:
    """Write all into empty tables, in the open transaction. Raises StoreError."""
    await connection.execute("LOCK TABLE lorafleet_intent, lorafleet_lease IN EXCLUSIVE MODE")
    used = "SELECT EXISTS (SELECT 1 FROM lorafleet_intent) OR EXISTS (SELECT 1 FROM lorafleet_lease)"
    row = await (await connection.execute(used)).fetchone()
    if row is None or row[0]:
        raise StoreError(
            "store: an orchestrator has led on the target database; expected an empty one: name another database, or"
            " another schema by search_path"
        )
    await write_all(connection, text)


def main() -> None:
    """Copy, and print what was copied; an error is one line on stderr and SystemExit with status 2."""
    try:
        source, target = sys.argv[1:]
        text = asyncio.run(copy_store(source, target))
    except ValueError:
        print("usage: lorafleet store copy FROM TO", file=sys.stderr)  # noqa: T201  (a command's output)
        raise SystemExit(2) from None
    except StoreError as exc:
        print(f"lorafleet store copy: {exc}", file=sys.stderr)  # noqa: T201  (a command's output)
        raise SystemExit(2) from exc
    ledger, history = len(text.ledger.rows), len(text.history)
    print(f"copied {len(text.rows or ())} rows, {history} history entries and {ledger} of usage")  # noqa: T201  (a command's output)


if __name__ == "__main__":
    main()
