"""The store in PostgreSQL under faults: fenced leaders, servers that are killed or hang, and connections that break."""

import asyncio
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from orchestrator.core.errors import OrchestratorError, OrchestratorUnavailable, StoreError
from orchestrator.model.policy import PlacementPolicy
from orchestrator.postgres import rows
from orchestrator.store_copy import read_database
from tests.orchestrator.postgres.instances import DatabaseStoreInstances, SilentProxy
from tests.patience import patience, until, within
from tests.postgres import own_postgres_server, postgres_server  # noqa: F401  (fixtures)
from tests.registered import registered


@pytest.fixture
async def instances(postgres_server):  # noqa: F811
    found = DatabaseStoreInstances(postgres_server.new_schema())
    yield found
    await found.close_all()


@pytest.fixture
async def alone(own_postgres_server):  # noqa: F811
    found = DatabaseStoreInstances(own_postgres_server.new_schema())
    yield found
    await found.close_all()


def stored(server, address):
    """The adapters in the database."""
    rows = server.run_sql("SELECT key FROM lorafleet_intent WHERE table_name = 'adapters' ORDER BY key", url=address)
    return [key for (key,) in rows]


def adapter(name):
    return registered(name, source="x", digest="d" * 64)


async def test_a_leader_whose_lease_was_taken_writes_nothing_more(instances, postgres_server):  # noqa: F811
    old = await instances.lead()
    old.store.put_adapter(adapter("a/v1"))
    await old.store.wait_durable()
    new = await instances.lead()
    assert list(new.store.adapters) == ["a/v1"]
    old.store.put_adapter(adapter("b/v1"))
    with pytest.raises(OrchestratorUnavailable) as caught:
        await old.store.wait_durable([("adapters", "b/v1")])
    assert caught.value.code == "not_leading"
    new.store.put_adapter(adapter("c/v1"))
    await new.store.wait_durable()
    assert stored(postgres_server, instances.address) == ["a/v1", "c/v1"]
    await until(lambda: old.undone)
    with pytest.raises(OrchestratorUnavailable):
        old.store.put_adapter(adapter("d/v1"))
    old.store.end_term()

    def sees_it():
        old.store.refresh()
        return list(old.store.adapters) == ["a/v1", "c/v1"]

    await until(lambda: old.store.is_read)
    await until(sees_it)


async def test_orchestrators_that_led_before_lead_again_in_turn(instances, postgres_server):  # noqa: F811
    one, two = await instances.open(), await instances.open()
    for number, leader in enumerate([one, two, one, two, one]):
        await leader.lead()
        leader.store.put_adapter(adapter(f"a{number}/v1"))
        await leader.store.wait_durable()
        assert leader.store.epoch == number + 1
        leader.store.end_term()
    assert stored(postgres_server, instances.address) == [f"a{number}/v1" for number in range(5)]


async def test_a_term_begins_with_all_that_the_term_before_has_written(instances):
    for number in range(4):
        leader = await instances.lead()
        assert list(leader.store.adapters) == [f"a{n}/v1" for n in range(number)]
        assert [entry.subject for entry in leader.store.history(kinds=("load",))] == [
            f"a{n}" for n in reversed(range(number))
        ]
        leader.store.put_adapter(adapter(f"a{number}/v1"))
        leader.store.record("load", f"a{number}")
        await leader.store.wait_durable()


async def test_a_server_that_is_killed_loses_nothing_that_was_promised(alone, own_postgres_server):  # noqa: F811
    leader = await alone.lead()
    promised = []

    async def write():
        for number in range(60):
            name = f"a{number:02}/v1"
            leader.store.put_adapter(adapter(name))
            leader.store.record("load", name)
            await leader.store.wait_durable([("adapters", name)])
            promised.append(name)

    writing = asyncio.create_task(write())
    await until(lambda: len(promised) >= 20)
    await asyncio.to_thread(own_postgres_server.kill)
    seen = list(promised)
    await asyncio.to_thread(own_postgres_server.start)
    assert set(seen) <= set(stored(own_postgres_server, alone.address))
    async with within(20):
        await writing
    assert stored(own_postgres_server, alone.address) == promised
    # Transactions whose answers were lost were sent again, and added no entry twice.
    await leader.store.wait_durable()
    assert own_postgres_server.run_sql("SELECT count(*) FROM lorafleet_history", url=alone.address) == [(60,)]
    assert leader.undone == 0
    assert leader.store.trouble == ""


