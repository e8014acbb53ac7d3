"""Placement is pure: any fleet and any intent, checked against what must hold for all of them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.placement.context import PlacementContext
from orchestrator.core.placement.place import LOOK_AGAIN_S, place, usable_slots
from orchestrator.core.placement.targets import slot_shares
from orchestrator.core.placement.victims import PATIENCE_S, eviction_loss_s
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import (
    AdapterFailure,
    DemandSnapshot,
    DesiredPlacement,
    Intent,
    LoadFigures,
    ObservedFleet,
    ObservedWorker,
    ReportedAdapter,
    WantedReplicas,
)
from tests.properties import examples
from tests.registered import changed, registered

NOW = 10_000.0
BASES = ("qwen", "llama")


def adapter(name, **changes):
    return changed(registered(name, source="s", base_model="qwen", digest=f"digest-{name}", rank=8), **changes)


def held(name, since=0.0, state="ready", digest=None):
    digest = digest or f"digest-{name}"
    return ReportedAdapter(lora_id=name, digest=digest, engine_name=f"{name}@{digest}", state=state, since=since)


def worker(name, *loras, slots=4, **changes):
    base = ObservedWorker(id=name, state="ready", base_model="qwen", slots=slots, max_lora_rank=64)
    return replace(base, adapters={lora.lora_id: lora for lora in loras}, **changes)


def fleet(*workers, **more):
    return ObservedFleet(workers={w.id: w for w in workers}, **more)


def intent(*adapters, **more):
    return Intent(adapters={a.lora_id: a for a in adapters}, **more)


def want(*names, replicas=1, may_evict=True, since=NOW - 15):
    return DemandSnapshot(
        wants=dict.fromkeys(names, WantedReplicas(replicas=replicas, may_evict=may_evict, since=since))
    )


def is_due(lora_id, demand):
    return lora_id in demand.wants and NOW - demand.wants[lora_id].since >= PATIENCE_S


def applied(observed, desired, now=NOW):
    """The fleet after all loads and removals."""
    workers = dict(observed.workers)
    for step in desired.removals:
        left = {k: v for k, v in workers[step.worker_id].adapters.items() if k != step.lora_id}
        workers[step.worker_id] = replace(workers[step.worker_id], adapters=left)
    for step in desired.loads:
        now_held = {k: v for k, v in workers[step.worker_id].adapters.items() if k != step.evict}
        now_held[step.lora_id] = held(step.lora_id, since=now)
        workers[step.worker_id] = replace(workers[step.worker_id], adapters=now_held)
    return replace(observed, workers=workers)


def could_load(known, worker):
    return worker.state == "ready" and known.base_model == worker.base_model and known.rank <= worker.max_lora_rank


@st.composite
def fleets(draw):
    names = [f"a{i}" for i in range(draw(st.integers(1, 8)))]
    adapters = []
    for name in names:
        least = draw(st.none() | st.integers(0, 3))
        adapters.append(
            adapter(
                name,
                base_model=draw(st.sampled_from(BASES)),
                rank=draw(st.sampled_from([8, 16, 64])),
                loading=draw(st.sampled_from([None, "lazy", "eager", "weighted", "everywhere"])),
                min_replicas=least,
                max_replicas=draw(st.none() | st.integers(max(1, least or 0), 4)),
                pinned=draw(st.booleans()),
                weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
                priority=draw(st.sampled_from([0, 0, 5])),
                is_deleting=draw(st.sampled_from([False, False, False, True])),
                quarantine=draw(st.sampled_from([None, None, None, "bad bytes"])),
            )
        )
    base_of = {a.lora_id: a.base_model for a in adapters}
    workers = []
    for i in range(draw(st.integers(1, 5))):
        base = draw(st.sampled_from(BASES))
        slots = draw(st.integers(0, 4))
        mine = [name for name in names if base_of[name] == base]
        there = draw(st.lists(st.sampled_from([*mine, "orphan"]), unique=True, max_size=slots))
        states = st.sampled_from(["ready", "ready", "ready", "loading", "failed"])
        loras = [held(name, since=draw(st.sampled_from([0.0, NOW])), state=draw(states)) for name in there]
        state = draw(st.sampled_from(["ready", "ready", "ready", "cordoned", "draining", "unmanaged", "lost"]))
        workers.append(
            worker(
                f"w{i}",
                *(loras if state != "lost" else ()),
                slots=slots,
                state=state,
                base_model=base,
                max_lora_rank=draw(st.sampled_from([16, 64])),
                zone=draw(st.sampled_from(["z0", "z1"])),
                node=f"n{i}",
            )
        )
    wanted = draw(st.lists(st.sampled_from(names), unique=True))
    demand = DemandSnapshot(
        rates={name: draw(st.sampled_from([0.0, 1.0, 9.0])) for name in names},
        last_asked_at={name: draw(st.sampled_from([NOW, NOW - 59, NOW - 61])) for name in names},
        in_use=frozenset(
            (name, w.id) for w in workers for name in w.adapters if draw(st.sampled_from([False, False, True]))
        ),
        wants={
            name: WantedReplicas(
                replicas=draw(st.integers(1, 3)),
                may_evict=draw(st.booleans()),
                since=draw(st.sampled_from([NOW, NOW - PATIENCE_S + 1, NOW - PATIENCE_S])),
            )
            for name in wanted
        },
    )
    loading = draw(st.sampled_from(["lazy", "eager", "weighted", "everywhere"]))
    rules = PlacementPolicy(
        loading=loading,
        min_replicas=draw(st.integers(0, 2)),
        reserve_slots=draw(st.integers(0, 2)),
        min_residency_s=draw(st.sampled_from([0.0, 60.0])),
    )
    return intent(*adapters), fleet(*workers), demand, rules


@settings(max_examples=examples(60))
@given(fleets())
def test_no_worker_is_given_more_than_its_slots_less_the_reserve(case):
    wanted, observed, demand, rules = case
    desired = place(wanted, observed, demand, rules, NOW)
    after = applied(observed, desired)
    for name, before in observed.workers.items():
        room = max(usable_slots(before.slots, rules.reserve_slots), before.occupied_slots)
        assert after.workers[name].occupied_slots <= room


@settings(max_examples=examples(60))
@given(fleets())
def test_loads_go_only_where_the_adapter_fits_and_may_go(case):
    wanted, observed, demand, rules = case
    for load in place(wanted, observed, demand, rules, NOW).loads:
        there, what = observed.workers[load.worker_id], wanted.adapters[load.lora_id]
        assert there.state == "ready"
        assert what.base_model == there.base_model
        assert what.rank <= there.max_lora_rank
        assert not there.has_in_slot(load.lora_id)
        assert not what.is_deleting
        assert what.quarantine is None


@settings(max_examples=examples(60))
@given(fleets(), st.data())
def test_a_worker_gets_nothing_that_it_keeps_out_and_loses_what_it_has_of_it(case, data):
    wanted, observed, demand, rules = case
    names = st.frozensets(st.sampled_from([*wanted.adapters, "orphan"]))
    kept = {name: replace(w, kept_out=data.draw(names)) for name, w in observed.workers.items()}
    desired = place(wanted, replace(observed, workers=kept), demand, rules, NOW)
    assert all(load.lora_id not in kept[load.worker_id].kept_out for load in desired.loads)
    assert all(kept[w].kept_out.isdisjoint({lora_id}) for lora_id, held in desired.replicas.items() for w in held)
    removed = {(step.lora_id, step.worker_id) for step in desired.removals}
    for there in kept.values():
        if there.state not in ("lost", "unmanaged"):
            assert {(name, there.id) for name in there.kept_out if there.has_in_slot(name)} <= removed


def test_a_copy_in_use_that_is_kept_out_is_loaded_elsewhere_at_once():
    observed = fleet(worker("w0", held("a"), kept_out=frozenset("a")), worker("w1"))
    idle = place(intent(adapter("a")), observed, DemandSnapshot(), PlacementPolicy(), NOW)
    assert ([step.lora_id for step in idle.removals], idle.loads) == (["a"], ())
    used = place(intent(adapter("a")), observed, DemandSnapshot(rates={"a": 1.0}), PlacementPolicy(), NOW)
    assert [(load.lora_id, load.worker_id) for load in used.loads] == [("a", "w1")]
    assert [step.reason for step in used.removals] == ["an operator keeps it out of this worker"]


def test_an_adapter_that_is_kept_out_of_every_worker_that_could_hold_it_fits_nowhere():
    small = worker("w1", max_lora_rank=4)
    desired = place(
        intent(adapter("a")), fleet(worker("w0", kept_out=frozenset("a")), small), want("a"), PlacementPolicy(), NOW
    )
    assert desired.fits_nowhere == {"a": "kept_out"}
    assert "POST /v1/workers/WORKER/adapters/a lets it in again" in desired.unplaced["a"]
    # Where it is only short of copies, the reason names the call, too.
    two = fleet(worker("w0", kept_out=frozenset("a")), worker("w1", held("a")))
    short = place(intent(adapter("a", min_replicas=2)), two, DemandSnapshot(), PlacementPolicy(), NOW)
    assert (short.fits_nowhere, "keeps it out of w0" in short.unplaced["a"]) == ({}, True)


def test_an_adapter_that_is_everywhere_is_on_every_worker_that_takes_it_and_stays_on_a_cordoned_one():
    everywhere = PlacementPolicy(loading="everywhere")
    busy = {"w2": worker("w2", kept_out=frozenset("a")), "w3": worker("w3", base_model="llama")}
    held_here = worker("w1", held("a"), state="cordoned")
    observed = fleet(worker("w0"), held_here, *busy.values(), worker("w4"))
    desired = place(intent(adapter("a")), observed, DemandSnapshot(), everywhere, NOW)
    assert sorted(load.worker_id for load in desired.loads) == ["w0", "w4"]
    assert (desired.removals, desired.unplaced) == ((), {})
    again = place(intent(adapter("a")), applied(observed, desired), DemandSnapshot(), everywhere, NOW)
    assert (again.loads, again.removals) == ((), ())
    most = place(intent(adapter("a", max_replicas=2)), observed, DemandSnapshot(), everywhere, NOW)
    assert len(most.loads) == 1
    timed = replace(everywhere, ttl_s=1.0, min_residency_s=0.0)
    assert place(intent(adapter("a")), applied(observed, desired), DemandSnapshot(), timed, NOW + 99).removals == ()
    # A version that its name has left is not spread again.
    old = place(intent(adapter("a"), superseded=frozenset("a")), observed, DemandSnapshot(), everywhere, NOW)
    assert old.loads == ()


def test_a_waiting_request_takes_the_slot_of_a_copy_that_is_everywhere():
    everywhere = changed(adapter("a"), loading="everywhere")
    full = [worker(name, held("a"), slots=1) for name in ("w0", "w1")]
    desired = place(intent(everywhere, adapter("b")), fleet(*full), want("b"), PlacementPolicy(), NOW)
    assert [(load.lora_id, load.evict) for load in desired.loads] == [("b", "a")]


def test_a_copy_of_another_client_is_kept_out_by_its_engine_name():
    stray = replace(held("mine@", digest="d"), engine_name="mine", is_foreign=True)
    desired = place(
        intent(), fleet(worker("w0", stray, kept_out=frozenset({"mine"}))), DemandSnapshot(), PlacementPolicy(), NOW
    )
    assert [(step.lora_id, step.worker_id) for step in desired.removals] == [("mine@", "w0")]


@settings(max_examples=examples(60))
@given(fleets())
def test_victims_are_never_pinned_in_use_unknown_or_needed(case):
    wanted, observed, demand, rules = case
    desired = place(wanted, observed, demand, rules, NOW)
    after = applied(observed, desired)
    victims = [(load.evict, load.worker_id) for load in desired.loads if load.evict is not None]
    due = {(load.evict, load.worker_id) for load in desired.loads if is_due(load.lora_id, demand)}
    assert len(victims) == len(set(victims))
    for lora_id, worker_id in victims:
        known = wanted.adapters[lora_id]
        assert not known.policy.pinned
        there = observed.workers[worker_id].adapters[lora_id]
        if (lora_id, worker_id) in demand.in_use:
            assert (lora_id, worker_id) in due
            assert NOW - there.since >= PATIENCE_S
        assert lora_id not in demand.wants
        if (known.loading or rules.loading) == "lazy":
            least = known.policy.min_replicas or 0
        else:
            least = rules.min_replicas if known.policy.min_replicas is None else known.min_replicas
        if (known.loading or rules.loading) == "weighted":
            # Its share counts only workers that could load it; one that holds it although it does not fit is no claim.
            least = min(least, sum(could_load(known, w) for w in observed.workers.values()))
        left = sum(
            w.has_in_slot(lora_id) for w in after.workers.values() if w.state in ("ready", "cordoned", "unmanaged")
        )
        assert left >= min(least, known.policy.max_replicas or 64)


@settings(max_examples=examples(60))
@given(fleets())
def test_the_same_input_in_another_order_gives_the_same_answer(case):
    wanted, observed, demand, rules = case
    shuffled = Intent(adapters=dict(reversed(wanted.adapters.items())), tombstones=wanted.tombstones)
    turned = replace(observed, workers=dict(reversed(observed.workers.items())))
    one, other = place(wanted, observed, demand, rules, NOW), place(shuffled, turned, demand, rules, NOW)
    assert (one.loads, one.removals, dict(one.replicas)) == (other.loads, other.removals, dict(other.replicas))


@settings(max_examples=examples(60))
@given(fleets())
def test_once_its_loads_are_done_nothing_more_is_loaded(case):
    wanted, observed, demand, rules = case
    # With a residency of 0 what was just loaded could be thrown out again: that setting asks for thrashing.
    rules = replace(rules, min_residency_s=60.0)
    after = applied(observed, place(wanted, observed, demand, rules, NOW))
    for _ in range(3):  # a finished move makes room, which may let one more adapter in
        after = applied(after, place(wanted, after, demand, rules, NOW))
    again = place(wanted, after, demand, rules, NOW)
    assert again.loads == ()
    assert again.removals == ()


@settings(max_examples=examples(60))
@given(st.integers(2, 8), st.integers(1, 12), st.data())
def test_removing_one_of_n_workers_moves_only_its_adapters(count, adapters, data):
    wanted = intent(*(adapter(f"a{i}", loading="eager") for i in range(adapters)))
    observed = fleet(*(worker(f"w{i}", slots=16) for i in range(count)))
    before = applied(observed, place(wanted, observed, DemandSnapshot(), PlacementPolicy(), NOW))
    gone = data.draw(st.sampled_from(sorted(before.workers)))
    rest = replace(before, workers={k: w for k, w in before.workers.items() if k != gone})
    desired = place(wanted, rest, DemandSnapshot(), PlacementPolicy(), NOW)
    assert {load.lora_id for load in desired.loads} == set(before.workers[gone].adapters)
    assert desired.removals == ()


def test_a_lazy_adapter_without_demand_is_neither_loaded_nor_unloaded():
    observed = fleet(worker("w0", held("a")), worker("w1"))
    desired = place(intent(adapter("a"), adapter("b")), observed, DemandSnapshot(), PlacementPolicy(), NOW)
    assert (desired.loads, desired.removals) == ((), ())
    assert desired.replicas == {"a": ("w0",)}


def test_an_empty_intent_removes_nothing_from_a_full_fleet():
    observed = fleet(worker("w0", *(held(f"a{i}") for i in range(4))))
    desired = place(Intent(), observed, DemandSnapshot(), PlacementPolicy(loading="eager"), NOW)
    assert (desired.loads, desired.removals, desired.replicas) == ((), (), {})


def test_an_unknown_adapter_is_never_a_victim():
    observed = fleet(worker("w0", held("orphan"), slots=1))
    desired = place(intent(adapter("a")), observed, want("a"), PlacementPolicy(), NOW)
    assert desired.loads == ()
    assert "no free slot" in desired.unplaced["a"]


AGO = {"ash": NOW - 600.0, "oak": NOW - 600.0, "yew": NOW - 600.0}
LEAST = {
    "asked for longest ago": ({}, {"ash": NOW - 5.0, "oak": NOW - 20.0, "yew": NOW - 60.0}, {}),
    "asked for least by habit": ({"ash": 0.3, "oak": 5.0, "yew": 0.1}, AGO, {}),
    "brought back soonest": ({"ash": 1.0, "oak": 1.0, "yew": 1.0}, AGO, {"ash": 10**10, "oak": 5 * 10**9}),
    "least of what is recent and habit together": ({"oak": 0.3, "yew": 0.2}, {"ash": NOW - 20.0}, {}),
    "nobody's by habit, though it was asked for once": ({"ash": 0.2, "oak": 0.2}, {"yew": NOW - 60.0}, {}),
}


@pytest.mark.parametrize("why", LEAST)
def test_the_victim_is_the_least_missed_and_is_named(why):
    habits, last, sizes = LEAST[why]
    observed = fleet(worker("w0", held("ash"), held("oak"), held("yew"), slots=4))
    adapters = intent(*[adapter(name, size_bytes=sizes.get(name)) for name in AGO], adapter("new"))
    demand = replace(want("new"), habits=habits, last_request_at=last)
    (load,) = place(adapters, observed, demand, PlacementPolicy(reserve_slots=1), NOW).loads
    assert load.evict == "yew"
    assert "yew" in load.reason


def test_a_weighted_adapter_evicts_no_other():
    observed = fleet(worker("w0", held("old"), slots=1))
    for loading, loads in (("weighted", 0), ("lazy", 1)):
        adapters = intent(adapter("old"), adapter("new", loading=loading))
        assert len(place(adapters, observed, want("new"), PlacementPolicy(), NOW).loads) == loads


def test_by_default_every_slot_is_filled_before_an_eviction():
    observed = fleet(worker("w0", held("hot"), held("cold"), held("warm"), slots=4))
    adapters = intent(*map(adapter, ("hot", "cold", "warm", "new", "newer")))
    (load,) = place(adapters, observed, want("new"), PlacementPolicy(), NOW).loads
    assert load.evict is None
    (load,) = place(
        adapters, applied(observed, DesiredPlacement(loads=(load,))), want("newer"), PlacementPolicy(), NOW
    ).loads
    assert load.evict is not None


def test_the_only_slot_of_a_worker_is_not_kept_in_reserve():
    desired = place(
        intent(adapter("a")), fleet(worker("w0", slots=1)), want("a"), PlacementPolicy(reserve_slots=1), NOW
    )
    assert [load.worker_id for load in desired.loads] == ["w0"]


@pytest.mark.parametrize(
    ("others", "limit"),
    [
        ([], 64),
        ([worker("w1", max_lora_rank=128)], None),
        ([worker("w1", max_lora_rank=32)], 64),
        # Full, or not there for the moment: what it could hold it can again.
        ([worker("w1", held("a"), slots=1, max_lora_rank=128)], None),
        ([worker("w1", max_lora_rank=256, state="lost")], None),
        ([worker("w1", max_lora_rank=256, state="starting")], None),
        ([worker("w1", max_lora_rank=127, state="lost")], 127),
        ([worker("w1", max_lora_rank=256, base_model="llama")], 64),
    ],
)
def test_an_adapter_too_large_for_every_worker_is_reported(others, limit):
    big = adapter("big", rank=128)
    for demand in (DemandSnapshot(), want("big")):
        desired = place(intent(big, adapter("a")), fleet(worker("w0"), *others), demand, PlacementPolicy(), NOW)
        assert desired.fits_nowhere == ({} if limit is None else {"big": "rank_too_big"})
        if limit is not None:
            assert f"rank 128 is above every worker's max_lora_rank (at most {limit})" in desired.unplaced["big"]


@pytest.mark.parametrize(
    "changes",
    [{"base_model": "llama"}, {"digest": None, "rank": None}, {"is_deleting": True}, {"rank": 64}],
)
def test_an_adapter_that_fits_somewhere_is_not_reported(changes):
    known = changed(adapter("big", rank=128), **changes)
    assert place(intent(known), fleet(worker("w0")), want("big"), PlacementPolicy(), NOW).fits_nowhere == {}


def test_an_adapter_on_a_worker_fits_there_despite_its_rank():
    desired = place(
        intent(adapter("big", rank=128)), fleet(worker("w0", held("big"))), DemandSnapshot(), PlacementPolicy(), NOW
    )
    assert desired.fits_nowhere == {}


def refusing(name, **changes):
    return worker(name, slots=0, refusal="its connector", **changes)


@pytest.mark.parametrize(
    ("others", "is_told"),
    [
        ([], True),
        ([refusing("w1", max_lora_rank=256)], True),
        ([worker("w1", base_model="llama")], True),
        ([worker("w1", state="lost")], False),
        ([worker("w1", held("b"), slots=1)], False),
    ],
)
def test_a_refusing_worker_gets_no_adapter_and_is_named(others, is_told):
    for demand in (DemandSnapshot(), want("a")):
        desired = place(intent(adapter("a")), fleet(refusing("w0"), *others), demand, PlacementPolicy(), NOW)
        assert desired.loads == ()
        assert desired.fits_nowhere == ({"a": "adapters_refused"} if is_told else {})
        if is_told:
            assert "no worker of qwen takes adapters (w0: its connector)" in desired.unplaced["a"]


def test_adapter_goes_to_the_worker_that_takes_it_whatever_ranks_others_name():
    observed = fleet(refusing("w0", max_lora_rank=256), worker("w1"))
    desired = place(intent(adapter("a"), adapter("big", rank=128)), observed, want("a", "big"), PlacementPolicy(), NOW)
    assert [(load.lora_id, load.worker_id) for load in desired.loads] == [("a", "w1")]
    assert "(at most 64)" in desired.unplaced["big"]


def test_an_adapter_that_only_workers_without_loads_could_have_says_so():
    observed = fleet(worker("w0", held("b"), slots=0), worker("w1", base_model="llama"))
    desired = place(intent(adapter("a"), adapter("b")), observed, want("a", "b"), PlacementPolicy(), NOW)
    assert desired.loads == ()
    assert desired.unplaced == {"a": "no ready worker of qwen loads adapters while it runs; start one that does"}


def full(name, **changes):
    """A worker whose only slot is taken for good."""
    return worker(name, held("pinned"), slots=1, **changes)


KEPT = f"fleet:{'0' * 64}"


@pytest.mark.parametrize(
    ("changes", "workers", "told"),
    [
        ({"source": KEPT}, [worker("w0", has_agent=False)], "only workers' agents have its files, and no ready worker"),
        ({"source": KEPT}, [full("w0"), worker("w1", has_agent=False)], "no free slot on 1 workers, and nothing"),
        (
            {"rank": 16},
            [full("w0"), worker("w1", max_lora_rank=8), worker("w2", max_lora_rank=8)],
            "no free slot on 1 workers, and nothing there may be evicted; 2 more take no adapter of rank 16",
        ),
        (
            {"rank": 16},
            [worker("w0", slots=0), worker("w1", max_lora_rank=8)],
            "no ready worker of qwen that loads adapters takes rank 16; start one that does",
        ),
    ],
)
def test_why_an_adapter_has_no_place_is_said_of_the_workers_that_could_have_it(changes, workers, told):
    known = intent(adapter("a", **changes), adapter("pinned", pinned=True))
    desired = place(known, fleet(*workers), want("a"), PlacementPolicy(), NOW)
    assert desired.loads == ()
    assert told in desired.unplaced["a"]


def test_failures_on_all_workers_that_could_have_an_adapter_are_its_reason():
    failure = AdapterFailure(until=NOW + 60, code="engine_error", message="out of memory")
    observed = fleet(worker("w0"), worker("w1", max_lora_rank=8), failures={("a", "w0"): failure})
    desired = place(intent(adapter("a", rank=16)), observed, want("a"), PlacementPolicy(), NOW)
    assert desired.unplaced == {"a": "out of memory"}


def test_more_replicas_than_able_workers_are_not_reported_as_lacking_slots():
    here = [worker("w0", held("a")), worker("w1", held("a")), worker("w2", base_model="llama")]
    desired = place(intent(adapter("a", min_replicas=3)), fleet(*here), DemandSnapshot(), PlacementPolicy(), NOW)
    assert desired.loads == ()
    assert desired.unplaced == {"a": "there are no more workers for it: each of the 2 that can have it has it"}


def test_a_second_replica_goes_to_another_zone_when_no_home_decides():
    there = worker("w0", held("a"), zone="z0", node="n0")
    others = [worker(f"w{i}", zone="z0" if i < 7 else "z1", node=f"n{i}") for i in range(1, 8)]
    observed = fleet(there, *others)
    homes = {
        load.worker_id
        for load in place(intent(adapter("a")), observed, want("a", replicas=2), PlacementPolicy(), NOW).loads
    }
    assert len(homes) == 1
    full = fleet(there, *(w if w.id not in homes else replace(w, slots=0) for w in others))
    (load,) = place(intent(adapter("a")), full, want("a", replicas=2), PlacementPolicy(), NOW).loads
    # Either another of the adapter's two homes, or, failing that, the other zone.
    assert load.worker_id not in homes


def test_a_tombstone_removes_only_the_same_digest():
    observed = fleet(worker("w0", held("a")), worker("w1", held("a", digest="other")))
    desired = place(
        Intent(tombstones={"a": frozenset({"digest-a"})}), observed, DemandSnapshot(), PlacementPolicy(), NOW
    )
    assert [(step.lora_id, step.worker_id) for step in desired.removals] == [("a", "w0")]


def test_a_draining_worker_keeps_an_adapter_until_ready_elsewhere():
    leaving = worker("w0", held("a"), state="draining")
    first = place(intent(adapter("a")), fleet(leaving, worker("w1")), DemandSnapshot(), PlacementPolicy(), NOW)
    assert [(load.lora_id, load.worker_id) for load in first.loads] == [("a", "w1")]
    assert (first.removals, first.workers_to_drain) == ((), ())
    half = place(
        intent(adapter("a")),
        fleet(leaving, worker("w1", held("a", state="loading"))),
        DemandSnapshot(),
        PlacementPolicy(),
        NOW,
    )
    assert (half.loads, half.removals) == ((), ())
    done = place(
        intent(adapter("a")), fleet(leaving, worker("w1", held("a"))), DemandSnapshot(), PlacementPolicy(), NOW
    )
    assert [(step.lora_id, step.worker_id) for step in done.removals] == [("a", "w0")]
    assert place(
        intent(adapter("a")), fleet(replace(leaving, adapters={})), DemandSnapshot(), PlacementPolicy(), NOW
    ).workers_to_drain == ("w0",)


def test_a_load_on_an_unmanaged_worker_does_not_count_as_a_copy():
    observed = fleet(worker("w0", held("a", state="loading"), state="unmanaged"), worker("w1"))
    desired = place(intent(adapter("a")), observed, want("a"), PlacementPolicy(), NOW)
    assert [(load.lora_id, load.worker_id) for load in desired.loads] == [("a", "w1")]
    for state in ("ready", "cordoned"):
        answers = fleet(worker("w0", held("a", state="loading"), state=state), worker("w1"))
        assert not place(intent(adapter("a")), answers, want("a"), PlacementPolicy(), NOW).loads


def test_an_unmanaged_worker_is_left_alone_and_its_copies_count():
    observed = fleet(worker("w0", held("a"), held("gone"), state="unmanaged"), worker("w1"))
    wanted = intent(adapter("a", loading="eager"), adapter("gone", is_deleting=True))
    desired = place(wanted, observed, DemandSnapshot(), PlacementPolicy(), NOW)
    assert (desired.loads, desired.removals) == ((), ())


@settings(max_examples=examples(60))
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.floats(0.1, 10), st.integers(0, 6)), min_size=1),
    st.integers(0, 30),
)
def test_shares_use_every_slot_that_caps_allow_and_follow_the_weights(table, slots):
    weights = {name: weight for name, (weight, _) in table.items()}
    caps = {name: cap for name, (_, cap) in table.items()}
    given_ = slot_shares(weights, caps, slots)
    assert set(given_) == set(table)
    assert sum(given_.values()) == min(slots, sum(caps.values()))
    assert all(0 <= given_[name] <= caps[name] for name in table)
    free = [name for name in table if given_[name] < caps[name]]
    for one in free:
        assert all(given_[one] >= given_[other] - 1 for other in table if weights[one] >= weights[other])


@pytest.mark.parametrize("unit", [5e-324, 1e-300, 1.0, 1e300, 8e307])
def test_only_the_proportions_of_weights_count(unit):
    assert slot_shares({"a": unit, "b": unit, "c": 2 * unit}, {"a": 9, "b": 9, "c": 9}, 8) == {"a": 2, "b": 2, "c": 4}
    assert slot_shares({"a": 1e308, "b": unit, "c": unit}, {"a": 1, "b": 9, "c": 9}, 3)["a"] == 1


def test_largest_remainder_gives_three_slots_of_four_to_three_times_the_weight():
    assert slot_shares({"a": 3.0, "b": 1.0}, {"a": 9, "b": 9}, 4) == {"a": 3, "b": 1}


PROTECTED = {
    "pinned": {"known": {"pinned": True}},
    "of higher priority": {"known": {"priority": 1}},
    "at its minimum": {"known": {"min_replicas": 1}},
    "eager at its minimum": {"known": {"loading": "eager"}},
    "dearer than the wait": {"asked": NOW - 2, "demand": {"habits": {"old": 2.0}}},
    "asked for of late": {"asked": NOW - 0.5, "demand": {"last_request_at": {"old": NOW - 1}}},
    "perhaps asked for at a router not heard": {"asked": NOW - 0.5, "demand": {"has_unheard_routers": True}},
    "in use": {"demand": {"in_use": frozenset({("old", "w0")})}, "asked": NOW - PATIENCE_S + 1},
    "in use for less": {
        "demand": {"in_use": frozenset({("old", "w0")})},
        "since": NOW - PATIENCE_S + 1,
    },
    "in use, and waited for": {"demand": {"backlog": {"old": 1.0}}, "asked": NOW - PATIENCE_S + 1},
    "in use, and who waited has gone": {
        "demand": {
            "in_use": frozenset({("old", "w0")}),
            "wants": {"new": WantedReplicas(replicas=1, since=0.0, is_abandoned=True)},
        }
    },
    "asked for itself": {"demand": {"wants": {"new": WantedReplicas(replicas=1), "old": WantedReplicas(replicas=1)}}},
    "loading": {"state": "loading"},
}


@pytest.mark.parametrize("why", PROTECTED)
def test_a_protected_adapter_is_never_evicted(why):
    case = PROTECTED[why]
    there = held("old", since=case.get("since", 0.0), state=case.get("state", "ready"))
    adapters = intent(adapter("old", **case.get("known", {})), adapter("new"))
    demand = replace(want("new", since=case.get("asked", 0.0)), **case.get("demand", {}))
    assert place(adapters, fleet(worker("w0", there, slots=1)), demand, PlacementPolicy(), NOW).loads == ()
    # The same without the protection, so that each of these cases can fail.
    plain = intent(adapter("old"), adapter("new"))
    (load,) = place(plain, fleet(worker("w0", held("old"), slots=1)), want("new"), PlacementPolicy(), NOW).loads
    assert load.evict == "old"


def test_a_publish_takes_an_idle_slot_at_once_however_young_its_copy():
    """Else each publish would wait for a name's idle version that has just taken the slot of the last one."""
    waits_for_publish, idle, asked = adapter("policy/v2", min_replicas=1), adapter("idle/v1"), adapter("asked/v1")
    observed = fleet(worker("w0", held("idle/v1", since=NOW - 1), held("asked/v1"), slots=2))
    demand = DemandSnapshot(last_request_at={"asked/v1": NOW - 9})
    (load,) = place(intent(waits_for_publish, idle, asked), observed, demand, PlacementPolicy(), NOW).loads
    assert (load.lora_id, load.evict) == ("policy/v2", "idle/v1")


