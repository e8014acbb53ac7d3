"""Adapters follow the traffic on a sim fleet, and come back when a worker is lost."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorafleet.local import tiny_model
from tests.e2e.fleets import RunningFleet, running, until
from tests.e2e.scenarios import fresh_prompt
from tests.e2e.shifting import FIVE, ShiftSuite

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder: Path = tmp_path_factory.mktemp("shift")
    tiny_model.make_adapters(folder / "adapters")
    for lora_id in FIVE[3:]:
        tiny_model.make_adapter(folder / "adapters", lora_id)
    flags = ["--engine", "sim", "--workers", "2", "--max-loras", "2", "--adapters", str(folder / "adapters")]
    with running(folder / "state", *flags) as fleet:
        yield fleet


class TestTwoSimWorkers(ShiftSuite):
    @pytest.mark.usefixtures("few_slots")
    def test_a_lost_workers_hot_adapters_are_elsewhere_within_five_seconds_plus_the_load(
        self, fleet: RunningFleet
    ) -> None:
        hot = FIVE[:2]

        def ask(lora_id: str) -> int:
            return fleet.ask(prompt=fresh_prompt(), lora_id=lora_id, max_tokens=4).status_code

        def is_known() -> bool:
            counted = fleet.http("GET", f"{fleet.orchestrator}/metrics").text
            return all(f'lora_usage_requests_total{{lora_id="{lora_id}"}}' in counted for lora_id in hot)

        for _ in range(2):
            with ThreadPoolExecutor(4) as pool:
                assert set(pool.map(ask, hot * 6)) == {200}
            until(is_known, within_s=10, what="the orchestrator knows who is hot")
        workers = fleet.workers()
        gone = next(name for name, metadata in workers.items() if set(hot) & _ready(metadata))
        left = next(name for name in workers if name != gone)
        lost = set(hot) & _ready(workers[gone])
        # Stopped rather than killed: `up` would restart a dead worker before it is missed.
        pids = [pid for pid, line in fleet.processes().items() if f"\0{gone}\0" in line]
        engine_port = workers[gone]["transport"]["engine_url"].rpartition(":")[2]
        pids += fleet.pids("--port", engine_port)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            agent_url = workers[left]["agent_url"]
            # A worker is missed after some three seconds, its adapters are loaded in milliseconds.
            until(lambda: lost <= _ready(fleet.get(f"{agent_url}/metadata")), within_s=6, what=f"{lost} on {left}")
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        until(fleet.is_whole, within_s=20, what=f"{gone} is back")


def _ready(metadata: dict) -> set[str]:
    return {lora["lora_id"] for lora in metadata["lora"]["loaded_loras"] if lora["state"] == "ready"}