async def test_connections_that_break_at_any_moment_lose_nothing_and_write_nothing_twice(instances, postgres_server):  # noqa: F811
    leader = await instances.lead()
    for number in range(30):
        leader.store.put_adapter(adapter(f"a{number:02}/v1"))
        leader.store.record("load", f"a{number:02}")
        for _ in range(number):
            await asyncio.sleep(0)  # so many turns of the loop: before, within or after the transaction
        leader.session.close()
    async with within(20):
        await leader.store.wait_durable()
    assert stored(postgres_server, instances.address) == [f"a{number:02}/v1" for number in range(30)]
    assert postgres_server.run_sql("SELECT subject FROM lorafleet_history ORDER BY id", url=instances.address) == [
        (f"a{number:02}",) for number in range(30)
    ]


async def test_a_write_that_a_hanging_server_does_not_take_is_taken_back(alone, own_postgres_server):  # noqa: F811
    leader = await alone.lead(give_up_s=1.0, call_s=0.4)
    leader.store.put_adapter(adapter("a/v1"))
    await leader.store.wait_durable()
    own_postgres_server.hang()
    leader.store.put_adapter(adapter("b/v1"))
    async with within(10):
        with pytest.raises(OrchestratorError) as caught:
            await leader.store.wait_durable()
    assert caught.value.code == "store_unreachable"
    assert "no answer" in leader.store.trouble or "goes on by itself" in leader.store.trouble
    with pytest.raises(OrchestratorUnavailable, match="refused"):
        leader.store.put_adapter(adapter("c/v1"))
    with pytest.raises(OrchestratorError):  # nothing may be done on intent that is not stored
        await leader.store.wait_durable([("adapters", "a/v1")])
    own_postgres_server.go_on()
    await until(lambda: leader.undone)
    # What the server had received before it hung may have been committed; memory and database agree.
    assert list(leader.store.adapters) == stored(own_postgres_server, alone.address)
    await until(lambda: not leader.store.trouble)
    leader.store.put_adapter(adapter("c/v1"))
    await leader.store.wait_durable()
    assert "c/v1" in stored(own_postgres_server, alone.address)


async def test_a_standby_follows_what_the_leader_writes(instances):
    leader, standby = await instances.lead(), await instances.open()
    leader.store.put_adapter(adapter("a/v1"))
    leader.store.record("load", "a/v1")
    await leader.store.wait_durable()

    def sees_both():
        standby.store.refresh()
        return list(standby.store.adapters) == ["a/v1"] and len(standby.store.history()) == 1

    await until(sees_both)
    with pytest.raises(OrchestratorUnavailable, match="does not lead"):
        standby.store.put_rules(PlacementPolicy())


async def test_an_unwritten_change_is_not_shown_after_the_term(alone, own_postgres_server):  # noqa: F811
    leader = await alone.lead(call_s=0.4)
    own_postgres_server.hang()
    leader.store.put_adapter(adapter("a/v1"))
    waiting = asyncio.create_task(leader.store.wait_durable())
    await asyncio.sleep(0)
    leader.store.end_term()
    with pytest.raises(OrchestratorUnavailable, match="may or may not"):
        await waiting
    with pytest.raises(OrchestratorUnavailable) as caught:
        leader.store.refresh()
    assert caught.value.code == "starting"
    own_postgres_server.go_on()
    await until(lambda: leader.store.is_read)
    leader.store.refresh()
    assert list(leader.store.adapters) == stored(own_postgres_server, alone.address)


