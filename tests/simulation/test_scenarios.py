"""Scenarios that are written by hand, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.patience import patience
from tests.simulation.scenario import Event, FaultScenario, FleetPlan

pytestmark = pytest.mark.fleet

_ROOT = Path(__file__).parents[2]


def simulate(*words, timeout_s=120):
    """Run the simulation's program; its output."""
    command = [sys.executable, "-m", "tests.simulation", *map(str, words)]
    ran = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=patience(timeout_s), check=False)
    assert ran.returncode == 0, f"{ran.stdout[-6000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


@pytest.fixture
def run(tmp_path):
    """Runs events on a fleet, and fails with the log where a promise breaks."""

    def run(fleet, *events, seed=1):
        scenario = FaultScenario(seed=seed, fleet=fleet, events=events)
        file = tmp_path / "scenario.json"
        file.write_bytes(msgspec.json.encode(scenario))
        return simulate("scenario", file)

    return run


def call(at_s, kind, name, content=None, *, client=0, router=0):
    return Event(at_s=at_s, kind=kind, about={"client": client, "router": router, "name": name, "content": content})


def test_name_is_published_while_the_leader_is_killed(run):
    log = run(
        FleetPlan(workers=2, orchestrators=2, names=("policy",)),
        call(0.0, "publish", "policy", 1),
        call(5.0, "publish", "policy", 2),
        Event(at_s=5.1, kind="kill", about={"node": "orch0", "in_callbacks": 20, "away_s": 3.0}),
        *(call(5.0 + number / 4, "ask", "policy", client=1) for number in range(20)),
    )
    assert "process ended process='orch0'" in log
    assert log.count("ask policy: ok") >= 20, "no request is lost with a leader"


@pytest.mark.parametrize("orchestrators", [1, 2])
def test_publish_at_a_new_leader_is_answered_when_routers_that_poll_rarely_go_by_it(run, orchestrators):
    publish = call(6.1, "publish", "policy", 2)
    publish.about.update(at_orchestrator=True, again_for_s=20.0, asks_after=4)
    log = run(
        FleetPlan(
            workers=1,
            routers=2,
            orchestrators=orchestrators,
            names=("policy",),
            settings={"orchestrator": {}, "router": {"catalog_poll_s": 5.0}, "agent": {}},
        ),
        call(0.0, "publish", "policy", 1),
        call(3.0, "ask", "policy"),
        call(3.0, "ask", "policy", router=1),
        Event(at_s=6.0, kind="kill", about={"node": "orch0", "in_callbacks": 1, "away_s": 3.0}),
        publish,
    )
    assert "write policy: ok, bytes 2" in log
    assert "router has not confirmed a change" not in log
    assert log.count("ask policy: ok, bytes 2") >= 4


def test_engine_that_dies_is_noticed_and_its_adapters_are_loaded_again(run):
    log = run(
        FleetPlan(workers=1, adapters=("a",)),
        call(0.0, "register", "a", 1),
        call(1.0, "ask", "a"),
        Event(at_s=3.0, kind="kill", about={"node": "engine0", "in_callbacks": 1, "away_s": 2.0}),
        call(20.0, "ask", "a"),
    )
    assert "the attached engine was restarted" in log or "engine down" in log


def test_bytes_that_are_deleted_while_all_workers_are_away_leave_them(run):
    log = run(
        FleetPlan(workers=2, adapters=("a",)),
        call(0.0, "register", "a", 1),
        call(2.0, "ask", "a"),
        *(
            Event(at_s=5.0, kind="kill", about={"node": f"w{number}", "in_callbacks": 1, "away_s": 15.0})
            for number in range(2)
        ),
        call(5.5, "delete", "a"),
        call(40.0, "register", "a", 2),
        call(50.0, "ask", "a"),
    )
    assert "write a: ok, bytes 2" in log


def test_fleet_on_kubernetes_publishes_while_its_api_server_fails_and_its_leader_is_killed(run):
    def trouble(at_s, how, for_s):
        return Event(at_s=at_s, kind="api", about={"how": how, "for_s": for_s})

    log = run(
        FleetPlan(workers=2, routers=2, orchestrators=2, names=("policy",), has_api_server=True),
        call(0.0, "publish", "policy", 1),
        trouble(5.0, "is late", 5.0),
        call(5.1, "publish", "policy", 2),
        trouble(15.0, "hangs", 3.0),
        call(15.1, "publish", "policy", 3),
        trouble(25.0, "refuses", 3.0),
        call(25.1, "publish", "policy", 4),
        trouble(35.0, "forgets", 1.0),
        call(35.1, "publish", "policy", 5),
        Event(at_s=45.0, kind="kill", about={"node": "api", "in_callbacks": 1, "away_s": 5.0}),
        Event(at_s=46.0, kind="kill", about={"node": "orch0", "in_callbacks": 1, "away_s": 30.0}),
        call(60.0, "publish", "policy", 0),
        *(call(number / 2, "ask", "policy", client=1, router=number % 2) for number in range(10, 160)),
    )
    assert "write policy: ok, bytes 0" in log
