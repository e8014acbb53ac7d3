"""What programs send, against a fleet of sim engines, which have no route of Anthropic's, and no responses."""

from collections.abc import Iterator

import pytest

from lorafleet.local import tiny_model
from tests.clients.suite import ADAPTER, RECORDED, ClientSuite
from tests.e2e.fleets import RunningFleet, running

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("clients")
    tiny_model.make_adapter(folder / "adapters", ADAPTER)
    flags = ("--engine", "sim", "--workers", "1", "--adapters", str(folder / "adapters"))
    with running(folder / "state", *flags) as fleet:
        yield fleet


class TestClientsOnSim(ClientSuite):
    lacking = frozenset({"/messages", "/responses", "/embeddings", "/count_tokens"})
    echoes_logprobs = False


def test_recordings_are_small_and_without_keys_and_hosts() -> None:
    assert len(RECORDED) >= 8
    for path in RECORDED:
        text = path.read_text()
        assert len(text) < 20_000, path.name
        assert not any(
            word in text for word in ("127.0.0.1", "localhost", "key-of-nobody", "/tmp", "/root", "/home")
        ), path.name
