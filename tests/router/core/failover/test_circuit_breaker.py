"""Circuits: when they open, for how long, who tries, and that nobody is left without a replica by them."""

import json
from dataclasses import dataclass, replace
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.errors import NoReplica
from router.core.failover.circuit_breaker import ANSWERED, COUNTED, BreakerRules, CircuitBreaker
from router.core.failover.retry_budget import RetryBudget
from router.core.fleet import Roster
from router.core.schedule.policies import POLICIES
from router.core.schedule.record import record_of, replay_decision
from router.core.schedule.request import RoutingRequest
from tests.router.core.schedule.test_policy import SQL, a_replica, choose
from tests.router.core.test_scheduler import SchedulerUnderTest


@dataclass
class FakeTrial:
    ended: bool = False


class BreakerUnderTest:
    """A breaker over some replicas, its clock and what it told of."""

    def __init__(self, replicas=4, **rules):
        self.fleet = [a_replica(f"w{i}", engine_boot_id="a") for i in range(replicas)]
        self.told = []
        self.rng = Random(1)
        self.now = 100.0
        self.breaker = CircuitBreaker(
            BreakerRules(**{"jitter": 0.0, **rules}), lambda r, s, why: self.told.append((r.id, s, why))
        )

    def fail(self, i=0, reason="no_answer", times=1, **more):
        for _ in range(times):
            self.breaker.record_failure(self.fleet[i], reason, self.now, self.rng, fleet=self.fleet, **more)

    def answer(self, i=0, times=1, **more):
        for _ in range(times):
            self.breaker.record_success(self.fleet[i], self.now, **more)

    def send(self, i=0):
        request = FakeTrial()
        self.breaker.record_dispatch(self.fleet[i], request, self.now)
        return request

    def state(self, i=0):
        return self.breaker.state(self.fleet[i], self.now)

    def shut(self):
        return {worker for worker, _ in self.breaker.open_incarnations(self.now)}


def test_failures_in_a_row_open_a_circuit_unless_an_answer_comes_between():
    book = BreakerUnderTest()
    book.fail(times=4)
    book.answer()
    book.fail(times=4)
    assert book.shut() == set()
    book.fail()
    assert book.shut() == {"w0"}
    assert book.told == [("w0", "open", "no_answer")]


@pytest.mark.parametrize("reason", ["adapter_missing", "bad_request", "404", ""])
def test_what_is_not_the_engines_making_never_counts(reason):
    book = BreakerUnderTest()
    book.fail(reason=reason, times=1000)
    assert book.state() == "closed"


@pytest.mark.parametrize("reason", sorted(COUNTED - {"silent", "hung"}))
def test_every_way_of_failing_opens_it(reason):
    book = BreakerUnderTest()
    book.fail(reason=reason, times=5)
    assert book.told == [("w0", "open", reason)]


@pytest.mark.parametrize("reason", ["silent", "hung"])
def test_silence_opens_a_circuit_and_any_answer_closes_it(reason):
    book = BreakerUnderTest()
    book.fail(reason=reason)
    assert book.state() == "open"
    book.answer(sent_at=50.0)
    assert book.state() == "closed"


def test_one_request_at_a_time_tries_and_its_success_closes():
    book = BreakerUnderTest(open_s=2.0)
    book.fail(times=5)
    book.now += 1.9
    assert book.shut() == {"w0"}
    book.now += 0.2
    assert (book.state(), book.shut()) == ("half_open", set())
    trial = book.send()
    assert book.breaker.is_trial(book.fleet[0], trial)
    assert book.shut() == {"w0"}
    trial.ended = True  # its client left: that says nothing
    assert book.shut() == set()
    trial = book.send()
    book.answer(sent_at=book.now)
    assert (book.state(), book.shut()) == ("closed", set())
    assert not book.breaker.is_trial(book.fleet[0], trial)


def test_openings_in_a_row_double_up_to_a_limit_and_reset_after_calm():
    book = BreakerUnderTest(open_s=2.0, most_open_s=10.0)
    book.fail(times=5)
    lengths = []
    for _ in range(5):
        began = book.now
        while book.state() == "open":
            book.now += 0.5
        lengths.append(book.now - began)
        book.send()
        book.fail(sent_at=book.now)
    assert lengths == [2.0, 4.0, 8.0, 10.0, 10.0]
    book.now += 10
    book.send()
    book.answer()
    book.now += 11
    book.fail(times=5)
    book.now += 2.0
    assert book.state() == "half_open"


