"""Sessions with a real PostgreSQL: what every fault says, deadlines, and secrets that stay secret."""

import asyncio
import time
from pathlib import Path

import pytest

from orchestrator.postgres.database import DatabaseFault, DatabaseSession, place_of, read_address
from orchestrator.postgres.schema import LAYOUT, OLDEST_SERVER, layout_text, version_text
from tests.patience import patience
from tests.postgres import PASSWORD, free_port, own_postgres_server, postgres_server  # noqa: F401  (fixtures)


async def answer(connection):
    """Whether the server computes."""
    return (await (await connection.execute("SELECT 40 + 2")).fetchone())[0]


async def fault_at(address, call_s=10.0):
    """The fault of a first call at this address."""
    session = DatabaseSession(lambda: address, call_s=call_s)
    with pytest.raises(DatabaseFault) as caught:
        await session.call(answer)
    session.close()
    assert PASSWORD not in str(caught.value)
    return caught.value


async def test_a_fault_of_the_address_says_what_was_expected_and_never_the_password(postgres_server):  # noqa: F811
    server = postgres_server
    server.run_sql("DROP ROLE IF EXISTS guest", f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'")
    expected = {
        server.url(password="wr0ng"): ("password authentication failed", "PGPASSFILE"),
        server.url(database="nothing"): ('database "nothing" does not exist', "createdb"),
        server.url(user="guest"): ("permission denied for schema public", "GRANT USAGE, CREATE ON SCHEMA public"),
        server.url(schema="not_there"): ("no schema has been selected", "search_path"),
        f"postgresql://postgres:{PASSWORD}/@127.0.0.1:x/postgres": ("cannot be parsed", "%XX"),
        f"postgresql://postgres:{PASSWORD}@{PASSWORD}@127.0.0.1/postgres": ("cannot be parsed", "%XX"),
        f"postgresql://postgres:1/{PASSWORD}@127.0.0.1/postgres": ("cannot be parsed", "%XX"),
        f"{server.url()}?nonsense=1": ("cannot be parsed", "options that libpq knows"),
    }
    for address, words in expected.items():
        fault = await fault_at(address)
        assert all(word in str(fault) for word in words), str(fault)
        assert not fault.may_pass
        assert "wr0ng" not in str(fault)


async def test_a_server_that_is_away_is_a_fault_that_may_pass():
    fault = await fault_at(f"postgresql://postgres:{PASSWORD}@127.0.0.1:{free_port()}/postgres")
    assert fault.may_pass
    assert "goes on by itself" in str(fault)


async def test_a_user_without_rights_may_use_tables_that_another_has_created(postgres_server):  # noqa: F811
    server, address = postgres_server, postgres_server.new_schema()
    owner = DatabaseSession(lambda: address, call_s=10)
    await owner.call(answer)
    owner.close()
    schema = address.rpartition("%3D")[2]
    server.run_sql(
        "DROP ROLE IF EXISTS writer",
        f"CREATE ROLE writer LOGIN PASSWORD '{PASSWORD}'",
        f"GRANT USAGE ON SCHEMA {schema} TO writer",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO writer",
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO writer",
    )
    session = DatabaseSession(lambda: server.url(schema=schema, user="writer"), call_s=10)
    assert await session.call(answer) == 42
    session.close()
    server.run_sql(f"DROP OWNED BY writer", "DROP ROLE writer")  # noqa: F541


async def test_sessions_that_start_together_create_the_tables_once(postgres_server):  # noqa: F811
    address = postgres_server.new_schema()
    sessions = [DatabaseSession(lambda: address, call_s=patience(5)) for _ in range(5)]
    assert await asyncio.gather(*(session.call(answer) for session in sessions)) == [42] * 5
    assert postgres_server.run_sql("SELECT layout FROM lorafleet_store", url=address) == [(LAYOUT,)]
    for session in sessions:
        session.close()


async def test_tables_of_another_layout_are_refused_and_left_as_they_are(postgres_server):  # noqa: F811
    address = postgres_server.new_schema()
    session = DatabaseSession(lambda: address, call_s=patience(5))
    await session.call(answer)
    session.close()
    postgres_server.run_sql("UPDATE lorafleet_store SET layout = 99", url=address)
    fault = await fault_at(address)
    assert layout_text(99) in str(fault)
    assert not fault.may_pass
    assert postgres_server.run_sql("SELECT layout FROM lorafleet_store", url=address) == [(99,)]


def test_an_old_server_is_named_with_the_oldest_that_is_enough():
    assert f"PostgreSQL 11; expected {OLDEST_SERVER} or newer" in version_text(11)


async def test_a_server_that_hangs_ends_a_call_at_its_deadline_and_the_next_call_connects_again(own_postgres_server):  # noqa: F811
    address = own_postgres_server.new_schema()
    session = DatabaseSession(lambda: address, call_s=1.0)
    assert await session.call(answer) == 42
    own_postgres_server.hang()
    began = time.monotonic()
    with pytest.raises(DatabaseFault, match="no answer in 1 s") as caught:
        await session.call(answer)
    assert caught.value.may_pass
    assert time.monotonic() - began < patience(2)
    own_postgres_server.go_on()
    async with asyncio.timeout(patience(10)):
        while True:
            try:
                assert await session.call(answer) == 42
            except DatabaseFault:
                continue
            break
    session.close()


async def test_a_cancelled_call_ends_at_once_though_the_server_hangs(own_postgres_server):  # noqa: F811
    session = DatabaseSession(own_postgres_server.url, call_s=300.0)
    await session.call(answer)
    own_postgres_server.hang()
    call = asyncio.create_task(session.call(answer))
    await asyncio.sleep(0)
    call.cancel()
    async with asyncio.timeout(patience(5)):
        await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()
    session.close()


async def test_a_connection_that_the_server_ends_is_opened_again_with_the_address_of_then(postgres_server, tmp_path):  # noqa: F811
    file = tmp_path / "address"
    file.write_text(postgres_server.new_schema() + "\n")
    session = DatabaseSession(lambda: read_address("", file), call_s=patience(5))

    async def schema(connection):
        return await (await connection.execute("SELECT current_schema(), pg_backend_pid()")).fetchone()

    first, pid = await session.call(schema)
    file.write_text(postgres_server.new_schema())
    postgres_server.run_sql(f"SELECT pg_terminate_backend({pid})")
    with pytest.raises(DatabaseFault) as caught:
        await session.call(schema)
    assert caught.value.may_pass
    assert (await session.call(schema))[0] != first
    session.close()


def test_a_file_that_cannot_be_read_is_named():
    with pytest.raises(
        DatabaseFault, match=r"store_file /nothing/here: No such file.*expected a file with postgresql://"
    ):
        read_address("", Path("/nothing/here"))


def test_the_place_names_host_and_database_and_no_password(monkeypatch):
    monkeypatch.setenv("PGHOST", "db.example")
    assert place_of({"user": "fleet", "password": "hush"}) == "PostgreSQL at db.example, database fleet, user fleet"


async def test_deadlines_of_the_servers_side_hold_whatever_its_defaults_are(postgres_server):  # noqa: F811
    server, address = postgres_server, postgres_server.new_schema()
    session = DatabaseSession(lambda: address, call_s=3.0)

    async def settings(connection):
        names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "synchronous_commit")
        return [(await (await connection.execute(f"SHOW {name}")).fetchone())[0] for name in names]

    server.run_sql("ALTER ROLE postgres SET synchronous_commit = off")
    try:
        assert await session.call(settings) == ["3s", "3s", "5s", "on"]
    finally:
        server.run_sql("ALTER ROLE postgres RESET synchronous_commit")
        session.close()
