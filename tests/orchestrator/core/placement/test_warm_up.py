"""Warm-up: a new worker loads its share of adapters in demand before it is ready."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.placement.context import usable_slots
from orchestrator.core.placement.place import place
from orchestrator.core.placement.warm_up import WARMING, warm_up_loads
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import DemandSnapshot
from tests.orchestrator.core.placement.test_place import NOW, adapter, fleet, held, intent, worker
from tests.orchestrator.doubles import FakeAgent
from tests.properties import examples

NAMES = [f"a{i}" for i in range(24)]


def demand(*names, rate=1.0):
    return DemandSnapshot(rates=dict.fromkeys(names, rate), work=dict.fromkeys(names, rate / 10))


def shares(observed, asked, adapters=None, **policy):
    adapters = adapters or [adapter(name) for name in NAMES]
    return warm_up_loads(intent(*adapters), observed, asked, PlacementPolicy(**policy), NOW)


def named(loads):
    return {load.lora_id for load in loads}


def two_and_a_new_one(*loras, slots=16):
    halves = [held(name) for name in NAMES[::2]], [held(name) for name in NAMES[1::2]]
    old = [worker(f"w{i}", *half, slots=slots) for i, half in enumerate(halves)]
    return fleet(*old, worker("new", *loras, slots=slots, state=WARMING))


def test_a_warming_worker_gets_its_share_of_adapters_in_demand():
    share = named(shares(two_and_a_new_one(), demand(*NAMES))["new"])
    assert 4 <= len(share) <= 12  # a third of 24, as the hashes fall
    cold = named(shares(two_and_a_new_one(), demand(*NAMES[:12]))["new"])
    assert cold
    assert cold <= set(NAMES[:12])


def test_a_worker_that_requests_are_held_for_warms_up_with_nothing():
    asked = demand(*NAMES)
    base_model = worker("new").base_model
    assert shares(two_and_a_new_one(), replace(asked, held_from_zero={base_model: 3})) == {"new": ()}
    assert shares(two_and_a_new_one(), replace(asked, held_from_zero={"another": 3}))["new"]


def test_warm_up_fills_usable_slots_hottest_first():
    asked = DemandSnapshot(rates={name: 1.0 + i for i, name in enumerate(NAMES)})
    full = [load.lora_id for load in shares(two_and_a_new_one(slots=16), asked)["new"]]
    few = [load.lora_id for load in shares(two_and_a_new_one(slots=16), asked, reserve_slots=13)["new"]]
    assert few == full[:3]
    rates = [asked.rates[name] for name in full]
    assert rates == sorted(rates, reverse=True)


def test_loaded_adapters_do_not_change_the_rest_of_the_share():
    everything = shares(two_and_a_new_one(), demand(*NAMES))["new"]
    some = [held(load.lora_id) for load in everything[:2]]
    loading = held(everything[2].lora_id, state="loading")
    left = shares(two_and_a_new_one(*some, loading), demand(*NAMES))["new"]
    assert named(left) == named(everything[2:])  # one that is on its way is not there yet
    assert shares(two_and_a_new_one(*(held(load.lora_id) for load in everything)), demand(*NAMES))["new"] == ()


def test_warm_up_skips_adapters_that_cannot_load():
    adapters = [adapter("huge", rank=128), adapter("bad", quarantine="bad bytes"), adapter("gone", is_deleting=True)]
    asked = demand("huge", "bad", "gone")
    assert shares(fleet(worker("new", state=WARMING)), asked, adapters)["new"] == ()


def test_without_demand_there_is_no_warm_up():
    assert shares(two_and_a_new_one(), DemandSnapshot())["new"] == ()
    assert shares(fleet(worker("w0")), demand(*NAMES)) == {}


@settings(max_examples=examples(60))
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.sets(st.sampled_from(NAMES)), st.integers(0, 3))
def test_a_warming_worker_does_not_change_placement_of_others(ready, new, slots, hot, reserve):
    old = [worker(f"w{i}", slots=slots) for i in range(ready)]
    asked, rules = demand(*hot), PlacementPolicy(reserve_slots=reserve)
    adapters = intent(*(adapter(name) for name in NAMES))
    observed = fleet(*old, *(worker(f"n{i}", slots=slots, state=WARMING) for i in range(new)))
    found = warm_up_loads(adapters, observed, asked, rules, NOW)
    assert found.keys() == {f"n{i}" for i in range(new)}
    for loads in found.values():
        assert len(loads) == len(named(loads)) <= usable_slots(slots, reserve)
        assert named(loads) <= hot
        assert all(load.evict is None for load in loads)
    assert place(adapters, observed, asked, rules, NOW) == place(adapters, fleet(*old), asked, rules, NOW)


class WarmingAgent(FakeAgent):
    """An agent that waits until it is warm."""

    def metadata(self):
        is_warming = self.state == "starting"
        return super().metadata() | {"is_warming": is_warming, "transport": {"engine_url": self.url}}


async def joined(service, worker_id="new", **shape):
    agent = WarmingAgent(worker_id, **shape)
    agent.state = "starting"
    await service.join(agent)
    return agent


async def is_warm(service, agent):
    answer = await service.http.post("/v1/workers/register", json=agent.heartbeat())
    return answer.json()["is_warm"]


async def report(service, *lora_ids):
    """One router that sends w0 a request a second for each adapter."""
    so_far = {"worker_id": "w0", "requests": service.sent, "work_s": service.sent / 10}
    uses = [so_far | {"engine_name": service.agents["w0"].loaded[name]["engine_name"]} for name in lora_ids]
    await service.usage(0, *uses, seq=service.sent)
    service.sent += 10
    service.clock.now += 1.0


async def busy_house(service):
    """Twelve adapters on one worker, all in demand."""
    names = [f"sql/v{i}" for i in range(12)]
    await service.worker("w0", slots=16)
    for name in names:
        await service.register(name, policy={"loading": "eager"})
    await service.settle()
    service.sent = 1
    for _ in range(3):
        await report(service, *names)
    for name in names:
        (await service.http.patch(f"/v1/adapters/{name}", json={"policy": {"loading": "lazy"}})).raise_for_status()
    return names


async def test_a_new_worker_waits_until_its_share_is_loaded(service):
    names = await busy_house(service)
    agent = await joined(service, slots=16)
    assert not await is_warm(service, agent)  # nobody has looked yet
    await service.turn()
    assert len(agent.loaded) == 4  # as many at once as may be, and not one
    assert not await is_warm(service, agent)
    await service.settle()
    assert 3 <= len(agent.loaded) < len(names)
    assert await is_warm(service, agent)
    before = set(agent.loaded)
    agent.state = "ready"
    await service.settle()
    assert before <= set(agent.loaded)


async def test_a_starting_worker_is_not_warm_before_a_pass_saw_it(service):
    await busy_house(service)
    agent = FakeAgent("new", slots=16)
    agent.state = "starting"
    await service.join(agent)
    await service.turn()
    agent.__class__ = WarmingAgent
    assert not await is_warm(service, agent)
    await service.settle()
    assert agent.loaded
    assert await is_warm(service, agent)


async def test_copies_on_a_warming_worker_are_no_replicas(service):
    names = await busy_house(service)
    agent = await joined(service, slots=16)
    await service.settle()
    assert agent.loaded
    assert {worker for name in names for worker in (await service.adapter(name))["status"]["workers"]} == {"w0"}
    catalog = (await service.http.get("/v1/catalog")).json()
    assert {w["id"]: w["state"] for w in catalog["workers"]} == {"w0": "ready", "new": "starting"}
    assert len(service.agents["w0"].loaded) == len(names)


async def test_a_share_that_cannot_be_loaded_keeps_no_worker_waiting(service):
    names = await busy_house(service)
    agent = await joined(service, slots=16)
    agent.refuse = dict.fromkeys(names, "disk_full")
    for _ in range(8):
        await service.turn()
    assert agent.loaded == {}
    assert await is_warm(service, agent)


async def test_a_worker_without_loads_is_warm_at_once(service):
    await busy_house(service)
    agent = await joined(service, slots=16)
    (await service.http.post("/v1/workers/new/cordon")).raise_for_status()
    await service.turn()
    assert agent.loaded == {}
    assert await is_warm(service, agent)


async def test_a_worker_without_demand_for_anything_is_warm_after_one_pass(service):
    await service.register()
    agent = await joined(service)
    await service.turn()
    assert await is_warm(service, agent)


def test_a_new_workers_share_is_of_adapters_hot_now():
    """Ties and orders are those of the ids, so that each pass decides the same."""
    observed, asked = two_and_a_new_one(), demand(*NAMES)
    first = shares(observed, asked)
    turned = replace(observed, workers=dict(reversed(observed.workers.items())))
    assert shares(turned, replace(asked, rates=dict(reversed(asked.rates.items())))) == first
