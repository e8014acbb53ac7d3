"""Moves, removals, victims, and the churn limiter."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.placement import churn
from orchestrator.core.placement.place import place
from orchestrator.core.placement.tenant_order import wait_bucket_s
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import (
    ChurnHistory,
    DemandSnapshot,
    LoadFigures,
    ObservedFleet,
    PassMemory,
    ReportedAdapter,
    StandingTarget,
    WantedReplicas,
)
from tests.orchestrator.core.placement.test_place import NOW, adapter, applied, fleet, held, intent, want, worker
from tests.properties import examples
from tests.registered import changed

RULES = PlacementPolicy(min_residency_s=10.0)
WAIT_BUCKET_S = wait_bucket_s(LoadFigures())


def busy(parts, **more):
    return DemandSnapshot(
        rates=dict(parts), work=dict(parts), habits=dict(parts), last_request_at=dict.fromkeys(parts, NOW), **more
    )


def carried(observed, desired):
    """The fleet after a pass's steps, and what the pass remembers."""
    return replace(applied(observed, desired), memory=desired.memory)


def settled(wanted, observed, demand, rules=RULES, passes=40, step_s=60.0, now=NOW):
    """Run passes until one has no step; returns (fleet, loads, removals)."""
    loads, removals = [], []
    for number in range(passes):
        desired = place(wanted, observed, demand, rules, now + number * step_s)
        observed = carried(observed, desired)
        loads += desired.loads
        removals += desired.removals
        if number > 8 and not desired.loads and not desired.removals:
            break
    return observed, loads, removals


@st.composite
def served(draw):
    """A fleet with every adapter placed and some demand for each."""
    workers = draw(st.integers(2, 6))
    names = [f"a{i}" for i in range(draw(st.integers(1, 3 * workers)))]
    parts = {name: draw(st.sampled_from([0.0, 0.02, 0.1, 0.3])) for name in names}
    placed = {name: draw(st.integers(0, workers - 1)) for name in names}
    observed = fleet(
        *(
            worker(
                f"w{i}",
                *(held(name) for name in names if placed[name] == i),
                slots=24,
                zone=f"z{i % 2}",
                node=f"n{i}",
            )
            for i in range(workers)
        )
    )
    return intent(*map(adapter, names)), observed, busy(parts)


@settings(max_examples=examples(60))
@given(served())
def test_under_constant_demand_everything_comes_to_rest_and_no_adapter_is_lost(case):
    wanted, observed, demand = case
    after, _, _ = settled(wanted, observed, demand)
    for step in range(3):
        again = place(wanted, after, demand, RULES, NOW + 5000 + 400 * step)
        assert (again.loads, again.removals) == ((), ())
        after = carried(after, again)
    there = {name for w in after.workers.values() for name in w.adapters}
    assert there == set(wanted.adapters)


@settings(max_examples=examples(60))
@given(served(), st.integers(0, 1000))
def test_noise_in_constant_demand_causes_hardly_any_moves(case, seed):
    wanted, observed, demand = case
    rng = Random(seed)
    observed, _, _ = settled(wanted, observed, demand)
    moves = []
    for number in range(60):
        parts = {name: part * rng.uniform(0.9, 1.1) for name, part in demand.work.items()}
        desired = place(wanted, observed, busy(parts), RULES, NOW + 5000 + 30 * number)
        moves += [(load.lora_id, load.worker_id) for load in desired.loads]
        observed = carried(observed, desired)
    assert len(moves) == len(set(moves))
    assert len(moves) <= len(observed.workers)


@settings(max_examples=examples(60))
@given(served())
def test_a_worker_that_joins_takes_no_more_than_its_fair_share(case):
    wanted, observed, demand = case
    observed, _, _ = settled(wanted, observed, demand)
    joined = replace(observed, workers={**observed.workers, "new": worker("new", slots=24, zone="z0", node="new")})
    after, loads, removals = settled(wanted, joined, demand, now=NOW + 5000)
    fair = sum(demand.work.values()) / len(joined.workers)
    copies = {name: sum(name in w.adapters for w in after.workers.values()) for name in wanted.adapters}
    takes = sum(demand.work[name] / copies[name] for name in after.workers["new"].adapters)
    assert takes <= fair + 1e-9
    assert len(loads) - len(removals) <= 1
    assert all(name in {load.lora_id for load in loads} for name in after.workers["new"].adapters)


