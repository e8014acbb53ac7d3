"""The lease in PostgreSQL: compare-and-set, terms, and the order of a takeover and the writes before it."""

import asyncio

import psycopg
import pytest

from orchestrator.core.errors import LeaseUnreachable
from orchestrator.core.lease import LeaseRecord
from orchestrator.postgres.database import DatabaseSession
from orchestrator.postgres.lease import PostgresLease
from tests.patience import patience
from tests.postgres import PASSWORD, free_port, postgres_server  # noqa: F401  (a fixture)


def record(holder, beat=0, *, is_released=False):
    return LeaseRecord(holder=holder, url=f"http://{holder}", beat=beat, duration_s=5.0, is_released=is_released)


@pytest.fixture
def leases(postgres_server):  # noqa: F811
    """Makes leases of one database; the last attribute of each is its address."""
    address, made = postgres_server.new_schema(), []

    def make():
        made.append(PostgresLease(DatabaseSession(lambda: address, call_s=patience(5))))
        made[-1].address = address
        return made[-1]

    yield make
    for lease in made:
        lease.close()


def term_in(server, address):
    return server.run_sql("SELECT term FROM lorafleet_lease", url=address)[0][0]


async def test_only_one_of_many_takes_a_new_lease(leases):
    candidates = [leases() for _ in range(4)]
    assert await asyncio.gather(*(lease.read() for lease in candidates)) == [None] * 4
    taken = await asyncio.gather(*(lease.write(record(f"h{n}"), None) for n, lease in enumerate(candidates)))
    assert sorted(taken) == [False, False, False, True]
    assert await candidates[0].read() == record(f"h{taken.index(True)}")


async def test_a_record_is_replaced_only_as_it_was_seen(leases):
    one, two = leases(), leases()
    assert await one.write(record("a"), None)
    assert await one.write(record("a", 1), record("a"))
    assert not await two.write(record("b", 1), record("a"))
    assert await two.write(record("b", 2), record("a", 1))
    assert not await one.write(record("a", 2), record("a", 1))
    assert await one.read() == record("b", 2)


async def test_a_new_holder_has_a_new_term_and_a_renewal_the_same(leases, postgres_server):  # noqa: F811
    lease = leases()
    await lease.write(record("a"), None)
    first = term_in(postgres_server, lease.address)
    await lease.write(record("a", 1), record("a"))
    assert term_in(postgres_server, lease.address) == first
    await lease.write(record("b", 2), record("a", 1))
    second = term_in(postgres_server, lease.address)
    await lease.write(record("b", 3, is_released=True), record("b", 2))
    await lease.write(record("b", 4), record("b", 3, is_released=True))
    third = term_in(postgres_server, lease.address)
    postgres_server.run_sql("DELETE FROM lorafleet_lease", url=lease.address)
    await lease.write(record("a"), None)
    assert first < second < third < term_in(postgres_server, lease.address)


async def test_a_takeover_waits_for_a_write_in_progress_and_a_renewal_does_not(leases):
    holder, other = leases(), leases()
    await holder.write(record("a"), None)
    with psycopg.connect(holder.address) as writer:
        writer.execute("SELECT 1 FROM lorafleet_lease FOR KEY SHARE")
        assert await holder.write(record("a", 1), record("a"))
        takeover = asyncio.create_task(other.write(record("b", 2), record("a", 1)))
        done, _ = await asyncio.wait([takeover], timeout=0.2)
        assert not done
        writer.commit()
        assert await takeover


async def test_a_database_that_is_away_is_named_without_its_password():
    address = f"postgresql://fleet:{PASSWORD}@127.0.0.1:{free_port()}/fleet"
    lease = PostgresLease(DatabaseSession(lambda: address, call_s=1))
    with pytest.raises(LeaseUnreachable, match="database fleet, user fleet") as caught:
        await lease.read()
    assert PASSWORD not in str(caught.value)
    lease.close()
