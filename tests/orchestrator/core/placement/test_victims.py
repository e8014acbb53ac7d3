"""An old version of a published name leaves a full worker before the next version needs its slot."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.placement.place import place
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import DemandSnapshot, WantedReplicas
from tests.orchestrator.core.placement.test_place import NOW, adapter, applied, fleet, fleets, held, intent, worker

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