@settings(max_examples=examples(60))
@given(served())
def test_moves_do_not_depend_on_mapping_order(case):
    wanted, observed, demand = case
    turned = replace(observed, workers=dict(reversed(observed.workers.items())))
    other = replace(demand, work=dict(reversed(demand.work.items())), rates=dict(reversed(demand.rates.items())))
    one, two = (
        place(wanted, observed, demand, RULES, NOW),
        place(replace(wanted, adapters=dict(reversed(wanted.adapters.items()))), turned, other, RULES, NOW),
    )
    assert (one.loads, one.removals, one.memory) == (two.loads, two.removals, two.memory)


def uneven():
    parts = {f"a{i}": 0.36 for i in range(4)}
    observed = fleet(worker("w0", *(held(name) for name in parts), slots=8), worker("w1", slots=8))
    return intent(*map(adapter, parts)), observed, busy(parts)


def test_a_move_loads_the_new_copy_before_removing_the_old():
    wanted, observed, demand = uneven()
    first = place(wanted, observed, demand, RULES, NOW)
    (load,) = first.loads
    assert load.worker_id == "w1"
    assert first.removals == ()
    assert first.memory.moves == {(load.lora_id, "w0"): "w1"}
    loading = ReportedAdapter(
        lora_id=load.lora_id, digest=f"digest-{load.lora_id}", engine_name="", state="loading", since=NOW
    )
    w1 = observed.workers["w1"]
    half = replace(observed, workers={**observed.workers, "w1": replace(w1, adapters={load.lora_id: loading})})
    second = place(wanted, replace(half, memory=first.memory), demand, RULES, NOW + 1)
    assert (second.loads, second.removals) == ((), ())
    done = replace(carried(observed, first), memory=second.memory)
    third = place(wanted, done, demand, RULES, NOW + 5)
    assert [(step.lora_id, step.worker_id) for step in third.removals] == [(load.lora_id, "w0")]


def test_a_move_whose_load_failed_is_no_reason_to_remove_anything():
    wanted, observed, demand = uneven()
    first = place(wanted, observed, demand, RULES, NOW)
    again = place(wanted, replace(observed, memory=first.memory), demand, RULES, NOW + 5)
    assert again.removals == ()


@pytest.mark.parametrize("why", ["pinned", "young", "idle fleet", "no work reported"])
def test_nothing_is_moved_that_is(why):
    wanted, observed, demand = uneven()
    if why == "pinned":
        wanted = intent(*(changed(known, pinned=True) for known in wanted.adapters.values()))
    elif why == "young":
        w0 = observed.workers["w0"]
        young = {name: replace(there, since=NOW - 5) for name, there in w0.adapters.items()}
        observed = replace(observed, workers={**observed.workers, "w0": replace(w0, adapters=young)})
    elif why == "idle fleet":
        demand = busy(dict.fromkeys(demand.work, 0.05))
    else:
        demand = replace(demand, work={})
    assert place(wanted, observed, demand, RULES, NOW).loads == ()


def doubled():
    observed = fleet(worker("w0", held("a"), zone="z0"), worker("w1", held("a"), zone="z0"), worker("w2", zone="z1"))
    return intent(adapter("a")), replace(
        observed, memory=PassMemory(standing_targets={"a": StandingTarget(replicas=1)})
    )


def test_a_surplus_copy_is_removed_with_that_reason():
    wanted, observed = doubled()
    (step,) = place(wanted, observed, DemandSnapshot(), RULES, NOW).removals
    assert step.reason == "surplus copy: 2 there, 1 needed"