def test_replica_answering_between_failures_stays_open_longer_each_time():
    book = BreakerUnderTest(open_s=2.0, most_open_s=100.0)
    for open_s in (2.0, 4.0, 8.0, 16.0):
        book.fail(times=5)
        book.now += open_s - 0.5
        assert book.state() == "open"
        book.now += 0.5
        book.send()
        book.answer()
        assert book.state() == "closed"
        assert book.told[-2:] == [("w0", "open", "no_answer"), ("w0", "closed", "answered")]
        book.now += 90.0


def test_chance_makes_an_opening_longer_and_never_shorter():
    lengths = []
    for seed in range(50):
        book = BreakerUnderTest(open_s=2.0, jitter=0.5)
        book.rng = Random(seed)
        book.fail(times=5)
        lengths.append(book.breaker.open_until(book.fleet[0]) - book.now)
    assert 2.0 <= min(lengths) < 2.1
    assert 2.9 < max(lengths) <= 3.0
    assert len(set(lengths)) > 40


def test_what_was_sent_before_a_circuit_changed_neither_opens_nor_closes_it():
    book = BreakerUnderTest()
    book.fail(times=5)
    book.now += 1
    book.fail(times=100, sent_at=99.0)
    book.answer(sent_at=99.0)
    assert book.state() == "open"
    book.now += 1
    book.fail(times=100, sent_at=99.0)
    assert book.state() == "half_open"
    book.answer(sent_at=book.now)
    book.fail(times=100, sent_at=99.0)
    assert book.state() == "closed"


def test_failure_at_an_ignored_open_circuit_does_not_prolong_it():
    book = BreakerUnderTest(open_s=2.0)
    book.fail(times=5)
    book.now += 1.0
    book.fail(times=5, sent_at=book.now)
    book.now += 1.0
    assert (book.state(), len(book.told)) == ("half_open", 1)


def test_a_trial_that_fails_opens_it_again_whatever_it_was_opened_by():
    book = BreakerUnderTest(open_s=2.0)
    book.fail(reason="silent")
    book.now += 2.0
    book.send()
    book.fail(sent_at=book.now)
    assert book.told == [("w0", "open", "silent"), ("w0", "open", "no_answer")]


def test_failed_trial_lets_another_request_try():
    book = BreakerUnderTest(open_s=2.0)
    book.fail(times=5)
    book.now += 2.0
    book.send()
    book.fail(sent_at=book.now)
    book.now += 4.0
    assert book.shut() == set()


def test_failures_of_requests_from_before_closing_do_not_reopen_a_circuit():
    book = BreakerUnderTest(open_s=2.0)
    book.fail(times=5)
    book.now += 3.0
    book.answer(sent_at=book.now)
    book.fail(times=5, sent_at=book.now - 0.5)
    assert book.told[-1] == ("w0", "closed", "answered")


def test_circuit_is_kept_while_open_and_for_a_while_after():
    book = BreakerUnderTest(open_s=2.0, most_open_s=90.0)
    book.fail(times=5)
    book.now += 1000.0
    book.breaker.forget_others(book.fleet, book.now)
    assert book.state() == "half_open"
    book.answer()
    book.now += 80.0
    book.breaker.forget_others(book.fleet, book.now)
    book.fail(times=5)
    book.now += 2.0
    assert book.state() == "open"  # the second one in a row, for 4 s
    book.answer(sent_at=book.now)
    book.now += 91.0
    book.breaker.forget_others(book.fleet, book.now)
    assert not len(book.breaker)


def test_a_worker_that_is_gone_takes_nobody_elses_circuit_with_it():
    book = BreakerUnderTest()
    for i in range(2):
        book.fail(i, times=5)
    book.breaker.forget("w0")
    assert book.shut() == {"w1"}
    assert book.state(0) == "closed"


def test_restarted_engine_that_fails_again_is_not_reported_as_closed():
    book = BreakerUnderTest()
    book.fail(times=5)
    book.fleet[0] = a_replica("w0", engine_boot_id="b")
    book.fail(times=5)
    book.breaker.forget_others(book.fleet, book.now)
    assert book.told == [("w0", "open", "no_answer")] * 2


