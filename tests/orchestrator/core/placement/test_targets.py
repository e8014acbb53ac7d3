"""Replica targets: from demand, and how long they last."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.demand import DemandBook
from orchestrator.core.placement.place import place
from orchestrator.core.placement.targets import replicas_for_demand, slot_shares, standing_target
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import DemandSnapshot, ObservedFleet, PassMemory, StandingTarget
from tests.orchestrator.core.placement.test_place import NOW, adapter, fleet, held, intent, worker
from tests.orchestrator.reports import CountingRouter
from tests.properties import examples

RULES = PlacementPolicy()


def zipf(count, exponent=0.9):
    weights = [(rank + 1) ** -exponent for rank in range(count)]
    return [weight / sum(weights) for weight in weights]


def test_with_zipf_popularity_only_the_hottest_adapter_needs_two_workers():
    busy = 8 * 0.7
    replicas = [replicas_for_demand(share, 8, busy * share, RULES.target_utilisation) for share in zipf(100)]
    assert [replica > 1 for replica in replicas] == [True] + [False] * 99
    assert replicas[0] <= 2


def test_one_user_at_night_is_not_a_hot_adapter():
    assert replicas_for_demand(share=1.0, fleet=8, busy=0.3, target_utilisation=0.7) < 1


@pytest.mark.parametrize(("copies", "scale"), [(1, None), (3, StandingTarget(replicas=3)), (3, None)])
def test_a_target_rises_at_once(copies, scale):
    assert standing_target(4, 5, copies, scale, NOW, 300.0)[0] == 4


def test_a_target_falls_only_after_lasting_low_demand():
    target, scale = standing_target(1, 1, 3, StandingTarget(replicas=3), NOW, 300.0)
    assert (target, scale.below_since) == (3, NOW)
    assert standing_target(1, 1, 3, scale, NOW + 299, 300.0)[0] == 3
    assert standing_target(1, 1, 3, scale, NOW + 300, 300.0)[0] == 1
    # One pass in which demand is nearly what it was begins the wait anew.
    _, again = standing_target(2, 3, 3, scale, NOW + 299, 300.0)
    assert standing_target(1, 1, 3, again, NOW + 400, 300.0)[0] == 3


def test_copies_found_after_a_restart_count_as_targets():
    target, scale = standing_target(1, 1, 3, None, NOW, 300.0)
    assert (target, scale) == (3, StandingTarget(replicas=3, below_since=NOW))


def test_a_copy_lost_while_its_target_falls_is_not_reloaded():
    assert standing_target(1, 1, 2, StandingTarget(replicas=3, below_since=NOW), NOW + 10, 300.0)[0] == 2


@settings(max_examples=examples(60))
@given(st.floats(0.3, 4.0), st.integers(0, 1000))
def test_constant_demand_with_noise_changes_a_target_at_most_once(level, seed):
    rng, scale, copies, changes, target = Random(seed), None, 1, 0, 1
    for second in range(0, 3000, 2):
        raw = level * rng.uniform(0.9, 1.1)
        up, down = -int(-raw // 1), -int(-raw / 0.8 // 1)
        before = target
        target, scale = standing_target(max(1, up), max(1, down), copies, scale, NOW + second, 300.0)
        copies = target
        changes += target != before and second > 100
    assert changes <= 1


def demanded(**busy):
    rates = {name: share * 2 for name, share in busy.items()}
    return DemandSnapshot(rates=rates, work=dict(busy), habits=rates, last_request_at=dict.fromkeys(busy, NOW))


def test_a_lazy_adapter_that_is_hot_gets_another_copy_in_another_zone():
    observed = fleet(
        worker("w0", held("hot"), zone="z0", node="n0"),
        *(worker(f"w{i}", zone="z0" if i < 4 else "z1", node=f"n{i}") for i in range(1, 8)),
    )
    desired = place(intent(adapter("hot")), observed, demanded(hot=1.2), RULES, NOW)
    assert desired.targets == {"hot": 2}
    (load,) = desired.loads
    assert observed.workers[load.worker_id].zone == "z1"


def test_a_hot_adapter_without_copies_waits_for_a_request():
    observed = fleet(*(worker(f"w{i}") for i in range(8)))
    assert place(intent(adapter("hot")), observed, demanded(hot=5.0), RULES, NOW).loads == ()


def test_demand_respects_max_replicas_and_fitting_workers():
    observed = fleet(worker("w0", held("hot")), worker("w1"), worker("w2"), worker("w3", max_lora_rank=4))
    wanted = intent(adapter("hot", max_replicas=2))
    assert place(wanted, observed, demanded(hot=3.0), RULES, NOW).targets == {"hot": 2}
    assert place(intent(adapter("hot")), observed, demanded(hot=3.0), RULES, NOW).targets == {"hot": 3}


def test_nothing_is_removed_while_no_router_reports():
    observed = fleet(worker("w0", held("a")), worker("w1", held("a")))
    blind = DemandSnapshot(is_blind=True)
    for step in range(4):
        desired = place(intent(adapter("a")), observed, blind, RULES, NOW + 400 * step)
        assert desired.removals == ()
        observed = ObservedFleet(workers=observed.workers, memory=desired.memory)
    # The same silence of requests while routers do speak is a reason.
    for step in range(4, 7):
        desired = place(intent(adapter("a")), observed, DemandSnapshot(), RULES, NOW + 400 * step)
        observed = ObservedFleet(workers=observed.workers, memory=desired.memory)
    assert [step.reason for step in desired.removals] == ["surplus copy: 2 there, 1 needed"]


def test_the_last_copy_is_never_surplus():
    memory = PassMemory(standing_targets={"a": StandingTarget(replicas=1, below_since=0.0)})
    observed = fleet(worker("w0", held("a")), memory=memory)
    assert place(intent(adapter("a", loading="lazy")), observed, DemandSnapshot(), RULES, NOW).removals == ()


def test_weighted_adapters_share_the_slots_by_largest_remainder():
    assert slot_shares({"a": 2.0, "b": 1.0, "c": 1.0}, {"a": 9, "b": 9, "c": 9}, 5) == {"a": 3, "b": 1, "c": 1}


@given(st.integers(1, 10), st.floats(0.1, 6.0), st.integers(0, 8))
def test_ten_versions_of_one_name_are_as_hot_as_one_adapter(count, busy, copies):
    """Copies of the versions before may stay, but none is loaded, and none stands in the way of the current one."""
    versions = [f"n/v{i}" for i in range(count)]
    current, before = versions[-1], versions[:-1]
    book, router = DemandBook(), CountingRouter()
    book.record_report(router.report(), NOW - count)
    for seq, version in enumerate(versions, 1):
        book.follow_names({"n": version})
        router.count(version, sent=3, work_s=busy)  # a second's requests
        book.record_report(router.report(), NOW - count + seq)
    demand = book.snapshot(NOW)
    workers = [worker(f"w{i}", *(held(name) for name in before if i < copies)) for i in range(8)]
    workers[0] = worker("w0", held(current), *(held(name) for name in before if copies))
    known = replace(intent(*map(adapter, versions)), superseded=frozenset(before))
    desired = place(known, fleet(*workers), demand, RULES, NOW)
    alone = fleet(worker("w0", held(current)), *(worker(f"w{i}") for i in range(1, 8)))
    expected = place(intent(adapter(current)), alone, demand, RULES, NOW)
    assert desired.targets.get(current) == expected.targets.get(current)
    assert {load.lora_id for load in desired.loads} <= {current}
    assert len(desired.loads) == len(expected.loads)
