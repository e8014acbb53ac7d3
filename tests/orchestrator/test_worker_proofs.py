"""With key files, an address gets no key, no adapter and no router before it has proved to be a worker's."""

import pytest
import yaml
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from lorafleet.keys.key_files import hash_key
from tests.orchestrator.doubles import FakeAgent
from tests.serving import client_of, serving
from workers.wire import WORKER_PROOF_PATH

KEYS = {
    "root": {"scopes": ["admin"]},
    "router": {"scopes": ["load"]},
    "worker": {"scopes": ["worker", "drain"]},
    "worker-2": {"scopes": ["worker", "drain"]},
    "trainer": {"scopes": ["infer", "register"], "tenant": "acme"},
    "tenant-admin": {"scopes": ["tenant-admin"], "tenant": "acme"},
    "pipeline": {"scopes": ["register"]},
}


class RecordingServer:
    """A server that keeps every request's path and `authorization`, and answers proofs as `prove` says."""

    def __init__(self):
        self.seen: list[tuple[str, str | None]] = []
        self.prove = None
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self.answer, methods=["GET", "POST", "PUT", "DELETE"])

    async def answer(self, path: str, request: Request):
        self.seen.append((f"/{path}", request.headers.get("authorization")))
        if f"/{path}" == WORKER_PROOF_PATH and self.prove is not None:
            return await self.prove(await request.json())
        return JSONResponse({"status": "ok"})


@pytest.fixture
def keyed(open_service, tmp_path):
    """An orchestrator with key files, called as an operator; its key for agents is `for-agents`."""
    rows = [{"sha256": hash_key(key), **fields} for key, fields in KEYS.items()]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": rows}))
    service = open_service(key_files=[tmp_path / "keys.yaml"], token="router", agent_token="for-agents")
    service.http.headers["authorization"] = "Bearer root"
    return service


async def beat(service, agent, key):
    headers = {"authorization": f"Bearer {key}"}
    return await service.http.post("/v1/workers/register", json=agent.heartbeat(), headers=headers)


def code_of(answer):
    return answer.status_code, answer.json()["error"]["code"]


async def agent_urls(service):
    listed = {worker["agent_url"] for worker in (await service.catalog())["workers"]}
    return listed | {worker["agent_url"] for worker in (await service.http.get("/v1/workers")).json()["data"]}


@pytest.mark.parametrize("key", ["trainer", "tenant-admin", "pipeline", "router"])
async def test_a_publishers_key_registers_no_worker(keyed, key):
    evil, fake = RecordingServer(), FakeAgent("evil")
    async with serving(evil.app) as fake.url:
        refused = await beat(keyed, fake, key)
        assert code_of(refused) == (403, "scope_missing")
        assert "'worker'" in refused.json()["error"]["message"]
        assert "lorafleet keys new --scopes worker" in refused.json()["error"]["message"]
        await keyed.turn()
    assert evil.seen == []
    assert await agent_urls(keyed) == set()


async def test_an_address_that_proves_nothing_gets_no_key_whoever_names_it(keyed):
    evil, fake = RecordingServer(), FakeAgent("evil")
    async with serving(evil.app) as fake.url:
        refused = await beat(keyed, fake, "worker")
        assert code_of(refused) == (409, "worker_unproved")
        assert fake.url in refused.json()["error"]["message"]
        await keyed.register(policy={"loading": "eager"})
        await keyed.settle()
    assert evil.seen == [(WORKER_PROOF_PATH, None)]
    assert await agent_urls(keyed) == set()


async def test_an_agent_is_called_with_the_agents_key_once_it_has_proved_its_address(keyed):
    agent = FakeAgent("w0")
    agent.key = "worker"
    proxy = RecordingServer()

    async def pass_on(path: str, request: Request):
        proxy.seen.append((f"/{path}", request.headers.get("authorization")))
        async with client_of(real) as client:
            answer = await client.request(
                request.method, f"/{path}", content=await request.body(), headers=_kept(request.headers)
            )
        return JSONResponse(answer.json(), answer.status_code)

    def _kept(headers):
        return {name: headers[name] for name in ("content-type", "x-lorafleet-epoch") if name in headers}

    front = FastAPI()
    front.add_api_route("/{path:path}", pass_on, methods=["GET", "POST"])
    async with serving(agent.app) as real, serving(front) as agent.url:
        assert (await beat(keyed, agent, "worker")).status_code == 200
        await keyed.register(policy={"loading": "eager"})
        for _ in range(4):
            assert (await beat(keyed, agent, "worker")).status_code == 200
            keyed.reconciler.run_pass()
            await keyed.reconciler.wait_for_actions()
        assert await agent_urls(keyed) == {agent.url}
    assert "sql/v1" in agent.loaded
    assert proxy.seen[0] == (WORKER_PROOF_PATH, None)
    assert {key for path, key in proxy.seen if path != WORKER_PROOF_PATH} == {"Bearer for-agents"}


