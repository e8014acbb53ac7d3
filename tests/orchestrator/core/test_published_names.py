"""The pure decisions about published names, against the simplest thing that could be right."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lorafleet.identity import split_version_id, version_id
from orchestrator.core.published_names import (
    LINGER_S,
    MOST_DROPPED,
    MOST_LINGER_S,
    UNFINISHED_S,
    after_deletion,
    after_pointing,
    is_trained,
    is_unused,
    meant_workers,
    retired_versions,
    with_next_version,
    with_published_floors,
    without_versions,
)
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import AliasTarget, Publication, PublishedSpec, ServedName, is_retired_version
from orchestrator.model.snapshot import Intent, ObservedWorker
from tests.registered import registered

POLICY = PlacementPolicy(keep_versions=2, max_staleness_s=3600.0, unused_name_s=86400.0)


def published(*digests, at=100.0, step_s=10.0, **settings):
    """A name under which these bytes were published, one every `step_s` seconds."""
    record = Publication(spec=PublishedSpec(**settings))
    for number, digest in enumerate(digests):
        record, version = with_next_version("policy", record, digest, (), at + number * step_s)
        record = pointed(record, version.lora_id, at + number * step_s)
    return record


def pointed(record, lora_id, at):
    """The record after its name was pointed at the version."""
    name = after_pointing(ServedName(name="policy", published=record), lora_id, at)
    assert name.targets == (AliasTarget(lora_id, 1.0),)
    return name.published


def current_of(record):
    return {v.lora_id for v in record.versions if v.pointed_at is not None and v.superseded_at is None}


steps = st.lists(st.tuples(st.sampled_from("abcde"), st.floats(1, 2000)), min_size=1, max_size=30)


@given(steps=steps, keep=st.integers(1, 4), stale_s=st.sampled_from([0.0, 60.0, 3600.0]))
def test_current_version_is_never_retired_and_others_are_bounded(steps, keep, stale_s):
    record, now, numbers = Publication(spec=PublishedSpec(keep_versions=keep, max_staleness_s=stale_s)), 0.0, []
    for digest, wait_s in steps:
        now += wait_s
        version = record.version_of(digest)
        if version is None:
            record, version = with_next_version("policy", record, digest, (), now)
            numbers.append(version.number)
        record = pointed(record, version.lora_id, now)
        assert current_of(record) == {version.lora_id}
        retired = set(retired_versions(record, current_of(record), POLICY, now + LINGER_S + 1))
        assert version.lora_id not in retired
        record = without_versions(record, retired)
        assert len(record.versions) <= keep
        assert len(record.dropped) <= MOST_DROPPED
        assert not {each.digest for each in record.versions} & set(record.dropped)
    assert numbers == sorted(set(numbers)), "no number is used twice"


def test_version_goes_when_it_is_stale_or_beyond_those_kept():
    record = published("a", "b", "c")
    assert retired_versions(record, {"policy/v3"}, POLICY, 130.0) == ("policy/v1",)
    assert retired_versions(record, {"policy/v3"}, POLICY, 120.0 + 3600.0) == ("policy/v1", "policy/v2")
    assert retired_versions(record, {"policy/v1", "policy/v3"}, POLICY, 130.0) == (), "another alias points there"


def test_version_with_requests_lingers_but_not_for_ever():
    record = published("a", "b", "c", step_s=1.0)
    assert retired_versions(record, {"policy/v3"}, POLICY, 101.0 + LINGER_S - 0.1) == ()
    assert retired_versions(record, {"policy/v3"}, POLICY, 110.0, {"policy/v1"}) == ()
    assert retired_versions(record, {"policy/v3"}, POLICY, 101.0 + MOST_LINGER_S, {"policy/v1"}) == ("policy/v1",)


def test_version_of_a_failed_publish_goes_after_a_while():
    record, version = with_next_version("policy", published("a"), "b", (), 200.0)
    assert retired_versions(record, {"policy/v1"}, POLICY, 200.0 + UNFINISHED_S - 1) == ()
    assert retired_versions(record, {"policy/v1"}, POLICY, 200.0 + UNFINISHED_S) == (version.lora_id,)


def test_versions_of_a_deleted_name_all_go():
    name = after_deletion(ServedName(name="policy", published=published("a", "b")), 200.0)
    record = name.published
    assert name.targets == ()
    assert retired_versions(record, (), POLICY, 200.0) == ("policy/v1",), "it was superseded before"
    assert retired_versions(record, (), POLICY, 200.0 + LINGER_S) == ("policy/v1", "policy/v2")


def test_name_is_unused_when_nobody_published_or_asked_in_a_long_time():
    record = published("a")
    assert not is_unused(record, None, POLICY, 100.0 + 86399.0)
    assert is_unused(record, None, POLICY, 100.0 + 86400.0)
    assert not is_unused(record, 50_000.0, POLICY, 100.0 + 86400.0)
    assert not is_unused(replace(record, used_at=50_000.0), None, POLICY, 100.0 + 86400.0)
    assert not is_unused(record, None, replace(POLICY, unused_name_s=0.0), 1e12)


@given(st.integers(1, 10**8), st.sampled_from(["policy", "team/policy", "m@3", "a/v2"]))
def test_version_ids_are_read_back(number, name):
    lora_id = version_id(name, number)
    assert split_version_id(lora_id) == (name, number)
    assert is_retired_version(lora_id, {name: number + 1}, ())
    assert not is_retired_version(lora_id, {name: number}, ())
    assert not is_retired_version(lora_id, {name: number + 1}, {lora_id})


def test_number_of_an_adapter_that_is_there_already_is_passed_over():
    record, version = with_next_version("policy", Publication(), "a", {"policy/v1", "policy/v2"}, 0.0)
    assert (version.lora_id, record.next_number) == ("policy/v3", 4)


def worker(name, *, slots=2, **more):
    return ObservedWorker(id=name, state="ready", base_model="tiny", slots=slots, max_lora_rank=16, **more)


def adapter(lora_id):
    return registered(lora_id, source="fleet:x", base_model="tiny", digest="d", rank=8)


def floors(names, workers, targets, **more):
    ids = {version.lora_id for name in names.values() for version in name.versions}
    intent = Intent(adapters={lora_id: adapter(lora_id) for lora_id in ids})
    served = [ServedName(name=name, targets=targets.get(name, ()), published=each) for name, each in names.items()]
    found = with_published_floors(intent, served, workers, most_replicas=64, **more)
    minima = {lora_id: each.policy.min_replicas for lora_id, each in found.adapters.items() if each.policy.min_replicas}
    return minima, found.superseded


def test_a_version_that_its_name_has_left_is_wanted_again_while_a_publish_waits_for_it():
    names, targets = {"policy": published("a", "b")}, {"policy": (AliasTarget("policy/v2", 1.0),)}
    assert floors(names, [worker("w0")], targets) == ({"policy/v2": 1}, {"policy/v1"})
    again = floors(names, [worker("w0")], targets, awaited={"policy/v1"})
    assert again == ({"policy/v1": 1, "policy/v2": 1}, frozenset())


def test_current_and_unfinished_versions_are_wanted_on_all_workers_that_may_have_them():
    record, _ = with_next_version("policy", published("a", "b"), "c", (), 300.0)
    workers = [worker("w0"), worker("w1"), worker("w2", has_agent=False)]
    assert meant_workers(workers, "tiny", 8, "all") == (frozenset({"w0", "w1"}), 2)
    assert meant_workers(workers, "tiny", 32, "all") == (frozenset(), 0)
    minima, superseded = floors({"policy": record}, workers, {"policy": (AliasTarget("policy/v2", 1.0),)})
    assert (minima, superseded) == ({"policy/v2": 2, "policy/v3": 2}, {"policy/v1"})
    minima, _ = floors(
        {"policy": replace(record, spec=PublishedSpec(replicas=1))},
        workers,
        {"policy": (AliasTarget("policy/v2", 1.0),)},
    )
    assert minima == {"policy/v2": 1, "policy/v3": 1}


def test_more_names_than_slots_leave_a_minimum_to_those_used_last():
    names = {f"n{n}": published("a", at=100.0 * n) for n in range(4)}
    names = {
        name: replace(record, versions=tuple(replace(v, lora_id=f"{name}/v1") for v in record.versions))
        for name, record in names.items()
    }
    targets = {name: (AliasTarget(f"{name}/v1", 1.0),) for name in names}
    minima, _ = floors(names, [worker("w0")], targets)
    assert minima == {"n3/v1": 1, "n2/v1": 1}
    # Slots that the policy keeps free are not theirs, and idle names take none: neither is a slot refused to others.
    minima, _ = floors(names, [worker("w0")], targets, reserve_slots=1)
    assert minima == {"n3/v1": 1}
    minima, superseded = floors(names, [worker("w0")], targets, idle={"n0", "n2", "n3"})
    assert (minima, superseded) == ({"n1/v1": 1}, frozenset())
    minima, _ = floors(names, [worker("w0")], targets, idle=names, awaited={"n0/v1"})
    assert minima == {"n0/v1": 1}


def named(name, *digests, **more):
    """A name with versions of its own, and what it points at."""
    record = published(*digests, **more)
    versions = tuple(replace(version, lora_id=version_id(name, version.number)) for version in record.versions)
    return replace(record, versions=versions), (AliasTarget(versions[-1].lora_id),)


def fleet_of(**records):
    """Names, and what each points at."""
    return {name: each for name, (each, _) in records.items()}, {name: to for name, (_, to) in records.items()}


def test_between_publishes_the_next_version_of_a_trained_name_counts_as_during_one():
    names, targets = fleet_of(old=named("old", "a"), run=named("run", "b", "c", at=200.0))
    assert is_trained(names["run"], POLICY, 210.0 + POLICY.scale_down_after_s - 1)
    assert not is_trained(names["run"], POLICY, 210.0 + POLICY.scale_down_after_s)
    assert not is_trained(names["old"], POLICY, 100.0), "one version is no sign of another"
    begun = names | {"run": with_next_version("run", names["run"], "d", (), 300.0)[0]}
    for slots in (1, 2, 3, 4):
        workers = [worker(f"w{n}", slots=slots) for n in range(2)]
        during, _ = floors(begun, workers, targets, trained={"run"})
        between, _ = floors(names, workers, targets, trained={"run"})
        assert ("old/v1" in during) is ("old/v1" in between) is (slots > 2)
        assert "run/v2" in between
    # One slot for all trainers; none that a name used later needs.
    two, both = fleet_of(old=named("old", "a"), one=named("one", "b", "c", at=200.0), run=named("run", "d", at=300.0))
    assert floors(two, [worker("w0", slots=3)], both, trained={"one", "run"})[0].keys() == {"one/v2", "run/v1"}
    assert floors(two, [worker("w0", slots=4)], both, trained={"one", "run"})[0].keys() == {
        "old/v1",
        "one/v2",
        "run/v1",
    }
    assert floors(two, [worker("w0", slots=2)], both, trained={"one"})[0].keys() == {"one/v2", "run/v1"}


def test_names_with_few_replicas_take_the_slots_of_as_many_workers():
    names, targets = fleet_of(**{f"n{n}": named(f"n{n}", "a", at=100.0 * n, replicas=1) for n in range(9)})
    workers = [worker(f"w{n}") for n in range(4)]
    minima, _ = floors(names, workers, targets)
    assert minima == {f"n{n}/v1": 1 for n in range(1, 9)}, "eight slots, and n0 was used first"
    names["n8"] = replace(names["n8"], spec=PublishedSpec())
    minima, _ = floors(names, workers, targets)
    assert minima == {"n8/v1": 4, "n7/v1": 1}, "where others are on one worker, n8 finds no slot there"


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    replicas=st.lists(st.one_of(st.just("all"), st.integers(1, 5)), min_size=1, max_size=9),
    data=st.data(),
)
def test_minimums_of_names_can_be_met_wherever_the_copies_of_others_are(sizes, replicas, data):
    records = {f"n{n}": named(f"n{n}", "a", at=100.0 * n, replicas=least) for n, least in enumerate(replicas)}
    names, targets = fleet_of(**records)
    minima, _ = floors(names, [worker(f"w{n}", slots=slots) for n, slots in enumerate(sizes)], targets)
    left = list(sizes)
    for lora_id in data.draw(st.permutations(sorted(minima))):
        free = [n for n, slots in enumerate(left) if slots]
        assert len(free) >= minima[lora_id]
        for n in data.draw(st.permutations(free))[: minima[lora_id]]:
            left[n] -= 1
    assert f"n{len(replicas) - 1}/v1" in minima, "the name used last"
