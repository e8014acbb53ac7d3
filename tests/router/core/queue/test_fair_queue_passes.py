"""A pass over the queue decides what an engine with room may take, and sends what a pass that decides all would."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.errors import NoReplica
from router.core.failover.circuit_breaker import HUNG
from router.core.fleet import EngineReport, Roster
from router.core.queue.fair_queue import FairQueue
from router.core.queue.queued_request import QueuedRequest
from router.core.queue.rooms import EngineRooms
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load_snapshot import FleetLoad, ReplicaLoad
from router.core.schedule.policies import POLICIES
from router.core.schedule.policies.kv_lora import KvLoraPolicy
from router.core.schedule.request import HashedRequest, PrefixMatch, RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot
from router.core.scheduler import Scheduler
from tests.properties import examples
from tests.router.core.schedule.test_policy import a_replica

COSTS = CostSettings()
ADAPTERS = ("a@0", "b@0", "c@0", "d@0", "e@0")


class Unseeded(Random):
    """Draws the same always, however often it is asked: of replicas that tie the second is chosen."""

    def getrandbits(self, k):
        return 1

    def random(self):
        return 0.5


class DecideAll(EngineRooms):
    """The plain twin: every queued request may be sent."""

    def is_any(self, base_models, now):
        return True

    def might_be_sent(self, queued, ahead, now):
        return True


class CountingPolicy(KvLoraPolicy):
    def __init__(self):
        self.choices = 0

    def choose(self, request, snapshot):
        self.choices += 1
        return super().choose(request, snapshot)


class PassedFleet:
    """One scheduler and what was sent by it; every prompt has a prefix of its own at some of the replicas."""

    def __init__(self, roster, *, decides_all=False, policy=None, costs=COSTS, **more):
        self.roster = roster
        self.scheduler = Scheduler(
            roster=lambda _: self.roster,
            match=lambda hashed: self.matched[hashed.request.session],
            costs=costs,
            rng=Unseeded(),
            policy=policy or KvLoraPolicy(),
            **more,
        )
        if decides_all:
            made = self.scheduler.queue
            self.scheduler.queue = FairQueue(
                made.decide,
                made.late_binding_s,
                made.is_full,
                rooms=DecideAll(
                    lambda _: self.roster, self.scheduler.load, made.late_binding_s, lambda *_: pytest.fail("asked")
                ),
                move_s=made.move_s,
            )
        self.matched = {}
        self.waiting = {}
        self.flights = []
        self.sent = []
        self.gone = []
        self.apply_reports()

    def apply_reports(self):
        for replica in self.roster.replicas:
            self.scheduler.load.apply_report(replica)

    def ask(self, number, tenant, adapter, tokens, depths, now):
        self.matched[str(number)] = PrefixMatch(depths)
        hashed = HashedRequest(RoutingRequest("m", adapter, tokens, session=str(number)))
        queued = QueuedRequest(hashed=hashed, tenant=tenant, adapter=adapter, payload=number)
        try:
            decision = self.scheduler.decide_or_enqueue(queued, now)
        except NoReplica:
            self.gone.append(number)
            return
        if decision is None:
            self.waiting[number] = queued
        else:
            self.send(number, decision, now)

    def send(self, number, decision, now):
        self.sent.append((number, decision.replica.id))
        self.flights.append(self.scheduler.record_dispatch(decision, now))

    def take_admissible(self, now):
        for queued, outcome in self.scheduler.take_admissible(now):
            del self.waiting[queued.payload]
            if isinstance(outcome, NoReplica):
                self.gone.append(queued.payload)
            else:
                self.send(queued.payload, outcome, now)

    def lines(self):
        return {n: (q.likely_worker, q.work_s, q.wants_slot) for n, q in self.waiting.items()}


def a_roster(rng, replicas):
    return Roster(
        tuple(
            a_replica(
                f"w{i:02}",
                residents=[name for name in ADAPTERS if rng.random() < 0.7],
                max_loras=rng.choice([1, 2]),
                max_num_seqs=6,
                total_kv_blocks=rng.choice([0, 2_000]),
                report=EngineReport(prefill_tokens_per_s=8_000.0 + 37.0 * i, token_s=1 / (40.0 + i / 7)),
            )
            for i in range(replicas)
        )
    )


def a_request(rng, replicas):
    """(tenant, adapter, tokens, depths): half have most of their prompt at some replicas, long lines for which form."""
    tokens, depths = rng.randrange(100, 9_000), {}
    if rng.random() < 0.5:
        depths = {f"w{rng.randrange(replicas):02}": tokens // 16 * 3 // 4 for _ in range(rng.choice([1, 2]))}
    return rng.choice("xyz"), rng.choice(["", *ADAPTERS]), tokens, depths


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "first", "first", "end", "end", "pass", "report", "leave", "roster", "hung"]),
        st.integers(0, 10**6),
    ),
    min_size=10,
    max_size=60,
)


@given(STEPS, st.sampled_from([2, 3, 13, 16]), st.integers(0, 99), st.sampled_from([0, 20_000]))
@settings(max_examples=examples(300))
def test_each_pass_sends_what_a_pass_that_decides_all_sends_and_leaves_the_same_lines(steps, replicas, seed, most):
    roster = a_roster(Random(seed), replicas)
    quick, plain = (
        PassedFleet(roster, decides_all=decides_all, most_in_flight_tokens=most) for decides_all in (False, True)
    )
    now, asked = 0.0, 0
    for step, number in steps:
        rng = Random(number)
        now += rng.choice([0.0, 0.01, 0.05, 0.3])
        if step == "roster":
            draining = rng.randrange(replicas)
            states = [rng.choice(["ready", "draining"]) if i == draining else "ready" for i in range(replicas)]
            changed = [replace(r, state=state) for r, state in zip(roster.replicas, states, strict=True)]
            quick.roster = plain.roster = Roster(tuple(changed))
        elif step == "report":
            reported = [
                replace(r, report=replace(r.report, at=now, running=rng.randrange(9), kv_usage=rng.random()))
                for r in quick.roster.replicas
            ]
            quick.roster = plain.roster = Roster(tuple(reported))
        requests = [a_request(rng, replicas) for _ in range(rng.choice([1, 3 * replicas]) if step == "ask" else 0)]
        for fleet in (quick, plain):
            if step == "hung":
                fleet.scheduler.record_failure(fleet.roster.replicas[number % replicas], HUNG, now)
            elif step == "ask":
                for later, request in enumerate(requests):
                    fleet.ask(asked + later, *request, now)
            elif step == "report":
                fleet.apply_reports()
            elif step == "leave" and fleet.waiting:
                fleet.scheduler.queue.remove(fleet.waiting.pop(sorted(fleet.waiting)[number % len(fleet.waiting)]))
            elif fleet.flights and step in {"first", "end"}:
                flight = fleet.flights[number % len(fleet.flights)]
                fleet.scheduler.load.record_first_token(flight, now)
                if step == "end":
                    fleet.scheduler.load.remove(flight, now)
                    fleet.flights.remove(flight)
            fleet.take_admissible(now)
        asked += len(requests)
        assert (quick.sent, quick.gone) == (plain.sent, plain.gone)
        assert quick.lines() == plain.lines()


@pytest.mark.parametrize("replicas", [8, 64])
def test_release_decides_one_request_while_64_wait(replicas):
    policy = CountingPolicy()
    roster = Roster(tuple(a_replica(f"w{i:02}", max_num_seqs=99) for i in range(replicas)))
    fleet = PassedFleet(roster, policy=policy)
    now, asked = 1.0, 0
    while len(fleet.waiting) < 64:
        fleet.ask(asked, "xyz"[asked % 3], "", 8_000, {}, now)
        asked += 1
    fleet.take_admissible(now)  # the first pass decides all
    for number in range(20):
        flight = fleet.flights.pop(0)
        fleet.scheduler.load.record_first_token(flight, now)
        fleet.scheduler.load.remove(flight, now)
        policy.choices, sent = 0, len(fleet.sent)
        fleet.take_admissible(now)
        assert policy.choices == 1
        assert len(fleet.sent) == sent + 1
        fleet.ask(1_000 + number, "x", "", 8_000, {}, now)
        policy.choices = 0
        fleet.take_admissible(now)
        assert policy.choices == 0  # nothing has room


def test_room_at_an_engine_that_nobody_waits_for_costs_no_decision():
    policy = CountingPolicy()
    roster = Roster((a_replica("w0", residents=["a@0"]), a_replica("w1", residents=["b@0"])))
    fleet = PassedFleet(roster, policy=policy)
    for number in range(70):
        fleet.ask(number, "x", "a@0", 8_000, {}, 0.0)
    fleet.take_admissible(0.0)
    policy.choices = 0
    fleet.take_admissible(0.1)
    assert policy.choices == 0
    assert len(fleet.waiting) > 60


def test_request_that_waits_for_its_prefix_is_not_decided_when_another_engine_has_room():
    policy = CountingPolicy()
    roster = Roster(tuple(a_replica(f"w{i:02}", max_num_seqs=99) for i in range(16)))
    # Computing again what w00 has would cost 16 times 0.45 s more. Only w01 has room.
    fleet = PassedFleet(roster, policy=policy, costs=replace(COSTS, kappa_min=16.0))
    for i in range(2, 16):
        fleet.scheduler.load.add(f"w{i:02}", "", 20.0, 0.0)
    fleet.scheduler.load.add("w00", "", 1.5, 0.0)
    for number in range(6):
        fleet.ask(number, "x", "", 9_000, {"w00": 280}, 0.0)
    assert [worker for worker, _, _ in fleet.lines().values()] == ["w00"] * 6
    fleet.take_admissible(0.0)
    policy.choices = 0
    fleet.take_admissible(0.05)
    assert policy.choices == 0
    assert not fleet.sent


def test_lines_are_decided_anew_each_half_second_and_when_a_replica_goes():
    policy = CountingPolicy()
    fleet = PassedFleet(a_roster(Random(1), 3), policy=policy)
    for number in range(40):
        fleet.ask(number, "x", "", 9_000, {}, 0.0)
    for now, most_choices in ((0.0, 40), (0.1, 0), (0.49, 0), (0.5, 40), (0.6, 0)):
        policy.choices = 0
        fleet.take_admissible(now)
        assert (policy.choices > 20) == (most_choices > 0)
    left, gone = fleet.roster.replicas[:2], fleet.roster.replicas[2].id
    assert gone in {worker for worker, _, _ in fleet.lines().values()}
    fleet.roster = Roster(left)
    fleet.take_admissible(0.61)
    fleet.take_admissible(1.2)
    assert gone not in {worker for worker, _, _ in fleet.lines().values()}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_sends_all_in_the_end(name):
    fleet = PassedFleet(a_roster(Random(2), 5), policy=POLICIES[name]())
    for number in range(80):
        fleet.ask(number, "xy"[number % 2], ["", *ADAPTERS][number % 4], 5_000, {f"w0{number % 5}": 100}, 0.0)
    now = 0.0
    while fleet.waiting:
        now += 0.2
        for flight in fleet.flights:
            fleet.scheduler.load.record_first_token(flight, now)
            fleet.scheduler.load.remove(flight, now)
        fleet.flights.clear()
        fleet.take_admissible(now)
        assert now < 100
    assert len(fleet.sent) == 80


def some_load(rng):
    return ReplicaLoad(
        busy_until=rng.choice([-inf, 0.3, 1.0, 2.0]),
        in_prefill=rng.randrange(3),
        engine_names=rng.choice([frozenset(), frozenset(["a@0"]), frozenset(["b@0"])]),
        slot_at=rng.choice([-inf, -inf, 0.5, 2.0]),
        placed=rng.choice([-inf, 0.0]),
    )


@pytest.mark.parametrize("engine_name", ["", "a@0"])
def test_position_that_a_policy_may_not_choose_is_never_chosen(engine_name):
    request, policy, ruled_out = RoutingRequest("m", engine_name, 1_000), KvLoraPolicy(), 0
    for number in range(200):
        rng = Random(number)
        loads = [some_load(rng) for _ in range(rng.randrange(3, 9))]
        scene = {
            "roster": Roster(tuple(a_replica(f"w{i}", residents=["a@0", "b@0"]) for i in range(len(loads)))),
            "loads": FleetLoad.of(loads),
            "depths": {f"w{i}": rng.randrange(1, 60) for i in range(len(loads))},
        }
        chosen = {policy.choose(request, FleetSnapshot(**scene, seed=seed))[0] for seed in range(len(loads))}
        for other in range(len(loads)):
            for position in set(range(len(loads))) - {other}:
                if not policy.may_choose(request, FleetSnapshot(**scene), [position], other):
                    assert position not in chosen
                    ruled_out += 1
    assert ruled_out > 1000
