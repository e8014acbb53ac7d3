"""Who may wait, and whether what a request is told about its wait comes true."""

import asyncio
import time
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.errors import DeadlineExceeded, Saturated
from router.core.fleet import Roster
from router.core.queue.admission import QueueLimits, QueueUsage, ServiceRates, wait_s
from router.core.queue.queued_request import QueuedRequest
from router.core.schedule.request import HashedRequest, RoutingRequest
from router.request.queue import RequestQueue
from router.telemetry.metrics import RouterMetrics
from tests.patience import patience, within
from tests.properties import examples
from tests.router.core.schedule.test_policy import SQL, a_replica
from tests.router.core.test_scheduler import RATE, SchedulerUnderTest

# --- bounds -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.booleans()), max_size=60),
    st.integers(1, 10),
    st.integers(1, 200),
    st.floats(0.05, 1),
)
def test_queue_stays_within_its_limits_and_no_tenant_fills_it(steps, requests, size_bytes, share):
    room = QueueUsage(QueueLimits(requests, size_bytes, share))
    inside = []
    for tenant, size, is_leaving in steps:
        if is_leaving and inside:
            room.remove(*inside.pop(size % len(inside)))
        elif room.refusal(tenant, size) is None:
            room.add(tenant, size)
            inside.append((tenant, size))
        assert (room.requests, room.size_bytes) == (len(inside), sum(size for _, size in inside))
        assert len(inside) <= requests
        assert len(inside) <= 1 or sum(size for _, size in inside) <= size_bytes
        for name in "abc":
            own = [size for tenant, size in inside if tenant == name]
            assert len(own) <= max(1, share * requests)
            assert len(own) <= 1 or sum(own) <= max(share * size_bytes, *own)
    while inside:
        room.remove(*inside.pop())
    assert not room.tenants


def test_a_refusal_says_which_bound_was_reached():
    room = QueueUsage(QueueLimits(requests=4, size_bytes=100, tenant_share=0.5))
    room.add("a", 30)
    assert "bytes" in room.refusal("b", 90).why
    assert "of yours hold 30 bytes" in room.refusal("a", 30).why
    room.add("a", 10)
    assert "2 requests of yours" in room.refusal("a", 0).why
    room.add("b", 0)
    room.add("c", 0)
    assert "4 requests wait already" in room.refusal("d", 0).why


def test_single_request_may_always_wait_however_large():
    room = QueueUsage(QueueLimits(requests=4, size_bytes=100, tenant_share=0.2))
    assert room.refusal("a", 1000) is None
    room.add("a", 60)
    assert room.refusal("b", 40) is None
    assert "60 bytes already" in room.refusal("b", 41).why
    shared = QueueUsage(QueueLimits(requests=8, size_bytes=100, tenant_share=0.5))
    for tenant, size in (("a", 30), ("b", 0)):
        shared.add(tenant, size)
    assert shared.refusal("a", 20) is None
    assert shared.refusal("b", 50) is None
    assert "of yours hold 30 bytes" in shared.refusal("a", 21).why


