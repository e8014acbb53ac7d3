"""What programs send, against a real vLLM with its tool parser."""

from collections.abc import Iterator

import pytest

from lorafleet.local import tiny_model
from tests.clients.suite import ADAPTER, ClientSuite
from tests.e2e.fleets import RunningFleet, running

pytestmark = [pytest.mark.vllm, pytest.mark.fleet, pytest.mark.thorough]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("clients-vllm")
    tiny_model.make_adapter(folder / "adapters", ADAPTER)
    flags = ("--engine", "vllm", "--workers", "1", "--adapters", str(folder / "adapters"))
    tools = ("--", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with running(folder / "state", *flags, *tools, within_s=600) as fleet:
        yield fleet


class TestClientsOnVllm(ClientSuite):
    lacking = frozenset({"/embeddings"})
