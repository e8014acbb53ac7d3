"""A fleet of sim workers does what every fleet must do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet.local import tiny_model
from tests.e2e.fleets import SIM_FLAGS, RunningFleet, running
from tests.e2e.scenarios import COLD, FleetSuite, fresh_prompt
from tests.properties import THOROUGH

pytestmark = pytest.mark.fleet

WORKERS = 8 if THOROUGH else 3


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder: Path = tmp_path_factory.mktemp("sim")
    tiny_model.make_adapters(folder / "adapters")
    tiny_model.make_adapter(folder / "adapters", COLD)
    with running(folder / "state", *SIM_FLAGS, str(WORKERS), "--adapters", str(folder / "adapters")) as fleet:
        yield fleet


class TestSimWorkers(FleetSuite):
    def test_every_worker_takes_part(self, fleet: RunningFleet) -> None:
        asked = {fleet.ask(prompt=fresh_prompt(), max_tokens=1).headers["x-lorafleet-worker"] for _ in range(60)}
        assert len(asked) > WORKERS // 2
