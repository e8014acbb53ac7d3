"""The lease protocol, the file lease, and competing orchestrators."""

import ast
import asyncio
import os
import signal
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orchestrator
from lorafleet.service.http import error_response
from orchestrator.core.errors import LeaseLost, LeaseUnreachable, OrchestratorUnavailable, StoreError
from orchestrator.core.lease import LeaseCandidate, LeaseRecord
from orchestrator.leadership.file_lease import FileLease
from orchestrator.leadership.leadership import Leadership
from tests.patience import patience, until, within
from tests.properties import examples

DURATION_S, MARGIN_S = 5.0, 1.0


class MemoryLease:
    """The lease in memory, with compare-and-set; `fails` makes every call raise."""

    place = "a dict"
    is_absence_new = True

    def __init__(self):
        self.hold = None
        self.fails = False
        self.changes_of_holder = 0

    async def read(self):
        self._check()
        return self.hold

    async def write(self, new, seen):
        self._check()
        if self.hold != seen:
            return False
        self.changes_of_holder += self.hold is not None and self.hold.holder != new.holder
        self.hold = new
        return True

    async def is_gone(self, hold):
        return False

    def close(self):
        pass

    def _check(self):
        if self.fails:
            raise LeaseUnreachable("away")


class LeaseClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class RecordedTerms:
    """Records the terms of a leadership."""

    def __init__(self, terms):
        self.begin_term = lambda: terms.append("begin")
        self.end_term = lambda: terms.append("end")

    async def prepare_term(self):
        pass


def leadership(record, holder, clock):
    terms = []
    handler = RecordedTerms(terms)
    it = Leadership(
        record,
        lambda: handler,
        holder=holder,
        url=f"http://{holder}",
        duration_s=DURATION_S,
        renew_s=1.0,
        margin_s=MARGIN_S,
        clock=clock,
    )
    it.terms, it.handler = terms, handler
    return it


@pytest.fixture
def two():
    record, clock = MemoryLease(), LeaseClock()
    return record, clock, leadership(record, "a", clock), leadership(record, "b", clock)


async def test_the_first_takes_the_lease_and_the_second_knows_the_leader(two):
    _, _, a, b = two
    await a.check_lease()
    await b.check_lease()
    assert (a.is_leading, b.is_leading) == (True, False)
    assert b.other_holder.url == "http://a"
    assert a.other_holder is None
    assert (a.terms, b.terms) == (["begin"], [])


async def test_a_silent_leader_stops_before_the_standby_takes_over(two):
    _, clock, a, b = two
    await a.check_lease()
    await b.check_lease()
    clock.now += DURATION_S - MARGIN_S
    assert not a.is_leading
    await b.check_lease()
    assert not b.is_leading
    clock.now += MARGIN_S
    await b.check_lease()
    assert b.is_leading
    await a.check_lease()
    assert a.terms == ["begin", "end"]
    assert a.other_holder.holder == "b"


async def test_renewals_keep_the_lease_for_any_time(two):
    _, clock, a, b = two
    for _ in range(20):
        await a.check_lease()
        await b.check_lease()
        clock.now += 1.0
    assert (a.is_leading, b.is_leading) == (True, False)
    assert a.terms == ["begin"]


async def test_an_expired_term_goes_on_when_no_other_has_led(two):
    """Starve the process so that no renewal comes in time."""
    _, clock, a, _ = two
    await a.check_lease()
    for _ in range(12):
        clock.now += DURATION_S * 3
        assert (a.is_leading, a.is_late) == (False, True)
        await a.check_lease()
        assert (a.is_leading, a.is_late) == (True, False)
    assert a.terms == ["begin"]


async def test_a_term_ends_at_a_late_check_when_another_has_led(two):
    _, clock, a, b = two
    await a.check_lease()
    await b.check_lease()
    clock.now += DURATION_S
    await b.check_lease()
    assert b.is_leading
    await b.release()
    await a.check_lease()
    assert a.terms == ["begin", "end", "begin"]


async def test_a_late_leader_with_a_standby_keeps_its_term_unless_the_standby_took_it(two):
    _, clock, a, b = two
    await a.check_lease()
    await b.check_lease()
    for _ in range(5):
        clock.now += DURATION_S - 0.1
        await b.check_lease()
        assert (a.is_late, b.is_leading) == (True, False)
        await a.check_lease()
        await b.check_lease()
        assert a.is_leading
    assert (a.terms, b.terms) == (["begin"], [])


