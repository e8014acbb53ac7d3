"""With key files, a router sends neither key nor request to an address that has not proved to be a worker's."""

from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from lorafleet.keys.key_files import hash_key
from tests.patience import until
from tests.router.doubles import BASE, CHAT, AgentDouble, EngineDouble, error_of, fleet
from workers.wire import WORKER_PROOF_PATH


@dataclass
class WatchedControl(AgentDouble):
    """Records each call to an agent, with its `authorization`."""

    seen: list[tuple[str, str]] = field(default_factory=list)

    @property
    def app(self) -> ASGIApp:
        inner: Any = super().app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and f"/{self.agents}/" in scope["path"]:
                path = scope["path"].partition("/w0")[2]
                self.seen.append((path, dict(scope["headers"]).get(b"authorization", b"").decode()))
            await inner(scope, receive, send)

        return app


def key_file(folder):
    path = folder / "keys.yaml"
    path.write_text(f"keys: [{{sha256: {hash_key('client')}, scopes: [infer]}}]")
    return (path,)


AS_CLIENT = {"authorization": "Bearer client"}


async def test_a_worker_in_the_catalog_that_proves_nothing_gets_no_key_and_no_request(tmp_path):
    engine, control = EngineDouble("w0"), WatchedControl(worker_key="not-a-workers", down=True)
    keys = {"key_files": key_file(tmp_path), "token": "own", "agent_token": "for-agents"}
    async with fleet(engine, control=control, **keys) as (client, _, _):
        control.down = False
        await until(lambda: len(control.seen) >= 3, what="the router asks for proofs")
        answer = await client.post("/v1/chat/completions", json={**CHAT, "model": BASE}, headers=AS_CLIENT)
        assert error_of(answer)[0] == 503
    assert set(control.seen) == {(WORKER_PROOF_PATH, "")}
    assert engine.bodies == []


async def test_a_worker_that_proves_its_address_gets_the_agents_key_alone(tmp_path):
    control = WatchedControl()
    keys = {"key_files": key_file(tmp_path), "token": "own", "agent_token": "for-agents"}
    async with fleet(EngineDouble("w0"), control=control, **keys) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "model": BASE}, headers=AS_CLIENT)
        assert answer.is_success, answer.text
    assert control.seen[0] == (WORKER_PROOF_PATH, "")
    assert {key for path, key in control.seen if path != WORKER_PROOF_PATH} == {"Bearer for-agents"}
    assert ("/metadata", "Bearer for-agents") in control.seen
