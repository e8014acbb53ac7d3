"""Late binding without a router: a fleet that is nothing but a number of seconds queued."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.errors import NoReplica
from router.core.fleet import EngineReport, Roster
from router.core.queue.fair_queue import MAX_SERVED_S
from router.core.queue.queued_request import QueuedRequest
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.policies import POLICIES
from router.core.schedule.policy import Decision
from router.core.schedule.request import HashedRequest, PrefixMatch, RoutingRequest
from router.core.scheduler import Scheduler, first_blocks
from router.core.sessions.session import NO_SESSION, Session
from tests.router.core.schedule.test_policy import SQL, a_replica

RATE = 10_000  # tokens per second


class SchedulerUnderTest:
    """A mind over replicas whose engines prefill in order at the rate they report; `finish` ends the oldest one."""

    def __init__(self, replicas=1, late_binding_s=1.0, **more):
        measured = EngineReport(prefill_tokens_per_s=RATE)
        self.roster = Roster(
            tuple(a_replica(f"w{i}", residents=[SQL], max_num_seqs=99, report=measured) for i in range(replicas))
        )
        self.depths = {}
        self.scheduler = Scheduler(
            roster=lambda _: self.roster,
            match=lambda _: PrefixMatch(self.depths),
            late_binding_s=late_binding_s,
            rng=Random(0),
            **more,
        )
        self.now = 0.0
        self.running = []
        self.sent = []
        self.work_s = {}

    def ask(self, tenant="", adapter="", seconds=0.5, session=NO_SESSION, **more):
        prompt = HashedRequest(RoutingRequest("m", adapter, int(seconds * RATE)), session=session)
        queued = QueuedRequest(hashed=prompt, tenant=tenant, adapter=adapter, **more)
        decision = self.scheduler.decide_or_enqueue(queued, self.now)
        if decision is not None:
            self.send(queued, decision)
        return queued

    def send(self, queued, decision):
        self.sent.append(queued)
        self.work_s[queued] = decision.score.prefill_s
        self.running.append((queued, self.scheduler.record_dispatch(decision, self.now, queued.hashed)))

    def finish(self):
        """The oldest request ends; then whatever has room goes."""
        _, flight = self.running.pop(0)
        self.now += flight.prefill_s / flight.pace  # as its engine takes, whatever was learned
        self.scheduler.load.record_first_token(flight, self.now)
        self.scheduler.load.remove(flight, self.now)
        self.look()

    def look(self):
        for queued, outcome in self.scheduler.take_admissible(self.now):
            assert isinstance(outcome, Decision)
            self.send(queued, outcome)


def test_engine_gets_about_a_second_of_work_and_further_requests_wait():
    fleet = SchedulerUnderTest()
    for _ in range(10):
        fleet.ask(seconds=0.4)
    assert len(fleet.sent) == 3  # 0.4 and 0.8 s queued leave room for one more, 1.2 s do not
    assert len(fleet.scheduler.queue) == 7
    while fleet.running:
        fleet.finish()
    assert len(fleet.sent) == 10
    assert not len(fleet.scheduler.queue)
    assert not fleet.scheduler.queue.backlog


def test_an_idle_engine_takes_a_request_however_long_it_is():
    fleet = SchedulerUnderTest()
    fleet.ask(seconds=30.0)
    assert len(fleet.sent) == 1


def test_without_a_bound_everything_is_sent_at_once():
    fleet = SchedulerUnderTest(late_binding_s=float("inf"))
    for _ in range(50):
        fleet.ask()
    assert len(fleet.sent) == 50


def test_tenant_with_many_requests_does_not_starve_one_with_few():
    fleet = SchedulerUnderTest()
    for _ in range(100):
        fleet.ask("greedy")
    for _ in range(10):
        fleet.ask("modest")
    while fleet.running:
        fleet.finish()
    modest_at = [i for i, queued in enumerate(fleet.sent) if queued.tenant == "modest"]
    # From when it came, every other request is its own.
    assert modest_at[-1] <= 3 + 2 * 10


def test_a_tenant_gets_no_more_for_spreading_over_many_adapters():
    fleet = SchedulerUnderTest()
    fleet.roster = Roster((a_replica("w0", residents=[f"a{i}@0" for i in range(30)], max_loras=99, max_num_seqs=99),))
    for i in range(30):
        fleet.ask("many", f"a{i}@0")
    for _ in range(30):
        fleet.ask("one", "a0@0")
    while len(fleet.sent) < 40:
        fleet.finish()
    counts = Counter(queued.tenant for queued in fleet.sent[3:40])
    assert abs(counts["many"] - counts["one"]) <= 3


def test_within_a_tenant_a_weight_of_two_gets_twice_the_share():
    fleet = SchedulerUnderTest()
    fleet.roster = Roster((a_replica("w0", residents=["a@0", "b@0"], max_loras=99, max_num_seqs=99),))
    for _ in range(60):
        fleet.ask("t", "a@0", weight=1.0)
        fleet.ask("t", "b@0", weight=2.0)
    while len(fleet.sent) < 63:
        fleet.finish()
    counts = Counter(queued.adapter for queued in fleet.sent[3:63])
    assert counts["b@0"] == pytest.approx(40, abs=3)


def test_shares_are_counted_in_seconds_of_work_not_in_requests():
    fleet = SchedulerUnderTest()
    for _ in range(100):
        fleet.ask("long", seconds=0.9)
        fleet.ask("short", seconds=0.1)
    while len(fleet.sent) < 80:
        fleet.finish()
    work = Counter()
    for queued in fleet.sent[3:80]:
        work[queued.tenant] += fleet.work_s[queued]
    assert work["short"] == pytest.approx(work["long"], abs=1.0)


@pytest.mark.parametrize("by", ["tenant", "adapter"])
@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_whose_answers_are_long_has_had_them_too(by, weight):
    fleet = SchedulerUnderTest()
    fleet.roster = Roster((a_replica("w0", residents=["a@0", "b@0"], max_loras=99, max_num_seqs=99),))
    wordy, terse = (("w", "a@0"), ("t", "b@0")) if by == "tenant" else (("t", "a@0"), ("t", "b@0"))
    had, line = Counter(), fleet.scheduler.queue
    for _ in range(200):
        fleet.ask(*wordy, seconds=0.2, weight=weight)
        fleet.ask(*terse, seconds=0.2)
    while len(fleet.sent) < 150:
        queued, _ = fleet.running[0]
        fleet.finish()
        is_wordy = queued.adapter == "a@0"
        had[queued.adapter] += 0.2 + 0.6 * is_wordy
        if is_wordy:
            line.charge_answer(queued.tenant, queued.adapter, weight, 0.6)
    share = weight if by == "adapter" else 1.0
    # Within what is in flight, whose answers are not known yet.
    assert had["a@0"] == pytest.approx(share * had["b@0"], abs=5 * 0.8 * share)


def test_answer_with_an_empty_queue_is_not_charged():
    fleet = SchedulerUnderTest()
    fleet.scheduler.queue.charge_answer("a", "", 1.0, 5.0)
    assert not fleet.scheduler.queue.remembered_flows
    for _ in range(10):
        fleet.ask("b")
    fleet.scheduler.queue.charge_answer("a", "", 1.0, 5.0)
    assert fleet.scheduler.queue.lag_s("a") == pytest.approx(-5.0)
    while fleet.running:
        fleet.finish()
    assert not fleet.scheduler.queue.remembered_flows


def test_answers_are_charged_from_the_virtual_time_on():
    fleet = SchedulerUnderTest()
    for _ in range(60):
        fleet.ask("others", seconds=0.5)
    for seconds in (30.0, 0.5):
        fleet.ask("long", seconds=seconds)
    while len(fleet.sent) < 30:
        fleet.finish()
    line = fleet.scheduler.queue
    before_s = line.lag_s("long")
    assert before_s < -10
    assert line.virtual_s > 5
    line.charge_answer("long", "", 1.0, 1.0)
    line.charge_answer("idle", "", 1.0, 2.0)
    assert line.lag_s("long") == before_s
    assert line.lag_s("idle") == pytest.approx(-2.0)


def test_charge_of_long_answers_is_bounded():
    fleet = SchedulerUnderTest()
    for _ in range(100):
        fleet.ask("others", seconds=0.5)
    for _ in range(50):
        fleet.scheduler.queue.charge_answer("a", "", 1.0, 30.0)
    late = fleet.ask("a", seconds=0.5)
    served = 0.0
    while late.is_waiting:
        fleet.finish()
        served += 0.5
    assert 9.0 < served < 12.0


class SchedulerModel(SchedulerUnderTest):
    """A line that never empties: `steady` always has one request in it and `greedy` ten, and others come once."""

    def __init__(self):
        super().__init__(late_binding_s=0.0)
        for tenant, times in (("steady", 2), ("greedy", 10)):
            for _ in range(times):
                self.come(tenant, "x")

    def come(self, tenant, adapter):
        queued = QueuedRequest(
            hashed=HashedRequest(RoutingRequest("m", "", RATE // 10)), tenant=tenant, adapter=adapter
        )
        decision = self.scheduler.decide_or_enqueue(queued, self.now)
        if decision is not None:
            self.send(queued, decision)

    def finish(self):
        before = len(self.sent)
        super().finish()
        for queued in self.sent[before:]:
            if queued.adapter == "x":
                self.come(queued.tenant, "x")


@pytest.mark.slow
@pytest.mark.parametrize("others", ["tenants", "adapters"])
def test_idle_flows_are_forgotten_while_the_queue_never_empties(others):
    fleet, most = SchedulerModel(), 0
    line = fleet.scheduler.queue
    for number in range(2000):
        fleet.come(f"t{number}", "") if others == "tenants" else fleet.come("steady", f"a{number}")
        fleet.finish()
        fleet.finish()
        most = max(most, line.remembered_flows)
        assert len(line)
    assert most < 1400
    counts = Counter(queued.tenant for queued in fleet.sent)
    assert counts["steady"] == pytest.approx(counts["greedy"], abs=20)


def test_priority_orders_the_requests_of_one_tenant_and_adapter_only():
    fleet = SchedulerUnderTest()
    for _ in range(3):
        fleet.ask("a")
    low, high = fleet.ask("a", priority=5.0), fleet.ask("a", priority=-5.0)
    other = fleet.ask("b", priority=99.0)
    while fleet.running:
        fleet.finish()
    assert fleet.sent.index(high) < fleet.sent.index(low)
    assert fleet.sent.index(other) < fleet.sent.index(low)


def test_who_left_while_waiting_is_not_sent_and_leaves_nothing_behind():
    fleet = SchedulerUnderTest()
    tickets = [fleet.ask() for _ in range(6)]
    waiting = [t for t in tickets if t.is_waiting]
    for queued in waiting:
        fleet.scheduler.queue.remove(queued)
        fleet.scheduler.queue.remove(queued)
    assert not len(fleet.scheduler.queue)
    assert not fleet.scheduler.queue.backlog
    while fleet.running:
        fleet.finish()
    assert not set(waiting) & set(fleet.sent)


def test_a_newcomer_does_not_overtake_those_who_wait_for_the_same_replica():
    fleet = SchedulerUnderTest()
    for _ in range(5):
        fleet.ask("a", seconds=0.5)
    assert fleet.ask("a", seconds=0.1).is_waiting


def test_requests_far_back_in_the_queue_go_to_a_replica_that_becomes_free():
    fleet = SchedulerUnderTest(replicas=2, costs=CostSettings(kappa_min=1.0, kappa_max=1.0, crowding=0.0))
    fleet.depths = {"w1": 10_000}
    fleet.ask(seconds=30.0)
    fleet.depths = {"w0": 100}
    for _ in range(20):
        fleet.ask(seconds=0.3)
    waiting = len(fleet.scheduler.queue)
    assert {flight.worker for _, flight in fleet.running[1:]} == {"w0"}
    (_, long), *fleet.running = fleet.running
    fleet.scheduler.load.record_first_token(long, fleet.now)
    fleet.scheduler.load.remove(long, fleet.now)
    fleet.look()
    assert "w1" in {flight.worker for _, flight in fleet.running}
    assert len(fleet.scheduler.queue) < waiting


def test_no_replica_idles_while_somebody_waits_who_could_run_there():
    fleet = SchedulerUnderTest(replicas=3)
    fleet.depths = {"w0": 3}  # a little warmer, so that all prefer it
    for _ in range(40):
        fleet.ask(seconds=0.3)
    assert len({flight.worker for _, flight in fleet.running}) == 3


def test_when_the_last_replica_goes_those_who_wait_are_told():
    fleet = SchedulerUnderTest()
    for _ in range(6):
        fleet.ask()
    waiting = len(fleet.scheduler.queue)
    fleet.roster = Roster(())
    outcomes = [outcome for _, outcome in fleet.scheduler.take_admissible(fleet.now)]
    assert len(outcomes) == waiting
    assert all(isinstance(outcome, NoReplica) for outcome in outcomes)
    assert not len(fleet.scheduler.queue)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "finish", "leave", "look"]),
        st.sampled_from("abc"),
        st.sampled_from(["", SQL]),
        st.floats(0.01, 2.0),
    ),
    max_size=80,
)


@given(STEPS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_request_is_sent_or_removed_once_and_backlog_counts_the_queued(steps, replicas, rng):
    fleet = SchedulerUnderTest(replicas=replicas)
    asked, left = [], set()
    for step, tenant, adapter, seconds in steps:
        if step == "ask":
            asked.append(fleet.ask(tenant, adapter, seconds))
        elif step == "finish" and fleet.running:
            fleet.finish()
        elif step == "look":
            fleet.look()
        elif step == "leave" and asked:
            queued = rng.choice(asked)
            if queued.is_waiting:
                left.add(queued)
            fleet.scheduler.queue.remove(queued)
        waiting = [t for t in asked if t.is_waiting]
        assert len(fleet.scheduler.queue) == len(waiting)
        assert sum(fleet.scheduler.queue.backlog.values()) == pytest.approx(sum(t.work_s for t in waiting))
    while fleet.running:
        fleet.finish()
    assert len(fleet.sent) == len(set(fleet.sent))
    assert set(fleet.sent) == set(asked) - left
    assert not fleet.scheduler.queue.backlog
    assert not fleet.scheduler.queue.remembered_flows


def test_shadow_policy_decides_nothing_and_has_costs_of_the_same_model():
    seen = []
    fleet = SchedulerUnderTest(
        replicas=2, shadows=[POLICIES["round_robin"](), POLICIES["kv_lora"]()], on_shadow=seen.append
    )
    fleet.depths = {"w0": 200}
    for _ in range(4):
        fleet.ask(seconds=0.4)
        fleet.finish()
    assert not list(fleet.scheduler.load.counts_by_name())
    assert [t for t in fleet.sent if t] == fleet.sent
    by = {name: [s for s in seen if s.policy == name] for name in ("round_robin", "kv_lora")}
    assert all(s.agrees for s in by["kv_lora"])
    assert not all(s.agrees for s in by["round_robin"])
    assert all(s.cost_s >= s.live_cost_s - 1e-9 for s in by["round_robin"])


def test_a_shadow_policy_that_fails_fails_nothing():
    class FailingPolicy:
        name = "broken"

        def choose(self, ask, scene):
            raise ZeroDivisionError

    failed = []
    fleet = SchedulerUnderTest(
        shadows=[FailingPolicy()], on_shadow_failure=lambda name, exc: failed.append((name, type(exc)))
    )
    fleet.ask()
    assert len(fleet.sent) == 1
    assert failed == [("broken", ZeroDivisionError)]


def test_prompts_that_begin_alike_have_the_same_first_blocks():
    assert first_blocks({}) == 0
    assert first_blocks({16: []}) == 0
    assert first_blocks({16: [1, 2]}) == 2
    assert first_blocks({16: list(range(1, 40))}) == first_blocks({16: list(range(1, 20))}) == 16
    assert first_blocks({512: [7, 8, 9]}) == 7


def test_a_conversation_without_a_name_is_one_session_and_a_retry_is_no_turn():
    fleet = SchedulerUnderTest()

    def send(chain, depth=0, **more):
        request = RoutingRequest("m", "", 16 * len(chain), **more)
        fleet.depths = {"w0": depth}
        prompt = HashedRequest(request, {16: chain})
        decision = fleet.scheduler.decide(prompt, fleet.now)
        known = fleet.scheduler.session_of(prompt, decision)
        entry = fleet.scheduler.record_dispatch(decision, fleet.now, prompt)
        fleet.scheduler.load.remove(entry, fleet.now)
        return known, entry.session

    first, other = send((1, 2)), send((1, 7))
    assert first[0] is other[0] is None
    assert first[1] is not other[1]
    fleet.now = 3.0
    assert send((1, 2, 3, 4), depth=3) == (first[1], first[1])
    habit = first[1].habit
    assert habit.usual_gap_s() == 4.0
    gaps = habit.gaps.copy()
    assert send((1, 2, 3, 4), excluded=frozenset({("w9", "b")})) == (first[1], first[1])
    assert habit.gaps == gaps


def test_a_request_that_computes_nothing_is_no_turn():
    fleet = SchedulerUnderTest()
    prompt = HashedRequest(RoutingRequest("m", "", 0), session=Session("a"))
    decision = fleet.scheduler.decide(prompt, 0.0)
    assert fleet.scheduler.record_dispatch(decision, 0.0, prompt).session is None


def waiting_order(fairness, *asked):
    """The order in which requests would be served: (time, session, priority) each, behind an old program's 5 s."""
    fleet = SchedulerUnderTest(fairness=fairness)
    fleet.ask(seconds=5.0, session=Session("old"))
    found = {}
    for fleet.now, session, priority in asked:
        found[fleet.ask(seconds=0.1, session=session, priority=priority)] = session.name
    assert len(fleet.scheduler.queue) == len(asked)
    return [found[queued] for queued in fleet.scheduler.queue.fair_order()]


