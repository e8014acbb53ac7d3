"""The key for calls to agents is one of its own: the service's key is never sent to them."""

import pytest
from structlog.testing import capture_logs

from lorafleet.engine.settings import WorkerDiscoverySettings, agent_key_of


@pytest.mark.parametrize(
    ("given", "is_warned"),
    [({}, False), ({"token": "own"}, True), ({"token": "own", "agent_token": "agents"}, False)],
)
def test_a_service_with_a_key_and_none_for_agents_says_what_to_do(given, is_warned):
    with capture_logs() as logs:
        key = agent_key_of(WorkerDiscoverySettings(**given))
    assert ["agents are called without a key" in line["event"] for line in logs] == [True] * is_warned
    assert key.key == given.get("agent_token", "")
