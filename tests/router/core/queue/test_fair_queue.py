"""Late binding with a long line for one replica, or for its adapter slots: who waits for neither is not held up."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.errors import NoReplica
from router.core.fleet import Roster
from router.core.queue import fair_queue
from router.core.queue.fair_queue import MAX_CANDIDATES, MAX_LAG_S
from router.core.queue.queued_request import QueuedRequest
from router.core.schedule.policies.kv_lora import KvLoraPolicy
from router.core.schedule.policy import Decision
from router.core.schedule.request import HashedRequest, RoutingRequest
from tests.router.core.schedule.test_policy import a_replica
from tests.router.core.test_scheduler import SchedulerUnderTest

# More than are looked at in one go.
MANY = MAX_CANDIDATES + 8


def a_fleet():
    """Adapter `a` is on w0 alone, which has no room for long and for which many wait; adapter `b` is on w1."""
    fleet = SchedulerUnderTest(late_binding_s=2.0)
    fleet.roster = Roster((a_replica("w0", residents=["a@0"]), a_replica("w1", residents=["b@0"])))
    for number in range(MANY + 4):
        fleet.ask(f"t{number:02}", "a@0", seconds=1.5)
    assert len(fleet.scheduler.queue) >= MANY
    return fleet


def finish_at(fleet, worker):
    """Everything that runs there ends at once; then whatever has room goes."""
    for queued, flight in list(fleet.running):
        if flight.worker == worker:
            fleet.running.remove((queued, flight))
            fleet.scheduler.load.record_first_token(flight, fleet.now)
            fleet.scheduler.load.remove(flight, fleet.now)
    fleet.look()


@pytest.mark.parametrize("looked_over", [1000, MANY], ids=["in sight", "far behind"])
def test_a_replica_does_not_idle_behind_a_long_line_for_another_one(looked_over, monkeypatch):
    monkeypatch.setattr(fair_queue, "MAX_SCANNED", looked_over)
    fleet = a_fleet()
    before = len(fleet.scheduler.queue)
    tickets = [fleet.ask("z", "b@0", seconds=0.9) for _ in range(8)]
    waiting = [queued for queued in tickets if queued.is_waiting]
    assert waiting  # behind all the others in fair order
    finish_at(fleet, "w1")
    assert [queued for queued in waiting if not queued.is_waiting]
    while any(flight.worker == "w1" for _, flight in fleet.running):
        finish_at(fleet, "w1")
    assert not any(queued.is_waiting for queued in waiting)
    assert len(fleet.scheduler.queue) == before


def test_those_beyond_the_first_go_in_fair_order_too():
    fleet = a_fleet()
    greedy = [fleet.ask("y", "b@0", seconds=0.9) for _ in range(20)]
    modest = fleet.ask("z", "b@0", seconds=0.9)
    assert modest.is_waiting
    rounds = 0
    while modest.is_waiting:
        finish_at(fleet, "w1")
        rounds += 1
        assert rounds < 10
    assert sum(queued.is_waiting for queued in greedy) > 10


@pytest.mark.parametrize("tenants", [("a", "b"), ("a", "a")], ids=["tenants", "adapters of one"])
def test_who_waited_for_what_was_scarce_is_owed_no_more_than_a_little_of_the_fleet(tenants):
    fleet = SchedulerUnderTest()
    fleet.roster = Roster((a_replica("w0", residents=["a@0"]), a_replica("w1", residents=["b@0"])))
    fleet.ask(tenants[0], "a@0", seconds=1000.0)
    for _ in range(200):
        fleet.ask(tenants[0], "a@0")
        fleet.ask(tenants[1], "b@0")
    for _ in range(100):
        finish_at(fleet, "w1")
        while fleet.ask(tenants[1], "b@0").is_waiting and len(fleet.scheduler.queue) < 400:
            pass
    sent = len(fleet.sent)
    fleet.roster = Roster((a_replica("w0", residents=["a@0"]), a_replica("w1", residents=["a@0", "b@0"])))
    while len(fleet.sent) < sent + 200:
        finish_at(fleet, "w1")
    lead = sum(1 if queued.adapter == "a@0" else -1 for queued in fleet.sent[sent:])
    assert abs(lead) * 0.5 <= MAX_LAG_S + 1.0


@pytest.mark.parametrize("tenants", [("a", "b"), ("a", "a")], ids=["tenants", "adapters of one"])
def test_who_waits_is_owed_as_much_less_as_an_answer_of_its_own_took_and_no_less_than_that(tenants):
    fleet = SchedulerUnderTest()
    fleet.roster = Roster((a_replica("w0", residents=["a@0"]), a_replica("w1", residents=["b@0"])))
    fleet.ask(tenants[0], "a@0", seconds=1000.0)
    for _ in range(200):
        fleet.ask(tenants[0], "a@0")
        fleet.ask(tenants[1], "b@0")
    line = fleet.scheduler.queue

    def owed_s():
        return line.lag_s("a", "a@0" if tenants[1] == "a" else None)

    for _ in range(20):
        finish_at(fleet, "w1")
    before_s = owed_s()
    assert before_s > 4.0
    line.charge_answer("a", "a@0", 1.0, 1.0)
    assert owed_s() == pytest.approx(before_s - 1.0)


def test_a_request_that_cannot_be_decided_stops_nobody_behind_it():
    class Picky(KvLoraPolicy):
        def choose(self, ask, scene):
            if ask.session == "odd" and scene.now > 0:
                raise ZeroDivisionError
            return super().choose(ask, scene)

    fleet = SchedulerUnderTest(policy=Picky())
    tickets = [fleet.ask() for _ in range(4)]
    fleet.scheduler.queue.remove(tickets[-1])
    odd = QueuedRequest(hashed=HashedRequest(RoutingRequest("m", "", 5000, session="odd")))
    assert fleet.scheduler.decide_or_enqueue(odd, fleet.now) is None
    behind = fleet.ask()
    assert behind.is_waiting
    for _, flight in fleet.running:
        fleet.scheduler.load.remove(flight, 1.0)
    told = dict(fleet.scheduler.take_admissible(1.0))
    assert isinstance(told[odd], NoReplica)
    assert isinstance(told[behind], Decision)
    assert not len(fleet.scheduler.queue)


def a_fleet_without_slots(adapters="bc", replicas=1):
    """The one slot of each replica is adapter a's, whose answer takes for as long as a request does: two seconds."""
    fleet = SchedulerUnderTest(replicas)
    names = [f"{name}@0" for name in "a" + adapters]
    fleet.roster = Roster(
        tuple(a_replica(f"w{i}", residents=names, max_loras=1, max_num_seqs=99) for i in range(replicas))
    )
    for replica in fleet.roster.replicas:
        fleet.scheduler.load.apply_report(replica)
        fleet.ask("t", "a@0", seconds=0.1)
    decode(fleet)
    return fleet