# --- the predicted wait -----------------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["", SQL]), st.floats(0.05, 0.5)), max_size=60),
    st.integers(0, 20),
    st.sampled_from("abcd"),
    st.sampled_from(["", SQL]),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["", SQL]), st.floats(0.0, 20.0)), max_size=5),
)
def test_what_is_ahead_of_a_request_is_what_is_served_before_it(asked, finished, tenant, adapter, weight, answers):
    fleet = SchedulerUnderTest()
    for who, what, seconds in asked:
        fleet.ask(who, what, seconds, weight=weight if what else 1.0)
    for _ in range(finished):
        if fleet.running:
            fleet.finish()
    line = fleet.scheduler.queue
    for who, what, seconds in answers:
        line.charge_answer(who, what, weight if what else 1.0, seconds)
    weighs = weight if adapter else 1.0
    queued = QueuedRequest(
        hashed=HashedRequest(RoutingRequest("m", adapter, RATE // 4)), tenant=tenant, adapter=adapter, weight=weighs
    )
    predicted = line.ahead_s(queued)
    if fleet.scheduler.decide_or_enqueue(queued, fleet.now) is not None:
        assert predicted == 0
        return
    order = list(line.fair_order())
    served = sum(t.work_s for t in order[: order.index(queued)])
    # Requests are served whole: each adapter of its tenant, and each tenant, may be ahead or behind by one.
    slack = sum(sorted((t.work_s * max(1.0, t.weight) for t in order), reverse=True)[:5])
    assert predicted == pytest.approx(served, abs=slack)


def test_predicted_wait_is_the_wait():
    fleet = SchedulerUnderTest()
    for _ in range(40):
        fleet.ask(seconds=0.5)
    queued = QueuedRequest(hashed=HashedRequest(RoutingRequest("m", "", RATE // 2)))
    decision = fleet.scheduler.decide(queued.hashed, fleet.now)
    told_s = fleet.scheduler.queue.wait_s(queued, decision)
    began_at = fleet.now
    fleet.scheduler.decide_or_enqueue(queued, began_at)
    while queued not in fleet.sent:
        fleet.finish()
    assert told_s == pytest.approx(fleet.now - began_at, rel=0.1)


@pytest.mark.parametrize("slower", [1.0, 4.0])
def test_an_engine_that_is_slower_than_predicted_makes_the_prediction_longer(slower):
    fleet = SchedulerUnderTest()
    for _ in range(200):
        fleet.ask(seconds=0.5)
    for _ in range(60):
        flight = fleet.running[0][1]
        fleet.now += (slower - 1) * flight.prefill_s / flight.pace
        fleet.finish()
    # The pace has become right, so a second of predicted work is done in a second.
    assert fleet.scheduler.load.replica_load("w0").prefill_pace == pytest.approx(slower, rel=0.1)
    assert fleet.scheduler.queue.rates.rate("w0") == pytest.approx(1.0, rel=0.3)


def test_too_long_queue_refuses_at_once_with_retry_after():
    fleet = SchedulerUnderTest()
    refused = None
    while refused is None:
        try:
            fleet.ask(seconds=0.5, most_wait_s=10.0)
        except Saturated as exc:
            refused = exc
    assert 10 <= len(fleet.scheduler.queue) <= 20
    assert refused.retry_after_s == pytest.approx(1.0, abs=0.6)
    assert "may wait 10 s" in str(refused)
    came_back_at = fleet.now + refused.retry_after_s
    while fleet.now < came_back_at:
        fleet.finish()
    fleet.ask(seconds=0.5, most_wait_s=10.0)


def test_shorter_deadline_is_refused_sooner():
    fleet = SchedulerUnderTest()
    for _ in range(20):
        fleet.ask(seconds=0.5)
    with pytest.raises(Saturated) as refused:
        fleet.ask(seconds=0.5, most_wait_s=2.0)
    assert refused.value.retry_after_s > 5
    assert fleet.ask(seconds=0.5, most_wait_s=100.0).is_waiting


def test_tenant_with_little_queued_is_admitted_where_a_greedy_one_is_refused():
    fleet = SchedulerUnderTest()
    for _ in range(100):
        fleet.ask("greedy", seconds=0.5)
    with pytest.raises(Saturated):
        fleet.ask("greedy", seconds=0.5, most_wait_s=10.0)
    assert fleet.ask("modest", seconds=0.5, most_wait_s=10.0).is_waiting


def test_adapter_with_little_queued_is_admitted_where_a_hot_one_is_refused():
    fleet = SchedulerUnderTest()
    for _ in range(100):
        fleet.ask("t", SQL, seconds=0.5)
    with pytest.raises(Saturated):
        fleet.ask("t", SQL, seconds=0.5, most_wait_s=10.0)
    assert fleet.ask("t", "", seconds=0.5, most_wait_s=10.0).is_waiting


def test_queue_for_one_replica_does_not_refuse_requests_for_another():
    fleet = SchedulerUnderTest()
    fleet.roster = Roster(
        tuple(replace(fleet.roster.replicas[0], id=f"w{i}", residents=a_replica("", residents=[name]).residents)
              for i, name in enumerate(("a@0", "b@0")))
    )  # fmt: skip
    for _ in range(100):
        fleet.ask("t", "a@0", seconds=0.5)
    for _ in range(5):
        fleet.ask("t", "b@0", seconds=0.5)
    with pytest.raises(Saturated):
        fleet.ask("t", "a@0", seconds=0.5, most_wait_s=10.0)
    fleet.ask("t", "b@0", seconds=0.5, most_wait_s=10.0)


def test_who_is_refused_leaves_nothing_behind():
    fleet = SchedulerUnderTest()
    fleet.scheduler.queue.usage = QueueUsage(QueueLimits(requests=5))
    for _ in range(7):
        fleet.ask(seconds=0.5)
    waiting, backlog = len(fleet.scheduler.queue), dict(fleet.scheduler.queue.backlog)
    remembered = fleet.scheduler.queue.remembered_flows
    for more in ({}, {"most_wait_s": 0.1}):
        with pytest.raises(Saturated) as refused:
            fleet.ask("other", seconds=0.5, **more)
        assert refused.value.retry_after_s >= 1
    assert (len(fleet.scheduler.queue), dict(fleet.scheduler.queue.backlog)) == (waiting, backlog)
    assert fleet.scheduler.queue.remembered_flows == remembered
    while fleet.running:
        fleet.finish()
    assert fleet.scheduler.queue.usage.requests == 0


def test_unmeasured_rate_is_one_and_an_empty_queue_has_no_wait():
    rates = ServiceRates()
    assert rates.rate("w0") == 1.0
    assert wait_s(10.0, {"w0": 5.0, "w1": 5.0}, ["w0", "w1"], rates) == 5.0
    assert wait_s(0.0, {}, ["w0"], rates) == 0.0
    assert wait_s(10.0, {"w1": 5.0}, ["w0"], rates) == 0.0
    assert wait_s(10.0, {"w1": 5.0}, [], rates) == 0.0


def test_long_standstill_of_the_process_does_not_slow_its_rates():
    rates = ServiceRates()
    rates.start(0.0)
    rates.advance(["w0"], 300.0)
    assert rates.rate("w0") > 0.05


# --- prompt tokens in flight ------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 1.5), min_size=1, max_size=40), st.integers(1, 3))
def test_in_flight_tokens_stay_within_the_bound_except_one_larger_prompt(seconds, replicas):
    fleet = SchedulerUnderTest(replicas, late_binding_s=1e9, most_in_flight_tokens=RATE)
    for each in seconds:
        fleet.ask(seconds=each)
        there = fleet.scheduler.load.in_flight_tokens("m")
        assert there == sum(flight.prompt_tokens for _, flight in fleet.running)
        assert there <= RATE or len(fleet.running) == 1
    while fleet.running:
        fleet.finish()
        assert fleet.scheduler.load.in_flight_tokens("m") <= RATE or len(fleet.running) == 1
    assert len(fleet.sent) == len(seconds)
    assert fleet.scheduler.load.in_flight_tokens("m") == 0


def test_long_prompt_is_not_starved_by_short_ones_that_fit():
    fleet = SchedulerUnderTest(2, late_binding_s=1e9, most_in_flight_tokens=RATE)
    for _ in range(5):
        fleet.ask(seconds=0.1)
    long = fleet.ask(seconds=0.9)
    assert long.is_waiting
    for _ in range(10):
        fleet.ask(seconds=0.1)
        fleet.finish()
        if long in fleet.sent:
            break
    assert long in fleet.sent
    assert fleet.sent.index(long) <= 6


# --- the waiting room -------------------------------------------------------------------------------------------------


class SentDecision:
    def __init__(self, fleet, decision):
        self.fleet = fleet
        self.flight = fleet.scheduler.record_dispatch(decision, time.monotonic())

    def end(self):
        self.fleet.scheduler.load.remove(self.flight, time.monotonic())


class QueueUnderTest:
    """A waiting room in real time, before one engine that never ends a prefill by itself."""

    def __init__(self, **limits):
        self.fleet = SchedulerUnderTest(late_binding_s=0.1)
        limits = {"most_waiting": 100, "most_wait_s": 60.0} | limits
        self.room = RequestQueue(self.fleet.scheduler, RouterMetrics(), clock=time.monotonic, **limits)

    def queued(self, tenant="", seconds=0.5, **more):
        request = HashedRequest(RoutingRequest("m", "", int(seconds * RATE)))
        return QueuedRequest(hashed=request, tenant=tenant, **more)

    def begin(self, decision):
        return SentDecision(self.fleet, decision)

    def send_at_once(self, queued=None):
        """The request that was sent, or None where it would have waited; it has left the queue then."""
        admission = self.admit_one(queued or self.queued(), self.begin)
        try:
            admission.send(None)
        except StopIteration as done:
            return done.value
        admission.close()
        return None

    async def admit(self, *args, **more):
        return await self.admit_one(self.queued(*args, **more), self.begin)

    async def admit_one(self, queued, begin):
        """The sent request, at once or after its wait, as the stage `decide` does it."""
        decision = self.room.decide_or_enqueue(queued)
        return begin(decision) if decision is not None else await self.room.wait(queued, begin, SentDecision.end)


async def test_request_with_room_is_sent_without_waiting():
    hall = QueueUnderTest()
    hall.send_at_once()
    assert hall.send_at_once() is None
    assert not len(hall.fleet.scheduler.queue)
    queued = hall.queued()
    waiting = asyncio.create_task(hall.admit_one(queued, hall.begin))
    await asyncio.sleep(0)
    assert queued.is_waiting
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not queued.is_waiting


async def test_request_tried_at_once_waits_once_and_is_sent_once():
    hall = QueueUnderTest()
    first = hall.send_at_once()
    queued = hall.queued()
    assert hall.send_at_once(queued) is None
    running = asyncio.create_task(hall.room.run())
    waiting = asyncio.create_task(hall.admit_one(queued, hall.begin))
    await asyncio.sleep(0)
    assert len(hall.fleet.scheduler.queue) == 1
    first.end()
    hall.room.poke()
    assert isinstance(await asyncio.wait_for(waiting, patience(5)), SentDecision)
    assert list(hall.fleet.scheduler.load.counts_by_name()) == [("w0", "m", 1)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_request_past_its_deadline_gets_deadline_exceeded():
    hall = QueueUnderTest()
    with pytest.raises(DeadlineExceeded):
        await hall.admit(deadline_at=time.monotonic() - 1)
    assert not list(hall.fleet.scheduler.load.counts_by_name())
    hall.send_at_once(hall.queued(seconds=0.2))
    began_at = time.monotonic()
    async with within(20):
        with pytest.raises(DeadlineExceeded):
            await hall.admit(seconds=0.1, deadline_at=began_at + 0.3)
    assert time.monotonic() - began_at > 0.25
    assert not len(hall.fleet.scheduler.queue)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    hall = QueueUnderTest()
    hall.send_at_once(hall.queued(seconds=5.0))
    with pytest.raises(Saturated) as refused:  # who waits for the deadline is told of that
        await hall.admit(deadline_at=time.monotonic() + 2)
    assert refused.value.retry_after_s > 1.5


async def test_one_tenant_cannot_fill_the_room_with_requests_or_with_bytes():
    hall = QueueUnderTest(most_waiting=8, tenant_share=0.5, most_waiting_bytes=1000)
    hall.send_at_once()
    rng = Random(1)
    waiting = [asyncio.create_task(hall.admit("a", 0.001, size_bytes=rng.randrange(50))) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Saturated, match="of yours"):
        await hall.admit("a", 0.001)
    waiting.append(asyncio.create_task(hall.admit("b", 0.001, size_bytes=300)))
    await asyncio.sleep(0)
    with pytest.raises(Saturated, match="of yours hold 300 bytes"):
        await hall.admit("b", 0.001, size_bytes=300)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert hall.fleet.scheduler.queue.usage.requests == 0


@pytest.mark.parametrize("is_sent", [True, False], ids=["as it is sent", "just before"])
async def test_client_leaving_as_its_request_is_sent_counts_nowhere(is_sent):
    hall, begun = QueueUnderTest(), []
    first = hall.send_at_once()
    running = asyncio.create_task(hall.room.run())

    def begin(decision):
        begun.append(hall.begin(decision))
        asyncio.get_running_loop().call_soon(waiting.cancel)
        return begun[-1]

    waiting = asyncio.create_task(hall.admit_one(hall.queued(), begin))
    await asyncio.sleep(0)
    assert len(hall.fleet.scheduler.queue) == 1
    first.end()
    hall.room.poke()
    if not is_sent:
        waiting.cancel()
    (told,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(told, asyncio.CancelledError)
    assert len(begun) == is_sent
    assert not list(hall.fleet.scheduler.load.counts_by_name())
    assert not len(hall.fleet.scheduler.queue)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_request_sent_at_the_moment_of_its_timeout_counts_nowhere():
    hall, begun = QueueUnderTest(most_wait_s=0.3), []
    first = hall.send_at_once(hall.queued(seconds=0.2))
    running = asyncio.create_task(hall.room.run())

    def begin(decision):
        begun.append(hall.begin(decision))
        return begun[-1]

    waiting = asyncio.create_task(hall.admit_one(hall.queued(seconds=0.1), begin))
    await asyncio.sleep(0)
    first.end()
    hall.room.poke()
    time.sleep(0.4)  # noqa: ASYNC251  (this process stands still, and then both are due at once)
    with pytest.raises(Saturated):
        await waiting
    assert len(begun) == 1
    assert not list(hall.fleet.scheduler.load.counts_by_name())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_request_that_fails_to_begin_gets_its_error_and_blocks_no_other():
    hall = QueueUnderTest()
    first = hall.send_at_once()
    running = asyncio.create_task(hall.room.run())

    def begin(decision):
        raise RuntimeError("cannot")

    broken = asyncio.create_task(hall.admit_one(hall.queued(seconds=0.01), begin))
    behind = asyncio.create_task(hall.admit(seconds=0.01))
    await asyncio.sleep(0)
    assert len(hall.fleet.scheduler.queue) == 2
    first.end()
    hall.room.poke()
    with pytest.raises(RuntimeError, match="cannot"):
        await asyncio.wait_for(broken, patience(5))
    assert isinstance(await asyncio.wait_for(behind, patience(5)), SentDecision)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_waiting_requests_are_reported_by_adapter():
    hall = QueueUnderTest(most_waiting=1)
    hall.send_at_once()
    waiting = asyncio.create_task(hall.admit(seconds=0.01, adapter=SQL))
    await asyncio.sleep(0)
    with pytest.raises(Saturated):
        await hall.admit("other", 0.01, adapter=SQL)
    assert hall.fleet.scheduler.queue.waiting_by_adapter() == {SQL: 1}
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert hall.fleet.scheduler.queue.waiting_by_adapter() == {}
    base = asyncio.create_task(hall.admit(seconds=0.01))
    await asyncio.sleep(0)
    assert hall.fleet.scheduler.queue.waiting_by_adapter() == {}
    base.cancel()
    await asyncio.gather(base, return_exceptions=True)


@pytest.mark.parametrize(("behind_s", "least_s"), [(0.05, 1.0), (5.0, 5.0)])
async def test_timed_out_request_gets_retry_after_of_the_remaining_queue(behind_s, least_s):
    hall = QueueUnderTest(most_wait_s=0.3)
    hall.send_at_once(hall.queued(seconds=0.2))
    short = asyncio.create_task(hall.admit("a", 0.05))
    await asyncio.sleep(0)
    behind = asyncio.create_task(hall.admit("b", behind_s))
    with pytest.raises(Saturated, match="no engine had room") as refused:
        await short
    assert least_s <= refused.value.retry_after_s <= 2 * least_s
    with pytest.raises(Saturated):
        await behind
