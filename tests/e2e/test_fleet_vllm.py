"""Two real vLLM workers on the CPU do what every fleet must do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet import tiny
from tests.e2e.fleets import Fleet, running
from tests.e2e.scenarios import FleetSuite
from tests.e2e.shifting import FIVE, ShiftSuite

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("vllm")
    tiny.make_adapters(folder / "adapters")
    for lora_id in FIVE[3:]:
        tiny.make_adapter(folder / "adapters", lora_id)
    flags = ["--engine", "vllm", "--workers", "2", "--max-loras", "2", "--adapters", str(folder / "adapters")]
    with running(folder / "state", *flags, within_s=600) as fleet:
        yield fleet


class TestTwoVllmWorkers(FleetSuite):
    come_back_within_s = 240.0

    @pytest.mark.thorough  # another start of a real engine
    def test_a_killed_engine_comes_back_with_its_adapters(self, fleet: Fleet) -> None:
        super().test_a_killed_engine_comes_back_with_its_adapters(fleet)


@pytest.mark.thorough
class TestTrafficThatShifts(ShiftSuite):
    pass
