"""Benchmarks run and report; their times are for people to read, never for tests."""

import pytest

from tests.benchmarks.smoke import KEYS, rows_of

# What `python -m benchmarks.decision` measures in its own process, as small as it goes.
DECISIONS = {"matching": (8, 100.0), "deciding": (), "events": (), "growth": (), "adopting": ()}


@pytest.mark.parametrize("part", DECISIONS)
def test_the_decision_benchmark_gives_rows_of_each_part(part):
    from benchmarks import decision

    size = decision.DecisionBenchSize(rounds=1, calls=2, prompts=4, blocks=2048, events=512)
    check([vars_of(row) for row in getattr(decision, part)(*DECISIONS[part], size)])


def test_the_agent_benchmark_gives_rows_of_verification(tmp_path):
    from benchmarks.agent import verification

    check([vars_of(row) for row in verification.rows(tmp_path, quick=True)])


@pytest.mark.fleet
def test_the_quick_rest_benchmark_writes_its_rows(tmp_path):
    check(rows_of("rest", tmp_path))


@pytest.mark.fleet
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["agent", "decision"])
def test_a_whole_quick_benchmark_writes_its_rows(tmp_path, name):
    check(rows_of(name, tmp_path))


def vars_of(row) -> dict:
    return {name: getattr(row, name) for name in KEYS}


def check(rows: list[dict]) -> None:
    assert rows
    assert all(row["value"] > 0 for row in rows)