@settings(max_examples=examples(60))
@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.floats(0, 3), st.floats(0, 200)), min_size=1),
    st.floats(0.02, 5),
)
def test_an_idle_copy_goes_once_the_wait_has_cost_as_much_as_its_loss(table, load_s):
    """`look_again_at` is that moment: nothing goes before it, and at it the copy whose loss costs least does."""
    adapters = intent(adapter("new"), *map(adapter, table))
    observed = fleet(worker("w0", *map(held, table), slots=len(table)))
    observed = replace(observed, load_figures=LoadFigures(seconds=load_s, size_bytes=1e9))
    demand = replace(
        want("new", since=NOW),
        habits={name: rate for name, (rate, _) in table.items()},
        last_request_at={name: NOW - silent_s for name, (_, silent_s) in table.items()},
    )
    waits = place(adapters, observed, demand, PlacementPolicy(), NOW)
    losses = {
        name: eviction_loss_s(
            PlacementContext(adapters, observed, demand, PlacementPolicy(), NOW), adapters.adapters[name], "w0"
        )
        for name in table
    }
    if waits.loads:
        assert losses[waits.loads[0].evict] == 0
        return
    assert waits.look_again_at == pytest.approx(NOW + max(LOOK_AGAIN_S, min(losses.values())))
    # Losses only fall while nobody asks, so by that moment one has fallen to the wait at the latest.
    (load,) = place(adapters, observed, demand, PlacementPolicy(), waits.look_again_at + 1e-6).loads
    assert losses[load.evict] <= min(losses.values()) + load_s