def test_restarted_engine_begins_with_a_closed_circuit():
    book = BreakerUnderTest()
    book.fail(times=5)
    book.fleet[0] = a_replica("w0", engine_boot_id="b")
    assert book.state() == "closed"
    book.breaker.forget_others(book.fleet, book.now)
    assert not len(book.breaker)
    assert not book.breaker.open_incarnations(book.now)
    book.fail()
    book.breaker.forget_others(book.fleet, book.now + 59)
    assert len(book.breaker)
    book.breaker.forget_others(book.fleet, book.now + 61)
    assert not len(book.breaker)  # nothing has failed there for long
    book.fail(times=5)
    book.breaker.forget("w0")
    assert not len(book.breaker)
    assert not book.breaker.open_incarnations(book.now)


def test_removed_open_circuit_is_reported_closed_only_if_its_worker_lives():
    book = BreakerUnderTest()
    book.fail(0, times=5)
    book.fail(1, times=5)
    book.fleet[0] = a_replica("w0", engine_boot_id="b")
    book.breaker.forget_others([book.fleet[0], *book.fleet[2:]], book.now)
    assert book.told[2:] == [("w0", "closed", "restarted")]
    book.breaker.forget_others(book.fleet, book.now)
    assert len(book.told) == 3


def test_trial_that_does_not_end_lets_another_request_try():
    book = BreakerUnderTest(open_s=2.0)
    book.fail(times=5)
    book.now += 2.1
    hanging = book.send()
    book.now += 30.0
    assert book.shut() == {"w0"}
    book.now += 0.1
    assert book.shut() == set()
    trial = book.send()
    assert book.shut() == {"w0"}
    assert [book.breaker.is_trial(book.fleet[0], request) for request in (hanging, trial)] == [False, True]
    hanging.ended = True
    assert book.shut() == {"w0"}
    trial.ended = True
    assert book.shut() == set()


def test_a_replica_that_fails_far_more_often_than_the_others_is_ejected():
    book = BreakerUnderTest(eject_share=0.25)
    for _ in range(20):
        for i in range(4):
            book.answer(i, sent_at=99.0)
        book.fail(0, sent_at=99.0)
    assert book.told == [("w0", "open", "outlier")]


def test_a_replica_that_fails_now_and_then_is_not_ejected():
    book = BreakerUnderTest()
    for n in range(200):
        for i in range(4):
            book.answer(i, sent_at=99.0)
        if n % 4 == 0:
            book.fail(0, sent_at=99.0)
    assert book.told == []


@pytest.mark.parametrize(("bad", "is_ejected"), [(19, False), (20, True)])
def test_who_fails_twice_as_often_as_the_others_do_is_ejected(bad, is_ejected):
    book = BreakerUnderTest(failures=1000, least_requests=40)
    for i, of_forty in enumerate((bad, 10, 10, 10)):
        book.fail(i)
        book.answer(i, times=40 - of_forty)
    for i in (1, 2, 3, 0):
        book.fail(i, times=(bad if i == 0 else 10) - 1)
    assert (book.shut() == {"w0"}) is is_ejected


def test_only_replica_may_be_an_outlier_where_all_may_be_ejected():
    book = BreakerUnderTest(replicas=1, failures=1000, eject_share=1.0)
    book.fail(times=20)
    assert book.told == [("w0", "open", "outlier")]


def test_one_of_two_outliers_stays_where_one_may_be_ejected():
    book = BreakerUnderTest(replicas=6, eject_share=0.2)
    for _ in range(20):
        for i in range(6):
            book.answer(i, sent_at=99.0)
        for i in range(2):
            book.fail(i, sent_at=99.0)
    assert book.told == [("w0", "open", "outlier")]


def test_when_all_fail_alike_nobody_is_an_outlier():
    book = BreakerUnderTest()
    for _ in range(30):
        for i in range(4):
            book.answer(i, sent_at=99.0)
        for i in range(4):
            book.fail(i, sent_at=99.0)
    # One is always the first to have enough requests; after it the others have each other to compare with.
    assert len(book.told) <= 1


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["answer", "fail", "sent", "later"])), max_size=300),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
def test_outliers_never_take_more_than_their_share_of_the_fleet(steps, replicas, share):
    book = BreakerUnderTest(replicas, failures=10**6, least_requests=3, eject_share=share)
    for i, step in steps:
        if step == "answer":
            book.answer(i % replicas)
        elif step == "fail":
            book.fail(i % replicas)
        elif step == "sent":
            book.send(i % replicas)
        else:
            book.now += 0.7
        assert len(book.breaker.open_incarnations(book.now)) <= share * replicas
        for replica in book.fleet:
            is_shut = replica.incarnation in book.breaker.open_incarnations(book.now)
            assert not is_shut or book.breaker.state(replica, book.now) != "closed"


