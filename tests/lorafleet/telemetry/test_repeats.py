"""A repeating cause gets one log line at once, then one a minute, and each occurrence is counted once."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lorafleet.telemetry.repeats import EVERY_S, RepeatLimiter


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_repeating_cause_gets_a_line_at_once_and_one_a_minute_for_all_others():
    clock = Clock()
    lines = RepeatLimiter(clock)
    assert [lines.count("slow") for _ in range(129)] == [1] + [0] * 128
    assert lines.count("other") == 1
    clock.now += EVERY_S
    assert lines.count("slow") == 129
    assert lines.count("slow") == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 100)), max_size=60))
def test_the_lines_stand_for_every_occurrence(occurrences):
    clock, written = Clock(), {"a": [], "b": []}
    lines = RepeatLimiter(clock)
    for cause, pause_s in occurrences:
        clock.now += pause_s
        if count := lines.count(cause):
            written[cause].append((clock.now, count))
    clock.now += EVERY_S + 1  # a sum of fractions is inexact
    for cause, found in written.items():
        times = [at for at, _ in found]
        assert all(later - before >= EVERY_S for before, later in pairwise(times))
        assert sum(count for _, count in found) + lines.count(cause) - 1 == sum(one == cause for one, _ in occurrences)


def test_a_thousand_causes_are_remembered():
    lines = RepeatLimiter(Clock())
    assert all(lines.count(n) == 1 for n in range(5000))
    assert lines.count(4999) == 0
    assert lines.count(0) == 1