@pytest.mark.parametrize(("factor", "evicted"), [(1.0, ["a"]), (0.0, ["a"]), (50.0, ["b"])])
def test_the_loss_of_a_copy_counts_by_its_adapters_factor(factor, evicted):
    adapters = intent(adapter("a", loss_factor=factor), adapter("b"), adapter("new"))
    observed = fleet(worker("w0", held("a"), held("b"), slots=2))
    demand = replace(want("new"), habits={"a": 0.2, "b": 0.4})
    assert [load.evict for load in place(adapters, observed, demand, PlacementPolicy(), NOW).loads] == evicted
    alone = intent(adapter("a", loss_factor=factor), adapter("new"))
    only = place(alone, fleet(worker("w0", held("a"), slots=1)), demand, PlacementPolicy(), NOW)
    # It has waited 15 s: less than fifty times the loss of a copy that is asked for every five seconds.
    assert [load.evict for load in only.loads] == ([] if factor == 50.0 else ["a"])


USED = frozenset({("a", "w0"), ("b", "w0")})


@pytest.mark.parametrize("used", [{"in_use": USED}, {"backlog": {"a": 1.0, "b": 1.0}}])
def test_a_long_wait_takes_the_slot_in_use_that_is_asked_for_least(used):
    adapters = intent(adapter("a"), adapter("b"), adapter("new"))
    observed = fleet(worker("w0", held("a", since=NOW - 500), held("b", since=NOW - 100), slots=2))
    demand = replace(want("new", since=NOW - PATIENCE_S), rates={"a": 9.0, "b": 1.0}, **used)
    (load,) = place(adapters, observed, demand, PlacementPolicy(), NOW).loads
    assert load.evict == "b"
    # One that is not in use goes before any that is.
    silent = replace(demand, in_use=frozenset({("a", "w0")}), backlog={})
    (load,) = place(adapters, observed, silent, PlacementPolicy(), NOW).loads
    assert load.evict == "b"


