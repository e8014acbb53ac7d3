"""Benchmarks run and report; their times are for people to read, never for tests."""

import pytest

from benchmarks.decision.__main__ import GROUPS
from benchmarks.decision.size import DecisionBenchSize
from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.chat import read_files
from tests.benchmarks.smoke import KEYS, rows_of

# What `python -m benchmarks.decision` measures in its own process, as small as it goes.
SMALL = DecisionBenchSize(rounds=1, calls=4, prompts=4, blocks=2048, events=512, stream_s=0.1, stream_turns=1)
IN_OTHER_PROCESSES = {"memory", "streams"}


@pytest.mark.parametrize("name", sorted(GROUPS.keys() - IN_OTHER_PROCESSES))
def test_the_decision_benchmark_gives_rows_of_each_part(name):
    check([vars_of(row) for row in GROUPS[name].measure(SMALL)])


def test_the_decision_benchmark_measures_the_rows_that_are_named(tmp_path):
    rows = rows_of("decision", tmp_path, "--rows", "waiting")
    assert {row["row"] for row in rows} == {"waiting"}
    (sent,) = [row["value"] for row in rows if "sent a release" in row["what"]]
    assert sent == pytest.approx(1.0, abs=0.5)


def test_the_agent_benchmark_gives_rows_of_verification(tmp_path):
    from benchmarks.agent import verification

    check([vars_of(row) for row in verification.rows(tmp_path, quick=True)])


async def test_the_token_sweep_has_a_cost_for_each_script_and_length_and_draws_it(tmp_path):
    from benchmarks import tokens

    files = read_files(make_model(tmp_path / "model"))
    size = tokens.SweepSize(lengths=(1_000, 20_000), rounds=1, chars=1_000)
    costs, held_us = await tokens.sweep(files, size)
    assert costs.keys() == held_us.keys() == tokens.SCRIPTS.keys()
    assert all(list(cost) == [1_000, 20_000] and min(cost.values()) > 0 for cost in costs.values())
    assert tokens.Cost({1: 10.0, 2: 30.0, 4: 20.0}).largest_step == (3.0, 2)
    pytest.importorskip("matplotlib")
    tokens.draw(costs, tmp_path / "sweep.svg")
    assert "Chinese" in (tmp_path / "sweep.svg").read_text(encoding="utf-8")


@pytest.mark.fleet
@pytest.mark.thorough
def test_the_quick_gateway_benchmark_has_each_front(tmp_path):
    rows = {row["what"]: row["value"] for row in rows_of("gateway", tmp_path)}
    for front in ("engines alone", "router", "picker behind Envoy"):
        assert 0 < rows[f"p50 of the whole answer, {front}"] <= rows[f"p99 of the whole answer, {front}"]


@pytest.mark.fleet
def test_the_quick_rest_benchmark_writes_its_rows(tmp_path):
    check(rows_of("rest", tmp_path))


@pytest.mark.fleet
@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["agent", "changes", "decision", "fetch", "isolation", "limits", "publish", "sessions"]
)
def test_a_whole_quick_benchmark_writes_its_rows(tmp_path, name):
    check(rows_of(name, tmp_path))


def vars_of(row) -> dict:
    return {name: getattr(row, name) for name in KEYS}


def check(rows: list[dict]) -> None:
    assert rows
    for row in rows:
        # A goal of zero: the row counts what must not happen.
        assert row["value"] == 0 if row["reach"] == 0 else row["value"] > 0, row["what"]
