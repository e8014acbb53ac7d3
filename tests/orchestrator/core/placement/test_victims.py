"""Victims in use, and old versions of a published name, which leave a full worker before the next one needs a slot."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.placement.context import PlacementContext
from orchestrator.core.placement.place import place
from orchestrator.core.placement.victims import PATIENCE_S, eviction_loss_s
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import DemandSnapshot, LoadFigures, WantedReplicas
from tests.orchestrator.core.placement.test_place import NOW, adapter, applied, fleet, fleets, held, intent, worker
from tests.properties import examples

RULES, QUIET = PlacementPolicy(), DemandSnapshot()
VERSIONS = ("n/v1", "n/v2", "n/v3")


def published(*old, names=VERSIONS):
    """The versions of a name, of which these are old."""
    return replace(intent(*map(adapter, names)), superseded=frozenset(old))


def full(*states, slots=3):
    """A worker that holds the versions, the oldest loaded first."""
    states = states or ("ready",) * len(VERSIONS)
    loras = [
        replace(held(name, state=state), since=NOW - 100 + n)
        for n, (name, state) in enumerate(zip(VERSIONS, states, strict=True))
    ]
    return worker("w0", *loras, slots=slots)


def leaving(wanted, *workers, demand=QUIET, rules=RULES):
    return [(step.lora_id, step.worker_id) for step in place(wanted, fleet(*workers), demand, rules, NOW).removals]


def test_the_oldest_version_leaves_a_full_worker():
    assert leaving(published("n/v1", "n/v2"), full()) == [("n/v1", "w0")]


def test_none_leaves_where_a_slot_is_free():
    assert leaving(published("n/v1", "n/v2"), full(slots=4)) == []


def test_the_version_that_drains_already_is_named_again_and_no_second_one():
    assert leaving(published("n/v1", "n/v2"), full("ready", "draining", "ready")) == [("n/v2", "w0")]


@pytest.mark.parametrize(
    "demand",
    [
        DemandSnapshot(in_use=frozenset({("n/v1", "w0")})),
        DemandSnapshot(backlog={"n/v1": 1.0}),
        DemandSnapshot(wants={"n/v1": WantedReplicas(replicas=1, since=NOW - 1)}),
    ],
    ids=["in use", "waiting in routers", "wanted"],
)
def test_a_version_that_somebody_asks_for_stays(demand):
    assert leaving(published("n/v1", "n/v2"), full(), demand=demand) == [("n/v2", "w0")]
    assert leaving(published("n/v1"), full(), demand=demand) == []


def test_a_version_that_a_name_points_at_stays():
    assert leaving(published(), full()) == []


def test_a_pinned_version_stays():
    wanted = published("n/v1")
    pinned = replace(wanted, adapters={**wanted.adapters, "n/v1": adapter("n/v1", pinned=True)})
    assert leaving(pinned, full()) == []


def test_a_load_that_evicts_a_version_frees_its_slot_itself():
    wanted = published("n/v1", "n/v2", names=(*VERSIONS, "n/v4"))
    asked = DemandSnapshot(wants={"n/v4": WantedReplicas(replicas=1, since=NOW - 1)})
    desired = place(wanted, fleet(full()), asked, RULES, NOW)
    assert [(load.lora_id, load.evict) for load in desired.loads] == [("n/v4", "n/v1")]
    assert desired.removals == ()


@given(fleets(), st.data())
def test_any_fleet_keeps_what_is_asked_for_and_every_worker_loses_one_version_at_most(scene, data):
    wanted, observed, demand, rules = scene
    old = data.draw(st.sets(st.sampled_from(sorted(wanted.adapters))) if wanted.adapters else st.just(set()))
    wanted = replace(wanted, superseded=frozenset(old))
    steps = [step for step in place(wanted, observed, demand, rules, NOW).removals if "next one needs" in step.reason]
    assert len({step.worker_id for step in steps}) == len(steps)
    for step in steps:
        there = observed.workers[step.worker_id]
        assert step.lora_id in old
        assert there.state == "ready"
        assert (step.lora_id, step.worker_id) not in demand.in_use
        assert step.lora_id not in demand.wants
        assert there.occupied_slots >= there.slots - rules.reserve_slots


@given(fleets(), st.data())
def test_passes_come_to_rest(scene, data):
    wanted, observed, _, rules = scene
    old = data.draw(st.sets(st.sampled_from(sorted(wanted.adapters))) if wanted.adapters else st.just(set()))
    wanted, now = replace(wanted, superseded=frozenset(old)), NOW
    for _ in range(12):
        desired = place(wanted, observed, DemandSnapshot(), rules, now)
        observed = applied(observed, desired)
        now += 60.0
    steps = place(wanted, observed, DemandSnapshot(), rules, now)
    assert not [step for step in steps.removals if "next one needs" in step.reason]


@settings(max_examples=examples(60))
@given(
    st.dictionaries(st.sampled_from("abc"), st.tuples(st.floats(1, 20), st.floats(0, 1), st.booleans()), min_size=1),
    st.dictionaries(st.sampled_from("xyz"), st.tuples(st.floats(0, 50), st.booleans()), min_size=1),
    st.floats(0.02, 5),
    st.floats(0, 60),
)
def test_adapters_asked_for_once_push_out_each_other_and_not_what_is_used_every_second(hot, tail, load_s, waited_s):
    adapters = intent(*map(adapter, (*hot, *tail, "new")))
    there = worker("w0", *map(held, (*hot, *tail)), slots=len(hot) + len(tail), finishes_unloaded=True)
    observed = replace(fleet(there), load_figures=LoadFigures(seconds=load_s, size_bytes=1e9))
    demand = DemandSnapshot(
        wants={"new": WantedReplicas(replicas=1, since=NOW - waited_s)},
        rates={name: rate for name, (rate, _, _) in hot.items()} | dict.fromkeys(tail, 1 / 60),
        habits={name: rate for name, (rate, _, _) in hot.items()} | dict.fromkeys(tail, 1 / 900),
        last_request_at={name: NOW - silent_s for name, (_, silent_s, _) in hot.items()}
        | {name: NOW - silent_s for name, (silent_s, _) in tail.items()},
        in_use=frozenset((name, "w0") for name, use in (*hot.items(), *tail.items()) if use[-1]),
    )
    loads = place(adapters, observed, demand, RULES, NOW).loads
    assert {load.evict for load in loads} <= tail.keys()
    context = PlacementContext(adapters, observed, demand, RULES, NOW)
    losses = [eviction_loss_s(context, adapters.adapters[name], "w0") for name in tail]
    assert bool(loads) == (waited_s >= min(losses))


@pytest.mark.parametrize(
    ("changes", "demand"),
    [
        ({"finishes_unloaded": False}, {}),
        ({}, {"has_unheard_routers": True}),
        ({}, {"backlog": {"old": 1.0}}),
    ],
    ids=["the engine does not finish it", "a router is not heard", "requests wait for room there"],
)
def test_a_copy_in_use_holds_its_slot_for_its_turn(changes, demand):
    there = worker("w0", held("old"), slots=1, finishes_unloaded=True)
    for waited_s in (PATIENCE_S - 1, PATIENCE_S):
        asked = DemandSnapshot(
            wants={"new": WantedReplicas(replicas=1, since=NOW - waited_s)}, in_use=frozenset({("old", "w0")})
        )
        wanted = intent(adapter("old"), adapter("new"))
        assert [load.evict for load in place(wanted, fleet(there), asked, RULES, NOW).loads] == ["old"]
        held_up = place(wanted, fleet(replace(there, **changes)), replace(asked, **demand), RULES, NOW)
        assert [load.evict for load in held_up.loads] == (["old"] if waited_s >= PATIENCE_S else [])
