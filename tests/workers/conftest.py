"""Fixtures of the agent's tests: the tiny model, its adapters, a worker's folders."""

from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter, make_adapters, make_model
from tests.workers.running import SIM, RunningWorker


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("agent-model"))


@pytest.fixture(scope="session")
def agent_adapters(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agent-adapters")
    make_adapters(folder)
    make_adapter(folder, "extra/v1", rank=8)
    return folder


@pytest.fixture
def worker(agent_model, agent_adapters, tmp_path) -> RunningWorker:
    return RunningWorker(agent_model, agent_adapters, tmp_path, *SIM)
