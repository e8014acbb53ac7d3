"""Reports of use: requests sent and in flight, and drains confirmed."""

from orchestrator.model.catalog import Draining
from router.request.usage_report import usage_report
from tests.patience import until
from tests.router.doubles import (
    CHAT,
    DIGEST,
    EngineDouble,
    counted,
    fleet,
    with_sql,
)
from tests.router.sql_adapter import SQL


async def test_a_usage_report_counts_what_was_sent_and_what_is_in_flight():
    engine = EngineDouble("w0")
    engine.go_on.clear()
    async with fleet(engine, control=with_sql("w0")) as (client, control, parts):
        ask = {**CHAT, "lora_id": "sql/v1", "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=ask) as answer:
            await anext(answer.aiter_bytes())
            assert usage_report(parts, parts.clock()).in_flight == {"w0": {SQL: 1}}
            engine.go_on.set()
        await until(lambda: any(report.get("batches") for report in control.usage))
        assert counted(control, parts)["sql/v1"].sent == 1
        assert control.usage[-1]["revision_seen"] == control.revision


async def test_drain_is_confirmed_by_an_extra_report(monkeypatch):
    monkeypatch.setattr("router.lifespan.USAGE_EVERY_S", 3600.0)
    async with fleet(EngineDouble("w0"), control=with_sql("w0")) as (_, control, _parts):
        await until(lambda: control.usage)
        control.draining = (Draining(lora_id="sql/v1", digest=DIGEST, worker_id="w0"),)
        control.tell()
        await until(lambda: control.usage[-1]["revision_seen"] == control.revision)