async def test_a_starved_leader_keeps_its_term_beside_a_living_standby(tmp_path):
    clock = LeaseClock()
    a = leadership(FileLease(tmp_path / "lease", holder="a"), "a", clock)
    standby = FileLease(tmp_path / "lease", holder="b")
    a.late_wait_s = patience(10)
    await a.start()
    running = asyncio.create_task(a.run())
    try:
        for _ in range(3):
            clock.now += DURATION_S * 3
            await a.wait_for_check()
            assert (a.is_leading, a.terms) == (True, ["begin"])
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await a.release()
        standby.close()


async def test_a_renewal_that_takes_longer_than_the_lease_is_made_again_in_the_same_term(two):
    record, clock, a, _ = two
    await a.check_lease()
    write = record.write

    async def slow_write(new, seen):
        clock.now += DURATION_S * 2
        return await write(new, seen)

    record.write = slow_write
    await a.check_lease()
    assert (a.is_leading, a.is_late) == (False, True)
    record.write = write
    await a.check_lease()
    assert (a.is_leading, a.terms) == (True, ["begin"])


async def test_a_term_outlasts_a_lease_that_could_not_be_reached_for_any_time(two):
    """The holder does not act meanwhile, and the record shows in the end that nobody else took it."""
    record, clock, a, _ = two
    await a.check_lease()
    record.fails = True
    for _ in range(10):
        clock.now += DURATION_S
        with pytest.raises(LeaseUnreachable):
            await a.check_lease()
        assert (a.is_leading, a.is_late) == (False, True)
        with pytest.raises(LeaseLost):
            a.require_leading()
    record.fails = False
    await a.check_lease()
    assert (a.is_leading, a.terms) == (True, ["begin"])


async def test_a_late_term_ends_when_its_record_was_deleted(two):
    record, clock, a, _ = two
    await a.check_lease()
    clock.now += DURATION_S
    record.hold = None  # another process may have led and gone
    await a.check_lease()
    assert a.terms == ["begin", "end"]


async def test_an_action_of_a_late_leader_does_not_end_its_term(two):
    _, clock, a, _ = two
    await a.check_lease()
    clock.now += DURATION_S
    a.on_newer_leader("this orchestrator does not hold the lease")
    await a.check_lease()
    assert (a.is_leading, a.terms) == (True, ["begin"])


async def test_calls_and_actions_wait_for_a_late_renewal(two):
    _, clock, a, _ = two
    a.late_wait_s = patience(10)
    await a.start()
    running = asyncio.create_task(a.run())
    try:
        clock.now += DURATION_S * 3
        await a.confirm_leading()
        assert (a.is_leading, a.terms) == (True, ["begin"])
    finally:
        running.cancel()


async def test_a_call_waits_only_so_long_for_a_lease_that_cannot_be_reached(two):
    record, clock, a, _ = two
    await a.start()
    record.fails = True
    running = asyncio.create_task(a.run())
    try:
        clock.now += DURATION_S * 3
        a.late_wait_s = 0.05
        with pytest.raises(LeaseLost):
            await a.confirm_leading()
        await until(lambda: a.trouble == "away")
    finally:
        running.cancel()


async def test_in_a_long_outage_of_the_lease_calls_do_not_wait_again(two):
    record, clock, a, _ = two
    await a.start()
    record.fails = True
    running = asyncio.create_task(a.run())
    try:
        clock.now += DURATION_S * 3
        await until(lambda: a.trouble == "away")
        a.late_wait_s = 1000.0
        for _ in range(1000):
            clock.now += 1.0
            a._record_failure("away")
        async with within(20):
            with pytest.raises(LeaseLost):
                await a.confirm_leading()
        clock.now += DURATION_S * 3  # the process is paused, and the outage ends meanwhile
        record.fails = False
        await a.confirm_leading()
        await until(lambda: a.is_leading)
        assert a.terms == ["begin"]
    finally:
        running.cancel()


