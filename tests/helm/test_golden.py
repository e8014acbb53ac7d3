"""The manifests equal the golden files."""

import difflib

import pytest

from tests.helm.golden import GOLDEN, golden


@pytest.mark.parametrize("case", GOLDEN)
def test_what_the_chart_makes_is_what_it_made_before(case):
    before, now = GOLDEN[case].read_text().splitlines(), golden(case).splitlines()
    difference = "\n".join(difflib.unified_diff(before, now, "golden", "now", lineterm="", n=2))
    assert difference == "", "look at each line; when all of it is meant: python -m tests.helm.refresh"
