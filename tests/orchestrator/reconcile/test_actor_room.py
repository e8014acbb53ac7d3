"""Actions that make room: victims drain, deletions wait, drained workers are told."""

import asyncio

import pytest

from lorafleet.identity import engine_name
from tests.orchestrator.doubles import digest_of
from tests.orchestrator.reconcile.ready_adapters import SQL, SQL_ENGINE, ready


async def test_a_victim_is_drained_before_it_makes_room(service, clock):
    agent = await service.worker(slots=1, dialect="sglang")
    await service.http.patch("/v1/policy", json={"min_residency_s": 5})
    await ready(service, "a/v1", source="a")
    name = engine_name("a/v1", digest_of("a"))
    clock.now += 10
    revision = (await service.catalog())["revision"]
    use = {"worker_id": "w0", "engine_name": name, "requests": 1, "in_flight": 0}
    await service.usage(revision, use)
    await service.register("b/v1", source="b")
    await service.ensure("b/v1")
    await service.settle()
    # The router has not seen the catalog that forbids new requests: nothing may be unloaded yet.
    assert list(agent.loaded) == ["a/v1"]
    catalog = await service.catalog()
    assert [(d["worker_id"], d["lora_id"]) for d in catalog["draining"]] == [("w0", "a/v1")]
    await service.usage(catalog["revision"], use, seq=2)
    await service.settle()
    assert list(agent.loaded) == ["b/v1"]
    assert [body.get("evict") for verb, body in agent.calls if verb == "load_lora"] == [None, name]
    assert (await service.catalog())["draining"] == []


async def test_a_victim_in_use_leaves_with_the_load_where_the_engine_finishes_what_runs(service, clock):
    agent = await service.worker(slots=1)
    await ready(service, "a/v1", source="a")
    name = engine_name("a/v1", digest_of("a"))
    clock.now += 10
    use = {"worker_id": "w0", "engine_name": name, "requests": 1, "in_flight": 1}
    await service.usage((await service.catalog())["revision"], use)
    await service.register("b/v1", source="b")
    await service.ensure("b/v1")
    await service.settle()
    # No router has seen a catalog without it: a request that one sends now is refused, and sent elsewhere.
    assert list(agent.loaded) == ["b/v1"]
    assert [body.get("evict") for verb, body in agent.calls if verb == "load_lora"] == [None, name]
    operations = (await service.http.get("/metrics")).text
    assert 'operation="drain"' not in operations, "one call to the agent, and no drain before it"


async def test_a_load_takes_the_reserve_and_its_victim_leaves_once_drained(service, clock):
    agent = await service.worker(slots=2)
    await service.http.patch("/v1/policy", json={"reserve_slots": 1})
    await ready(service, "a/v1", source="a")
    clock.now += 1000
    name = engine_name("a/v1", digest_of("a"))
    use = {"worker_id": "w0", "engine_name": name, "requests": 1, "in_flight": 0}
    await service.usage((await service.catalog())["revision"], use)
    await service.register("b/v1", source="b")
    await service.ensure("b/v1")
    await service.settle()
    assert set(agent.loaded) == {"a/v1", "b/v1"}
    catalog = await service.catalog()
    assert [d["lora_id"] for d in catalog["draining"]] == ["a/v1"]
    # A request that slipped in before the router knew is still given its time.
    await service.usage(catalog["revision"], use | {"in_flight": 1}, seq=2)
    await service.settle()
    assert set(agent.loaded) == {"a/v1", "b/v1"}
    await service.usage(catalog["revision"], use, seq=3)
    await service.settle()
    assert list(agent.loaded) == ["b/v1"]
    assert (await service.catalog())["draining"] == []


async def test_a_victim_that_is_requested_before_its_unload_stays(service, clock):
    agent = await service.worker(slots=2)
    await ready(service, "a/v1", source="a")
    clock.now += 1000
    use = {"worker_id": "w0", "engine_name": engine_name("a/v1", digest_of("a")), "requests": 1, "in_flight": 0}
    await service.usage(0, use)
    await service.register("b/v1", source="b")
    await service.ensure("b/v1")
    await service.settle()
    await service.ensure("a/v1")
    await service.settle()
    assert (await service.ensure("a/v1")).json()["ready"] == ["w0"]
    assert set(agent.loaded) == {"a/v1", "b/v1"}
    assert await service.turn() == []


async def test_a_failed_attempt_does_not_keep_a_worker_from_trying_again(service, clock):
    agent = await service.worker()
    await service.register()
    await service.settle()
    agent.put("sql/v1", SQL)["state"] = "failed"
    agent.slots += 1
    await service.ensure()
    await service.settle()
    assert agent.loaded["sql/v1"]["state"] == "ready"


async def test_a_deletion_waits_for_requests_in_flight_and_then_unloads(service):
    agent = await service.worker()
    await ready(service)
    use = {"worker_id": "w0", "engine_name": SQL_ENGINE, "requests": 1, "in_flight": 1}
    await service.usage((await service.catalog())["revision"], use)
    assert (await service.http.delete("/v1/adapters/sql/v1")).status_code == 202
    await service.settle()
    catalog = await service.catalog()
    assert catalog["adapters"][0]["is_deleting"]
    assert [(d["worker_id"], d["lora_id"]) for d in catalog["draining"]] == [("w0", "sql/v1")]

    await service.usage(catalog["revision"], use, seq=2)
    await service.settle()
    assert "sql/v1" in agent.loaded
    await service.usage(catalog["revision"], use | {"in_flight": 0}, seq=3)
    await service.settle()
    assert agent.loaded == {}
    assert (await service.http.get("/v1/adapters/sql/v1")).status_code == 404
    assert (await service.catalog())["adapters"] == []


