"""Work beside requests: every step once and in order, a bounded part of each turn, and no work left behind."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.kv.turns import LoopTurns, turn_budget_s


class SteppedClock:
    """A clock that only steps move."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class CountedTurns:
    """Counts the turns of the running event loop: `number` grows by one in each of them."""

    def __init__(self):
        self.number = 0
        self._is_over = False
        asyncio.get_running_loop().call_soon(self._count)

    def _count(self):
        self.number += 1
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._count)

    def close(self):
        self._is_over = True


async def _run(costs_us, *, most_us=100_000):
    """[(turn, work, step)] of works with these costs a step, all begun in one turn; and the seconds spent by turn."""
    clock, counted, ran, spent = SteppedClock(), CountedTurns(), [], {}
    turns = LoopTurns(clock)

    def steps(work):
        for number, cost_us in enumerate(costs_us[work]):
            ran.append((counted.number, work, number))
            spent.setdefault(counted.number, []).append(cost_us / 1e6)
            clock.now += cost_us / 1e6
            yield

    await asyncio.wait_for(asyncio.gather(*(turns.run(steps(work)) for work in range(len(costs_us)))), most_us)
    counted.close()
    assert turns.waiting == 0
    return ran, spent


@given(st.lists(st.lists(st.integers(1, 400), max_size=40), min_size=1, max_size=8))
def test_each_step_runs_once_in_order_and_a_turn_ends_with_the_step_that_uses_up_its_time(costs_us):
    ran, spent = asyncio.run(_run(costs_us))
    for work, costs in enumerate(costs_us):
        assert [number for _, one, number in ran if one == work] == list(range(len(costs)))
    for costs in spent.values():
        assert sum(costs[:-1]) <= turn_budget_s(1.0)


def test_long_work_delays_short_work_by_turns_and_not_by_its_length():
    ran, _ = asyncio.run(_run([[50] * 4000, [50]]))
    (turn,) = {turn for turn, work, _ in ran if work == 1}
    assert turn <= min(turn for turn, _, _ in ran) + 2
    assert max(turn for turn, _, _ in ran) > 100


@given(st.floats(0, 10), st.floats(0, 10))
def test_a_turn_has_more_time_for_work_that_has_waited_for_longer(one, other):
    assert turn_budget_s(min(one, other)) <= turn_budget_s(max(one, other)) <= 0.001


async def test_the_error_of_a_step_is_raised_where_the_work_was_begun_and_stops_no_other():
    clock = SteppedClock()
    turns, ran = LoopTurns(clock), []

    def steps(name, fails):
        for number in range(20):
            clock.now += 0.0002
            ran.append(name)
            yield
            if fails and number == 10:
                raise ValueError("a malformed frame")

    works = [asyncio.create_task(turns.run(steps("a", True))), asyncio.create_task(turns.run(steps("b", False)))]
    failed, done = await asyncio.gather(*works, return_exceptions=True)
    assert isinstance(failed, ValueError)
    assert done is None
    assert ran.count("a") == 11
    assert ran.count("b") == 20


async def test_cancelled_work_runs_no_further_step():
    clock, ran = SteppedClock(), []
    turns = LoopTurns(clock)

    def steps():
        while True:
            clock.now += 0.0002
            ran.append(1)
            yield

    work = asyncio.create_task(turns.run(steps()))
    while len(ran) < 5:
        await asyncio.sleep(0)
    work.cancel()
    before = len(ran)
    with pytest.raises(asyncio.CancelledError):
        await work
    await turns.run(iter(()))
    assert len(ran) == before
    assert turns.waiting == 0


async def test_started_work_tells_its_end_once():
    clock, ends = SteppedClock(), []
    turns = LoopTurns(clock)

    def steps(count):
        for _ in range(count):
            clock.now += 0.0002
            yield

    turns.start(steps(1), ends.append)
    assert ends == [None]
    turns.start(steps(50), ends.append)
    assert ends == [None]
    while len(ends) < 2:
        await asyncio.sleep(0)
    assert ends == [None, None]
