"""Sessions with a PostgreSQL database: its address, deadlines, and every failure with what was expected and what to do.

A call that hangs ends by closing its socket: a server that is stopped, or a network that drops packets, answers neither
a query nor the request to cancel it.
"""

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from orchestrator.postgres.schema import SchemaFault, prepare_schema

T = TypeVar("T")
Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Work = Callable[[Connection], Awaitable[T]]

_CONNECT_S = 5.0
_IDLE_IN_TRANSACTION_S = 5.0
"""A leader that is cut off in a transaction holds up its successor for this long at most."""
_CUT_S = 1.0  # until a call whose socket was closed has ended

# The address wins. Without the last two a host that vanished would be noticed after a quarter of an hour.
_USUAL: Mapping[str, Any] = {
    "application_name": "lorafleet orchestrator",
    "connect_timeout": int(_CONNECT_S),
    "target_session_attrs": "read-write",
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

# SQLSTATE classes of failures that pass: connection, rollback, resources, intervention, locks; and a standby's refusal.
# source  postgresql.org/docs/current/errcodes-appendix.html
_PASSING = ("08", "40", "53", "57", "55P03", "25006", "25P03")

# libpq reports a refused connection as text alone. What is set up wrong does not pass by itself; "" matches the rest.
_ADVICE: tuple[tuple[str, bool, str], ...] = (
    (r"password authentication failed|no password supplied|SCRAM", False,
     "expected the password of this user: set it in the address, in PGPASSWORD, or in a file that PGPASSFILE names"),
    (r'role ".*" does not exist|is not permitted to log in', False,
     "expected a user that may log in: `createuser NAME`, or name another one in the address"),
    (r'database ".*" does not exist', False,
     "expected a database that exists: `createdb --owner USER NAME`, or name another one in the address"),
    (r"pg_hba\.conf", False,
     "expected a line in the server's pg_hba.conf for this host, user and database; it may want sslmode=require"),
    (r"does not support SSL|certificate|SSL error", False,
     "expected TLS as the address asks: see sslmode and sslrootcert of libpq"),
    (r"permission denied", False,
     "expected a user that may use the schema and create tables in it: `GRANT USAGE, CREATE ON SCHEMA public TO USER`,"
     " or make the user the owner of the database"),
    (r"no schema has been selected", False,
     "expected a schema to create tables in: create the one that search_path names"),
    (r"read-only", True,
     "expected the primary, and this is a standby: name all hosts, postgresql://user@one,two/database, or wait for the"
     " failover"),
    (r"No space left|could not extend", True, "make room on the database's disk, and it goes on by itself"),
    (r"too many clients|remaining connection slots", True,
     "an orchestrator needs two connections: raise max_connections, or end other programs' connections"),
    (r"", True, "expected an answer from the server: is it up, and does the network reach it? It goes on by itself"),
)  # fmt: skip


class DatabaseFault(Exception):
    """The database did not do what was asked. The message has no secret, and says what was expected and what to do.

    may_pass  whether the same call may succeed later without a change of address, rights or schema
    """

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class DatabaseSession:
    """One connection to a database, opened at the first call and again after a failure. It runs one call at a time.

    address  returns the URL or connection string; asked for each connection, so that a new password is taken over
    call_s   deadline of one call; opening a connection has a deadline of its own
    """

    def __init__(self, address: Callable[[], str], *, call_s: float) -> None:
        self._address = address
        self._call_s = call_s
        self._turn = asyncio.Lock()
        self._connection: Connection | None = None
        self.place = "the database"

    async def call(self, work: Work[T]) -> T:
        """Run this work in one transaction, and return its result. After DatabaseFault it may or may not be committed.

        An error of the work's own is raised as it is, after a rollback.
        """
        async with self._turn:
            connection = await self._connected()
            return await self._within(self._call_s, connection, _in_transaction(connection, work))

    def close(self) -> None:
        """Close the connection, also in the middle of a call."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _cut(connection)
            if not self._turn.locked():
                connection.pgconn.finish()

    async def _connected(self) -> Connection:
        """The open connection; a new one has its schema checked first."""
        if self._connection is None or self._connection.closed:
            self._connection = None
            connection = await self._open()
            await self._within(self._call_s, connection, self._prepared(connection))
            self._connection = connection
        return self._connection

    async def _open(self) -> Connection:
        """A new connection. Raises DatabaseFault."""
        given = _parsed_address(self._address())
        self.place = place_of(given)
        usual = {name: value for name, value in _USUAL.items() if name not in given}
        hosts = str(given.get("host") or os.environ.get("PGHOST", "")).count(",") + 1
        try:
            async with asyncio.timeout(_CONNECT_S * hosts):
                return await psycopg.AsyncConnection.connect(make_conninfo(**given, **usual), autocommit=True)
        except psycopg.Error as exc:
            raise _fault(exc, self.place) from None  # the cause repeats the message
        except TimeoutError:
            raise self._timeout_fault(_CONNECT_S * hosts) from None

    async def _prepared(self, connection: Connection) -> None:
        """Set the deadlines of the server's side, and create or check the tables. Raises SchemaFault, psycopg.Error."""
        deadlines = {
            "statement_timeout": self._call_s,
            "lock_timeout": self._call_s,
            "idle_in_transaction_session_timeout": _IDLE_IN_TRANSACTION_S,
        }
        for name, seconds in deadlines.items():
            await connection.execute("SELECT set_config(%s, %s, false)", (name, f"{seconds * 1000:.0f}ms"))
        # A commit that the server may forget in a crash would be a promise broken.
        await connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
        async with connection.transaction():
            await prepare_schema(connection)

    async def _within(self, seconds: float, connection: Connection, work: Awaitable[T]) -> T:
        """The result of this work on the connection. Its socket is closed at the deadline and when we are cancelled."""
        task = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(task)
        except TimeoutError:
            await self._end(connection, task)
            raise self._timeout_fault(seconds) from None
        except asyncio.CancelledError:
            await self._end(connection, task)
            raise
        except (psycopg.Error, SchemaFault) as exc:
            await self._end(connection, task)
            raise _fault(exc, self.place) from exc

    async def _end(self, connection: Connection, task: "asyncio.Future[T]") -> None:
        """End the work and close the connection: what became of a transaction in progress is not known.

        Not before the work's end: the event loop would go on watching a socket whose number another one may have.
        """
        self._connection = None
        task.add_done_callback(partial(_finish, connection))
        if not task.done():
            _cut(connection)
            ended, _ = await asyncio.wait([task], timeout=_CUT_S)
            if not ended:
                task.cancel()

    def _timeout_fault(self, seconds: float) -> DatabaseFault:
        """The fault of a server that does not answer."""
        return DatabaseFault(f"{self.place}: no answer in {seconds:g} s; {_ADVICE[-1][2]}", may_pass=True)


async def _in_transaction(connection: Connection, work: Work[T]) -> T:
    """The result of this work, in one transaction."""
    async with connection.transaction():
        return await work(connection)


def _cut(connection: Connection) -> None:
    """Shut the connection's socket down: who waits for an answer gets an error at once."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.shutdown(socket.SHUT_RDWR)


def _finish(connection: Connection, task: "asyncio.Future[Any]") -> None:
    """Close the connection of work that has ended, and take note of its error, which `_within` has raised."""
    if not task.cancelled():
        task.exception()
    connection.pgconn.finish()


def read_address(address: str, file: Path | None) -> str:
    """The address itself, or what the file has. Raises DatabaseFault."""
    if file is None:
        return address
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "no text"
        message = f"store_file {file}: {why}; expected a file with postgresql://user:password@host/database"
        raise DatabaseFault(message, may_pass=False) from None


def _parsed_address(address: str) -> dict[str, Any]:
    """The parts of an address. Raises DatabaseFault without libpq's message, which may have the password."""
    try:
        given = {name: value for name, value in conninfo_to_dict(address).items() if value is not None}
    except psycopg.ProgrammingError:
        given = {}
    if not given or _may_show_password(given):
        message = (
            "store: the address of the database cannot be parsed; expected postgresql://user:password@host:port/database,"
            " with special characters of a password as %XX (`@` is %40, `/` is %2F), and options that libpq knows"
        )
        raise DatabaseFault(message, may_pass=False)
    return given


def _may_show_password(given: Mapping[str, Any]) -> bool:
    """Whether a part that messages name may be one of a password: libpq takes `/` and `@` in it for the next part."""
    is_number = re.fullmatch(r"[\d,]*", str(given.get("port", ""))) is not None
    return not is_number or any("@" in str(given.get(name, "")) for name in ("host", "dbname"))


def place_of(given: Mapping[str, Any]) -> str:
    """User, host and database in words, by the address and libpq's variables; without password."""
    host = given.get("host") or os.environ.get("PGHOST") or given.get("hostaddr") or "the local socket"
    user = given.get("user") or os.environ.get("PGUSER") or "the system's user"
    name = given.get("dbname") or os.environ.get("PGDATABASE") or user
    port = given.get("port") or os.environ.get("PGPORT")
    return f"PostgreSQL at {host}{f':{port}' if port else ''}, database {name}, user {user}"


def _fault(exc: psycopg.Error | SchemaFault, place: str) -> DatabaseFault:
    """The fault for an error of the server, of libpq or of our schema's check."""
    if isinstance(exc, SchemaFault):
        return DatabaseFault(f"{place}: {exc}", may_pass=False)
    # The first line: further ones quote the statement, or repeat the message for each address.
    problem = str(exc).strip().split("\n")[0].removeprefix("connection failed: ")
    may_pass, advice = next((passes, advice) for pattern, passes, advice in _ADVICE if re.search(pattern, str(exc)))
    if exc.sqlstate is not None and not exc.sqlstate.startswith(_PASSING):
        may_pass, advice = False, advice if advice is not _ADVICE[-1][2] else "see the server's log"
    return DatabaseFault(f"{place}: {problem}; {advice}", may_pass=may_pass)
