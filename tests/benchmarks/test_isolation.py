"""The figures of `benchmarks.isolation`."""

import random

import pytest

from benchmarks.isolation.attack import area_under_curve
from benchmarks.isolation.lost_hits import hit_share, with_common_beginning
from benchmarks.trace.workload import drawn


def test_area_is_the_chance_that_a_right_guess_shows_more():
    rng = random.Random(3)
    right, wrong = [rng.randrange(9) for _ in range(40)], [rng.randrange(7) for _ in range(30)]
    pairs = [(one > other) + (one == other) / 2 for one in right for other in wrong]
    assert area_under_curve(right, wrong) == pytest.approx(sum(pairs) / len(pairs))
    assert area_under_curve([5, 6], [1, 2]) == 1.0
    assert area_under_curve([0, 0], [0, 0, 0]) == 0.5


def test_more_owners_find_less_cached_and_sessions_keep_their_own():
    lines = drawn(300)
    shares = [hit_share(lines, capacity=10_000, owners=owners) for owners in (1, 4, 50)]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < shares[0]


def test_longer_common_beginning_costs_more_and_leaves_the_sessions_owners():
    lines = drawn(200)
    longer = with_common_beginning(lines, 7)
    assert longer[0].prompt_tokens == lines[0].prompt_tokens + 7 * 512
    assert hit_share(with_common_beginning(lines, 0), capacity=10_000, owners=9) == hit_share(
        lines, capacity=10_000, owners=9
    )

    def lost(found):
        return hit_share(found, capacity=10_000, owners=1) - hit_share(found, capacity=10_000, owners=50)

    assert lost(longer) > lost(lines) > 0
