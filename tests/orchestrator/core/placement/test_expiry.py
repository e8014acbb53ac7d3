"""Adapters that nobody asks for in their `ttl_s`: what expires, what never does, and whose word the clock is."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.identity import engine_name
from orchestrator.core.demand import DemandBook
from orchestrator.core.placement.context import PlacementContext
from orchestrator.core.placement.expiry import longest_ttl_s, ttl_s
from orchestrator.core.placement.place import place
from orchestrator.core.routers import ROUTER_GONE_S, ROUTER_LIVE_S
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import DemandSnapshot, WantedReplicas
from tests.orchestrator.core.placement.test_place import NOW, adapter, applied, fleet, fleets, held, intent, worker
from tests.orchestrator.doubles import digest_of
from tests.orchestrator.reports import CountingRouter, loaded_name
from tests.orchestrator.test_metrics import series
from tests.properties import examples
from tests.registered import changed

TTL_S = 600.0
RULES = PlacementPolicy(ttl_s=TTL_S)
QUIET = DemandSnapshot(last_asked_at={"a": NOW - 700, "b": NOW - 700})


def removed(wanted, observed, demand=QUIET, rules=RULES):
    """The expired copies of one pass, as (adapter, worker)."""
    steps = place(wanted, observed, demand, rules, NOW).removals
    return [(step.lora_id, step.worker_id) for step in steps if step.is_expired]


# --- which copies expire


@st.composite
def quiet_fleets(draw):
    """Any fleet and intent, with times without requests on both sides of every `ttl_s`."""
    wanted, observed, demand, rules = draw(fleets())
    ages = st.sampled_from([0.0, 50.0, 500.0, 5000.0])
    adapters = {
        name: changed(known, ttl_s=draw(st.sampled_from([None, None, 0.0, 100.0, 1000.0])))
        for name, known in wanted.adapters.items()
    }
    workers = {}
    for name, there in observed.workers.items():
        loras = {
            lora_id: replace(lora, since=NOW - 6000, last_used_at=draw(st.none() | ages.map(lambda age: NOW - age)))
            for lora_id, lora in there.adapters.items()
        }
        workers[name] = replace(there, adapters=loras)
    demand = replace(
        demand,
        wants={} if draw(st.booleans()) else demand.wants,
        in_use=frozenset() if draw(st.booleans()) else demand.in_use,
        last_asked_at={name: NOW - draw(ages) for name in draw(st.lists(st.sampled_from([*adapters]), unique=True))},
        is_blind=draw(st.sampled_from([False, False, False, True])),
        has_unheard_routers=draw(st.sampled_from([False, False, False, True])),
    )
    rules = replace(rules, ttl_s=draw(st.sampled_from([0.0, 100.0, 1000.0])))
    return replace(wanted, adapters=adapters), replace(observed, workers=workers), demand, rules


def idle_s(lora_id, observed, demand):
    """Seconds since anybody, router or agent, has known of a request for the adapter."""
    used = [w.adapters[lora_id].last_used_at for w in observed.workers.values() if lora_id in w.adapters]
    return NOW - max([-NOW, demand.last_asked_at.get(lora_id, -NOW), *(at for at in used if at is not None)])


@settings(max_examples=examples(150))
@given(quiet_fleets())
def test_only_idle_copies_above_the_minimum_expire_and_none_while_a_router_is_unheard(case):
    wanted, observed, demand, rules = case
    desired = place(wanted, observed, demand, rules, NOW)
    expired = [step for step in desired.removals if step.is_expired]
    after = applied(observed, desired)
    context = PlacementContext(wanted, observed, demand, rules, NOW)
    context.targets = desired.targets
    assert not (expired and (demand.is_blind or demand.has_unheard_routers))
    assert len({step.worker_id for step in expired}) == len(expired)
    for step in expired:
        known = wanted.adapters[step.lora_id]
        assert 0 < ttl_s(known, rules) <= idle_s(step.lora_id, observed, demand)
        assert not known.policy.pinned
        assert step.lora_id not in demand.wants
        assert (step.lora_id, step.worker_id) not in demand.in_use
        ready = sum(
            w.state in ("ready", "cordoned", "unmanaged") and step.lora_id in w.adapters
            for w in after.workers.values()
            if w.adapters.get(step.lora_id) is not None and w.adapters[step.lora_id].state == "ready"
        )
        assert ready >= context.replica_floor(known)


@settings(max_examples=examples(60))
@given(quiet_fleets())
def test_passes_without_requests_end_with_every_idle_adapter_at_its_minimum(case):
    wanted, observed, demand, rules = case
    demand = replace(demand, wants={}, in_use=frozenset(), is_blind=False, has_unheard_routers=False)
    demand = replace(demand, rates={})
    for number in range(60):
        desired = place(wanted, observed, demand, rules, NOW + 1000 * number)
        observed = replace(applied(observed, desired), memory=desired.memory)
        if number > 12 and not desired.removals and not desired.loads:
            break
    else:
        raise AssertionError(f"still {desired.removals} and {desired.loads}")
    now = NOW + 1000 * number
    context = PlacementContext(wanted, observed, demand, rules, now)
    context.targets = desired.targets
    for lora_id, holders in context.holders.items():
        known = wanted.adapters[lora_id]
        movable = [
            name
            for name in holders
            if observed.workers[name].state == "ready" and observed.workers[name].adapters[lora_id].state == "ready"
        ]
        is_timed = ttl_s(known, rules) > 0 and not (known.policy.pinned or known.is_deleting or known.quarantine)
        if is_timed and movable and lora_id not in context.draining_ids:
            young = max(now - observed.workers[name].adapters[lora_id].since for name in movable) < 1000
            assert young or len(holders) <= max(context.replica_floor(known), len(holders) - len(movable) + 1)


@settings(max_examples=examples(60))
@given(quiet_fleets())
def test_nothing_expires_without_a_ttl(case):
    wanted, observed, demand, rules = case
    adapters = {name: changed(known, ttl_s=None) for name, known in wanted.adapters.items()}
    assert removed(replace(wanted, adapters=adapters), observed, demand, replace(rules, ttl_s=0.0)) == []
    assert longest_ttl_s(replace(wanted, adapters=adapters), replace(rules, ttl_s=0.0)) == 0.0


@pytest.mark.parametrize(
    ("own", "of_policy", "expires"),
    [(None, TTL_S, True), (None, 0.0, False), (TTL_S, 0.0, True), (0.0, TTL_S, False), (800.0, TTL_S, False)],
)
def test_an_adapters_own_ttl_outweighs_the_policys(own, of_policy, expires):
    observed = fleet(worker("w0", held("a")))
    rules = PlacementPolicy(ttl_s=of_policy)
    assert removed(intent(adapter("a", ttl_s=own)), observed, rules=rules) == ([("a", "w0")] if expires else [])


@pytest.mark.parametrize(
    ("changes", "demand"),
    [
        ({"pinned": True}, {}),
        ({"min_replicas": 1}, {}),
        ({"loading": "eager"}, {}),
        ({"loading": "weighted"}, {}),
        ({"quarantine": "refused"}, {}),
        ({}, {"wants": {"a": WantedReplicas(replicas=1)}}),
        ({}, {"in_use": frozenset({("a", "w0")})}),
        ({}, {"backlog": {"a": 1.0}}),
        ({}, {"is_blind": True}),
        ({}, {"has_unheard_routers": True}),
        ({}, {"last_asked_at": {"a": NOW - 599}}),
    ],
)
def test_adapter_stays_that_is_needed_or_may_be_in_use(changes, demand):
    observed = fleet(worker("w0", held("a")))
    assert removed(intent(adapter("a")), observed) == [("a", "w0")]
    assert removed(intent(adapter("a", **changes)), observed, replace(QUIET, **demand)) == []


def test_young_copy_has_its_time_and_one_that_drains_goes_on():
    young = fleet(worker("w0", held("a", since=NOW - 599)))
    assert removed(intent(adapter("a")), young) == []
    used = fleet(worker("w0", replace(held("a"), last_used_at=NOW - 599)))
    assert removed(intent(adapter("a")), used) == []
    # What another agent knows of it counts as well.
    two = fleet(worker("w0", held("a")), worker("w1", replace(held("a"), last_used_at=NOW - 1), state="cordoned"))
    assert removed(intent(adapter("a")), two) == []
    draining = fleet(worker("w0", held("b"), held("a", since=1.0, state="draining")))
    assert removed(intent(adapter("a"), adapter("b")), draining) == [("a", "w0")]


def test_one_copy_of_a_worker_expires_at_a_time_the_longest_idle_first():
    demand = DemandSnapshot(last_asked_at={"a": NOW - 700, "b": NOW - 900, "c": NOW - 800})
    observed = fleet(worker("w0", held("a"), held("b")), worker("w1", held("a"), held("c")))
    wanted = intent(*(adapter(name) for name in "abc"))
    assert removed(wanted, observed, demand) == [("b", "w0"), ("c", "w1")]


def test_expiries_hold_back_no_copy_that_demand_needs_and_wait_while_moves_are_frozen():
    rules = replace(RULES, storm_moves_per_worker=1)
    observed = fleet(worker("w0", held("a")))
    desired = place(intent(adapter("a")), observed, QUIET, rules, NOW)
    assert desired.memory.churn.step_counts == ()
    churn = replace(desired.memory.churn, step_counts=((int(NOW), 9),))
    frozen = replace(observed, memory=replace(desired.memory, churn=churn))
    assert removed(intent(adapter("a")), frozen, rules=rules) == []


# --- when an adapter was asked for last


def test_first_report_after_a_restart_says_when_the_last_request_was():
    book = DemandBook()
    book.record_report(CountingRouter().report(seq=7, asked_age_s={"a": 300.0}), NOW)
    assert book.snapshot(NOW).last_asked_at == {"a": NOW - 300}
    router = CountingRouter("r1", "b1")
    for at, age_s in ((1, 0.0), (9, 8.0)):
        book.record_report(router.report(asked_age_s={"a": age_s}), NOW + at)
    assert book.snapshot(NOW + 9).last_asked_at == {"a": NOW + 1}


def test_running_waiting_and_refused_requests_and_ensure_all_ask():
    book, router = DemandBook(), CountingRouter()
    running = {"w0": {loaded_name("a"): 1}}
    for at, in_flight in ((0, running), (100, running), (200, {})):
        book.record_report(router.report(in_flight=in_flight, asked_age_s={"a": float(at)}), NOW + at)
    assert book.snapshot(NOW + 200).last_asked_at["a"] == NOW + 100
    book.record_report(router.report(waiting={"a": 1}), NOW + 250)
    assert book.snapshot(NOW + 250).last_asked_at["a"] == NOW + 250
    router.count(worker_id="", requests=1)  # a refused one
    for at, age_s in ((300, 0.0), (310, 10.0)):
        book.record_report(router.report(asked_age_s={"a": age_s}), NOW + at)
    assert book.snapshot(NOW + 310).last_asked_at["a"] == NOW + 300
    book.add_want("a", WantedReplicas(replicas=1, since=NOW + 400), NOW + 500)
    book.add_want("b", WantedReplicas(replicas=1, since=NOW + 400, is_repair=True), NOW + 500)
    assert book.snapshot(NOW + 401).last_asked_at == {"a": NOW + 400}
    book.forget_adapter("a")
    assert book.snapshot(NOW + 401).last_asked_at == {}


def test_time_of_a_last_request_is_kept_for_the_longest_ttl():
    book = DemandBook()
    book.record_report(CountingRouter().report(asked_age_s={"a": 0.0}), NOW)
    book.keep_asked_s = 86_400.0
    assert book.snapshot(NOW + 80_000).last_asked_at == {"a": NOW}
    assert book.snapshot(NOW + 90_000).last_asked_at == {}


def test_router_is_unheard_until_it_has_had_time_to_report_and_while_it_is_silent():
    book, first, second = DemandBook(), CountingRouter("r0"), CountingRouter("r1")
    assert book.snapshot(NOW).has_unheard_routers
    book.begin_term(NOW)
    book.record_report(first.report(), NOW + 1)
    book.record_report(second.report(), NOW + 1)
    assert book.snapshot(NOW + 1).has_unheard_routers
    for at in range(2, 12):
        book.record_report(first.report(), NOW + at)
        book.record_report(second.report(), NOW + at)
    assert not book.snapshot(NOW + 11).has_unheard_routers
    for at in range(12, int(ROUTER_GONE_S) + 30):
        book.record_report(first.report(), NOW + at)
        is_silent = ROUTER_LIVE_S <= at - 11 < ROUTER_GONE_S
        assert book.snapshot(NOW + at).has_unheard_routers == is_silent
    last = NOW + ROUTER_GONE_S + 30
    third = CountingRouter("r2")
    book.record_report(third.report(), last)
    book.record_report(third.report(is_last=True), last)
    book.record_report(first.report(), last + 20)
    assert not book.snapshot(last + 20).has_unheard_routers
    book.begin_term(NOW + 2000)
    assert book.snapshot(NOW + 2001).has_unheard_routers


# --- an orchestrator before agents


SQL = engine_name("sql/v1", digest_of("file:///sql/v1"))


def iso(service):
    """The present time as an agent writes it."""
    return datetime.fromtimestamp(1_800_000_000.0 + service.clock.now, UTC).isoformat()


async def pass_time(service, seconds, *, seq, age_s, in_flight=0):
    """Let time pass with a report of one router each five seconds; `age_s`: of the last request, now."""
    for step in range(0, seconds, 5):
        service.clock.now += 5
        use = {"worker_id": "w0", "engine_name": SQL, "requests": 1, "in_flight": in_flight}
        revision = (await service.catalog())["revision"]
        await service.usage(revision, use | {"last_dispatch_age_s": age_s + step + 5}, seq=seq + step + 5)
        await service.turn()


async def test_idle_adapter_is_drained_and_unloaded_counted_as_ttl_and_loaded_again_on_demand(service, clock):
    agent = await service.worker()
    await service.http.patch("/v1/policy", json={"ttl_s": 60})
    await service.register()
    await service.ensure()
    await service.settle()
    await pass_time(service, 50, seq=100, age_s=0)
    item = await service.adapter()
    assert (item["status"]["workers"], 45 <= item["status"]["idle_s"] <= 55) == (["w0"], True)
    await pass_time(service, 40, seq=200, age_s=50)
    assert agent.operations()[-1] == ("unload_lora", "sql/v1")
    assert (await service.adapter())["status"]["workers"] == []
    text = (await service.http.get("/metrics")).text
    assert series(text, "lora_evictions_total") == {'lora_id="sql/v1",reason="ttl"': 1.0}
    entries = (await service.http.get("/v1/history")).json()["data"]
    (unload,) = [entry for entry in entries if entry["kind"] == "unload"]
    assert "its ttl_s is 60" in unload["body"]["reason"]
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["status"]["workers"] == ["w0"]


async def test_adapters_own_ttl_and_its_end_are_set_over_rest(service):
    await service.worker()
    await service.register(policy={"ttl_s": 60})
    assert (await service.adapter())["spec"]["policy"]["ttl_s"] == 60
    await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"ttl_s": 0}})
    await service.http.patch("/v1/policy", json={"ttl_s": 30})
    assert (await service.adapter())["spec"]["policy"]["ttl_s"] == 0
    await service.ensure()
    await service.settle()
    await pass_time(service, 120, seq=1, age_s=0)
    assert (await service.adapter())["status"]["workers"] == ["w0"]
    assert (await service.http.patch("/v1/policy", json={"ttl_s": -1})).status_code == 400
    await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"ttl_s": None}})
    await pass_time(service, 40, seq=500, age_s=120)
    assert (await service.adapter())["status"]["workers"] == []


async def test_clock_of_the_last_request_goes_on_over_a_restart(open_service, clock):
    first = open_service()
    agent = await first.worker()
    await first.http.patch("/v1/policy", json={"ttl_s": 600})
    await first.register()
    await first.ensure()
    await first.settle()
    agent.loaded["sql/v1"]["loaded_at"] = iso(first)
    clock.now += 500
    # The agent was told of a request; its orchestrator and router restart and know of none.
    agent.loaded["sql/v1"]["last_used"] = iso(first)
    await first.close()
    agent.url = ""
    second = open_service()
    await second.join(agent)
    for step in range(0, 590, 10):
        clock.now += 10
        await second.usage(0, boot_id="new", seq=step)
        await second.turn()
    assert ("unload_lora", "sql/v1") not in agent.operations()
    for step in range(590, 650, 10):
        clock.now += 10
        await second.usage((await second.catalog())["revision"], boot_id="new", seq=step)
        await second.turn()
    assert agent.operations()[-1] == ("unload_lora", "sql/v1")


async def test_nothing_expires_while_a_router_is_silent(service, clock):
    agent = await service.worker()
    await service.http.patch("/v1/policy", json={"ttl_s": 60})
    await service.register()
    await service.ensure()
    await service.settle()
    await service.usage(0, router_id="cut off", boot_id="c", seq=1)
    await pass_time(service, 300, seq=100, age_s=0)
    assert ("unload_lora", "sql/v1") not in agent.operations()
    await pass_time(service, 700, seq=1000, age_s=300)
    assert agent.operations()[-1] == ("unload_lora", "sql/v1")


async def test_ttl_of_policy_and_adapter_survive_a_restart(open_service):
    first = open_service()
    await first.register(policy={"ttl_s": 86_400})
    await first.http.patch("/v1/policy", json={"ttl_s": 3600})
    await first.close()
    second = open_service()
    assert (await second.adapter())["spec"]["policy"]["ttl_s"] == 86_400
    assert (await second.http.get("/v1/policy")).json()["ttl_s"] == 3600
