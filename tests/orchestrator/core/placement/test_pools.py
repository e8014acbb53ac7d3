"""Figures for autoscalers: queue wait and needed adapter slots of each pool."""

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.placement.pools import AdapterNeed, PoolMember, engine_wait_s, pool_figures
from tests.orchestrator.doubles import FakeAgent
from tests.orchestrator.test_metrics import series

RANKS = (8, 16, 64)


def member(pool="p", slots=8, rank=64, **more):
    return PoolMember(**{"base_model": "qwen"} | more, pool=pool, slots=slots, max_lora_rank=rank)


def need(copies=1, rank=8, base_model="qwen"):
    return AdapterNeed(base_model=base_model, rank=rank, copies=copies)


def wanted(members, needs):
    return {pool.name: pool.slots_wanted for pool in pool_figures(members, needs)}


def test_a_copy_counts_for_the_pool_of_the_smallest_fitting_rank():
    tiers = [member("small", rank=8), member("large", rank=64)]
    assert wanted(tiers, [need(3, rank=8), need(2, rank=32)]) == {"small": 3, "large": 2}


def test_pools_of_one_rank_share_by_their_slots():
    assert wanted([member("a", slots=30), member("b", slots=10)], [need(8)]) == {"a": 6, "b": 2}
    assert wanted([member("a", slots=0), member("b", slots=0)], [need(8)]) == {"a": 4, "b": 4}


def test_an_adapter_that_fits_nowhere_is_needed_in_no_pool():
    assert wanted([member("a", rank=8)], [need(rank=16), need(base_model="llama"), need(base_model=None)]) == {"a": 0}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.sampled_from(RANKS)), min_size=1),
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from(RANKS))),
)
def test_every_copy_that_fits_somewhere_is_wanted_once(workers, copies):
    members = [member(pool, slots, rank) for pool, slots, rank in workers]
    most = max(rank for _, _, rank in workers)
    fitting = sum(count for count, rank in copies if rank <= most)
    assert sum(wanted(members, [need(count, rank) for count, rank in copies]).values()) == pytest.approx(fitting)


def test_queue_wait_follows_littles_law():
    assert engine_wait_s(running=10, waiting=20, request_s=3.0) == pytest.approx(6.0)
    assert engine_wait_s(running=0, waiting=4, request_s=0.0) == 4.0  # none has ended yet
    assert engine_wait_s(running=9, waiting=0, request_s=3.0) == 0.0


def test_the_wait_of_a_pool_is_the_mean_of_its_workers():
    (pool,) = pool_figures([member(wait_s=4.0), member(wait_s=0.0)], [])
    assert (pool.slots, pool.queue_wait_s) == (16, 2.0)


async def test_the_heartbeat_answer_has_routers_requests_in_flight(service, clock):
    agent = FakeAgent("w0")
    await service.join(agent)
    names = ("tiny-qwen", "sql/v1@3f9a1c2b77aa")
    uses = [{"worker_id": "w0", "engine_name": name, "requests": 9, "in_flight": 2} for name in names]
    await service.usage(0, *uses)

    async def told():
        return (await service.http.post("/v1/workers/register", json=agent.heartbeat())).json()["in_flight"]

    assert await told() == 4
    clock.now += 11
    assert await told() == 0


async def test_the_heartbeat_answer_says_when_to_send_the_next(open_service):
    service = open_service(heartbeat_interval_s=0.25)
    answer = await service.http.post("/v1/workers/register", json=FakeAgent("w0").heartbeat())
    assert answer.json()["interval_s"] == 0.25


class PooledAgent(FakeAgent):
    load: ClassVar = {}

    def metadata(self):
        return super().metadata() | {"pool": "gold", "load": self.load}


async def test_the_leader_exports_slots_need_and_wait_of_each_pool(service, clock):
    agent = PooledAgent("w0", slots=3)
    await service.join(agent)
    (await service.http.patch("/v1/policy", json={"reserve_slots": 1})).raise_for_status()
    await service.http.patch("/v1/policy", json={"reserve_slots": 1})
    for lora_id in ("a/v1", "b/v1", "c/v1"):
        await service.register(lora_id, policy={"loading": "eager"})
    await service.settle()
    agent.load = {"running": 4, "waiting": 2, "mean_request_s": 3.0}
    await service.beat()
    queues = {"router_id": "r", "boot_id": "b", "seq": 1, "revision_seen": 0, "waits_s": {"w0": 2.5}}
    (await service.http.post("/v1/usage", json=queues)).raise_for_status()

    text = (await service.http.get("/metrics")).text
    labels = 'base_model="tiny-qwen",pool="gold"'
    assert series(text, "lorafleet_pool_slots") == {labels: 2.0}  # one is kept in reserve
    assert series(text, "lorafleet_pool_slots_wanted") == {labels: 3.0}  # one of them has no room
    assert series(text, "lorafleet_pool_queue_wait_seconds") == {labels: 4.0}
    clock.now += 11
    assert series((await service.http.get("/metrics")).text, "lorafleet_pool_queue_wait_seconds") == {labels: 1.5}

    service.built.leadership.lead_until(0.0)
    assert series((await service.http.get("/metrics")).text, "lorafleet_pool_slots") == {}


async def test_a_lazy_adapter_needs_a_slot_while_in_demand(service, clock):
    await service.join(PooledAgent("w0", slots=4))
    await service.register("a/v1")
    await service.ensure("a/v1")
    await service.settle()

    async def needed():
        return sum(series((await service.http.get("/metrics")).text, "lorafleet_pool_slots_wanted").values())

    name = service.agents["w0"].loaded["a/v1"]["engine_name"]
    for seq in (1, 2):
        use = {"worker_id": "w0", "engine_name": name, "requests": seq}
        await service.usage(0, use, seq=seq)
        clock.now += 1
    assert await needed() == 1.0
    clock.now += 120
    await service.settle()
    assert await needed() == 0.0


async def test_a_pool_that_may_be_at_zero_has_figures_without_a_worker(open_service, clock):
    service = open_service(scale_from_zero={"gold": {"base_model": "tiny-qwen"}, "night": {"base_model": "other"}})
    await service.join(PooledAgent("w0", slots=3))
    report = {"router_id": "r", "boot_id": "b", "seq": 1, "revision_seen": 0, "held_from_zero": {"other": 7}}
    (await service.http.post("/v1/usage", json=report)).raise_for_status()
    text = (await service.http.get("/metrics")).text
    gold, night = 'base_model="tiny-qwen",pool="gold"', 'base_model="other",pool="night"'
    assert series(text, "lorafleet_pool_slots") == {gold: 3.0, night: 0.0}
    assert series(text, "lorafleet_pool_held_requests") == {gold: 0.0, night: 7.0}
    assert series(text, "lorafleet_pool_idle_seconds") == {gold: 0.0, night: 0.0}  # a router may be unheard yet
    for seq in range(2, 5):
        clock.now += 9
        (await service.http.post("/v1/usage", json=report | {"seq": seq, "held_from_zero": {}})).raise_for_status()
    idle = series((await service.http.get("/metrics")).text, "lorafleet_pool_idle_seconds")
    assert idle[night] == 27.0
    running = report | {"seq": 5, "held_from_zero": {}, "in_flight": {"w0": {"tiny-qwen": 1}}}
    (await service.http.post("/v1/usage", json=running)).raise_for_status()
    assert series((await service.http.get("/metrics")).text, "lorafleet_pool_idle_seconds")[gold] == 0.0
    clock.now += 11  # the router is silent: what it does is not known
    assert series((await service.http.get("/metrics")).text, "lorafleet_pool_idle_seconds")[night] == 0.0
