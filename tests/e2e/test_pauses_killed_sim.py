"""A pause of a fleet of processes outlives its orchestrator, and holds both processes of a router."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.fleets import RunningFleet, running, until
from tests.patience import patience

pytestmark = [pytest.mark.fleet, pytest.mark.slow]

# Each asks on a connection of its own: enough that both router processes get some.
ASKERS = 8


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder: Path = tmp_path_factory.mktemp("paused")
    config = folder / "router.yaml"
    config.write_text("processes: 2\n")
    flags = ("--engine", "sim", "--workers", "1", "--router-config", str(config))
    with running(folder / "state", *flags) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def _whole(fleet: RunningFleet) -> None:
    """A test begins when the test before it has left nothing that is still starting."""
    until(fleet.is_whole, within_s=60, what="every worker is ready")


def held(fleet: RunningFleet) -> float:
    """Requests that pauses hold, at all processes of the router together."""
    text = fleet.http("GET", f"{fleet.router}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("lorafleet_router_paused_requests")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_pause_holds_both_router_processes_while_the_orchestrator_is_killed_until_it_is_resumed(fleet):
    told = fleet.http("POST", f"{fleet.router}/pause", params={"mode": "keep"})
    assert (told.status_code, told.json()["scope"]) == (200, "the whole fleet"), told.text
    with ThreadPoolExecutor(ASKERS) as pool:
        asked = [pool.submit(fleet.ask, max_tokens=2) for _ in range(ASKERS)]
        until(lambda: held(fleet) == ASKERS, within_s=20, what="all requests are held")
        (before,) = fleet.get(f"{fleet.orchestrator}/v1/pauses")["data"]
        fleet.kill("-m", "orchestrator")
        until(lambda: fleet.http("GET", f"{fleet.orchestrator}/ready").is_success, within_s=40, what="a successor")
        (after,) = fleet.get(f"{fleet.orchestrator}/v1/pauses")["data"]
        assert (after["began_at"], after["expires_at"]) == (before["began_at"], before["expires_at"])
        assert held(fleet) == ASKERS
        assert not any(each.done() for each in asked)
        assert fleet.http("POST", f"{fleet.router}/resume").json() == {"status": "resumed"}
        assert [each.result(patience(20)).status_code for each in asked] == [200] * ASKERS
