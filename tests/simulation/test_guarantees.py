"""Each check of a promise, on a history that keeps it and on one that breaks it."""

from dataclasses import replace

import pytest

from tests.simulation.answers import BASE, UNKNOWN
from tests.simulation.clients import OWN_TOKENS
from tests.simulation.guarantees import check_run
from tests.simulation.history import History, Operation, Outcome
from tests.simulation.scenario import Event, FaultScenario, FleetPlan

FLEET = FleetPlan(workers=2, owners={"acme/a": "acme"}, rolling=("canary",))


def ask(value, at_s=0.0, until_s=0.0, *, name="a", prompt=(), cached=0, outcome=Outcome.OK, **detail):
    detail = {"router": 0, "tenant": "", "salt": "", "prompt": prompt, "cached": cached} | detail
    return Operation("ask", name, at_s, "client0", value, until_s or at_s + 0.1, outcome, detail=detail)


def change(kind, value, at_s, until_s, *, name="a", **detail):
    return Operation(kind, name, at_s, "client0", value, until_s, Outcome.OK, detail=detail)


def broken(*operations, events=(), fleet=FLEET, cut_off=None):
    """Names of the promises that a history breaks."""
    scenario = FaultScenario(seed=0, fleet=fleet, events=tuple(events))
    return [each.guarantee for each in check_run(History(list(operations)), scenario, cut_off or {})]


WRITE = change("write", 1, 0, 1)
KILL = Event(at_s=0, kind="kill", about={"node": "engine0"})


def test_answer_by_the_version_before_breaks_a_promise_unless_the_router_was_cut_off():
    history = WRITE, change("write", 2, 2, 3), ask(1, 4)
    assert broken(WRITE, ask(1, 1.5)) == []
    assert broken(*history) == ["names"]
    assert broken(*history, cut_off={0: [(3.5, 5.0)]}) == []
    assert broken(*history, cut_off={1: [(3.5, 5.0)]}) == ["names"]


def test_change_that_an_api_server_never_took_may_be_taken_back():
    lost = replace(change("write", 2, 2, 3), outcome=Outcome.UNKNOWN)
    history = WRITE, lost, ask(2, 4), ask(1, 5)
    assert broken(*history) == ["names"]
    at_api_server = replace(FLEET, has_api_server=True)
    assert broken(*history, fleet=at_api_server) == []
    assert broken(*history, ask(3, 6), fleet=at_api_server) == ["names"]
    assert broken(WRITE, change("write", 2, 2, 3), ask(2, 4), ask(1, 5), fleet=at_api_server) == ["names"]


def test_routers_may_differ_until_a_change_is_answered_and_agree_in_the_end():
    two = replace(FLEET, routers=2)
    new, late = change("write", 2, 2, 4), ask(1, 3, router=1)
    again = change("write", 1, 2.5, 5)
    assert broken(WRITE, new, ask(2, 2.2), late, again, ask(2, 3.5), ask(1, 6, router=1), fleet=two) == []
    assert broken(WRITE, new, ask(1, 4.5, router=1), fleet=two) == ["names"]
    ends = ask(2, 6), ask(1, 6, router=1)
    assert broken(WRITE, new, again, *ends, fleet=two) == []
    assert broken(WRITE, new, again, *[replace(each, is_final=True) for each in ends], fleet=two) == ["names"]


@pytest.mark.parametrize("value", [BASE, UNKNOWN])
def test_answer_of_the_base_model_or_of_bytes_that_nobody_wrote_breaks_a_promise(value):
    assert "never the base model" in broken(ask(value))


def test_request_that_never_ends_or_takes_too_long_breaks_a_promise():
    assert broken(WRITE, ask(1, 2, 600)) == []
    assert broken(WRITE, ask(1, 2, 800)) == ["never silence"]
    assert "never silence" in broken(WRITE, ask(None, 2, float("inf"), outcome=Outcome.UNKNOWN))


SHARED = tuple(range(64))
OWN = tuple(range(900, 900 + OWN_TOKENS))
OTHER = tuple(range(1900, 1900 + OWN_TOKENS))


@pytest.mark.parametrize(
    ("before", "is_broken"),
    [
        (ask(1, 2, prompt=SHARED + OWN), False),
        (ask(1, 2, prompt=SHARED[:32] + OWN), True),
        (ask(1, 2, prompt=SHARED + OWN, salt="one"), True),
        (ask(1, 2, prompt=SHARED + OWN, tenant="acme"), True),
        (ask(2, 2, prompt=SHARED + OWN, name="b"), True),
    ],
    ids=["these bytes asked for them", "shorter", "another salt", "another tenant", "other bytes"],
)
def test_cached_tokens_that_nobody_asked_for_with_these_bytes_and_this_salt_break_a_promise(before, is_broken):
    history = WRITE, change("write", 2, 0, 1, name="b"), before, ask(1, 3, prompt=SHARED + OTHER, cached=64)
    assert broken(*history) == (["caches"] if is_broken else [])


def test_answer_while_a_hold_is_in_force_breaks_a_promise():
    hold = change("hold", None, 2, 3, name="", until=10.0)
    assert broken(WRITE, hold, ask(1, 4, 11), ask(1, 2.5, 4)) == []
    assert broken(WRITE, hold, ask(1, 4, 9)) == ["holds"]


@pytest.mark.parametrize(
    ("value", "at_s", "is_broken"),
    [(0, 1, False), (1, 1, True), (0, 3, False), (1, 3, False), (1, 9, False), (0, 9, True)],
)
def test_answer_by_the_other_side_of_a_rollout_that_is_over_or_has_not_begun_breaks_a_promise(value, at_s, is_broken):
    rollout = change("rollout", 1, 2, 5, name="canary", before=0, after=1)
    assert broken(rollout, ask(value, at_s, name="canary")) == (["rollouts"] if is_broken else [])


@pytest.mark.parametrize("after", [0, 1])
def test_aborted_rollout_has_to_end_where_it_says(after):
    rollout = change("rollout", 1, 2, 5, name="canary", before=0, after=after)
    assert broken(rollout, ask(after, 6, name="canary")) == []
    assert broken(rollout, ask(1 - after, 6, name="canary")) == ["rollouts"]


def test_abort_that_does_not_lead_back_breaks_a_promise():
    for after in (0, 1):
        rollout = change("rollout", 1, 2, 5, name="canary", before=0, after=after, is_aborted=True)
        assert broken(rollout) == (["rollouts"] if after else [])


@pytest.mark.parametrize(("tenant", "is_broken"), [("", False), ("acme", False), ("globex", True)])
def test_answer_to_another_tenant_breaks_a_promise(tenant, is_broken):
    history = change("write", 1, 0, 1, name="acme/a"), ask(1, 2, name="acme/a", tenant=tenant)
    assert broken(*history) == (["tenants"] if is_broken else [])


@pytest.mark.parametrize(
    ("events", "is_broken"),
    [
        ((), True),
        ((KILL,), True),
        ((KILL, KILL), False),
        ((replace(KILL, about={"node": "router0"}),), False),
        ((replace(KILL, kind="power"),), False),
    ],
)
def test_lost_request_breaks_a_promise_without_faults_and_beside_one_kill(events, is_broken):
    lost = ask(None, 2, outcome=Outcome.UNKNOWN)
    assert broken(WRITE, lost, events=events) == (["no request is lost"] if is_broken else [])
