"""By which catalog a router answers once it has started."""

import asyncio
import shutil

from orchestrator.model.catalog import CatalogAlias
from orchestrator.model.served_names import AliasTarget
from router.app import build
from router.config import RouterSettings
from tests.patience import patience
from tests.router.doubles import (
    CHAT,
    AgentDouble,
    EngineDouble,
    error_of,
    fleet,
    with_sql,
)
from tests.serving import client_of, serving


async def test_router_without_any_catalog_is_not_ready():
    async with fleet(control=AgentDouble(down=True)) as (client, _, _):
        assert error_of(await client.post("/v1/chat/completions", json=CHAT)) == (503, "catalog_unavailable")
        assert error_of(await client.get("/v1/models")) == (503, "catalog_unavailable")
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200


async def test_the_last_catalog_on_disk_serves_while_the_orchestrator_is_away(tmp_path):
    engine, control = EngineDouble("w0"), with_sql("w0")
    async with fleet(engine, control=control, state_dir=tmp_path):
        pass
    control.down = True
    control.url = ""
    async with fleet(engine, control=control, state_dir=tmp_path) as (client, _, parts):
        # The workers' addresses moved with the doubles' ports, so only the catalog itself can be looked at.
        assert parts.discovery.has_catalog
        assert "sql/v1" in {card["id"] for card in (await client.get("/v1/models")).json()["data"]}


async def test_a_router_that_starts_again_answers_by_no_older_catalog_while_the_orchestrator_is_there(tmp_path):
    engine, control = EngineDouble("w0"), AgentDouble()
    for number in (1, 2):
        control.add_adapter(f"policy/v{number}", on=["w0"])

    def point(number):
        control.aliases = (CatalogAlias(name="policy", targets=(AliasTarget(lora_id=f"policy/v{number}"),)),)
        control.tell()

    point(1)
    async with fleet(engine, control=control, state_dir=tmp_path / "killed"):
        # A killed router leaves the folder as it is.
        shutil.copytree(tmp_path / "killed", tmp_path / "again")
        point(2)
        control.catalog_turn = asyncio.Event()
        wait_s = {"first_sync_wait_s": patience(20), "control_timeout_s": patience(20)}
        app, parts = build(
            RouterSettings(orchestrator_url=control.url, state_dir=tmp_path / "again", tokenizer="remote", **wait_s)
        )
        async with serving(app, http=app.state.http) as url, client_of(url) as client:
            worker_known = parts.discovery.changes.until(
                lambda: parts.discovery.report_age_s("w0") is not None, timeout_s=patience(10)
            )
            assert await worker_known
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"model": "policy"}))
            assert (await client.get("/ready")).status_code == 503
            control.catalog_turn.set()
            answer = await asking
    assert answer.headers["x-lorafleet-adapter"].startswith("policy/v2@")
