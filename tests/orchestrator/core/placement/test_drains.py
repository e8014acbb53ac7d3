"""A worker that an operator drains: until when the drain waits for moves, its progress, and calls that are repeated."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.placement.place import place
from orchestrator.intent.registry import MOST_GONE_ORDERS
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import DemandSnapshot, LoadFigures, WorkerDrainOrder, WorkerIntent
from tests.orchestrator.core.placement.test_place import NOW, adapter, fleet, held, intent, worker
from tests.properties import examples

POLICY = PlacementPolicy()
MB = 1_000_000


def draining_fleet(*names, order=None, seconds=1.0, size_bytes=0.0, others=1, slots=64):
    """w0, which drains and holds these adapters, and other empty workers."""
    order = WorkerDrainOrder(began_at=NOW) if order is None else order
    leaving = worker("w0", *map(held, names), slots=slots, state="draining", drain=order)
    takers = [worker(f"w{n + 1}", slots=slots) for n in range(others)]
    return fleet(leaving, *takers, load_figures=LoadFigures(seconds=seconds, size_bytes=size_bytes))


def progress(observed, *adapters, now=NOW, policy=POLICY):
    return place(intent(*adapters), observed, DemandSnapshot(), policy, now).drains["w0"]


@settings(max_examples=examples(200), deadline=None)
@given(
    count=st.integers(1, 30),
    seconds=st.floats(0.01, 60),
    size_mb=st.integers(1, 500),
    others=st.integers(1, 4),
    usual_mb=st.integers(1, 500),
)
def test_a_drains_deadline_leaves_twice_the_time_of_its_loads(count, seconds, size_mb, others, usual_mb):
    names = [f"a{n}" for n in range(count)]
    observed = draining_fleet(*names, seconds=seconds, size_bytes=usual_mb * MB, others=others)
    found = progress(observed, *(adapter(name, size_bytes=size_mb * MB) for name in names))
    each_s = seconds + max(0, size_mb - usual_mb) * MB * observed.load_figures.s_per_byte
    expected_s = max(each_s, count * each_s / others)
    assert (found.moves, found.move_bytes, found.left) == (count, count * size_mb * MB, tuple(sorted(names)))
    assert found.expected_s == pytest.approx(expected_s, abs=1e-3)
    assert found.deadline == pytest.approx(NOW + POLICY.drain_deadline_s + 2 * expected_s, rel=1e-6)


def test_a_drain_waits_longer_when_its_loads_are_slower_than_they_were():
    names = [f"a{n}" for n in range(10)]
    counted = WorkerDrainOrder(began_at=NOW, deadline=NOW + 50, moves=10, move_bytes=0)
    adapters = [adapter(name) for name in names]
    assert progress(draining_fleet(*names[8:], order=counted, seconds=1.0), *adapters).deadline == NOW + 50
    assert progress(draining_fleet(*names[8:], order=counted, seconds=9.0), *adapters).deadline == NOW + 30 + 2 * 90


def test_a_deadline_that_the_operator_names_stays():
    fixed = WorkerDrainOrder(began_at=NOW, deadline=NOW + 5, is_fixed=True)
    observed = draining_fleet("a", "b", order=fixed, seconds=60.0)
    assert progress(observed, adapter("a"), adapter("b")).deadline == NOW + 5
    desired = place(intent(adapter("a"), adapter("b")), observed, DemandSnapshot(), POLICY, NOW + 5)
    assert desired.workers_to_drain == ("w0",)


def test_two_drains_share_the_workers_that_take_their_adapters():
    two = draining_fleet("a", "b")
    also = worker("w9", held("c"), held("d"), slots=64, state="draining", drain=WorkerDrainOrder(began_at=NOW))
    both = replace(two, workers={**two.workers, "w9": also})
    adapters = [adapter(name) for name in "abcd"]
    assert progress(two, *adapters).expected_s == 2.0
    assert progress(both, *adapters).expected_s == 4.0


def test_only_adapters_that_are_not_ready_elsewhere_are_left():
    observed = draining_fleet("a", "b", "gone", "bad")
    ready = worker("w1", held("a"), held("b", state="loading"), slots=64)
    observed = replace(observed, workers={**observed.workers, "w1": ready})
    adapters = [adapter("a"), adapter("b"), adapter("gone", is_deleting=True), adapter("bad", quarantine="refused")]
    assert progress(observed, *adapters).left == ("b",)


def test_an_adapter_in_use_leaves_a_draining_worker_at_the_expense_of_an_idle_one():
    going = worker("w0", held("hot"), held("idle"), slots=2, state="draining")
    full = worker("w1", held("cold"), slots=1)
    demand = DemandSnapshot(
        rates={"hot": 1.0}, habits={"hot": 1.0, "idle": 0.0, "cold": 0.0}, last_request_at={"hot": NOW}
    )
    desired = place(intent(*map(adapter, ("hot", "idle", "cold"))), fleet(going, full), demand, POLICY, NOW)
    assert [(load.lora_id, load.worker_id, load.evict) for load in desired.loads] == [("hot", "w1", "cold")]
    # Nor does one in use evict another one that is hotter.
    hotter = replace(demand, rates={"hot": 1.0, "cold": 9.0}, habits={"hot": 1.0, "cold": 9.0}, last_request_at={})
    assert place(intent(*map(adapter, ("hot", "idle", "cold"))), fleet(going, full), hotter, POLICY, NOW).loads == ()


async def _loaded(service, count, *, load_s):
    """Registers so many adapters and loads them all on w0, each in this time of the clock."""
    names = [f"a{n:02}/v1" for n in range(count)]
    for name in names:
        await service.register(name, source=f"file:///{name}")
        service.agents["w0"].put(name, f"file:///{name}")
    await service.settle()
    service.reconciler.operations.measured_loads.append((load_s, 1000))
    return names


async def test_a_drain_of_many_slow_adapters_waits_until_all_are_elsewhere(service, clock):
    agent, taker = await service.worker("w0", slots=64), await service.worker("w1", slots=64)
    names = await _loaded(service, 20, load_s=5.0)
    answer = (await service.http.post("/v1/workers/w0/drain")).json()["drain"]
    assert (answer["phase"], answer["moves"], answer["moved"], answer["expected_s"]) == ("moving", 20, 0, 100.0)
    assert answer["deadline_in_s"] == 230.0
    for moved in range(20):
        await service.beat()
        taker.hold_loads = asyncio.Event()  # the load that the pass begins is in progress when we ask
        begun = [action.operation for action in service.reconciler.run_pass()]
        assert begun.count("load") == 1
        shown = (await service.http.get("/v1/workers/w0")).json()["drain"]
        assert (shown["moved"], len(shown["left"])) == (moved, 20 - moved)
        assert not agent.drained
        clock.now += 5.0
        taker.hold_loads.set()
        await service.reconciler.wait_for_actions()
    for _ in range(2):
        clock.now += 1
        await service.settle(100)
    assert set(taker.loaded) == set(names)
    assert agent.drained
    done = (await service.http.get("/v1/workers/w0")).json()["drain"]
    assert (done["phase"], done["moved"], done["left"], done["requests"]) == ("drained", 20, [], 0)


async def test_a_second_post_of_the_same_drain_changes_nothing(service, clock):
    await service.worker("w0", slots=64)
    await _loaded(service, 3, load_s=2.0)
    for body in ({}, {"deadline_s": 600}):
        first = (await service.http.post("/v1/workers/w0/drain", json=body)).json()["drain"]
        await service.turn()
        entries = len(service.store.history(kinds=["worker_draining"], limit=100))
        order = service.store.workers["w0"]
        clock.now += 10
        second = (await service.http.post("/v1/workers/w0/drain", json=body)).json()["drain"]
        assert service.store.workers["w0"] == order
        assert len(service.store.history(kinds=["worker_draining"], limit=100)) == entries
        assert (second["began_at"], second["deadline"]) == (first["began_at"], first["deadline"])
        assert second["deadline_in_s"] == first["deadline_in_s"] - 10
    clock.now += 10
    # Another deadline is another order: it counts from now, and the history has it.
    changed = (await service.http.post("/v1/workers/w0/drain", json={"deadline_s": 60})).json()["drain"]
    assert (changed["deadline_in_s"], changed["moves"]) == (60.0, 3)
    assert len(service.store.history(kinds=["worker_draining"], limit=100)) == entries + 1


async def test_a_drains_deadline_and_count_survive_a_restart(open_service, clock):
    first = open_service()
    agent = await first.worker("w0", slots=64)
    await _loaded(first, 4, load_s=7.0)
    await first.http.post("/v1/workers/w0/drain")
    await first.turn()
    order = first.store.workers["w0"]
    assert (order.moves, order.move_bytes, order.deadline_s) == (4, 4000, None)
    assert order.until == order.since + 30 + 2 * 28
    second = open_service()
    assert second.store.workers["w0"] == order
    await second.join(agent)
    clock.now += 1
    await second.settle()
    shown = (await second.http.get("/v1/workers/w0")).json()["drain"]
    assert (shown["moves"], shown["deadline_in_s"]) == (4, 85.0)


async def test_an_adapter_that_fits_nowhere_is_shown_with_the_reason(service):
    await service.worker("w0", slots=64)
    await service.worker("w1", slots=64, max_lora_rank=4)
    await _loaded(service, 1, load_s=1.0)
    await service.http.post("/v1/workers/w0/drain")
    await service.turn()
    shown = (await service.http.get("/v1/workers/w0")).json()["drain"]
    assert list(shown["stuck"]) == shown["left"] == ["a00/v1"]
    assert "rank 8 is above" in shown["stuck"]["a00/v1"]


async def test_a_drain_keeps_the_deadline_that_the_operator_named_before_this_leader(service, clock):
    agent = await service.worker("w0", slots=64)
    await _loaded(service, 2, load_s=50.0)
    began_at = 1_800_000_000.0 + clock.now
    service.store.put_worker("w0", WorkerIntent(state="draining", since=began_at, until=began_at + 20, deadline_s=20.0))
    await service.turn()
    assert (await service.http.get("/v1/workers/w0")).json()["drain"]["deadline_in_s"] == 20.0
    clock.now += 20
    await service.turn()
    assert agent.drained


async def test_the_oldest_orders_for_workers_that_are_gone_are_forgotten(service):
    await service.worker("w0")
    await service.worker("w1")
    service.store.put_worker("w0", WorkerIntent(state="cordoned", since=7.5))
    with service.store.together():
        for number in range(MOST_GONE_ORDERS + 2):
            service.store.put_worker(f"gone-{number}", WorkerIntent(state="draining", since=100.0 + number))
        service.store.put_worker("gone-long-ago", WorkerIntent(state="draining", since=99.0))
    assert (await service.http.post("/v1/workers/w1/cordon")).json()["state"] == "cordoned"
    kept = [f"gone-{number}" for number in range(2, MOST_GONE_ORDERS + 2)]
    assert set(service.store.workers) == {"w0", "w1", *kept}
