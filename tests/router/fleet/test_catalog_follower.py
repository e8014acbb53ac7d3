"""Requests before the first worker is known, and requests for adapters registered a moment ago."""

import asyncio
import time
from dataclasses import replace

from orchestrator.model.catalog import CatalogAlias
from orchestrator.model.served_names import AliasTarget
from router.protocols.stored_responses import tagged_response_id
from tests.patience import until
from tests.router.doubles import BASE, CHAT, AgentDouble, EngineDouble, error_of, fleet, with_sql
from tests.router.fleet.test_background import RESPONSES, Keeper
from tests.serving import serving

CHATS = "/v1/chat/completions"
RARELY = {"catalog_poll_s": 60.0}


async def test_early_requests_wait_for_the_first_worker():
    engine, control = EngineDouble("w0"), with_sql("w0")
    control.silent = True
    async with (
        serving(engine.app) as url,
        fleet(control=control, first_sync_wait_s=60) as (client, _, parts),
    ):
        control.workers["w0"] = url
        control.tell()
        asks = [
            client.post(CHATS, json=CHAT),
            client.post(CHATS, json={**CHAT, "stream": True}),
            client.post(CHATS, json={**CHAT, "lora_id": "sql/v1"}),
            client.post("/v1/completions", json={"model": BASE, "prompt": "hi"}),
            client.get("/v1/models"),
            client.get(f"/v1/models/{BASE}"),
            client.post("/v1/route", json=CHAT),
        ]
        answering = [asyncio.create_task(ask) for ask in asks]
        before = control.unanswered
        # A poll without a report does not count as knowing the worker.
        await until(lambda: control.unanswered >= before + 3)
        assert not [task for task in answering if task.done()]
        control.silent = False
        answers = await asyncio.gather(*answering)
        assert [answer.status_code for answer in answers] == [200] * len(asks)
        assert {card["id"] for card in answers[4].json()["data"]} == {BASE, "sql/v1"}
        assert not parts.discovery.is_starting_up


async def test_a_stored_response_is_not_missing_before_its_worker_is_known():
    engine, control = Keeper("w0"), AgentDouble(silent=True)
    kept = tagged_response_id("mine", "", tenant=None, worker="w0")
    engine.kept[kept] = {"id": kept, "status": "completed"}
    async with (
        serving(engine.app) as url,
        fleet(control=control, first_sync_wait_s=60) as (client, _, _),
    ):
        control.workers["w0"] = url
        control.tell()
        asking = asyncio.create_task(client.get(f"{RESPONSES}/{kept}"))
        before = control.unanswered
        await until(lambda: control.unanswered >= before + 3)
        assert not asking.done()
        control.silent = False
        assert (await asking).json()["id"] == kept


async def test_the_missing_part_is_named_after_the_wait():
    async with fleet(control=AgentDouble(down=True), first_sync_wait_s=0.1) as (client, _, _):
        assert error_of(await client.post(CHATS, json=CHAT)) == (503, "catalog_unavailable")
        assert error_of(await client.get("/v1/models")) == (503, "catalog_unavailable")


async def test_a_request_sees_adapters_registered_before_it():
    control = with_sql("w0")
    async with fleet(EngineDouble("w0"), control=control, **RARELY) as (client, _, _):
        assert (await client.post(CHATS, json={**CHAT, "lora_id": "sql/v1"})).status_code == 200
        # Deleted and registered under another name, without an event to the router.
        control.adapters.clear()
        control.add_adapter("sql/v2", on=["w0"])
        answer = await client.post(CHATS, json={**CHAT, "lora_id": "sql/v2"})
        assert (answer.status_code, answer.json()["model"]) == (200, BASE)
        control.add_adapter("sql/v3", on=["w0"])
        assert (await client.get("/v1/models/sql/v3")).status_code == 200
        control.aliases = (CatalogAlias(name="sql", targets=(AliasTarget(lora_id="sql/v3"),)),)
        assert (await client.post(CHATS, json={**CHAT, "model": "sql"})).status_code == 200
        (failed,) = (adapter for adapter in control.adapters if adapter.lora_id == "sql/v3")
        broken = replace(failed, error="no such file")
        control.adapters.remove(failed)
        control.adapters.append(broken)
        control.add_adapter("sql/v4", on=["w0"])
        assert (await client.get("/v1/models/sql/v4")).status_code == 200
        assert error_of(await client.post(CHATS, json={**CHAT, "lora_id": "sql/v3"})) == (409, "adapter_failed")
        control.adapters.remove(broken)
        control.adapters.append(failed)
        assert (await client.post(CHATS, json={**CHAT, "lora_id": "sql/v3"})).status_code == 200


async def test_unknown_names_cost_the_orchestrator_few_catalog_reads():
    async with fleet(EngineDouble("w0"), **RARELY) as (client, control, _):
        before, began_at = control.catalogs, time.monotonic()
        for wave in range(5):
            asks = [client.post(CHATS, json={**CHAT, "model": f"no-{wave}-{n}"}) for n in range(100)]
            answers = await asyncio.gather(*asks)
            assert {error_of(answer) for answer in answers} == {(404, "model_not_found")}
        # One at once, and then ten a second, whatever comes.
        assert 0 < control.catalogs - before <= 2 + 10 * (time.monotonic() - began_at)


async def test_without_an_orchestrator_an_unknown_name_is_refused():
    async with fleet(EngineDouble("w0")) as (client, control, parts):
        control.down = True
        await until(lambda: not parts.discovery.can_refresh_catalog)
        answer = await client.post(CHATS, json={**CHAT, "model": "nope"})
        assert error_of(answer) == (404, "model_not_found")
        control.down = False
        control.add_adapter("sql/v1", on=["w0"])
        control.tell()
        await until(lambda: parts.discovery.can_refresh_catalog)
        assert (await client.post(CHATS, json={**CHAT, "lora_id": "sql/v1"})).status_code == 200