async def test_a_drain_ends_at_its_deadline_in_any_case(service, clock):
    agent = await service.worker()
    await ready(service)
    use = {"worker_id": "w0", "engine_name": SQL_ENGINE, "requests": 1, "in_flight": 1}
    await service.usage(10**15, use)
    await service.http.delete("/v1/adapters/sql/v1")
    for seq in range(2, 6):
        clock.now += service.store.rules.drain_deadline_s / 4 - 1
        await service.usage(10**15, use, seq=seq)
        await service.settle()
    assert "sql/v1" in agent.loaded
    clock.now += 5
    await service.usage(10**15, use, seq=9)
    await service.settle()
    assert agent.loaded == {}


async def test_without_a_live_router_the_engines_own_count_decides(service, clock):
    agent = await service.worker()
    await ready(service)
    agent.running = 1
    await service.beat()
    await service.http.delete("/v1/adapters/sql/v1")
    await service.settle()
    assert "sql/v1" in agent.loaded
    agent.running = 0
    clock.now += 1
    await service.settle()
    assert agent.loaded == {}


async def test_a_drained_worker_is_told_once_its_adapters_are_elsewhere(service):
    for name in ("w0", "w1"):
        await service.worker(name)
    await ready(service)
    (home,) = (await service.adapter())["status"]["workers"]
    answer = await service.http.post(f"/v1/workers/{home}/drain", json={"deadline_s": 60})
    assert answer.json()["state"] == "draining"
    service.clock.now += 1
    await service.settle()
    service.clock.now += 1
    await service.settle()
    other = {"w0": "w1", "w1": "w0"}[home]
    assert (await service.adapter())["status"]["workers"] == [other]
    assert service.agents[home].loaded == {}
    assert service.agents[home].drained
    # Make before break: the new copy was there before the old one went.
    assert ("load_lora", "sql/v1") in service.agents[other].operations()


async def test_a_drained_worker_serves_again_once_it_is_uncordoned(service):
    agent = await service.worker()
    await service.http.post("/v1/workers/w0/drain", json={"deadline_s": 60})
    await service.settle()
    assert agent.drained
    await service.http.post("/v1/workers/w0/uncordon")
    await service.settle()
    assert not agent.drained
    await ready(service)
    assert [call for call in agent.calls if call[0] == "undrain"] == [("undrain", {"wire": 1})]


@pytest.mark.parametrize("is_ordered", [True, False], ids=["by a leader that has ended", "by its pod"])
async def test_a_drain_without_an_order_is_taken_back_if_a_leader_ordered_it(service, is_ordered):
    agent = await service.worker()
    agent.drained, agent.state = is_ordered, "draining"
    agent.changes += 1
    await service.beat()
    await service.settle()
    await service.settle()
    assert agent.state == ("ready" if is_ordered else "draining")
    assert [call[0] for call in agent.calls].count("undrain") == is_ordered


async def test_a_cordoned_worker_keeps_its_adapters_and_gets_nothing_new(service):
    agent = await service.worker()
    await ready(service)
    await service.http.post("/v1/workers/w0/cordon")
    await service.register("b/v1")
    await service.ensure("b/v1")
    await service.settle()
    assert list(agent.loaded) == ["sql/v1"]
    await service.http.post("/v1/workers/w0/uncordon")
    await service.ensure("b/v1")
    await service.settle()
    assert set(agent.loaded) == {"sql/v1", "b/v1"}


async def test_an_adapter_with_requests_in_routers_is_not_a_victim(service, clock):
    agent = await service.worker(slots=1)
    await ready(service, "a/v1", source="a")
    clock.now += 1000
    name = engine_name("a/v1", digest_of("a"))
    use = {"worker_id": "w0", "engine_name": name, "requests": 1, "in_flight": 1}
    await service.usage(10**15, use, waiting={"a/v1": 1})
    await service.register("b/v1", source="b")
    await service.ensure("b/v1")
    await service.settle()
    assert list(agent.loaded) == ["a/v1"]
    plan = (await service.http.post("/v1/placements/plan")).json()
    assert (plan["actions"], plan["unplaced"]) == ([], ["b/v1"])


async def test_two_loads_on_one_worker_at_a_time_take_two_victims(service):
    agent = await service.worker(slots=2)
    await service.http.patch("/v1/policy", json={"loads_per_worker": 2, "min_residency_s": 0, "drain_deadline_s": 0})
    for name in ("a", "b", "c", "d"):
        await service.register(name)
    for name in ("a", "b"):
        await service.ensure(name)
        await service.settle()
    agent.hold_loads = asyncio.Event()
    for name in ("c", "d"):
        await service.ensure(name)
        for _ in range(2):  # one pass has the victim drain, the next one names it
            await service.beat()
            service.reconciler.run_pass()
    agent.hold_loads.set()
    await service.reconciler.wait_for_actions()
    assert sorted(body["evict"] for verb, body in agent.calls if verb == "load_lora" and body.get("evict")) == [
        engine_name("a", digest_of("file:///a")),
        engine_name("b", digest_of("file:///b")),
    ]
    await service.settle()
    assert sorted(agent.loaded) == ["c", "d"]