def test_the_first_in_turn_takes_the_victim_that_has_drained():
    """Otherwise each pass would begin a drain for it, and give the one that has ended to those behind it."""
    drains = {("a", "w0"): False, ("b", "w1"): True}
    copies = (held("a", state="draining"), held("b", state="draining"))
    observed = fleet(*(worker(f"w{at}", lora, slots=1) for at, lora in enumerate(copies)), drains=drains)
    for first, second in (("x", "y"), ("y", "x")):
        demand = DemandSnapshot(
            wants={
                first: WantedReplicas(replicas=1, since=NOW - 40),
                second: WantedReplicas(replicas=1, since=NOW - 20),
            }
        )
        desired = place(intent(*map(adapter, "abxy")), observed, demand, PlacementPolicy(), NOW)
        assert [(load.lora_id, load.evict) for load in desired.loads] == [(first, "b"), (second, "a")]


def test_a_started_eviction_goes_on_though_another_adapter_falls_silent():
    adapters = intent(adapter("a"), adapter("b"), adapter("new"))
    going = worker("w0", held("a", state="draining"), slots=1)
    observed = fleet(going, worker("w1", held("b"), slots=1))
    demand = replace(want("new", since=NOW - PATIENCE_S), in_use=frozenset({("a", "w0")}))
    (load,) = place(adapters, observed, demand, PlacementPolicy(), NOW).loads
    assert (load.worker_id, load.evict) == ("w0", "a")


