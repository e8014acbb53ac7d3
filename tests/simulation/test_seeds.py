"""A few seeds run whole: fixed ones, and fresh ones that are printed."""

import re
import time

import pytest

from tests.simulation.regressions import kept_regressions
from tests.simulation.test_scenarios import simulate

pytestmark = pytest.mark.fleet


def test_first_seeds_and_two_fresh_ones_hold_every_promise():
    fixed = simulate("seeds", 3, "--from", 1)
    fresh = simulate("seeds", 2, "--from", int(time.time()) % 10**9)
    print(fixed, fresh)
    assert len(re.findall(r"^seed \d+: held", fixed + fresh, re.MULTILINE)) == 5


def test_kept_histories_hold_every_promise():
    ran = simulate("kept", timeout_s=600)
    assert ran.count(": held") == len(list(kept_regressions())) > 0


def test_two_runs_of_a_seed_have_the_same_log():
    first, second = (simulate("seed", 3) for _ in range(2))
    assert first.count("\n") > 100
    assert first == second