@pytest.mark.parametrize("why", ["in use", "pinned", "young", "asked for", "the other is still loading"])
def test_a_surplus_copy_stays_while_it_is(why):
    wanted, observed = doubled()
    demand = DemandSnapshot()
    if why == "in use":
        demand = DemandSnapshot(in_use=frozenset({("a", "w0"), ("a", "w1")}))
    elif why == "pinned":
        wanted = intent(adapter("a", pinned=True))
    elif why == "asked for":
        demand = want("a", replicas=2)
    else:
        change = {"since": NOW - 5} if why == "young" else {"state": "loading"}
        workers = {
            name: replace(w, adapters={n: replace(there, **change) for n, there in w.adapters.items()})
            for name, w in observed.workers.items()
            if name != "w1" or why == "young"
        }
        observed = replace(observed, workers={"w1": observed.workers["w1"], **workers})
    assert place(wanted, observed, demand, RULES, NOW).removals == ()


def test_a_draining_surplus_copy_goes_first_even_in_use():
    wanted, observed = doubled()
    w1 = observed.workers["w1"]
    w1 = replace(w1, adapters={"a": replace(w1.adapters["a"], state="draining")})
    demand = DemandSnapshot(in_use=frozenset({("a", "w1")}))
    steps = place(wanted, replace(observed, workers={**observed.workers, "w1": w1}), demand, RULES, NOW).removals
    assert [step.worker_id for step in steps] == ["w1"]


def test_a_surplus_copy_of_a_restarted_worker_can_be_evicted_at_once():
    young = NOW - 1
    observed = fleet(
        worker("w0", held("a", since=young), slots=1), worker("w1", held("a", since=young), held("b", since=young))
    )
    rules = PlacementPolicy(min_residency_s=60.0)
    names = intent(adapter("a"), adapter("b"), adapter("cold", rank=8))
    full = replace(observed, workers={**observed.workers, "w1": replace(observed.workers["w1"], slots=2)})
    (load,) = place(names, full, want("cold"), rules, NOW).loads
    assert load.evict == "a"
    # The only copy of another, asked for as much as two a second, costs more than the wait, and stays.
    alone = replace(full, workers={"w1": replace(full.workers["w1"], adapters={"b": held("b", since=young)}, slots=1)})
    demand = replace(want("cold", since=NOW - 5), habits={"b": 2.0})
    assert place(names, alone, demand, rules, NOW).loads == ()


def test_the_victim_is_the_cheapest_to_reload():
    observed = fleet(worker("w0", held("small"), held("large"), slots=2))
    names = intent(adapter("small", size_bytes=10**7), adapter("large", size_bytes=10**10), adapter("new"))
    demand = replace(want("new"), habits={"small": 0.3, "large": 0.2})
    (load,) = place(names, observed, demand, PlacementPolicy(reserve_slots=0), NOW).loads
    assert load.evict == "small"


def test_recency_outweighs_frequency_for_victims():
    observed = fleet(worker("w0", held("talking"), held("over"), slots=2))
    names = intent(adapter("talking"), adapter("over"), adapter("new"))
    demand = replace(
        want("new"), rates={"talking": 0.02, "over": 0.1}, last_request_at={"talking": NOW - 2, "over": NOW - 200.0}
    )
    (load,) = place(names, observed, demand, PlacementPolicy(reserve_slots=0), NOW).loads
    assert load.evict == "over"


def test_a_scale_up_evicts_only_copies_worth_less():
    hot = {"hot": 1.6, "warm": 1.5}
    observed = fleet(worker("w0", held("hot"), slots=1), worker("w1", held("warm"), slots=1))
    names = intent(adapter("hot"), adapter("warm"))
    assert place(names, observed, busy(hot), RULES, NOW).loads == ()
    cold = replace(busy({"hot": 2.0, "warm": 0.001}), last_request_at={"hot": NOW, "warm": NOW - 900})
    (load,) = place(names, observed, cold, RULES, NOW).loads
    assert (load.lora_id, load.evict) == ("hot", "warm")


def test_a_repair_evicts_no_hotter_adapter_that_is_briefly_silent():
    observed = fleet(worker("w0", held("hot"), slots=1))
    names = intent(adapter("hot"), adapter("cool"))
    repair = {"cool": WantedReplicas(replicas=1, is_repair=True)}
    demand = DemandSnapshot(
        habits={"hot": 0.2, "cool": 0.1}, last_request_at={"hot": NOW - 300, "cool": NOW - 1}, wants=repair
    )
    refused = place(names, observed, demand, RULES, NOW)
    assert refused.loads == ()
    assert "nothing there may be evicted" in refused.unplaced["cool"]
    # A request that waits does, and so does a repair where it is the hotter one.
    waits = replace(demand, wants={"cool": WantedReplicas(replicas=1, since=NOW - 15)})
    (load,) = place(names, observed, waits, RULES, NOW).loads
    assert load.evict == "hot"
    (load,) = place(names, observed, replace(demand, habits={"hot": 0.1, "cool": 0.2}), RULES, NOW).loads
    assert load.evict == "hot"