async def test_another_worker_key_claims_no_other_workers_address(keyed):
    agent, fake = FakeAgent("w0"), FakeAgent("w0")
    agent.key, fake.key = "worker", "worker-2"
    async with serving(agent.app) as agent.url:
        assert (await beat(keyed, agent, "worker")).status_code == 200
        fake.url, fake.agent_boot_id = agent.url, agent.agent_boot_id
        assert code_of(await beat(keyed, fake, "worker-2")) == (409, "worker_unproved")
        fake.worker_id = "w9"
        assert code_of(await beat(keyed, fake, "worker-2")) == (409, "worker_unproved")
        assert code_of(await beat(keyed, fake, "worker")) == (409, "worker_unproved")
        assert (await keyed.http.get("/v1/workers")).json()["data"][0]["id"] == "w0"


async def test_a_workers_id_stays_at_its_address_while_that_worker_is_heard(keyed):
    agent, fake = FakeAgent("w0"), FakeAgent("w0")
    agent.key = fake.key = "worker"
    evil = RecordingServer()
    async with serving(agent.app) as agent.url, serving(evil.app) as fake.url:
        assert (await beat(keyed, agent, "worker")).status_code == 200

        async def prove(asked):
            return fake.proof(asked)

        evil.prove = prove
        for boot_id in (agent.agent_boot_id, "a2"):
            fake.agent_boot_id = boot_id
            assert code_of(await beat(keyed, fake, "worker")) == (409, "worker_id_taken")
        assert await agent_urls(keyed) == {agent.url}
    assert {key for _, key in evil.seen} == {None}


async def test_a_proof_that_a_worker_gave_is_of_no_use_to_another_address(keyed):
    agent, fake = FakeAgent("w0"), FakeAgent("w1")
    agent.key = "worker"
    evil = RecordingServer()
    async with serving(agent.app) as agent.url, serving(evil.app) as fake.url, client_of(agent.url) as to_agent:
        said = []

        async def replay(asked):
            said.append(asked)
            earlier = {"nonce": "0" * 64, "url": agent.url}
            return (await to_agent.post(WORKER_PROOF_PATH, json=earlier)).json()

        evil.prove = replay
        fake.agent_boot_id = agent.agent_boot_id
        assert code_of(await beat(keyed, fake, "worker")) == (409, "worker_unproved")
    assert said[0]["url"] == fake.url
    assert evil.seen == [(WORKER_PROOF_PATH, None)]


async def test_a_heartbeat_with_another_address_needs_another_proof(keyed, clock):
    agent = FakeAgent("w0")
    agent.key = "worker"
    evil = RecordingServer()
    async with serving(agent.app) as first, serving(evil.app) as elsewhere:
        agent.url = first
        assert (await beat(keyed, agent, "worker")).status_code == 200
        clock.now += keyed.settings.probe_after_s
        agent.url = elsewhere
        assert code_of(await beat(keyed, agent, "worker")) == (409, "worker_unproved")
        assert await agent_urls(keyed) == {first}
        assert {key for _, key in evil.seen} == {None}


async def test_a_restarted_agent_proves_its_address_again(keyed):
    agent, proofs = FakeAgent("w0"), []
    agent.key = "worker"
    prove = agent.proof
    agent.proof = lambda asked: proofs.append(asked) or prove(asked)
    async with serving(agent.app) as agent.url:
        for _ in range(3):
            assert (await beat(keyed, agent, "worker")).status_code == 200
        assert len(proofs) == 1
        agent.agent_boot_id = "a2"
        assert (await beat(keyed, agent, "worker")).status_code == 200
    assert len(proofs) == 2


async def test_a_silent_workers_address_is_proved_again_before_it_is_called(keyed, clock):
    agent, evil = FakeAgent("w0"), RecordingServer()
    agent.key = "worker"
    async with serving(agent.app) as agent.url:
        assert (await beat(keyed, agent, "worker")).status_code == 200
    port = int(agent.url.rpartition(":")[2])
    async with serving(evil.app, port=port):
        clock.now += keyed.settings.probe_after_s
        await keyed.turn()
        await keyed.reconciler.wait_for_actions()
    assert {key for _, key in evil.seen} <= {None}
    assert (WORKER_PROOF_PATH, None) in evil.seen
