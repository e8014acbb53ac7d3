"""The end of drains, and the action budgets of a pass."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.placement.place import place
from orchestrator.core.plan import (
    SHORT_LOAD_S,
    AdapterDrain,
    WorkerAction,
    diff,
    ends_move,
    is_drained,
    parallel_loads_of_adapter,
)
from orchestrator.core.routers import RouterBook
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import (
    AdapterFailure,
    DesiredPlacement,
    FilesSnapshot,
    LoadFigures,
    ObservedFleet,
    ObservedWorker,
    OngoingFetch,
    PlannedLoad,
    PlannedRemoval,
    ReportedAdapter,
)
from tests.orchestrator.core.placement.test_place import NOW, adapter, fleet, fleets, held, intent, want, worker
from tests.orchestrator.reports import CountingRouter
from tests.properties import examples
from tests.registered import changed, registered

MARK = AdapterDrain(
    lora_id="a", worker_id="w0", engine_name="a@1", revision=50, since=100.0, deadline=130.0, reason="deleted"
)
IDLE = ObservedWorker(id="w0", state="ready", base_model="q", slots=8, max_lora_rank=8, running=0, reported_at=101.0)


def routers(*words, now=105.0, ended=()):
    """Live and silent routers at `now`, from (revision_seen, in_flight, heard_at), some of them stopped."""
    book = RouterBook()
    for number, (revision_seen, in_flight, heard_at) in enumerate(words):
        report = CountingRouter(f"r{number}").report(
            revision_seen, in_flight={"w0": {"a@1": in_flight}}, is_last=number in ended
        )
        book.record(report, heard_at)
    return book.live(now), book.silent(now)


@pytest.mark.parametrize(
    ("words", "is_over"),
    [
        ([(50, 0, 104.0)], True),
        ([(51, 0, 104.0), (50, 0, 104.0)], True),
        ([(49, 0, 104.0)], False),
        ([(50, 1, 104.0)], False),
        ([(50, 0, 104.0), (50, 2, 104.0)], False),
        ([(50, 0, 104.0), (51, 0, 90.0)], True),
        ([(50, 0, 104.0), (40, 2, 90.0)], False),
    ],
)
def test_a_drain_ends_when_every_router_confirms_it(words, is_over):
    assert is_drained(MARK, *routers(*words), replace(IDLE, running=9), 105.0) is is_over


def test_without_a_router_only_a_newer_report_ends_a_drain():
    assert is_drained(MARK, [], [], IDLE, 105.0)
    assert not is_drained(MARK, [], [], replace(IDLE, running=1), 105.0)
    assert not is_drained(MARK, [], [], replace(IDLE, reported_at=100.0), 105.0)


@pytest.mark.parametrize("silent", [(40, 1, 90.0), (40, 0, 90.0), (60, 1, 90.0)])
def test_the_engines_own_count_decides_for_a_silent_router_while_others_are_live(silent):
    live_and_silent = routers((50, 0, 104.0), silent)
    assert is_drained(MARK, *live_and_silent, IDLE, 105.0)
    # A request that no live router knows of is the silent router's.
    assert not is_drained(MARK, *live_and_silent, replace(IDLE, running=1), 105.0)
    assert not is_drained(MARK, *live_and_silent, replace(IDLE, reported_at=100.0), 105.0)


def test_requests_of_live_routers_do_not_count_as_a_silent_ones():
    book = RouterBook()
    mine = {"w0": {"b@1": 3}, "w1": {"b@1": 3}}
    book.record(CountingRouter("live").report(50, in_flight=mine), 104.0)
    book.record(CountingRouter("silent").report(40), 90.0)
    both = book.live(105.0), book.silent(105.0)
    assert is_drained(MARK, *both, replace(IDLE, running=3), 105.0)
    assert not is_drained(MARK, *both, replace(IDLE, running=4), 105.0)


def test_a_router_that_has_said_that_it_stops_is_neither_live_nor_silent():
    assert routers((40, 1, 90.0), ended={0}) == routers((40, 1, 104.0), ended={0}) == ([], [])
    book = RouterBook()
    book.record(CountingRouter("r0", "b").report(40, is_last=True), 90.0)
    book.record(CountingRouter("r0", "c").report(41), 91.0)
    assert [router.report.revision_seen for router in book.live(95.0)] == [41]


def test_the_deadline_ends_every_drain():
    assert not is_drained(MARK, *routers((0, 9, 129.0), now=129.9), IDLE, 129.9)
    assert is_drained(MARK, *routers((0, 9, 129.0), now=130.0), IDLE, 130.0)


def many(count, worker_id="w0"):
    return tuple(PlannedLoad(lora_id=f"a{i}", worker_id=worker_id, reason="wanted") for i in range(count))


def started(loads, observed, rules, now=0.0):
    actions = diff(DesiredPlacement(loads=loads), observed, rules, 0, now)
    return [action.worker_id for action in actions]


def test_a_worker_gets_loads_within_its_remaining_budget():
    observed = ObservedFleet(workers={"w0": IDLE, "w1": replace(IDLE, id="w1")})
    assert started(many(3) + many(3, "w1"), observed, PlacementPolicy()) == ["w0", "w1"]
    assert started(many(3), observed, PlacementPolicy(loads_per_worker=2)) == ["w0", "w0"]
    assert started(many(3), replace(observed, busy={"w0": 1}), PlacementPolicy()) == []


def test_the_fleet_gets_loads_within_its_remaining_budget():
    workers = {f"w{i}": replace(IDLE, id=f"w{i}") for i in range(9)}
    loads = tuple(load for name in workers for load in many(1, name))
    assert len(started(loads, ObservedFleet(workers=workers), PlacementPolicy(loads_fleet_wide=4))) == 4
    assert (
        len(started(loads, ObservedFleet(workers=workers, loads_in_flight=3), PlacementPolicy(loads_fleet_wide=4))) == 1
    )


def test_every_worker_of_a_large_fleet_may_load_at_once():
    workers = {f"w{i}": replace(IDLE, id=f"w{i}") for i in range(64)}
    loads = tuple(PlannedLoad(lora_id=f"a{i}", worker_id=name, reason="wanted") for i, name in enumerate(workers))
    assert len(started(loads, ObservedFleet(workers=workers), PlacementPolicy())) == 64


@given(st.integers(1, 12), st.sets(st.integers(0, 11)))
def test_workers_that_serve_do_not_all_load_one_adapter_at_once_and_all_have_it_after_two_waves(n, holders):
    at_once = parallel_loads_of_adapter(n)
    assert at_once < n or n == 1
    held = ReportedAdapter(lora_id="a", digest="d" * 64, engine_name="a@dddddddddddd", state="ready")
    workers = {f"w{i}": replace(IDLE, id=f"w{i}", adapters={"a": held} if i in holders else {}) for i in range(n)}
    missing = [name for name, worker in workers.items() if not worker.adapters]
    rules, waves = PlacementPolicy(load_spread_s=2.0, loads_fleet_wide=100), 0
    while missing:
        loads = tuple(PlannedLoad(lora_id="a", worker_id=name, reason="meant for all") for name in missing)
        wave = started(loads, ObservedFleet(workers=workers), rules)
        assert 0 < len(wave) <= at_once
        # Passes while they load start no more than the rest of the wave; after `load_spread_s` they start all.
        during = ObservedFleet(
            workers=workers,
            busy=dict.fromkeys(wave, 1),
            load_began=dict.fromkeys([("a", name) for name in wave], 10.0),
        )
        assert len(wave) + len(started(loads, during, rules, now=11.9)) <= at_once
        assert len(wave) + len(started(loads, during, rules, now=12.1)) in (len(missing), len(wave) + at_once)
        for name in wave:
            workers[name] = replace(workers[name], adapters={"a": held})
        missing = [name for name in missing if name not in wave]
        waves += 1
    assert waves <= 2


def test_loads_are_not_spread_where_the_policy_says_so():
    workers = {f"w{i}": replace(IDLE, id=f"w{i}") for i in range(4)}
    loads = tuple(PlannedLoad(lora_id="a", worker_id=name, reason="meant for all") for name in workers)
    assert len(started(loads, ObservedFleet(workers=workers), PlacementPolicy(load_spread_s=0))) == 4


def test_loads_that_should_be_short_are_not_spread():
    workers = {f"w{i}": replace(IDLE, id=f"w{i}") for i in range(4)}
    loads = tuple(PlannedLoad(lora_id="a", worker_id=name, reason="meant for all") for name in workers)
    for took_s, at_once in ((SHORT_LOAD_S * 0.9, 4), (SHORT_LOAD_S, 2)):
        observed = ObservedFleet(workers=workers, load_figures=LoadFigures(seconds=took_s, size_bytes=1000))
        assert len(started(loads, observed, PlacementPolicy())) == at_once
    # An adapter that is much larger than those that loaded so fast is spread.
    large = {"a": registered("a", source="file:///a", size_bytes=10**9)}
    observed = ObservedFleet(workers=workers, load_figures=LoadFigures(seconds=0.01, size_bytes=1000))
    actions = diff(DesiredPlacement(loads=loads), observed, PlacementPolicy(), 0, 0.0, adapters=large)
    assert len(actions) == 2


def test_a_worker_that_serves_nobody_yet_loads_its_share_at_once():
    warming = {f"w{i}": replace(IDLE, id=f"w{i}", state="warming") for i in range(4)}
    loads = tuple(PlannedLoad(lora_id="a", worker_id=name, reason="its share") for name in warming)
    assert len(started(loads, ObservedFleet(workers=warming), PlacementPolicy())) == 4


def test_a_removal_is_drained_first_and_unloaded_only_then():
    desired = DesiredPlacement(removals=(PlannedRemoval(lora_id="a", worker_id="w0", reason="deleted"),))
    observed = ObservedFleet(workers={"w0": IDLE})

    def operations(drains):
        return [
            action.operation for action in diff(desired, replace(observed, drains=drains), PlacementPolicy(), 0, 0.0)
        ]

    assert operations({}) == ["drain"]
    assert operations({("a", "w0"): False}) == []
    assert operations({("a", "w0"): True}) == ["unload"]


def test_only_a_full_worker_waits_for_its_victim():
    load = (PlannedLoad(lora_id="a", worker_id="w0", reason="wanted", evict="v"),)
    full = ObservedFleet(workers={"w0": replace(IDLE, slots=0)})

    def loads(observed, drains):
        actions = diff(DesiredPlacement(loads=load), replace(observed, drains=drains), PlacementPolicy(), 0, 0.0)
        return [(a.evict, a.evict_after) for a in actions if a.operation == "load"]

    assert loads(full, {("v", "w0"): False}) == []
    assert loads(full, {("v", "w0"): True}) == [("v", None)]
    assert loads(ObservedFleet(workers={"w0": IDLE}), {("v", "w0"): False}) == [(None, "v")]


def test_a_victim_that_leaves_at_once_serves_until_its_load_takes_the_slot():
    """One call: no drain, no answer of a router, no further pass. Beside a reserve slot the victim drains."""
    load = (PlannedLoad(lora_id="a", worker_id="w0", reason="wanted", evict="v", evicts_at_once=True),)

    def steps(worker, **more):
        actions = diff(
            DesiredPlacement(loads=load), ObservedFleet(workers={"w0": worker}, **more), PlacementPolicy(), 0, 0.0
        )
        return [(action.operation, action.evict, action.evict_after) for action in actions]

    full = replace(IDLE, slots=0)
    assert steps(full) == [("load", "v", None)]
    assert steps(full, busy={"w0": PlacementPolicy().loads_per_worker}) == []
    assert steps(IDLE) == [("drain", None, None), ("load", None, "v")]


@pytest.mark.parametrize(
    ("operation", "worker_id", "outcome", "is_end"),
    [
        ("load", "w1", "ok", False),  # its old copy is still there
        ("load", "w1", "failed", True),
        ("load", "w2", "failed", False),
        ("unload", "w0", "ok", True),
        ("unload", "w0", "timeout", True),
        ("unload", "w1", "ok", False),
        ("drain", "w0", "ok", False),
    ],
)
def test_a_move_ends_with_the_unload_of_its_old_copy_or_a_failed_load(operation, worker_id, outcome, is_end):
    action = WorkerAction(operation=operation, lora_id="a", worker_id=worker_id, reason="moves")
    assert ends_move(action, outcome, {("a", "w0"): "w1", ("b", "w1"): "w2"}) is is_end


@settings(max_examples=examples(60))
@given(fleets(), st.data())
def test_files_are_fetched_ahead_for_waiting_requests_alone_and_at_no_loads_cost(case, data):
    wanted, observed, demand, rules = case
    wanted = intent(*(changed(known, source=f"s3://b/{name}") for name, known in wanted.adapters.items()))
    pairs = st.frozensets(
        st.tuples(st.sampled_from(sorted(wanted.adapters)), st.sampled_from(sorted(observed.workers)))
    )
    on_disk, ahead, by_loads = data.draw(pairs), data.draw(pairs), data.draw(pairs)

    def workers_by_digest(of):
        names = {name for name, _ in of}
        return {wanted.adapters[name].digest: [w for lora_id, w in of if lora_id == name] for name in names}

    fetches = {
        digest: [OngoingFetch(worker_id=name, moved_at=NOW) for name in names]
        for digest, names in workers_by_digest(ahead | by_loads).items()
    }
    observed = replace(
        observed,
        busy={name: data.draw(st.integers(0, 1)) for name in observed.workers},
        fetching=ahead,
        files=FilesSnapshot(is_known=True, holders=workers_by_digest(on_disk), fetches=fetches),
    )
    desired = place(wanted, observed, demand, rules, NOW)
    actions = diff(desired, observed, rules, 0, NOW, adapters=wanted.adapters)
    fetched = [(action.lora_id, action.worker_id) for action in actions if action.operation == "fetch"]
    others = [action for action in actions if action.operation != "fetch"]
    assert others == diff(replace(desired, fetches=()), observed, rules, 0, NOW, adapters=wanted.adapters)
    assert len({worker_id for _, worker_id in fetched}) == len(fetched)
    for lora_id, worker_id in fetched:
        assert demand.wants[lora_id].is_waited_for
        assert observed.workers[worker_id].can_take(wanted.adapters[lora_id])
        assert (lora_id, worker_id) not in on_disk
        assert worker_id not in {name for _, name in ahead | by_loads}


def test_the_files_of_an_adapter_that_waits_for_a_slot_come_to_the_worker_where_one_will_be_free_first():
    adapters = intent(adapter("hot"), adapter("cool"), changed(adapter("new"), source="s3://b/new"))
    full = (worker("w0", held("hot"), slots=1), worker("w1", held("cool"), slots=1))
    demand = replace(want("new", since=NOW), habits={"hot": 9.0, "cool": 1.0})

    def steps(files, **more):
        observed = fleet(*full, files=files, **more)
        actions = diff(
            place(adapters, observed, demand, PlacementPolicy(), NOW),
            observed,
            PlacementPolicy(),
            0,
            NOW,
            adapters=adapters.adapters,
        )
        return [(action.operation, action.lora_id, action.worker_id, action.neighbours) for action in actions]

    assert steps(FilesSnapshot(is_known=True)) == [("fetch", "new", "w1", ())]
    assert steps(FilesSnapshot(is_known=True, holders={"digest-new": ["w0"]})) == [("fetch", "new", "w1", ("w0",))]
    assert steps(FilesSnapshot(is_known=True, holders={"digest-new": ["w1"]})) == []
    assert steps(FilesSnapshot()) == []
    going = {"digest-new": [OngoingFetch(worker_id="w1", moved_at=NOW)]}
    fetching = frozenset({("new", "w1")})
    assert steps(FilesSnapshot(is_known=True, fetches=going), fetching=fetching) == []


@pytest.mark.parametrize(
    ("found", "own", "fleets", "is_checked"),
    [
        ("differs", None, "require", True),
        ("unknown", None, "require", True),
        ("equal", None, "require", False),
        (None, None, "require", False),  # without a file: it counts from its next load
        ("differs", "warn", "require", False),
        ("differs", "require", "warn", True),
        ("differs", None, "warn", False),
    ],
)
def test_a_loaded_copy_is_compared_where_its_policy_requires_equal_answers_and_they_are_not_proved(
    found, own, fleets, is_checked
):
    known = adapter("a", acceptance=own)
    holder = worker("w0", replace(held("a"), acceptance=found))
    rules = PlacementPolicy(acceptance=fleets)

    def checked(observed, now=NOW):
        actions = diff(DesiredPlacement(), observed, rules, 0, now, adapters={"a": known})
        return [(action.operation, action.lora_id, action.worker_id) for action in actions]

    observed = fleet(holder)
    assert checked(observed) == [("check", "a", "w0")] * is_checked
    failed = AdapterFailure(code="not_accepted", message="", until=NOW + 1)
    for busy in (
        replace(observed, checking={"w0": "b"}),
        replace(observed, failures={("a", "w0"): failed}),
        fleet(replace(holder, has_agent=False)),
        fleet(replace(holder, state="lost")),
    ):
        assert checked(busy) == []