def test_an_adapter_with_queued_requests_is_no_victim():
    observed = fleet(worker("w0", held("queued"), held("idle"), slots=2))
    names = intent(adapter("queued"), adapter("idle"), adapter("new"))
    demand = replace(want("new"), habits={"idle": 1.0}, last_request_at={"idle": NOW}, backlog={"queued": 0.5})
    (load,) = place(names, observed, demand, RULES, NOW).loads
    assert load.evict == "idle"


def test_queued_requests_raise_the_target_of_a_saturated_adapter():
    observed = fleet(*(worker(f"w{n}", *([held("a")] if n == 0 else [held(f"b{n}")])) for n in range(4)))
    names = intent(*map(adapter, ("a", "b1", "b2", "b3")))
    served = busy({"a": 0.7, "b1": 0.2, "b2": 0.2, "b3": 0.2})
    assert place(names, observed, served, RULES, NOW).loads == ()
    (load,) = place(names, observed, replace(served, backlog={"a": 6.0}), RULES, NOW).loads
    assert load.lora_id == "a"


def test_only_a_worker_with_queued_requests_gives_adapters_away():
    parts = {"a": 0.4, "b": 0.3, "c": 0.3, "d": 0.1}
    observed = fleet(worker("w0", held("a"), held("b"), held("c")), worker("w1", held("d")))
    names = intent(*map(adapter, parts))
    assert place(names, observed, busy(parts), RULES, NOW).loads == ()
    (load,) = place(names, observed, replace(busy(parts), backlog=dict.fromkeys("abc", 5.0)), RULES, NOW).loads
    assert (load.worker_id, "moves from w0" in load.reason) == ("w1", True)


def test_nothing_is_moved_while_a_further_copy_loads():
    names = intent(adapter("a"))
    observed = fleet(worker("w0", held("a")), worker("w1"), worker("w2"), worker("w3"))
    assert place(names, observed, busy({"a": 0.4}), RULES, NOW).loads == ()
    surge = replace(busy({"a": 4.0}), surges={"a": 4.0})
    desired = place(names, observed, surge, RULES, NOW)
    assert [load.reason.partition(" (")[0] for load in desired.loads] == [
        "replica 2 of 4",
        "replica 3 of 4",
        "replica 4 of 4",
    ]
    desired = place(names, observed, surge, replace(RULES, max_replicas=3), NOW)
    assert [load.reason.partition(" (")[0] for load in desired.loads] == ["replica 2 of 3", "replica 3 of 3"]


def test_an_adapter_with_a_loading_copy_does_not_move():
    parts = {"hot": 0.8, "large": 1.2}
    names = intent(adapter("hot"), adapter("large", max_replicas=1))

    def moved(state):
        there = (worker("w0", held("hot"), held("large")), worker("w1", held("hot", state=state)), worker("w2"))
        return [load.lora_id for load in place(names, fleet(*there), busy(parts), RULES, NOW).loads]

    assert (moved("ready"), moved("loading")) == (["hot"], [])


def test_a_named_copy_takes_its_share_of_load_in_the_same_pass():
    parts = {"hot": 1.8, "warm": 0.5}
    names = intent(adapter("hot", max_replicas=3), adapter("warm"))
    observed = fleet(worker("w0", held("hot"), held("warm")), worker("w1"), worker("w2"), worker("w3"))
    # Alone, w0 had too much to do and would give something away; with two copies elsewhere it has not.
    moved = place(names, observed, busy(parts), RULES, NOW)
    assert [load.lora_id for load in moved.loads] == ["hot", "hot"]


