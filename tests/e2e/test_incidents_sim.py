"""A process of a fleet dies or hangs: history and the output of `lorafleet up` say so, each once, with the cause."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleets import RunningFleet, running, until
from tests.e2e.test_any_process_killed import victims
from tests.patience import patience

pytestmark = [pytest.mark.fleet, pytest.mark.slow]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder: Path = tmp_path_factory.mktemp("incidents")
    environment = {"LORAFLEET_WORKERS_HANG_AFTER_S": str(patience(2))}
    with running(folder / "state", "--engine", "sim", "--workers", "1", environment=environment) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def _whole(fleet: RunningFleet) -> None:
    """A test begins when the test before it has left nothing that is still starting."""
    until(fleet.is_whole, within_s=60, what="every worker is ready")


def incidents(fleet: RunningFleet, **asked: Any) -> list[dict[str, Any]]:
    """The incidents that the history has, oldest first; none while the orchestrator is away."""
    answer = fleet.http("GET", f"{fleet.orchestrator}/v1/history", params={"kind": "incident", **asked})
    return list(reversed(answer.json()["data"])) if answer.is_success else []


def kinds(fleet: RunningFleet, **asked: Any) -> list[str]:
    return [item["kind"] for item in incidents(fleet, **asked)]


def test_a_killed_engine_is_named_with_its_signal_and_its_adapters_come_back(fleet: RunningFleet) -> None:
    assert fleet.ask(model="sql-expert/v1", prompt="one", max_tokens=2).is_success
    before = Counter(kinds(fleet))
    assert before["engine_started"] == before["agent_started"] == before["leader_changed"] == 1
    (engine,) = victims(fleet)["engine"]
    os.kill(engine, signal.SIGKILL)
    until(lambda: Counter(kinds(fleet))["engine_back"] == 1, within_s=60, what="the incident")
    died = incidents(fleet, severity="error")[-1]
    assert (died["kind"], died["subject"], died["severity"]) == ("engine_died", "w0", "error")
    assert died["body"]["cause"].startswith("the engine exited (killed by SIGKILL, status 137)")
    assert died["next_step"]
    back = [item for item in incidents(fleet) if item["kind"] == "engine_back"][-1]
    assert "back after" in back["body"]["cause"]
    assert back["body"]["adapters"] >= 1
    until(lambda: "engine back" in fleet.progress(), within_s=20, what="the incident")
    shown = fleet.progress()
    assert "w0: engine died: the engine exited (killed by SIGKILL, status 137)" in shown
    assert "next: read the engine's output" in shown
    assert "back after" in shown


def test_a_restarted_orchestrator_has_all_incidents_once(fleet: RunningFleet) -> None:
    before = Counter(kinds(fleet))
    (orchestrator,) = victims(fleet)["orchestrator"]
    os.kill(orchestrator, signal.SIGKILL)
    until(lambda: Counter(kinds(fleet))["leader_changed"] > before["leader_changed"], within_s=60, what="the incident")
    until(lambda: "leader changed" in fleet.progress(), within_s=20, what="the incident")
    after = Counter(kinds(fleet))
    after.subtract(before)
    assert {kind: count for kind, count in after.items() if count} == {"leader_changed": 1}


def test_a_killed_agent_and_its_engine_are_named(fleet: RunningFleet) -> None:
    before = Counter(kinds(fleet))
    (agent,) = victims(fleet)["workers"]
    os.kill(agent, signal.SIGKILL)
    until(lambda: Counter(kinds(fleet))["engine_started"] > before["engine_started"], within_s=60, what="the incident")
    assert Counter(kinds(fleet))["agent_started"] == before["agent_started"] + 1
    until(lambda: fleet.progress().count("w0: engine started") >= 1, within_s=20, what="the incident")


def test_a_hung_engine_is_named_and_replaced(fleet: RunningFleet) -> None:
    before = Counter(kinds(fleet))
    (engine,) = victims(fleet)["engine"]
    os.kill(engine, signal.SIGSTOP)
    until(lambda: Counter(kinds(fleet))["engine_back"] > before["engine_back"], within_s=90, what="the incident")
    hung = [item for item in incidents(fleet) if item["kind"] == "engine_hung"][-1]
    assert hung["subject"] == "w0"
    assert hung["body"]["cause"]
    assert "nvidia-smi" in hung["next_step"]
