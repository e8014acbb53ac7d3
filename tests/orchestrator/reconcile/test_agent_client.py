"""The orchestrator's own key may change in its file while it runs."""

import httpx
import pytest

from lorafleet.engine.worker_proofs import AgentProofs
from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.own_key import OwnKey
from orchestrator.core.errors import WorkerFailed
from orchestrator.reconcile.agent_client import AgentClient


async def epoch_one():
    return 1


async def test_agent_calls_use_the_key_now_in_the_file(tmp_path):
    now, seen, file = [0.0], [], tmp_path / "token"
    file.write_text("one")

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.headers.get("authorization")))
        return httpx.Response(503, json={})

    async def ask() -> None:
        for asked in (agents.metadata("http://a", timeout_s=1), agents.claim("http://a", timeout_s=1)):
            with pytest.raises(WorkerFailed):
                await asked

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        key, proofs = OwnKey("", file, clock=lambda: now[0]), AgentProofs(ApiKeys(()), None, 1.0, lambda: now[0])
        agents = AgentClient(client, agent_key=key, proofs=proofs, epoch=epoch_one)
        await ask()
        file.write_text("another")
        now[0] += 1
        await ask()
    assert seen == [(method, f"Bearer {key}") for key in ("one", "another") for method in ("GET", "POST")]
