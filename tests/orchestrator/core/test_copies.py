"""Copies of files that only the fleet has: as many as wanted, on as many disks, whatever becomes of workers."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.copies import COPIES_AT_ONCE, CopyFacts, CopyPlan, WorkerDisk, plan_copies

A, B = "a" * 64, "b" * 64


def disk(name: str, files=None, **more) -> WorkerDisk:
    return WorkerDisk(worker_id=name, disk_id=more.pop("disk_id", f"disk-{name}"), files=files or {}, **more)


def plan(needs, disks, *, copies: int = 2, **more) -> CopyPlan:
    keepers: dict[str, set[str]] = {}
    for each in disks:
        for digest, is_kept in each.files.items():
            if is_kept:
                keepers.setdefault(digest, set()).add(each.worker_id)
    named = dict.fromkeys(needs, "tiny")
    return plan_copies(CopyFacts(needs=named, disks=disks, keepers=keepers, copies=copies, **more))


def applied(disks, decided: CopyPlan) -> list[WorkerDisk]:
    """The disks after all steps."""
    files = {each.worker_id: dict(each.files) for each in disks}
    for keep in decided.keeps:
        (digest,) = keep.digests
        assert keep.mark == "kept"
        assert digest in files[keep.worker_id] or keep.neighbours, "bytes come from somewhere"
        assert all(digest in files[name] for name in keep.neighbours)
        files[keep.worker_id][digest] = True
    for release in decided.releases:
        for digest in release.digests:
            files[release.worker_id][digest] = False
    return [replace(each, files=files[each.worker_id]) for each in disks]


FILES = st.dictionaries(st.sampled_from([A, B]), st.booleans())
DISKS = st.lists(
    st.builds(
        lambda number, files, shared, safe, heard, takes: {
            "number": number, "files": files, "shared": shared, "is_safe": safe, "is_reachable": heard,
            "takes_copies": takes and heard,
        },
        st.integers(0, 9), FILES, st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    ),
    max_size=6,
    unique_by=lambda it: it["number"],
)  # fmt: skip


@given(DISKS, st.integers(1, 3))
def test_passes_end_with_as_many_copies_as_there_can_be_and_release_none_that_is_needed(drawn, copies: int):
    disks = []
    for each in drawn:
        number, shared = each.pop("number"), each.pop("shared")
        disks.append(disk(f"w{number}", each.pop("files"), disk_id="shared" if shared else f"disk-{number}", **each))

    def safe_copies(digest: str, now: list[WorkerDisk]) -> set[str]:
        return {one.disk_id for one in now if one.is_safe and one.files.get(digest)}

    had = {digest: safe_copies(digest, disks) for digest in (A, B)}
    for _ in range(8):
        before = {digest: len(safe_copies(digest, disks)) for digest in (A, B)}
        decided = plan((A, B), disks, copies=copies)
        disks = applied(disks, decided)
        for digest in (A, B):
            now = len(safe_copies(digest, disks))
            assert now >= min(copies, before[digest]), "a release leaves as many as are wanted"
    assert not decided.keeps, "a second pass with nothing changed does nothing"
    for digest in (A, B):
        possible = had[digest] | {one.disk_id for one in disks if one.is_safe and one.takes_copies}
        is_there = any(one.is_reachable and digest in one.files for one in disks)
        least = min(copies, len(possible)) if is_there else min(copies, len(had[digest]))
        found = len(safe_copies(digest, disks))
        assert found >= least, (digest, decided.states.get(digest))
        state = decided.states.get(digest)
        if found < copies:
            assert state is not None
            assert state.status in {"short", "lost"}
            assert state.reason


def test_marking_files_that_are_there_comes_before_a_transfer_then_another_machine_and_zone():
    here = disk("w0", {A: True}, node="n0", zone="z0", base_model="tiny")
    has_it = disk("w1", {A: False}, node="n1", zone="z0", base_model="tiny")
    beside = disk("w2", node="n0", zone="z0", base_model="tiny")
    away = disk("w3", node="n3", zone="z1", base_model="tiny")
    assert [step.worker_id for step in plan([A], [here, has_it, beside, away]).keeps] == ["w1"]
    (step,) = plan([A], [here, beside, away]).keeps
    assert (step.worker_id, step.neighbours) == ("w3", ("w0",))
    other_model = disk("w4", node="n4", zone="z1", base_model="other")
    assert [step.worker_id for step in plan([A], [here, other_model, away]).keeps] == ["w3"]


def test_agents_that_share_a_disk_have_one_copy():
    shared = [disk(name, {A: True}, disk_id="nfs") for name in ("w0", "w1")]
    decided = plan([A], shared)
    assert decided.states[A].status == "short"
    assert not decided.releases
    assert [step.worker_id for step in plan([A], [*shared, disk("w2")]).keeps] == ["w2"]


def test_a_drained_workers_copy_counts_no_more_and_is_read_from():
    going = disk("w0", {A: True}, is_safe=False, takes_copies=False)
    (step,) = plan([A], [going, disk("w1", {A: True}), disk("w2")]).keeps
    assert step.worker_id == "w2"
    assert set(step.neighbours) == {"w0", "w1"}


def test_files_on_no_disk_are_lost_only_once_every_worker_has_said_what_it_has():
    silent = disk("w1", {A: True}, is_safe=False, is_reachable=False, takes_copies=False)
    state = plan([A], [disk("w0"), silent]).states[A]
    assert state.status == "lost"
    assert "w1" in state.reason
    assert "publish" in state.reason
    assert plan([A], [disk("w0", is_whole=False)]).states[A].status == "unknown"


def test_an_unknown_digest_stays_kept_and_a_deleted_one_is_dropped():
    disks = [disk("w0", {A: True, B: True}), disk("w1", {A: True})]
    assert plan([], disks).releases == (), "an empty store releases nothing"
    releases = plan([], disks, deleted={A}).releases
    assert [(step.worker_id, step.digests, step.mark) for step in releases] == [
        ("w0", (A,), "gone"), ("w1", (A,), "gone"),
    ]  # fmt: skip
    assert plan([A], disks, deleted={A}).releases == (), "registered again under another name"


def test_deleted_files_are_dropped_once_on_every_disk_marked_or_not():
    disks = [disk("w0", {A: True, B: False}), disk("w1", {A: False}), disk("w2", {A: False}, is_reachable=False)]
    releases = plan([], disks, deleted={A}).releases
    assert [(step.worker_id, step.digests) for step in releases] == [("w0", (A,)), ("w1", (A,))]
    assert plan([], disks, deleted={A}, dropping={(A, "w0"), (A, "w1")}).releases == ()


def test_transfers_are_bounded_and_one_a_worker_and_those_that_failed_are_passed_over():
    digests = [f"{number:064x}" for number in range(100)]
    disks = [disk("w0", dict.fromkeys(digests, True)), *(disk(f"w{number}") for number in range(1, 20))]
    keeps = plan(digests, disks).keeps
    assert len(keeps) == COPIES_AT_ONCE
    assert len({step.worker_id for step in keeps}) == COPIES_AT_ONCE
    two = [disk("w0", {A: True}), disk("w1"), disk("w2")]
    first = plan([A], two).keeps[0].worker_id
    other = plan([A], two, blocked={(A, first)}).keeps[0].worker_id
    assert {first, other} == {"w1", "w2"}
    assert plan([A], two, under_way={(A, first)}).keeps == ()
