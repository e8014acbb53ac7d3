"""More is asked than a fleet can do: who is let in is served, and who is not is told a time at which there is room."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.queue.admission import RetryTimes, WaitMargin
from tests.router.simulated_fleet import SimulatedFleet, SimulatedRequest

MOST_WAIT_S = 15.0


def flood(*, obeys: bool, seed: int, joined_at: float) -> SimulatedFleet:
    """A greedy tenant with many users asks without a pause, and three modest ones do from `joined_at` on."""
    fleet, rng = SimulatedFleet(max_num_seqs=8, most_wait_s=MOST_WAIT_S, seed=seed), Random(seed)

    def ask(tenant: str, pause_s: float) -> None:
        def again(asked: SimulatedRequest) -> None:
            retry_s = pause_s * rng.random()
            if asked.refused is not None:
                assert asked.refused.retry_after_s is not None
                retry_s = asked.refused.retry_after_s if obeys else 1.0
            fleet.at(fleet.now + retry_s, lambda: ask(tenant, pause_s))

        if fleet.now < 70.0:
            fleet.ask(rng.randint(500, 1500), rng.randint(50, 150), tenant=tenant, on_end=again)

    for _ in range(60):
        fleet.at(5.0 * rng.random(), lambda: ask("greedy", 0.1))
    for number in range(3):
        fleet.at(joined_at + rng.random(), lambda name=f"modest {number}": ask(name, 2.0))
    fleet.run()
    return fleet


@pytest.mark.thorough
@pytest.mark.parametrize(("obeys", "joined_at"), [(True, 0.0), (True, 30.0), (False, 0.0)])
def test_of_those_let_in_at_most_a_twentieth_waits_in_vain(obeys, joined_at):
    fleet = flood(obeys=obeys, seed=1, joined_at=joined_at)
    greedy = [asked for asked in fleet.asked if asked.tenant == "greedy"]
    admitted = [asked for asked in greedy if asked.is_admitted]
    assert len(greedy) > len(admitted) > 100
    assert sum(asked.is_late for asked in admitted) <= 0.05 * len(admitted)
    assert not [asked for asked in fleet.asked if asked.tenant != "greedy" and asked.refused is not None]
    # The engine never rests for it: about two a second are what it can do.
    assert sum(asked.refused is None for asked in fleet.asked if asked.at < 70.0) > 120
    retries_s = sorted(asked.refused.retry_after_s for asked in greedy if asked.refused is not None)
    assert retries_s[len(retries_s) // 2] > 4.0
    assert retries_s[-1] < 10 * MOST_WAIT_S


def test_those_turned_away_together_are_told_different_times():
    retry_times = RetryTimes()
    told = [retry_times.next_s("a", 2.0, 0.5, 60.0, 100.0) for _ in range(5)]
    assert told == pytest.approx([2.0, 2.5, 3.0, 3.5, 4.0])
    assert retry_times.next_s("b", 0.0, 0.5, 60.0, 100.0) == 1.0
    assert retry_times.next_s("a", 2.0, 0.5, 60.0, 200.0) == 2.0
    assert max(retry_times.next_s("a", 2.0, 0.5, 60.0, 200.0) for _ in range(500)) == pytest.approx(62.0)


def test_many_tenants_that_were_turned_away_are_forgotten_when_their_time_has_come():
    retry_times = RetryTimes()
    for number in range(5_000):
        retry_times.next_s(f"tenant {number}", 0.0, 0.5, 60.0, float(number))
    assert len(retry_times) < 1_100


def test_waits_that_were_longer_than_predicted_widen_the_margin_and_it_narrows_again():
    margin = WaitMargin()
    at_first = margin.factor("a")
    for _ in range(20):
        margin.record_wait("a", 5.0, 10.0, is_over=True)
    assert margin.factor("a") == pytest.approx(2.0)
    margin.record_wait("a", 0.01, 10.0, is_over=True)  # says nothing of long waits
    for _ in range(200):
        margin.record_wait("a", 5.0, 60.0, is_over=False)
    assert margin.factor("a") == 4.0
    for _ in range(200):
        margin.record_wait("a", 5.0, 5.0, is_over=True)
    assert 1.0 < margin.factor("a") < at_first


WAITS = st.tuples(st.sampled_from("abc"), st.floats(0, 100), st.floats(0, 100), st.booleans())


@given(st.lists(WAITS, max_size=100))
def test_a_tenants_margin_depends_on_its_own_waits_alone(waits):
    together = WaitMargin()
    alone = {tenant: WaitMargin() for tenant in "abc"}
    for tenant, expected_s, waited_s, is_over in waits:
        together.record_wait(tenant, expected_s, waited_s, is_over=is_over)
        alone[tenant].record_wait(tenant, expected_s, waited_s, is_over=is_over)
    for tenant, own in alone.items():
        assert 1.0 < together.factor(tenant) == own.factor(tenant) <= 4.0


def test_margins_of_many_tenants_are_bounded_and_the_last_ones_stay():
    margin = WaitMargin()
    for number in range(1500):
        margin.record_wait(f"tenant {number}", 5.0, 60.0, is_over=False)
    assert len(margin) == 1000
    assert margin.factor("tenant 0") == margin.factor("new") < margin.factor("tenant 1499") == 4.0


def quarter_beside(times: float, seed: int) -> SimulatedFleet:
    """A tenant asks for a quarter of what an engine can do, in small bursts; another asks for `times` all of it.

    Predictions were far too short for the greedy one before, so that its own margin is wide.
    """
    fleet, rng = SimulatedFleet(max_num_seqs=8, most_wait_s=MOST_WAIT_S, seed=seed), Random(seed)
    capacity, end_s, burst = 2.6, 60.0, 6
    for _ in range(100):
        fleet.scheduler.queue.wait_margin.record_wait("greedy", 5.0, 60.0, is_over=False)

    def ask(tenant: str, count: int, mean_s: float) -> None:
        if fleet.now < end_s:
            for _ in range(count):
                fleet.ask(rng.randint(500, 1500), rng.randint(50, 150), tenant=tenant)
            fleet.at(fleet.now + mean_s * rng.uniform(0.5, 1.5), lambda: ask(tenant, count, mean_s))

    fleet.at(0.0, lambda: ask("greedy", 1, 1 / (times * capacity)))
    fleet.at(2.0, lambda: ask("small", burst, burst / (0.25 * capacity)))
    fleet.run()
    return fleet


@pytest.mark.parametrize("times", [2, 3, 5])
def test_a_tenant_within_its_share_is_not_refused_for_the_waits_of_another(times):
    fleet = quarter_beside(times, seed=4)
    small = [asked for asked in fleet.asked if asked.tenant == "small"]
    greedy = [asked for asked in fleet.asked if asked.tenant == "greedy"]
    assert len(small) > 30
    assert [asked for asked in small if asked.refused is not None] == []
    assert sum(asked.refused is not None for asked in greedy) > len(greedy) / 4
    # The engine never rests: about 2.6 a second are what it can do.
    assert sum(asked.ended_at <= 60.0 for asked in fleet.asked) > 60.0 * 2.2