class BreakerWithProbes(BreakerUnderTest):
    """Whose breaker has engines looked at that answer with errors: `looked` has the names, in order."""

    def __init__(self, **rules):
        super().__init__(**rules)
        self.looked = []
        self.breaker.probe = lambda replica: self.looked.append(replica.id)

    def find(self, i=0, *, is_well):
        self.breaker.record_probe(self.fleet[i], self.now, self.rng, is_well=is_well)


@pytest.mark.parametrize("reason", sorted(ANSWERED))
def test_errors_of_a_healthy_engine_open_nothing_and_cause_occasional_probes(reason):
    book = BreakerWithProbes()
    book.fail(reason=reason, times=4)
    assert book.looked == []
    book.fail(reason=reason, times=20)
    assert book.looked == ["w0"]
    book.find(is_well=True)
    book.now += 5
    book.fail(reason=reason, times=100)
    assert book.looked == ["w0"]  # found well just now
    book.find(is_well=True)  # so that another row of them is needed
    book.now += 0.1
    book.fail(reason=reason, times=4)
    assert book.looked == ["w0"]
    book.fail(reason=reason)
    assert book.looked == ["w0", "w0"]
    assert book.told == []


def test_failed_probe_opens_the_circuit_and_each_trial_probes_again():
    book = BreakerWithProbes(open_s=2.0)
    book.fail(reason="engine_error", times=5)
    assert book.state() == "closed"
    book.find(is_well=False)
    assert book.told == [("w0", "open", "engine_error")]
    book.find(is_well=False)  # opened meanwhile: not for twice as long
    assert len(book.told) == 1
    book.now += 2.0
    book.send()
    book.fail(reason="engine_error", sent_at=book.now)
    assert (book.looked, book.state()) == (["w0", "w0"], "half_open")
    book.find(is_well=False)
    book.now += 3.9
    assert book.state() == "open"
    book.now += 0.1
    book.send()
    book.fail(reason="first_event_error", sent_at=book.now)
    book.find(is_well=True)
    assert book.told == [("w0", "open", "engine_error"), ("w0", "open", "engine_error"), ("w0", "closed", "answered")]


def test_engine_without_a_probe_result_is_probed_again_and_stays_closed():
    book = BreakerWithProbes()
    book.fail(reason="engine_error", times=5)
    book.now += 5
    book.fail(reason="engine_error", times=5)
    assert book.looked == ["w0"]
    book.now += 0.1
    book.fail(reason="engine_error")
    assert book.looked == ["w0", "w0"]
    assert book.told == []


def test_outlier_by_errors_is_probed_and_stays_closed_if_healthy():
    book = BreakerWithProbes()
    for _ in range(20):
        for i in range(4):
            book.answer(i, sent_at=99.0)
        book.fail(0, reason="engine_error", sent_at=99.0)
    assert (book.looked, book.told) == (["w0"], [])
    book.find(is_well=True)
    book.now += 6
    book.fail(0, reason="engine_error")
    assert book.looked == ["w0"]
    for _ in range(20):
        book.answer(0)
        book.fail(0, reason="engine_error")
    assert book.looked == ["w0", "w0"]
    book.find(is_well=False)
    assert book.told == [("w0", "open", "outlier")]


@pytest.mark.parametrize("reason", sorted(COUNTED - ANSWERED - {"silent", "hung"}))
def test_who_gave_no_answer_is_not_asked_for_another_first(reason):
    book = BreakerWithProbes()
    book.fail(reason=reason, times=5)
    assert (book.looked, book.told) == ([], [("w0", "open", reason)])


def test_probe_of_an_earlier_boot_says_nothing_about_the_new_engine():
    book = BreakerWithProbes()
    book.fail(reason="engine_error", times=5)
    before, book.fleet[0] = book.fleet[0], a_replica("w0", engine_boot_id="b")
    book.breaker.forget_others(book.fleet, book.now)
    book.breaker.record_probe(before, book.now, book.rng, is_well=False)
    assert (book.shut(), book.told) == (set(), [])