def test_a_started_eviction_goes_on_though_its_victim_is_asked_for():
    adapters = intent(adapter("a"), adapter("new"))
    observed = fleet(worker("w0", held("a", state="draining"), slots=1))
    demand = want("new", since=NOW - PATIENCE_S)
    for since, evicted in ((NOW - 1, ["a"]), (NOW - PATIENCE_S - 1, [])):
        both = replace(demand, wants={**demand.wants, "a": WantedReplicas(replicas=1, since=since)})
        assert [load.evict for load in place(adapters, observed, both, PlacementPolicy(), NOW).loads] == evicted


def test_repairs_and_further_copies_take_no_slot_in_use():
    adapters = intent(adapter("old"), adapter("new"))
    observed = fleet(worker("w0", held("old"), slots=1), worker("w1", held("new"), slots=1))
    second = DemandSnapshot(in_use=frozenset({("old", "w0")}), wants={"new": WantedReplicas(replicas=2, since=0.0)})
    assert place(adapters, observed, second, PlacementPolicy(), NOW).loads == ()
    repair = replace(second, wants={"new": WantedReplicas(replicas=1, since=0.0, is_repair=True)})
    assert place(adapters, fleet(observed.workers["w0"]), repair, PlacementPolicy(), NOW).loads == ()


def test_adapters_in_constant_demand_take_turns_in_one_slot():
    names = [f"a{i}" for i in range(4)]
    adapters = intent(*(adapter(name) for name in names))
    there, since, asked, had, drains_at = "a0", 0.0, dict.fromkeys(names[1:], 0.0), dict.fromkeys(names, 0), None
    for now in map(float, range(400)):
        had[there] += 1
        state = "ready" if drains_at is None else "draining"
        wants = {name: WantedReplicas(replicas=1, since=began) for name, began in asked.items()}
        demand = DemandSnapshot(in_use=frozenset({(there, "w0")}), wants=wants, rates={"a0": 50.0})
        observed = fleet(worker("w0", held(there, since=since, state=state), slots=1))
        evicted = [
            load for load in place(adapters, observed, demand, PlacementPolicy(), now).loads if load.evict == there
        ]
        if not evicted:
            drains_at = None
        elif drains_at is None:
            drains_at = asked[there] = now  # whoever would have gone on with it asks for it from now on
        elif now - drains_at >= 5:
            there, since, drains_at = evicted[0].lora_id, now, None
            del asked[there]
    assert min(had.values()) >= 75