async def test_a_renewal_needs_no_thread_that_others_share(tmp_path):
    """Uploads, hashes and reads of files may have all of the event loop's own threads for seconds."""
    lease, go_on = FileLease(tmp_path / "lease", holder="a"), threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.ensure_future(asyncio.to_thread(go_on.wait))
    try:
        async with within(10):
            assert await lease.read() is None
            assert await lease.write(LeaseRecord(holder="a", url="", duration_s=5.0), None)
    finally:
        go_on.set()
        await busy
        lease.close()


async def test_the_trouble_with_the_lease_is_shown_until_it_is_over(two):
    record, _, a, _ = two
    record.fails = True
    await a.start()
    assert a.trouble == "away"
    record.fails = False

    def full():
        raise StoreError("no space left in /srv: make room")

    begin, a.handler.begin_term = a.handler.begin_term, full
    await a.check_lease()
    assert (a.is_leading, a.trouble) == (False, "no space left in /srv: make room")
    a.handler.begin_term = begin
    await a.check_lease()
    assert (a.is_leading, a.trouble) == (True, "")


async def test_a_standby_that_cannot_read_the_lease_knows_its_last_holder_for_a_minute(two):
    record, clock, a, b = two
    await a.check_lease()
    await b.check_lease()
    record.fails = True
    for _ in range(58):
        clock.now += 1.0
        b._record_failure("away")
    assert b.leader_url == "http://a"
    assert not b.is_leading
    for _ in range(10):
        clock.now += 1.0
        b._record_failure("away")
    assert b.leader_url is None


async def test_a_leader_that_cannot_reach_the_lease_stops_in_time(two):
    record, clock, a, _ = two
    await a.check_lease()
    record.fails = True
    clock.now += 3.9
    with pytest.raises(LeaseUnreachable):
        await a.check_lease()
    assert a.is_leading
    clock.now += 0.1
    assert not a.is_leading


async def test_a_deleted_lease_is_created_again_by_its_holder_only(two):
    record, clock, a, b = two
    await a.check_lease()
    await b.check_lease()
    record.hold = None
    await b.check_lease()
    assert not b.is_leading
    clock.now += 1.0
    await a.check_lease()
    await b.check_lease()
    assert (a.is_leading, b.is_leading) == (True, False)
    assert a.terms == ["begin"]
    record.hold = None
    for _ in range(2):
        await b.check_lease()
        clock.now += DURATION_S
    await b.check_lease()
    assert b.is_leading  # the holder was gone, too


async def test_a_newcomer_without_a_record_waits_for_a_possible_holder(two):
    record, clock, a, _ = two
    record.is_absence_new = False
    c = leadership(record, "c", clock)
    await a.check_lease()
    record.hold = None
    await c.check_lease()
    assert not c.is_leading
    clock.now += DURATION_S - MARGIN_S
    assert not a.is_leading
    await c.check_lease()
    assert not c.is_leading
    clock.now += MARGIN_S
    await c.check_lease()
    assert c.is_leading


async def test_a_released_lease_is_free_at_once(two):
    _, _, a, b = two
    await a.check_lease()
    await b.check_lease()
    await a.release()
    await b.check_lease()
    assert (a.is_leading, b.is_leading) == (False, True)
    assert a.terms == ["begin", "end"]


async def test_a_leader_that_steps_down_watches_its_successor_and_leads_no_more(two):
    _, clock, a, b = two
    await a.check_lease()
    await a.step_down()
    await a.check_lease()  # nobody has taken it: it stays free all the same
    assert (a.is_leading, a.other_holder, a.terms) == (False, None, ["begin", "end"])
    await b.check_lease()
    await a.check_lease()
    assert (b.is_leading, a.leader_url) == (True, "http://b")
    await b.release()
    clock.now += 10 * DURATION_S
    await a.check_lease()
    assert (a.is_leading, a.terms) == (False, ["begin", "end"])


async def test_a_renewal_under_way_does_not_undo_a_release(two):
    record, _, a, b = two
    await a.check_lease()
    reading, go_on = asyncio.Event(), asyncio.Event()
    read = record.read

    async def slow_read():
        found = await read()
        reading.set()
        await go_on.wait()
        return found

    record.read = slow_read
    renewal = asyncio.create_task(a.check_lease())
    await asyncio.wait_for(reading.wait(), patience(5))
    leaving = asyncio.create_task(a.step_down())
    go_on.set()
    await asyncio.gather(renewal, leaving)
    record.read = read
    await b.check_lease()
    assert (a.is_leading, b.is_leading) == (False, True)