def test_a_waiting_request_prefers_an_idle_worker_to_a_loading_one():
    names = intent(adapter("a"))
    idle = fleet(worker("w0"), worker("w1"))
    (first,) = place(names, idle, want("a"), RULES, NOW).loads
    (other,) = place(names, replace(idle, busy={first.worker_id: 1}), want("a"), RULES, NOW).loads
    assert other.worker_id != first.worker_id
    repair = DemandSnapshot(wants={"a": WantedReplicas(replicas=1, is_repair=True)})
    (patient,) = place(names, replace(idle, busy={first.worker_id: 1}), repair, RULES, NOW).loads
    assert patient.worker_id == first.worker_id


def frozen_storm(count=100):
    return ChurnHistory(step_counts=((int(NOW) - 5, count),))


def test_under_churn_nothing_is_moved_or_scaled_and_the_reason_is_given():
    wanted, observed, demand = uneven()
    stormy = replace(observed, memory=PassMemory(churn=frozen_storm()))
    desired = place(wanted, stormy, demand, RULES, NOW)
    assert (desired.loads, desired.removals) == ((), ())
    assert "storm: 100 loads and unloads within 60 s" in desired.frozen_reason
    hot = fleet(worker("w0", held("a")), worker("w1"), memory=PassMemory(churn=frozen_storm()))
    assert place(intent(adapter("a")), hot, busy({"a": 1.5}), RULES, NOW).loads == ()
    assert place(intent(adapter("a")), replace(hot, memory=PassMemory()), busy({"a": 1.5}), RULES, NOW).loads != ()


def test_under_churn_repairs_and_waiting_requests_are_still_served():
    observed = fleet(worker("w0"), worker("w1"), memory=PassMemory(churn=frozen_storm()))
    demand = DemandSnapshot(
        rates={"cool": 1.0, "hot": 9.0},
        wants={name: WantedReplicas(replicas=1, is_repair=True) for name in ("cool", "hot")}
        | {"asked": WantedReplicas(replicas=1)},
    )
    desired = place(intent(*map(adapter, ("cool", "hot", "asked"))), observed, demand, RULES, NOW)
    assert [load.lora_id for load in desired.loads] == ["asked", "hot", "cool"]


def test_a_fleet_without_workers_is_never_frozen():
    assert place(intent(adapter("a")), fleet(), DemandSnapshot(), RULES, NOW).frozen_reason is None


def test_with_no_moves_allowed_every_pass_is_frozen():
    forbidden, observed = replace(RULES, storm_moves_per_worker=0), fleet(worker("w0"))
    for number in range(3):
        desired = place(intent(adapter("a")), observed, DemandSnapshot(), forbidden, NOW + number)
        assert desired.frozen_reason is not None
        observed = replace(observed, memory=desired.memory)


def test_any_number_of_moves_may_be_allowed():
    rules = PlacementPolicy(storm_moves_per_worker=10**30)
    assert (
        place(intent(adapter("a")), fleet(worker("w0", held("a"))), DemandSnapshot(), rules, NOW).frozen_reason is None
    )


def test_moves_resume_at_half_of_the_allowed_churn():
    rules = PlacementPolicy(storm_window_s=60.0, storm_moves_per_worker=4)
    calm = ChurnHistory(step_counts=((0, 3), (30, 5)))
    assert churn.is_frozen(calm, rules, 2, 40.0)
    assert not churn.is_frozen(calm, rules, 2, 60.0)
    assert churn.is_frozen(replace(calm, frozen_since=40.0), rules, 2, 60.0)
    assert not churn.is_frozen(replace(calm, frozen_since=40.0), rules, 2, 90.0)


def test_a_step_that_takes_many_passes_is_counted_once():
    steps = frozenset({("a", "w0", "load")})
    once = churn.history_after(ChurnHistory(), steps, RULES, is_held=False, now=10.0)
    assert churn.steps_in_window(churn.history_after(once, steps, RULES, is_held=False, now=11.0), RULES, 11.0) == 1