@pytest.mark.parametrize(("later_s", "failures"), [(30.0, 12), (30.5, 6), (60.0, 6), (60.5, 20), (3600.0, 20)])
def test_failure_share_halves_old_requests_and_then_drops_them(later_s, failures):
    book = BreakerUnderTest(failures=1000)
    book.fail(times=4)
    book.answer(times=36)
    book.now += later_s
    book.fail(times=failures - 1)
    assert book.shut() == set()
    book.fail()
    assert book.told == [("w0", "open", "outlier")]


@pytest.mark.parametrize(
    "rules",
    [
        {"failures": 0},
        {"least_requests": 0},
        {"open_s": 0.0},
        {"open_s": 2.0, "most_open_s": 1.0},
        {"eject_share": -0.1},
        {"eject_share": 1.1},
    ],
)
def test_rules_by_which_a_circuit_could_not_open_or_close_are_none(rules):
    with pytest.raises(ValueError, match=next(iter(rules))):
        BreakerRules(**rules)
    BreakerRules(failures=1, least_requests=1, open_s=1.0, most_open_s=1.0, eject_share=len(rules) - 1.0)


# --- in a decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_passes_over_an_open_circuit(policy):
    fleet = [a_replica(f"w{i}", engine_boot_id="a") for i in range(3)]
    shut = frozenset({("w0", "a"), ("w1", "a")})
    for seed in range(10):
        decision = choose(
            RoutingRequest("m", "", 100), fleet, {"w0": 6}, policy=policy, open_circuits=shut, seed=seed, turn=seed
        )
        assert decision.replica.id == "w2"
        assert decision.rejected == {"w0": "circuit open", "w1": "circuit open"}
        again = replay_decision(json.loads(json.dumps(record_of(decision), allow_nan=False)))
        assert again == decision or again.snapshot.open_circuits == shut
        assert again.replica.id == "w2"


def test_an_earlier_boot_of_a_worker_shuts_nothing_of_the_next():
    fleet = [a_replica("w0", engine_boot_id="b"), a_replica("w1", engine_boot_id="b")]
    decision = choose(RoutingRequest("m", "", 100), fleet, {"w0": 6}, open_circuits=frozenset({("w0", "a")}))
    assert decision.replica.id == "w0"
    assert decision.rejected == {}


def test_when_every_able_replica_is_shut_the_breaker_is_ignored_for_them():
    fleet = [a_replica("w0", residents=[SQL]), a_replica("w1")]
    shut = frozenset({("w0", "")})
    holder = choose(RoutingRequest("m", SQL, 100), fleet, open_circuits=shut)
    assert holder.replica.id == "w0"
    assert holder.rejected == {"w1": "adapter not resident"}
    assert choose(RoutingRequest("m", "", 100), fleet, open_circuits=shut).replica.id == "w1"
    with pytest.raises(NoReplica):
        choose(RoutingRequest("m", SQL, 100, frozenset({("w0", "")})), fleet, open_circuits=shut)


def test_a_record_of_before_there_were_circuits_is_still_replayed():
    record = record_of(choose(RoutingRequest("m", "", 100), [a_replica("w0")]))
    del record["shut"]
    assert replay_decision(record).replica.id == "w0"


# --- in the mind ------------------------------------------------------------------------------------------------------


class FailingFleet(SchedulerUnderTest):
    """A fleet whose requests can fail."""

    def fail(self, reason="no_answer"):
        _, flight = self.running.pop(0)
        replica = next(r for r in self.roster.replicas if r.id == flight.worker)
        self.scheduler.load.remove(flight, self.now)
        return self.scheduler.record_failure(replica, reason, self.now, sent_at=flight.began_at)


def test_failing_replica_gets_no_requests_until_a_trial_succeeds():
    fleet = FailingFleet(replicas=2)
    fleet.depths = {"w0": 100}
    for _ in range(5):
        fleet.ask(seconds=0.2)
        assert fleet.running[0][1].worker == "w0"
        fleet.fail()
    fleet.ask(seconds=0.2)
    assert fleet.running[0][1].worker == "w1"
    fleet.finish()
    fleet.now += 10
    fleet.ask(seconds=0.2)
    assert fleet.running[0][1].worker == "w0"
    fleet.ask(seconds=0.2)
    assert fleet.running[1][1].worker == "w1"  # one trial at a time
    fleet.scheduler.record_success(fleet.roster.replicas[0], fleet.now, sent_at=fleet.now)
    fleet.ask(seconds=0.2)
    assert fleet.running[2][1].worker == "w0"