async def test_a_lease_that_could_not_be_released_is_released_at_the_next_read(two):
    record, _, a, b = two
    await a.check_lease()
    record.fails = True
    await a.step_down()
    record.fails = False
    assert not a.is_leading
    await b.check_lease()
    assert not b.is_leading
    await a.check_lease()
    await b.check_lease()
    assert b.is_leading


async def test_a_call_waits_for_the_successor_of_a_leader_that_steps_down(two):
    _, _, a, b = two
    await a.check_lease()
    run = asyncio.create_task(a.run())
    waiting = asyncio.create_task(a.wait_for_successor(patience(10)))
    await a.step_down()
    assert not waiting.done()
    await b.check_lease()
    await asyncio.wait_for(waiting, patience(10))
    assert a.leader_url == "http://b"
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_a_term_that_cannot_begin_is_tried_again(two):
    _, _, a, _ = two

    def worst():
        raise RuntimeError("the store is away")

    good, a.handler.begin_term = a.handler.begin_term, worst
    await a.check_lease()
    assert not a.is_leading
    a.handler.begin_term = good
    await a.check_lease()
    assert a.is_leading


async def test_a_newer_leader_ends_the_term_until_the_next_renewal(two):
    _, _, a, _ = two
    await a.check_lease()
    a.on_newer_leader("an agent has obeyed somebody newer")
    assert not a.is_leading
    await a.check_lease()
    assert a.is_leading
    assert a.terms == ["begin", "end", "begin"]


# Waits around the times that matter: a renewal, the holder's own end, the moment after which it is free.
WAITS = st.sampled_from([0.0, 0.0, 0.1, 1.0, 3.9, 4.9, 5.0])
SELDOM = st.sampled_from([False, False, False, True])
STEPS = st.lists(st.tuples(st.integers(0, 2), WAITS, SELDOM, SELDOM), min_size=20)


@settings(max_examples=examples(300))
@given(STEPS, st.booleans())
def test_two_processes_never_lead_at_once(steps, may_be_deleted):
    """Any order of looks, of waits, of losses between look and write: candidates with clocks far apart.

    Where the record may be deleted nobody may take its absence for a first start. Not before all who look have seen it:
    of a record that is made and deleted between two looks nobody would know.
    """
    record, now = None, 0.0
    offsets = [0.0, 1e6, -1e6]
    them = [
        LeaseCandidate(
            holder=str(n), url="", duration_s=DURATION_S, margin_s=MARGIN_S, is_absence_new=not may_be_deleted
        )
        for n in range(3)
    ]
    looked = set()
    for who, wait_s, is_lost, is_deleted in steps:
        now += wait_s
        if is_deleted and may_be_deleted and all(them[n].last_seen is not None for n in looked):
            record, may_be_deleted = None, False
        looked.add(who)
        one, mine = them[who], now + offsets[who]
        one.observe_record(record, mine)
        wanted = one.next_record(mine, is_holder_gone=False)
        if wanted is not None:
            record = wanted
            if not is_lost:  # written, but the answer never came
                one.record_written(wanted, mine)
        acting = [n for n, other in enumerate(them) if other.remaining_s(now + offsets[n]) > 0]
        assert len(acting) <= 1


@types.coroutine
def pause():
    """A point at which the process may be paused for any time."""
    yield


class PausingLease(MemoryLease):
    """A lease before and after whose every step a process may be paused."""

    async def read(self):
        await pause()
        found = self.hold
        await pause()
        return found

    async def write(self, new, seen):
        await pause()
        is_written = await super().write(new, seen)
        await pause()
        return is_written


class TermStore:
    """The epoch in the store, and an agent: both refuse an older one."""

    def __init__(self):
        self.epoch = self.obeyed = 0
        self.began = []  # (holder, epoch, changes of the lease's holder before) of each term, in order