def test_the_program_that_was_served_least_goes_first_where_programs_count():
    asked = (0.1, Session("old"), 0), (0.2, Session("new"), 0)
    assert waiting_order("request", *asked) == ["old", "new"]
    assert waiting_order("program", *asked) == ["new", "old"]


def test_a_sub_agent_has_its_parents_place_in_the_queue():
    children = Session("named by its parent", parent="old"), Session("named by its root", root="old")
    asked = *((0.1, child, 0) for child in children), (0.2, Session("new"), 0)
    assert waiting_order("program", *asked) == ["new", *(child.name for child in children)]


def test_a_program_that_was_served_for_long_is_passed_by_what_comes_so_much_later_and_by_nothing_else():
    asked = (0.1, Session("old"), 0), (2.0, Session("soon"), 0), (10.2, Session("late"), 0), (0.3, Session("first"), -1)
    asked = tuple(sorted(asked, key=lambda one: one[0]))
    assert waiting_order("program", *asked) == ["first", "soon", "old", "late"]


def test_no_program_is_passed_by_what_comes_more_than_ten_seconds_later():
    fleet = SchedulerUnderTest(fairness="program")
    for _ in range(3):
        fleet.ask(seconds=20.0, session=Session("old"))
    old = fleet.ask(seconds=0.1, session=Session("old"))
    fleet.now = MAX_SERVED_S + 0.1
    late = fleet.ask(seconds=0.1, session=Session("new"))
    order = list(fleet.scheduler.queue.fair_order())
    assert order.index(old) < order.index(late)


def test_what_a_program_was_served_counts_its_answers_loads_and_sub_agents():
    fleet = SchedulerUnderTest()
    parent, child = (fleet.ask(seconds=0.2, session=Session(name, root="task")) for name in ("task", "helper"))
    states = [flight.session for _, flight in fleet.running]
    assert states[0].program is states[1].program
    assert states[0].program.service_s == pytest.approx(sum(fleet.work_s[one] for one in (parent, child)))
