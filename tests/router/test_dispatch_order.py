"""Late binding with a long line for one replica: who waits for another one is not held up by it."""

import pytest

from router.core import dispatch
from router.core.decision import Ask, Decision
from router.core.dispatch import _LOOKED_AT, _MOST_LAG_S, Prompt, Ticket
from router.core.errors import NoReplica
from router.core.fleet import Roster
from router.core.policies.kv_lora import KvLora
from tests.router.test_dispatch import Fleet
from tests.router.test_policy import a_replica

# More than are looked at in one go.
MANY = _LOOKED_AT + 8


def a_fleet():
    """Adapter `a` is on w0 alone, which has no room for long and for which many wait; adapter `b` is on w1."""
    fleet = Fleet(late_binding_s=2.0)
    fleet.roster = Roster((a_replica("w0", residents=["a@0"]), a_replica("w1", residents=["b@0"])))
    for number in range(MANY + 4):
        fleet.ask(f"t{number:02}", "a@0", seconds=1.5)
    assert len(fleet.mind.waiting) >= MANY
    return fleet


def finish_at(fleet, worker):
    """Everything that runs there ends at once; then whatever has room goes."""
    for ticket, flight in list(fleet.running):
        if flight.worker == worker:
            fleet.running.remove((ticket, flight))
            fleet.mind.load.first_token(flight, fleet.now)
            fleet.mind.load.end(flight, fleet.now)
    fleet.look()


@pytest.mark.parametrize("looked_over", [1000, MANY], ids=["in sight", "far behind"])
def test_a_replica_does_not_idle_behind_a_long_line_for_another_one(looked_over, monkeypatch):
    monkeypatch.setattr(dispatch, "_LOOKED_OVER", looked_over)
    fleet = a_fleet()
    before = len(fleet.mind.waiting)
    tickets = [fleet.ask("z", "b@0", seconds=0.9) for _ in range(8)]
    waiting = [ticket for ticket in tickets if ticket.is_waiting]
    assert waiting  # behind all the others in fair order
    finish_at(fleet, "w1")
    assert [ticket for ticket in waiting if not ticket.is_waiting]
    while any(flight.worker == "w1" for _, flight in fleet.running):
        finish_at(fleet, "w1")
    assert not any(ticket.is_waiting for ticket in waiting)
    assert len(fleet.mind.waiting) == before


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
    assert sum(ticket.is_waiting for ticket in greedy) > 10


@pytest.mark.parametrize("tenants", [("a", "b"), ("a", "a")], ids=["tenants", "adapters of one"])
def test_who_waited_for_what_was_scarce_is_owed_no_more_than_a_little_of_the_fleet(tenants):
    fleet = Fleet()
    fleet.roster = Roster((a_replica("w0", residents=["a@0"]), a_replica("w1", residents=["b@0"])))
    fleet.ask(tenants[0], "a@0", seconds=1000.0)
    for _ in range(200):
        fleet.ask(tenants[0], "a@0")
        fleet.ask(tenants[1], "b@0")
    for _ in range(100):
        finish_at(fleet, "w1")
        while fleet.ask(tenants[1], "b@0").is_waiting and len(fleet.mind.waiting) < 400:
            pass
    sent = len(fleet.sent)
    fleet.roster = Roster((a_replica("w0", residents=["a@0"]), a_replica("w1", residents=["a@0", "b@0"])))
    while len(fleet.sent) < sent + 200:
        finish_at(fleet, "w1")
    lead = sum(1 if ticket.adapter == "a@0" else -1 for ticket in fleet.sent[sent:])
    assert abs(lead) * 0.5 <= _MOST_LAG_S + 1.0


def test_a_request_that_cannot_be_decided_stops_nobody_behind_it():
    class Picky(KvLora):
        def choose(self, ask, scene):
            if ask.session == "odd" and scene.now > 0:
                raise ZeroDivisionError
            return super().choose(ask, scene)

    fleet = Fleet(policy=Picky())
    tickets = [fleet.ask() for _ in range(4)]
    fleet.mind.waiting.withdraw(tickets[-1])
    odd = Ticket(prompt=Prompt(Ask("m", "", 5000, session="odd")))
    assert fleet.mind.offer(odd, fleet.now) is None
    behind = fleet.ask()
    assert behind.is_waiting
    for _, flight in fleet.running:
        fleet.mind.load.end(flight, 1.0)
    told = dict(fleet.mind.ready(1.0))
    assert isinstance(told[odd], NoReplica)
    assert isinstance(told[behind], Decision)
    assert not len(fleet.mind.waiting)