def test_silent_engine_opens_its_circuit_before_any_timeout():
    fleet = FailingFleet(replicas=2)
    fleet.depths = {"w0": 100}
    fleet.ask(seconds=0.2)
    for _ in range(5):
        fleet.now += 5
        fleet.scheduler.check_engines(fleet.roster.replicas, fleet.now)
    assert fleet.scheduler.breaker.state(fleet.roster.replicas[0], fleet.now) != "closed"
    fleet.ask(seconds=0.2)
    assert [flight.worker for _, flight in fleet.running[1:]] == ["w1"]
    # Half-open: the one that hangs since before does not keep it shut, its trial does.
    fleet.now += 10
    fleet.scheduler.check_engines(fleet.roster.replicas[:1], fleet.now)
    assert not fleet.scheduler.breaker.open_incarnations(fleet.now)


def test_hung_engine_is_passed_over_until_its_agent_clears_it():
    fleet = FailingFleet(replicas=2)
    suspect, other = fleet.roster.replicas
    hung = replace(suspect, is_suspect=True)
    for _ in range(5):
        fleet.scheduler.check_engines([hung, other], fleet.now)
        assert suspect.incarnation in fleet.scheduler.breaker.open_incarnations(fleet.now)
        fleet.now += 5
    fleet.roster = Roster((hung, other))
    assert fleet.scheduler.healthy_replicas("m", fleet.now) == [other]
    fleet.scheduler.check_engines([suspect, other], fleet.now)
    assert fleet.scheduler.breaker.state(suspect, fleet.now) == "closed"


def test_an_agents_trust_closes_nothing_that_it_did_not_open():
    fleet = FailingFleet(replicas=2)
    for _ in range(5):
        fleet.scheduler.record_failure(fleet.roster.replicas[0], "no_answer", fleet.now)
    fleet.scheduler.check_engines(fleet.roster.replicas, fleet.now)
    assert fleet.scheduler.breaker.state(fleet.roster.replicas[0], fleet.now) == "open"


def test_a_long_prompt_and_a_full_engine_are_not_taken_for_silence():
    fleet = FailingFleet()
    fleet.ask(seconds=60.0)
    fleet.now += fleet.running[0][1].prefill_s + 15
    fleet.scheduler.check_engines(fleet.roster.replicas, fleet.now)
    assert fleet.scheduler.breaker.state(fleet.roster.replicas[0], fleet.now) == "closed"
    fleet.now += 10
    fleet.scheduler.check_engines(fleet.roster.replicas, fleet.now)
    assert fleet.scheduler.breaker.state(fleet.roster.replicas[0], fleet.now) == "open"


@pytest.mark.parametrize(("is_heard", "state"), [(True, "closed"), (False, "open")])
def test_an_engine_that_streams_is_not_silent(is_heard, state):
    fleet = FailingFleet(late_binding_s=inf)
    fleet.ask(seconds=0.1)
    streaming = fleet.running[0][1]
    fleet.scheduler.load.record_first_token(streaming, fleet.now)
    fleet.ask(seconds=0.1)
    for _ in range(5):
        fleet.now += 5
        if is_heard:
            fleet.scheduler.load.record_data(streaming.worker, fleet.now)
        fleet.scheduler.check_engines(fleet.roster.replicas, fleet.now)
    assert fleet.scheduler.breaker.state(fleet.roster.replicas[0], fleet.now) == state


def test_being_sent_to_a_shut_fleet_is_counted():
    fleet = FailingFleet()
    for _ in range(5):
        fleet.ask(seconds=0.2)
        fleet.fail()
    assert fleet.scheduler.breaker.ignored_circuits == 0
    fleet.ask(seconds=0.2)
    assert fleet.scheduler.breaker.ignored_circuits == 1


# --- the retry budget -------------------------------------------------------------------------------------------------