@pytest.mark.parametrize("registered", ["other bytes", None])
def test_a_copy_with_an_unregistered_digest_can_be_evicted(registered):
    adapters = intent(adapter("old", digest=registered), adapter("new"))
    observed = fleet(worker("w0", held("old"), slots=1))
    desired = place(adapters, observed, want("new"), PlacementPolicy(), NOW)
    assert [(load.lora_id, load.evict) for load in desired.loads] == [("new", "old")]
    assert "old" not in desired.replicas


def test_a_repair_evicts_no_adapter_without_demand():
    observed = fleet(worker("w0", held("old"), slots=1))
    adapters = intent(adapter("old"), adapter("new"))
    assert place(adapters, observed, want("new", may_evict=False), PlacementPolicy(), NOW).loads == ()


@pytest.mark.parametrize("owed", [{}, {("a", "w0"): "c"}])
def test_loading_and_leaving_copies_do_not_count_towards_a_minimum(owed):
    state = "ready" if owed else "draining"
    observed = fleet(
        worker("w0", held("a", state=state), slots=1), worker("w1", held("a"), slots=1), reserve_victims=owed
    )
    observed = replace(observed, load_figures=LoadFigures(seconds=4.4))  # longer than a drain, so that none is ahead
    known = intent(adapter("a", min_replicas=1), adapter("b"))
    desired = place(known, observed, want("b"), PlacementPolicy(), NOW)
    assert [(load.worker_id, load.evict) for load in desired.loads] == [("w0", "a")]
    there = fleet(worker("w0", held("a", state="loading"), slots=1), worker("w1", held("a"), slots=1), busy={"w0": 1})
    there = replace(there, load_figures=observed.load_figures)
    assert place(known, there, want("b"), PlacementPolicy(), NOW).loads == ()
    busy = replace(observed, busy={"w0": 1})  # a load that waits for that very copy to be gone, say
    assert place(known, busy, want("b"), PlacementPolicy(), NOW).loads == ()


def test_only_one_of_two_copies_is_surplus():
    # The one on w0 goes already: another load must not take the hot adapter's last copy for another one too many.
    going = worker("w0", held("hot", state="draining"), slots=1)
    observed = fleet(going, worker("w1", held("hot"), held("cold"), slots=2), busy={"w0": 1})
    observed = replace(observed, load_figures=LoadFigures(seconds=4.4))
    known = intent(adapter("hot"), adapter("cold"), adapter("new"))
    demand = replace(
        want("new", since=0.0), habits={"hot": 5.0, "cold": 0.1}, last_request_at={"hot": NOW, "cold": NOW - 600}
    )
    (load,) = place(known, observed, demand, PlacementPolicy(), NOW).loads
    assert (load.worker_id, load.evict) == ("w1", "cold")