async def test_a_leader_that_is_cut_off_within_a_transaction_holds_up_its_successor_for_seconds_alone(postgres_server):  # noqa: F811
    address = postgres_server.new_schema()
    async with SilentProxy(postgres_server.port) as proxy:
        cut_off = DatabaseStoreInstances(address.replace(f":{postgres_server.port}/", f":{proxy.port}/"))
        old = await cut_off.lead()
        old.store.put_adapter(adapter("a/v1"))
        await old.store.wait_durable()
        proxy.is_silent_after("FOR KEY SHARE")
        old.store.put_adapter(adapter("b/v1"))
        waiting = asyncio.create_task(old.store.wait_durable())
        await until(lambda: proxy.is_silent)
        instances = DatabaseStoreInstances(address)
        async with within(20):
            new = await instances.lead(call_s=patience(10))
        assert list(new.store.adapters) == ["a/v1"]
        new.store.put_adapter(adapter("c/v1"))
        await new.store.wait_durable()
        proxy.close_all()
        proxy.is_silent = False
        async with within(20):
            with pytest.raises(OrchestratorUnavailable) as caught:
                await waiting
        assert caught.value.code == "not_leading"
        assert stored(postgres_server, address) == ["a/v1", "c/v1"]
        await instances.close_all()
        await cut_off.close_all()


async def test_only_the_holder_of_the_lease_begins_a_term(instances):
    leader, standby = await instances.lead(), await instances.open()
    with pytest.raises(OrchestratorUnavailable) as caught:
        await standby.store.catch_up()
    assert caught.value.code == "not_leading"
    leader.store.put_adapter(adapter("a/v1"))
    await leader.store.wait_durable()


async def test_the_oldest_entries_of_a_kind_go_and_others_stay(instances, postgres_server):  # noqa: F811
    leader = await instances.lead()
    leader.backend._history_kept = 100
    leader.store.record("policy_changed", "kept")
    for number in range(300):
        leader.store.record("load", f"a{number}")
        if number % 50 == 0:
            await leader.store.wait_durable()
    await leader.store.wait_durable()
    counts = dict(
        postgres_server.run_sql("SELECT kind, count(*) FROM lorafleet_history GROUP BY kind", url=instances.address)
    )
    assert counts["policy_changed"] == 1
    assert 100 <= counts["load"] < 300


async def test_a_history_that_is_read_in_parts_is_whole(instances, monkeypatch):
    leader = await instances.lead()
    monkeypatch.setattr(rows, "MOST_READ", 7)
    for number in range(21):
        leader.store.record("load", f"a{number}")
    leader.store.put_adapter(adapter("a/v1"))
    await leader.store.wait_durable()
    following = await instances.open()
    assert following.store.is_read
    following.store.refresh()
    assert list(following.store.adapters) == ["a/v1"]
    assert [entry.subject for entry in following.store.history()] == [f"a{n}" for n in reversed(range(21))]
    back = await read_database(instances.address)
    assert [entry.subject for entry in back.history] == [f"a{n}" for n in range(21)]


async def test_a_text_that_postgresql_cannot_hold_is_refused_before_anything_is_written(instances, postgres_server):  # noqa: F811
    leader = await instances.lead()
    with pytest.raises(StoreError, match="NUL"):
        leader.store.put_adapter(adapter("a\0/v1"))
    assert list(leader.store.adapters) == []
    leader.store.put_adapter(adapter("b/v1"))
    await leader.store.wait_durable()
    assert stored(postgres_server, instances.address) == ["b/v1"]


async def test_a_store_that_cannot_be_used_stops_the_start_and_one_that_is_away_does_not(own_postgres_server):  # noqa: F811
    server = own_postgres_server
    address = server.new_schema()
    with pytest.raises(StoreError, match="password authentication failed"):
        await DatabaseStoreInstances(server.url(password="wr0ng")).open()
    await asyncio.to_thread(server.kill)
    instances = DatabaseStoreInstances(address)
    with capture_logs() as logs:
        early = await instances.open(call_s=patience(1))
        assert not early.store.is_read
        assert "goes on by itself" in early.store.trouble
        await asyncio.to_thread(server.start)
        await until(lambda: early.store.is_read and not early.store.trouble)
    problems = [line["error"] for line in logs if line["event"] == "store not reached"]
    assert all(one != next_one for one, next_one in pairwise(problems)), "a line for each problem, not for each try"
    await instances.close_all()
