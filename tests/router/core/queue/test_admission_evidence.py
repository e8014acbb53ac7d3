"""Nobody is refused on a guess: what routers learn from counters of engines, and what they refuse by it."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.engine.rates import USUAL_PREFILL_TOKENS_PER_S
from router.core.errors import Saturated
from router.core.fleet import EngineReport, Roster
from router.core.schedule.cost_settings import CostSettings
from tests.properties import examples
from tests.router.core.test_scheduler import SchedulerUnderTest
from tests.router.simulated_fleet import SimulatedFleet, SimulatedRequest


def user(fleet: SimulatedFleet, size: Callable[[], tuple[int, int]], until: float) -> None:
    """One user asks, waits for the answer, and asks on."""

    def again(_: object = None) -> None:
        if fleet.now < until:
            fleet.ask(*size(), on_end=again)

    fleet.at(fleet.now, again)


def refused(asked: list[SimulatedRequest]) -> list[str]:
    return [str(one.refused) for one in asked if one.refused is not None]


@pytest.mark.parametrize("prompt", [1, 30])
def test_crowd_after_45_seconds_of_short_chats_is_let_in_whole(prompt):
    fleet = SimulatedFleet()
    user(fleet, lambda: (prompt, 400), until=45.0)
    fleet.at(60.0, lambda: [fleet.ask(30, 50) for _ in range(60)])
    fleet.at(80.0, lambda: [fleet.ask(1_500, 50) for _ in range(6)])
    fleet.run()
    assert len(fleet.asked) >= 66
    assert refused(fleet.asked) == []


SIZES = st.tuples(
    st.one_of(st.integers(1, 60), st.integers(60, 3_000)), st.one_of(st.integers(1, 10), st.integers(10, 200))
)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(
    st.lists(SIZES, min_size=1, max_size=4),
    st.integers(1, 3),
    st.lists(SIZES, min_size=1, max_size=40),
    st.floats(1_000, 40_000),
    st.floats(0.005, 0.04),
)
def test_request_is_refused_only_behind_work_that_takes_that_long(chats, users, crowd, prefill, token_s):
    fleet, rng = SimulatedFleet(prefill=prefill, token_s=token_s), Random(1)
    for _ in range(users):
        user(fleet, lambda: rng.choice(chats), until=12.0)
    fleet.at(40.0, lambda: [fleet.ask(*each) for each in crowd])
    fleet.run()
    for late in (one for one in fleet.asked if one.refused is not None):
        ahead = [one for one in fleet.asked if one.at <= late.at <= one.first_at]
        assert sum(one.prompt_tokens for one in ahead) / prefill > 0.3 * fleet.most_wait_s


def measured_at(fleet: SchedulerUnderTest, prefill_tokens_per_s: float) -> None:
    report = EngineReport(prefill_tokens_per_s=prefill_tokens_per_s)
    fleet.roster = Roster(tuple(replace(replica, report=report) for replica in fleet.roster.replicas))


def test_prediction_that_a_first_token_contradicts_refuses_nobody():
    fleet = SchedulerUnderTest()
    measured_at(fleet, 15.5)
    fleet.ask(seconds=0.003, most_wait_s=60.0)
    _, flight = fleet.running.pop(0)
    assert flight.prefill_s > 1
    fleet.now += 0.02
    fleet.scheduler.load.record_first_token(flight, fleet.now)
    fleet.scheduler.load.remove(flight, fleet.now)
    for _ in range(60):
        fleet.ask(seconds=0.003, most_wait_s=60.0)


def test_prediction_that_came_true_refuses_who_would_wait_too_long():
    fleet = SchedulerUnderTest()
    measured_at(fleet, 15.5)
    fleet.ask(seconds=0.003, most_wait_s=60.0)
    fleet.finish()
    for _ in range(10):
        fleet.ask(seconds=0.003, most_wait_s=600.0)
    with pytest.raises(Saturated):
        fleet.ask(seconds=0.003, most_wait_s=10.0)


def test_predictions_count_again_when_first_tokens_take_as_long():
    fleet = SchedulerUnderTest()
    fleet.ask(seconds=2.0)
    _, flight = fleet.running.pop(0)
    fleet.scheduler.load.record_first_token(flight, fleet.now + 0.1)
    fleet.scheduler.load.remove(flight, fleet.now + 0.1)
    assert fleet.scheduler.load.replica_load("w0").prefill_pace == pytest.approx(0.1 / flight.first_token_s)
    for _ in range(20):
        fleet.ask(seconds=2.0)
        fleet.finish()
    assert fleet.scheduler.load.replica_load("w0").prefill_pace > 0.85


def test_unmeasured_fleet_refuses_nobody_before_a_line_was_waited_in():
    fleet = SchedulerUnderTest()
    measured_at(fleet, 0.0)
    for _ in range(100):
        fleet.ask(seconds=0.5, most_wait_s=10.0)
    for _ in range(10):
        fleet.finish()
    with pytest.raises(Saturated):
        fleet.ask(seconds=0.5, most_wait_s=10.0)


def test_idle_replica_keeps_a_request_from_being_refused_for_a_busy_one():
    fleet = SchedulerUnderTest(replicas=2)
    fleet.depths = {"w0": 10_000}
    for _ in range(3):
        fleet.ask(seconds=16.0)
    assert {flight.worker for _, flight in fleet.running} == {"w0"}
    fleet.ask(seconds=16.0, most_wait_s=0.1)


def test_engines_and_routers_guess_the_same_rate_before_any_is_known():
    assert CostSettings().prefill_tokens_per_s == USUAL_PREFILL_TOKENS_PER_S
