"""A router's keys may change in their files while it runs: calls to orchestrator and agents then have the new ones."""

from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.patience import until
from tests.router.doubles import BASE, CHAT, AgentDouble, EngineDouble, fleet


@dataclass
class GuardedControl(AgentDouble):
    """Accepts one key for the orchestrator's routes and another for agents', and records the paths called with them."""

    takes: str = "one"
    opened: set[str] = field(default_factory=set)

    @property
    def app(self) -> ASGIApp:
        inner: Any = super().app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                name = scope["path"].rpartition("/")[2]
                is_agents = "/w0/" in scope["path"]
                wanted = f"agent-{self.takes}" if is_agents else self.takes
                if dict(scope["headers"]).get(b"authorization", b"").decode() != f"Bearer {wanted}":
                    refused = {"error": {"message": "no", "code": "invalid_api_key"}}
                    await JSONResponse(refused, 401)(scope, receive, send)
                    return
                self.opened.add(name)
            await inner(scope, receive, send)

        return app


async def test_calls_to_other_services_have_the_files_current_key(tmp_path):
    own, agents, control = tmp_path / "token", tmp_path / "agent-token", GuardedControl()
    own.write_text("one\n")
    agents.write_text("agent-one\n")
    async with fleet(EngineDouble("w0"), control=control, token_file=own, agent_token_file=agents) as (client, _, _):
        await until(lambda: control.opened >= {"catalog", "metadata"})
        control.takes = "another"
        control.opened.clear()
        own.write_text("another\n")
        agents.write_text("agent-another\n")
        control.add_adapter("sql/v1", on=["w0"])
        control.tell()
        await until(lambda: control.opened >= {"catalog", "metadata"})

        async def serves_it() -> bool:
            answer = await client.post("/v1/chat/completions", json={**CHAT, "model": "sql/v1"})
            return answer.is_success

        await until(serves_it)
        assert (await client.post("/v1/chat/completions", json={**CHAT, "model": BASE})).is_success