def test_failures_of_a_replica_that_was_just_lost_draw_on_no_budget():
    fleet = FailingFleet(replicas=2, late_binding_s=inf)
    fleet.depths = {"w0": 100}
    fleet.scheduler.budget = lambda: RetryBudget(share=0.0, floor_per_s=0.4)  # four in all
    for _ in range(100):
        fleet.ask(seconds=0.001)
    lost = [flight for _, flight in fleet.running if flight.worker == "w0"]
    assert len(lost) > 40
    replica = fleet.roster.replicas[0]
    allowed = []
    for flight in lost:
        fleet.scheduler.load.remove(flight, fleet.now)
        fleet.scheduler.record_failure(replica, "no_answer", fleet.now, sent_at=flight.began_at)
        allowed.append(fleet.scheduler.try_take_retry(replica, fleet.now, sent_at=flight.began_at))
    assert all(allowed)
    # What is sent there although it is known to fail is no surprise.
    fleet.now += 0.001
    assert not fleet.scheduler.try_take_retry(replica, fleet.now, sent_at=fleet.now)


def test_retry_at_a_lost_or_restarted_replica_takes_no_budget():
    fleet = FailingFleet(replicas=1)
    fleet.scheduler.budget = lambda: RetryBudget(share=0.0, floor_per_s=0.0)
    replica = fleet.roster.replicas[0]
    assert not fleet.scheduler.try_take_retry(replica, 0.0, sent_at=0.0)
    assert fleet.scheduler.try_take_retry(a_replica("w0", engine_boot_id="before"), 0.0, sent_at=0.0)
    assert fleet.scheduler.try_take_retry(a_replica("w9"), 0.0, sent_at=0.0)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500), st.floats(0, 100)), max_size=40),
    st.floats(0, 1),
    st.floats(0, 10),
)
def test_retries_are_never_more_than_their_share_and_the_floor(rounds, share, floor_per_s):
    budget = RetryBudget(share=share, floor_per_s=floor_per_s)
    now, requests, granted = 0.0, 0, 0
    for sent, failed, wait_s in rounds:
        now += wait_s
        budget.requests += sent
        requests += sent
        granted += sum(budget.take(now) for _ in range(failed))
    assert granted <= share * requests + floor_per_s * (now + budget.window_s) + 1e-6


@pytest.mark.slow
def test_the_first_storm_after_a_quiet_day_is_bounded_as_every_other():
    fleet = FailingFleet()
    for hour in range(24):
        fleet.now = 3600.0 * hour
        for _ in range(1000):
            fleet.ask()
            fleet.finish()
    replica = fleet.roster.replicas[0]
    granted = sum(fleet.scheduler.try_take_retry(replica, fleet.now + 3600.0, sent_at=fleet.now) for _ in range(1000))
    assert granted <= 30 + 1


def test_a_storm_of_retries_is_bounded_by_what_was_asked_lately():
    budget = RetryBudget(share=0.2, floor_per_s=0.0)
    budget.requests += 100_000
    assert budget.take(0.0)
    allowed = sum(budget.take(3600.0) for _ in range(1000))
    assert allowed == 0
    now = 3600.0
    for _ in range(200):
        now += 0.1
        budget.requests += 10
        budget.take(now)
    allowed = sum(budget.take(now) for _ in range(1000))
    assert 50 < allowed < 0.2 * 10 * 10 * 10


def granted(budget, now):
    return next(count for count in range(10_000) if not budget.take(now))


def test_retry_budget_begins_with_its_floor_and_refills_over_time():
    budget = RetryBudget()
    budget.begin(3600.0)
    assert granted(budget, 3600.0) == 30
    assert granted(budget, 3600.0) == 0
    assert granted(budget, 3601.0) == 2  # three a second, of which a twentieth has leaked
    budget.begin(3700.0)
    assert granted(budget, 4700.0) == 30
    assert budget.refused == 4


def test_retry_budget_is_a_share_of_requests_and_leaks_evenly():
    budget = RetryBudget(share=0.5, floor_per_s=0.0)
    budget.requests += 100
    assert granted(budget, 0.0) == 50
    assert granted(budget, 0.0) == 0
    budget.requests += 100
    assert granted(budget, 10.0) == 31  # 50 (1 - 1/e)
    budget.requests += 100
    assert budget.take(10.0)
    assert granted(budget, 20.0) == 18  # 49.6 / e
