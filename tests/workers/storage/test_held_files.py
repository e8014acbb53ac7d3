"""What is on a worker's disk, as the orchestrator learns it: by changes in pieces, whatever is lost on the way."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.reconcile.agent_view import HeldFilesBook
from tests.orchestrator.doubles import FakeAgent
from workers.storage.held_files import HeldFilesLog
from workers.wire import Metadata

DIGESTS = [f"{number:064x}" for number in range(6)]
CHANGES = st.lists(st.tuples(st.sampled_from(DIGESTS), st.sampled_from([True, False, None])), max_size=30)


def report(boot_id: str = "a1") -> Metadata:
    return Metadata.model_validate(FakeAgent("w0").metadata() | {"agent_boot_id": boot_id})


def beat(log: HeldFilesLog, book: HeldFilesBook, seen: int, *, most: int, boot_id: str = "a1") -> int:
    """One heartbeat; returns the number that its answer confirms."""
    book.record(report(boot_id), log.report_since(seen, disk_id="d", most=most))
    return book.disks["w0"].seen


@given(st.lists(st.tuples(CHANGES, st.booleans(), st.booleans()), max_size=12), st.integers(1, 3), st.randoms())
def test_orchestrator_knows_the_disk_after_a_few_heartbeats_whatever_was_lost(rounds, most: int, rng: Random):
    """Each round: changes, then a heartbeat whose answer may be lost, and perhaps a new orchestrator."""
    log, book, seen, truth = HeldFilesLog(), HeldFilesBook(), 0, {}
    for changes, is_answer_lost, is_new_leader in rounds:
        for digest, state in changes:
            log.put(digest, state)
            truth[digest] = state
        if is_new_leader:
            book = HeldFilesBook()
        answer = beat(log, book, seen, most=most)
        seen = seen if is_answer_lost else answer
    for _ in range(20):
        seen = beat(log, book, seen, most=most)
        if book.disks["w0"].is_whole:
            break
    assert book.disks["w0"].is_whole
    here = {digest: state for digest, state in truth.items() if state is not None}
    assert book.disks["w0"].files == here
    assert set(book.holders) == set(here)
    assert set(book.keepers) == {digest for digest, is_kept in here.items() if is_kept}


def test_files_of_before_count_until_a_restarted_agent_has_reported_all_of_its_own():
    before, book = HeldFilesLog(), HeldFilesBook()
    for digest in DIGESTS[:4]:
        before.put(digest, True)
    beat(before, book, 0, most=9)
    after = HeldFilesLog()
    for digest in DIGESTS[1:4]:
        after.put(digest, True)
    seen = beat(after, book, 0, most=1, boot_id="a2")
    assert not book.disks["w0"].is_whole
    assert set(book.keepers) == set(DIGESTS[:4]), "two are not reported yet, so nothing is known to be gone"
    while not book.disks["w0"].is_whole:
        seen = beat(after, book, seen, most=1, boot_id="a2")
    assert set(book.keepers) == set(DIGESTS[1:4])


def test_ten_thousand_adapters_arrive_in_bounded_pieces_and_a_change_is_one_entry():
    log, book, seen, pieces = HeldFilesLog(), HeldFilesBook(), 0, 0
    for number in range(10_000):
        log.put(f"{number:064x}", False)
    while not (book.disks and book.disks["w0"].is_whole):
        seen, pieces = beat(log, book, seen, most=1000), pieces + 1
    assert (pieces, len(book.holders)) == (10, 10_000)
    log.put(DIGESTS[0], None)
    found = log.report_since(seen, disk_id="d", most=1000)
    assert (found.held, found.kept, found.gone) == ((), (), (DIGESTS[0],))


def test_what_is_gone_is_forgotten_in_the_end_and_readers_begin_anew_once():
    log, book, seen = HeldFilesLog(), HeldFilesBook(), 0
    for number in range(30_000):
        log.put(f"{number:064x}", False)
        if number >= 5:
            log.put(f"{number:064x}", None)
        if number == 10:
            seen = beat(log, book, seen, most=1000)
    for _ in range(60):
        seen = beat(log, book, seen, most=1000)
    assert sorted(book.holders) == [f"{number:064x}" for number in range(5)]
    assert book.disks["w0"].is_whole


def test_files_that_come_to_a_known_disk_have_arrived_and_those_that_were_there_before_have_not():
    log, book, seen = HeldFilesLog(), HeldFilesBook(), 0
    log.put(DIGESTS[0], False)
    seen = beat(log, book, seen, most=9)
    assert not book.arrived
    log.put(DIGESTS[1], False)
    log.put(DIGESTS[2], True)
    seen = beat(log, book, seen, most=9)
    log.put(DIGESTS[1], None)
    log.put(DIGESTS[2], False)
    seen = beat(log, book, seen, most=9)
    log.put(DIGESTS[1], False)
    beat(log, book, seen, most=9)
    assert book.arrived == {DIGESTS[1]: 2, DIGESTS[2]: 1}


def test_files_on_a_disk_that_agents_share_arrive_once():
    log, book = HeldFilesLog(), HeldFilesBook()
    reports = [report(), Metadata.model_validate(FakeAgent("w1").metadata())]
    for each in reports:
        book.record(each, log.report_since(0, disk_id="d", most=9))
    log.put(DIGESTS[0], False)
    for each in reports:
        book.record(each, log.report_since(0, disk_id="d", most=9))
    assert book.arrived == {DIGESTS[0]: 1}
