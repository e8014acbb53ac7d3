"""What is learned of the time to a session's next turn."""

from statistics import median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.sessions.habits import ReturnHabit, ReturnHabits

SECONDS = st.floats(0, 5000)
GAPS = st.lists(SECONDS, max_size=60)


def learned(gaps, ends=0):
    habit = ReturnHabit()
    for gap_s in gaps:
        habit.add_gap(gap_s)
    for _ in range(ends):
        habit.add_end()
    return habit


@given(GAPS, st.integers(0, 30), SECONDS, SECONDS)
def test_the_chance_of_a_return_is_a_share_and_never_rises_with_idle_time(gaps, ends, some, more):
    habit = learned(gaps, ends)
    sooner, later = habit.chance(min(some, more)), habit.chance(max(some, more))
    assert 0 <= later <= sooner <= 1


@given(st.lists(SECONDS, min_size=30, max_size=60))
def test_the_usual_gap_is_the_median_to_a_power_of_two(gaps):
    usual_s, middle_s = learned(gaps).usual_gap_s(), median_low(gaps)
    assert usual_s >= min(middle_s, 1024) / 2
    assert usual_s <= max(1.0, 4 * middle_s)


def test_sessions_that_mostly_return_soon_are_expected_soon_and_given_up_later():
    habit = learned([3.0] * 90, ends=10)
    assert habit.chance(1.0) > 0.8
    assert habit.chance(60.0) < 0.05
    assert learned([300.0] * 90, ends=10).chance(60.0) > 0.8


def test_before_anything_is_known_half_of_all_turns_have_a_next_one():
    assert ReturnHabit().chance(0.0) == pytest.approx(0.5)


def test_a_habit_that_has_changed_is_learned_again():
    habit = learned([3.0] * 5000)
    assert habit.usual_gap_s() == 4.0
    for _ in range(2500):
        habit.add_gap(100.0)
    assert habit.usual_gap_s() == 128.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["", "x", "y", "z"])), max_size=50))
def test_habits_are_kept_for_each_tenant_and_adapter_and_bounded(asked):
    habits, latest = ReturnHabits(most=4), {}
    for key in asked:
        found = habits.habit(*key)
        # The four asked for last are still known.
        latest = {other: habit for other, habit in latest.items() if other != key} | {key: found}
        assert all(habits.habit(*other) is habit for other, habit in list(latest.items())[-4:])
        assert len(habits) <= 4
