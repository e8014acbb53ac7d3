"""A router's own key may change in its file while it runs: calls to orchestrator and agents then have the new one."""

from dataclasses import dataclass, field
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.patience import until
from tests.router.doubles import BASE, CHAT, AgentDouble, EngineDouble, fleet


@dataclass
class GuardedControl(AgentDouble):
    """Accepts one key, and records the paths called with it."""

    takes: str = "one"
    opened: set[str] = field(default_factory=set)

    @property
    def app(self) -> ASGIApp:
        inner: Any = super().app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                if dict(scope["headers"]).get(b"authorization", b"").decode() != f"Bearer {self.takes}":
                    await PlainTextResponse({"error": {"message": "no", "code": "invalid_api_key"}}, 401)(
                        scope, receive, send
                    )
                    return
                self.opened.add(scope["path"].rpartition("/")[2])
            await inner(scope, receive, send)

        return app


async def test_calls_to_other_services_have_the_files_current_key(tmp_path):
    file, control = tmp_path / "token", GuardedControl()
    file.write_text("one\n")
    async with fleet(EngineDouble("w0"), control=control, token_file=file) as (client, _, _):
        await until(lambda: control.opened >= {"catalog", "metadata"})
        control.takes = "another"
        control.opened.clear()
        file.write_text("another\n")
        control.add_adapter("sql/v1", on=["w0"])
        control.tell()
        await until(lambda: control.opened >= {"catalog", "metadata"})

        async def serves_it() -> bool:
            answer = await client.post("/v1/chat/completions", json={**CHAT, "model": "sql/v1"})
            return answer.is_success

        await until(serves_it)
        assert (await client.post("/v1/chat/completions", json={**CHAT, "model": BASE})).is_success
