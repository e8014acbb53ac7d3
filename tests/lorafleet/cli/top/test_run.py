"""`lorafleet bench` and `lorafleet top` on a fleet of two sim engines."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lorafleet.cli.context import FleetAddress
from lorafleet.cli.top.frame import explanation
from lorafleet.cli.top.run import last_decision
from tests.e2e.fleets import RunningFleet, running
from tests.lorafleet.cli.conftest import Run
from tests.patience import patience, wait_until

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Two workers with the three adapters of the demo."""
    with running(tmp_path_factory.mktemp("fleet") / "state", "--engine", "sim", "--workers", "2") as found:
        yield found


def test_a_benchmark_fills_top_and_its_last_request_is_explained(run: Run, fleet: RunningFleet) -> None:
    at = ("--router-url", fleet.router, "--orchestrator-url", fleet.orchestrator)
    shape = ("--requests", "30", "--concurrency", "8", "--input-tokens", "96", "--output-tokens", "4")
    result = run(
        "bench", *shape, "--shared-prefix", "64", "--adapters", "all", "--zipf", "1", "--warm-up", *at, "--json"
    )
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert (found["successful"], found["failed"], found["errors"]) == (30, 0, {})
    assert (found["input_tokens"], found["output_tokens"]) == (30 * 96, 30 * 4)
    assert len(found["models"]) == 3
    assert found["peak_concurrent"] <= 8
    assert found["hit_share"] > 0.2, "prompts of one adapter share two thirds of their tokens"
    assert found["ttft_ms"]["median"] > 0
    assert "30 of 30 requests ended, 0 failed" in result.err

    def top() -> Any:
        """One snapshot."""
        return json.loads(run("top", "--json", *at).out)

    def busy(seen: Any) -> set[str]:
        """Adapters with traffic. The base model has some, too: its tokenizer was asked."""
        names = {line["name"] for line in seen["adapters"] if line["traffic"]["requests_per_s"]}
        return names - {"base:tiny-qwen"}

    wait_until(lambda: busy(top()), within_s=patience(60), what="routers have reported")
    seen = top()
    assert seen["fleet"]["requests_per_s"] > 0
    assert busy(seen) <= {*found["models"]}
    assert [worker["state"] for worker in seen["workers"]] == ["ready", "ready"]
    assert seen["routers"] == 1
    assert "2 of 2 workers ready" in run("top", *at).out

    decision = last_decision(FleetAddress(fleet.orchestrator, fleet.router, ""))
    assert decision is not None
    lines = [line.text for line in explanation(decision, 80)]
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("-> w") for line in lines)


def test_the_table_is_printed_and_unknown_names_are_refused(run: Run, fleet: RunningFleet) -> None:
    at = ("--router-url", fleet.router)
    small = ("--requests", "3", "--input-tokens", "8", "--output-tokens", "2")
    result = run("bench", *small, "--adapters", "base", *at)
    assert result.status == 0, result.err
    assert "Successful requests:                     3\n" in result.out
    refused = run("bench", *small, "--adapters", "nope", *at)
    assert (refused.status, "nope: not adapters of tiny-qwen" in refused.err) == (2, True)
    too_long = run("bench", "--requests", "2", "--input-tokens", "1000000", *at)
    assert too_long.status == 1
    assert "none of 2 requests succeeded" in too_long.err
    assert len(too_long.err.splitlines()[-1:]) == 1