class PausedProcess:
    """A leadership whose checks are run step by step, and that acts by its epoch."""

    def __init__(self, lease, store, name, clock):
        self.name, self.lease, self.store, self.epoch = name, lease, store, 0
        self.it = leadership(lease, name, clock)
        self.it.handler.prepare_term, self.it.handler.begin_term = self._prepare, self._begin
        self.it.handler.end_term = lambda: None
        self._check = None

    async def _prepare(self):
        await pause()
        self.epoch = self.store.epoch = self.store.epoch + 1
        await pause()

    def _begin(self):
        self.store.began.append((self.name, self.epoch, self.lease.changes_of_holder))

    def step(self):
        if self._check is None:
            self._check = self.it.check_lease()
        try:
            self._check.send(None)
        except StopIteration:
            self._check = None

    def close(self):
        if self._check is not None:
            self._check.close()


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 14), WAITS), min_size=20))
def test_a_paused_leader_never_acts_after_anothers_term_began_and_keeps_a_term_that_nobody_took(runs):
    lease, clock, store = PausingLease(), LeaseClock(), TermStore()
    them = [PausedProcess(lease, store, name, clock) for name in "ab"]
    for who, count, wait_s in runs:
        clock.now += wait_s
        for _ in range(count):
            them[who].step()
            acting = [each for each in them if each.it.is_leading]
            assert len(acting) <= 1
            for each in acting:
                assert (each.name, each.epoch, store.epoch) == (*store.began[-1][:2], each.epoch)
    for each in them:
        each.close()
    epochs = [epoch for _, epoch, _ in store.began]
    assert epochs == sorted(set(epochs))
    for (name, _, before), (next_name, _, after) in pairwise(store.began):
        assert name != next_name or before < after, "a term ended though nobody took the lease"


def test_the_expiry_of_another_holders_lease_is_known():
    one = LeaseCandidate(holder="one", url="", duration_s=DURATION_S, margin_s=MARGIN_S)
    theirs = LeaseRecord(holder="other", url="http://other", beat=7, duration_s=9.0)
    assert one.free_in_s(100.0) == 0.0
    one.observe_record(theirs, 100.0)
    one.observe_record(theirs, 103.0)
    assert (one.free_in_s(103.0), one.other_holder(103.0)) == (6.0, theirs)
    assert one.next_record(108.9, is_holder_gone=False) is None
    assert (one.free_in_s(109.0), one.other_holder(109.0)) == (0.0, None)
    one.observe_record(replace(theirs, beat=8, is_released=True), 110.0)
    assert (one.free_in_s(110.0), one.other_holder(110.0)) == (0.0, None)
    mine = one.next_record(110.0, is_holder_gone=False)
    assert mine.beat == 9
    one.record_written(mine, 110.0)
    assert (one.free_in_s(111.0), one.other_holder(111.0)) == (0.0, None)


def test_a_deleted_record_is_rewritten_by_its_holder_with_a_new_beat():
    mine = LeaseCandidate(holder="mine", url="", duration_s=DURATION_S, margin_s=MARGIN_S)
    mine.observe_record(None, 100.0)
    first = mine.next_record(100.0, is_holder_gone=False)
    mine.record_written(first, 100.0)
    other = LeaseCandidate(holder="other", url="", duration_s=DURATION_S, margin_s=MARGIN_S)
    other.observe_record(first, 100.0)
    for one in (mine, other):
        one.observe_record(None, 101.0)
    assert other.next_record(101.0, is_holder_gone=False) is None
    again = mine.next_record(101.0, is_holder_gone=False)
    assert again.beat > first.beat
    # Its own time is over, and it cannot know who else has written meanwhile.
    assert mine.next_record(104.5, is_holder_gone=False) is None


async def test_the_lease_file_changes_only_from_its_last_read_state(tmp_path):
    a, b = FileLease(tmp_path / "lease", holder="a"), FileLease(tmp_path / "lease", holder="b")
    first = LeaseRecord(holder="a", url="http://a", duration_s=5.0)
    assert await a.read() is None
    assert await a.write(first, None)
    assert not await b.write(LeaseRecord(holder="b", url="", duration_s=5.0), None)
    assert await b.read() == first
    assert await b.write(LeaseRecord(holder="b", url="", duration_s=5.0, beat=1), first)
    assert not await a.write(first, first)
    a.close()
    b.close()