def decode(fleet):
    """All that was sent has its first token: what is queued there is nothing."""
    for _, flight in fleet.running:
        fleet.scheduler.load.record_first_token(flight, fleet.now)


def test_who_waits_for_an_adapter_slot_holds_up_nobody_who_takes_none():
    fleet = a_fleet_without_slots()
    slotless = fleet.ask("b", "b@0")
    assert slotless.is_waiting
    base = [fleet.ask("base", seconds=0.7) for _ in range(3)]
    assert [queued.is_waiting for queued in base] == [False, False, True]  # until an engine has its second of work
    decode(fleet)
    fleet.look()
    assert not base[-1].is_waiting
    assert slotless.is_waiting


def test_an_adapter_that_runs_keeps_its_slot_from_nobody_who_was_before_it():
    fleet = a_fleet_without_slots()
    slotless = fleet.ask("b", "b@0")
    runs_on = fleet.ask("t", "a@0")
    assert runs_on.is_waiting
    assert not fleet.ask("base").is_waiting
    fleet.look()
    assert runs_on.is_waiting
    fleet.now = 2.0  # the slot is as good as free
    fleet.look()
    assert not slotless.is_waiting


@pytest.mark.parametrize("adapters", ["b", "bcdefghi"], ids=["one", "many"])
def test_a_long_line_for_an_adapter_slot_does_not_hide_who_takes_none(adapters):
    fleet = a_fleet_without_slots(adapters)
    for i in range(3):
        fleet.ask("base", seconds=0.7 if i < 2 else 0.01)
    behind = [fleet.ask("base", seconds=0.01) for _ in range(20)]
    assert all(queued.is_waiting for queued in behind)
    for number in range(MANY * len(adapters)):
        fleet.ask(f"a{number:03}", f"{adapters[number % len(adapters)]}@0", seconds=0.01)
    decode(fleet)
    fleet.look()
    assert not any(queued.is_waiting for queued in behind)
    assert len(fleet.scheduler.queue) == MANY * len(adapters)


def test_who_goes_by_those_who_wait_for_a_slot_has_had_it():
    fleet = a_fleet_without_slots()
    fleet.ask("b", "b@0")
    for _ in range(4):
        assert not fleet.ask("greedy", seconds=0.5).is_waiting
        decode(fleet)
    fleet.ask("greedy", seconds=1.5)
    later = [fleet.ask(tenant, seconds=0.2) for tenant in ("greedy", "modest", "modest")]
    assert all(queued.is_waiting for queued in later)
    waiting = [queued.tenant for queued in fleet.scheduler.queue.fair_order() if not queued.adapter]
    assert waiting == ["modest", "modest", "greedy"]


def test_of_those_who_only_went_by_few_are_remembered():
    fleet = a_fleet_without_slots()
    fleet.ask("b", "b@0")
    for number in range(2000):
        assert not fleet.ask(f"t{number}", seconds=0.01).is_waiting
        fleet.scheduler.load.remove(fleet.running.pop()[1], fleet.now)
    assert fleet.scheduler.queue.remembered_flows < 2 * 600


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "decode", "end", "pass"]),
        st.sampled_from("xyz"),
        st.sampled_from(["", "a@0", "b@0", "c@0"]),
        st.floats(0.05, 1.5),
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 2))
def test_no_replica_with_room_has_anybody_waiting_who_takes_no_slot_and_all_are_sent_in_the_end(steps, replicas):
    fleet = a_fleet_without_slots(replicas=replicas)
    asked = []
    for step, tenant, adapter, seconds in steps:
        if step == "ask":
            asked.append(fleet.ask(tenant, adapter, seconds))
        elif step == "decode":
            decode(fleet)
        elif step == "end" and fleet.running:
            fleet.finish()
        fleet.now += seconds if step == "pass" else 0.0
        fleet.look()
        waiting = Counter(queued.likely_worker for queued in asked if queued.is_waiting and not queued.adapter)
        for worker in waiting:
            assert fleet.scheduler.load.replica_load(worker).queue_s(fleet.now) > fleet.scheduler.late_binding_s
        assert sum(fleet.scheduler.queue.backlog.values()) == pytest.approx(
            sum(t.work_s for t in asked if t.is_waiting)
        )
    while fleet.running:
        fleet.finish()
    assert set(asked) <= set(fleet.sent)
    assert not fleet.scheduler.queue.backlog