def test_constantly_changing_demand_is_stopped_by_the_churn_limiter():
    names = [f"a{i}" for i in range(8)]
    wanted = intent(*map(adapter, names))
    rules = PlacementPolicy(min_residency_s=0.0, scale_down_after_s=0.0, storm_moves_per_worker=2)
    observed = fleet(*(worker(f"w{i}", held(names[i]), held(names[i + 4]), slots=8) for i in range(4)))
    said, steps = [], 0
    for number in range(100):
        hot = names[number % 8]
        demand = busy({name: 2.5 if name == hot else 0.01 for name in names})
        desired = place(wanted, observed, demand, rules, NOW + number)
        observed = carried(observed, desired)
        steps += len(desired.loads) + len(desired.removals)
        said.append(desired.frozen_reason)
    assert any(said)
    # Two windows, four workers, twice each; old halves of moves are finished in a storm as well.
    assert steps <= 3 * 4 * 2


def test_removals_of_one_pass_stay_within_the_churn_limit():
    names = [f"a{i}" for i in range(40)]
    memory = PassMemory(standing_targets=dict.fromkeys(names, StandingTarget(replicas=1)))
    observed = fleet(*(worker(f"w{i}", *map(held, names), slots=64) for i in range(2)), memory=memory)
    rules = PlacementPolicy(storm_moves_per_worker=4)
    first = place(intent(*map(adapter, names)), observed, DemandSnapshot(), rules, NOW)
    assert len(first.removals) == 8
    # Those that were named go on being named; no others join them.
    second = place(
        intent(*map(adapter, names)), replace(observed, memory=first.memory), DemandSnapshot(), rules, NOW + 1
    )
    assert second.frozen_reason is not None
    assert second.removals == first.removals


def test_pass_memory_is_the_only_state_between_passes():
    wanted, observed, demand = uneven()
    first = place(wanted, observed, demand, RULES, NOW)
    assert place(wanted, ObservedFleet(workers=observed.workers), demand, RULES, NOW) == first


def test_an_earlier_wait_comes_before_a_hotter_adapter():
    turn = NOW // WAIT_BUCKET_S * WAIT_BUCKET_S
    now = turn + WAIT_BUCKET_S - 0.5
    wants = {
        "hot": WantedReplicas(replicas=1, since=turn + 2.0),
        "warm": WantedReplicas(replicas=1, since=turn),
        "early": WantedReplicas(replicas=1, since=turn - 0.5),
        "lost": WantedReplicas(replicas=1, since=turn - 3 * WAIT_BUCKET_S, is_repair=True),
        "lost and hot": WantedReplicas(replicas=1, since=turn + 1.0, is_repair=True),
        "urgent": WantedReplicas(replicas=1, since=now),
        "left": WantedReplicas(replicas=1, since=turn - 2 * WAIT_BUCKET_S, is_abandoned=True),
    }
    demand = DemandSnapshot(rates={"hot": 9.0, "warm": 3.0, "lost": 1.0, "lost and hot": 8.0}, wants=wants)
    every = intent(*(adapter(name, priority=int(name == "urgent")) for name in wants))
    observed = fleet(*(worker(f"w{number}", slots=1) for number in range(7)))
    desired = place(every, observed, demand, RULES, now)
    in_turn = ["urgent", "early", "hot", "warm", "lost and hot", "lost", "left"]
    assert [load.lora_id for load in desired.loads] == in_turn


def test_every_waiting_adapter_gets_a_turn_when_not_all_fit():
    """Four slots for twelve adapters in constant demand, one of them far colder."""
    rates = {f"a{number}": 1.0 + number for number in range(11)} | {"rare": 0.01}
    observed, every = fleet(worker("w0", slots=2), worker("w1", slots=2)), intent(*map(adapter, rates))
    waiting, longest = dict.fromkeys(rates, NOW), 0.0
    for number in range(60):
        now = NOW + number * RULES.min_residency_s
        there = {lora_id for known in observed.workers.values() for lora_id in known.adapters}
        waiting = {name: waiting.get(name, now) for name in rates if name not in there}
        longest = max(longest, *(now - since for since in waiting.values()))
        wants = {name: WantedReplicas(replicas=1, since=since) for name, since in waiting.items()}
        demand = DemandSnapshot(rates=rates, habits=rates, last_request_at=dict.fromkeys(rates, now), wants=wants)
        observed = applied(observed, place(every, observed, demand, RULES, now), now)
    # A load for each worker in each turn, and eight wait: for the dearest as long as its loss costs, 40 s.
    assert longest <= 50
