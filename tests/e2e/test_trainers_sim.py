"""Trainers' loops against a fleet of two sim engines."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleets import RunningFleet, running
from tests.e2e.trainers import TrainerSuite

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> Iterator[RunningFleet]:
    environment = {"LORAFLEET_WORKERS_LORA_ROOTS": json.dumps([str(runs)])}
    folder = tmp_path_factory.mktemp("trainers") / "state"
    with running(folder, "--engine", "sim", "--workers", "2", environment=environment) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def model(fleet: RunningFleet) -> Path:
    return fleet.state_dir / "tiny-qwen"


class TestTrainersOnSim(TrainerSuite):
    pass
