"""Prefetch: files of what is asked for now and then are fetched where they are missing, and only at rest."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.placement.context import ClaimOrder
from orchestrator.core.placement.warm_up import AHEAD_S, FETCHES_AT_ONCE, LEAST_EXPECTED, SPARE_FILES, prefetches
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import AdapterFailure, DemandSnapshot, FilesSnapshot, WantedReplicas
from tests.orchestrator.core.placement.test_place import NOW, adapter, fleet, held, intent, worker
from tests.properties import examples
from tests.registered import changed

NAMES = [f"a{number}" for number in range(8)]
WORKERS = [f"w{number}" for number in range(4)]
SIZE_BYTES = 1000
ROOM = SPARE_FILES * SIZE_BYTES
ONCE = LEAST_EXPECTED / AHEAD_S
"""The fewest requests a second for which files are fetched."""


def sized(name, **changes):
    return changed(adapter(name, **changes), size_bytes=SIZE_BYTES)


def planned(observed, habits, **demand):
    adapters = [sized(name) for name in NAMES]
    asked = DemandSnapshot(habits=habits, **demand)
    return [
        (step.lora_id, step.worker_id)
        for step in prefetches(intent(*adapters), observed, asked, PlacementPolicy(), NOW)
    ]


def at_rest(*workers, holders=None, **more):
    """A fleet that has reported all of its files."""
    workers = workers or [worker(name, disk_room_bytes=ROOM) for name in WORKERS]
    return fleet(*workers, files=FilesSnapshot(is_known=True, is_whole=True, holders=holders or {}), **more)


def home_of(name):
    return min((worker(each) for each in WORKERS), key=ClaimOrder(name)).id


def test_most_expected_adapters_are_fetched_by_their_homes_first():
    habits = {"a0": 2 * ONCE, "a1": 9 * ONCE, "a2": 5 * ONCE, "a3": 0.9 * ONCE}
    assert planned(at_rest(), habits) == [("a1", home_of("a1")), ("a2", home_of("a2"))]
    assert planned(at_rest(), {"a3": 0.9 * ONCE}) == []


def test_what_is_asked_for_now_goes_first():
    habits = {"a1": 9 * ONCE}
    wants = {"a7": WantedReplicas(replicas=1, since=NOW - 1)}
    assert planned(at_rest(), habits, wants=wants) == []
    assert planned(at_rest(loads_in_flight=1), habits) == []
    assert planned(at_rest(fetching=frozenset({("a6", "w0"), ("a5", "w1")})), habits) == []


def test_what_is_served_or_on_its_homes_disk_or_has_no_room_is_not_fetched():
    habits, home = {"a1": 9 * ONCE}, home_of("a1")
    assert planned(at_rest(holders={"digest-a1": {home}}), habits) == []
    others = {name for name in WORKERS if name != home}
    assert planned(at_rest(holders={"digest-a1": others}), habits) == [("a1", home)]
    assert planned(at_rest(*(worker(name, disk_room_bytes=ROOM - 1) for name in WORKERS)), habits) == []
    serving = [worker(name, *([held("a1")] if name != home else []), disk_room_bytes=ROOM) for name in WORKERS]
    assert planned(at_rest(*serving), habits) == []
    failure = AdapterFailure(until=NOW + 9, code="source_failed", message="503")
    assert planned(at_rest(failures={("a1", next(iter(others))): failure}), habits) == []
    assert planned(replace(at_rest(), files=FilesSnapshot(is_known=True)), habits) == [], "not all files are reported"


@settings(max_examples=examples(80))
@given(
    habits=st.dictionaries(st.sampled_from([*NAMES, "gone"]), st.floats(0.0, 20 * ONCE)),
    rooms=st.lists(st.sampled_from([0, ROOM - 1, ROOM]), min_size=4, max_size=4),
    on_disk=st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(WORKERS))),
    in_slots=st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(WORKERS)), max_size=6),
    fetching=st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(WORKERS)), max_size=2),
    agentless=st.sets(st.sampled_from(WORKERS)),
)
def test_prefetches_are_few_and_each_puts_files_where_they_are_missing_and_expected(
    habits, rooms, on_disk, in_slots, fetching, agentless
):
    workers = [
        worker(
            name,
            *(held(lora_id) for lora_id, where in in_slots if where == name),
            slots=8,
            disk_room_bytes=room,
            has_agent=name not in agentless,
        )
        for name, room in zip(WORKERS, rooms, strict=True)
    ]
    holders = {}
    for lora_id, name in on_disk:
        holders.setdefault(f"digest-{lora_id}", set()).add(name)
    found = planned(at_rest(*workers, holders=holders, fetching=frozenset(fetching)), habits)
    assert len(found) + len(fetching) <= max(FETCHES_AT_ONCE, len(fetching))
    rates = [habits[lora_id] for lora_id, _ in found]
    assert rates == sorted(rates, reverse=True)
    room_of = dict(zip(WORKERS, rooms, strict=True))
    for lora_id, name in found:
        assert habits[lora_id] >= ONCE
        assert room_of[name] >= ROOM
        assert name not in agentless
        assert (lora_id, name) not in on_disk | fetching
        assert not any(held_id == lora_id for held_id, _ in in_slots)