async def test_only_one_of_many_concurrent_writers_gets_the_lease_file(tmp_path):
    them = [FileLease(tmp_path / "lease", holder=str(n)) for n in range(8)]
    won = await asyncio.gather(
        *(it.write(LeaseRecord(holder=str(n), url="", duration_s=5.0), None) for n, it in enumerate(them))
    )
    assert won.count(True) == 1
    assert (await them[0].read()).holder == str(won.index(True))
    for it in them:
        it.close()


async def test_a_damaged_lease_is_named_and_unchanged_while_another_process_may_lead(tmp_path):
    it = FileLease(tmp_path / "lease", holder="a")
    (tmp_path / "lease").write_text("not a database " * 500)
    other = FileLease(tmp_path / "lease", holder="b")
    with pytest.raises(LeaseUnreachable, match="delete it"):
        await it.read()
    assert (tmp_path / "lease").exists()
    it.close()
    other.close()


@pytest.mark.parametrize("left", [b"not a database " * 500, None], ids=["other bytes", "cut off"])
async def test_a_lease_that_a_power_loss_has_damaged_is_made_again_by_the_first_process_that_starts(tmp_path, left):
    path, hold = tmp_path / "lease", LeaseRecord(holder="b", url="", duration_s=5.0)
    before = FileLease(path, holder="before")
    assert await before.write(LeaseRecord(holder="before", url="", duration_s=5.0), None)
    before.close()
    path.write_bytes(path.read_bytes()[:5000] if left is None else left)
    a, b = FileLease(path, holder="a"), FileLease(path, holder="b")
    assert await a.read() is None
    assert await b.write(hold, None)
    assert await a.read() == hold
    a.close()
    b.close()


async def test_a_lease_whose_folder_is_gone_says_so_and_is_read_again_once_it_is_back(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    it, hold = FileLease(folder / "lease", holder="a"), LeaseRecord(holder="a", url="", duration_s=5.0)
    assert await it.write(hold, None)
    folder.rename(tmp_path / "moved")
    with pytest.raises(LeaseUnreachable, match="its folder was moved"):
        await it.read()
    (tmp_path / "moved").rename(folder)
    assert await it.read() == hold
    it.close()


HOLD_IT = """
import sys, time
from pathlib import Path
from orchestrator.leadership.file_lease import FileLease
FileLease(Path(sys.argv[1]), holder="it")
print("held", flush=True)
time.sleep(60)
"""


async def test_only_a_killed_holder_is_known_to_be_gone(tmp_path):
    path = tmp_path / "lease"
    command = [sys.executable, "-c", HOLD_IT, str(path)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    me, hold = FileLease(path, holder="me"), LeaseRecord(holder="it", url="", duration_s=5.0)
    try:
        assert await process.stdout.readline() == b"held\n"
        os.kill(process.pid, signal.SIGSTOP)
        assert not await me.is_gone(hold)
    finally:
        process.kill()
        await process.wait()
    assert await me.is_gone(hold)
    assert not await me.is_gone(LeaseRecord(holder="never-seen", url="", duration_s=5.0))
    assert path.with_name("lease.it").exists()
    assert await me.write(LeaseRecord(holder="me", url="", duration_s=5.0), None)
    assert sorted(tmp_path.iterdir()) == [path, path.with_name("lease.me")]  # and no lock of a start
    me.close()


@pytest.mark.parametrize("error", [LeaseLost("x"), LeaseUnreachable("x"), OrchestratorUnavailable("x")])
def test_every_error_that_ends_with_the_next_leader_says_when_to_come_back(error):
    answer = error_response(error)
    assert (answer.status_code, int(answer.headers["retry-after"]) >= 1) == (503, True)


def is_code(keyword: ast.keyword) -> bool:
    return keyword.arg == "code" and getattr(keyword.value, "value", "") == "not_leading"


def test_not_leading_is_never_said_without_retry_after():
    """Of another class than these the answer would have another status, or no Retry-After."""
    trees = [ast.parse(file.read_text()) for file in Path(orchestrator.__file__).parent.rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    said = [ast.unparse(call.func) for call in calls if any(is_code(each) for each in call.keywords)]
    assert said
    assert set(said) == {"OrchestratorUnavailable"}
