"""Requests that wait when a router stops: each gets its 503 with its id, and is counted as that and as no client's."""

import asyncio
import contextlib

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from lorafleet.http_server.listener import HttpListener
from tests.patience import until, within
from tests.router.doubles import BASE, CHAT, AgentDouble, EngineDouble, echo, error_of, fleet, sample_value, with_sql

SQL = CHAT | {"lora_id": "sql/v1"}


async def silent(engine, body):
    await engine.go_on.wait()
    return await echo(engine, body)


async def never(control, lora_id):
    await asyncio.Event().wait()


WAITS = {
    "at an engine": (CHAT, {}),
    "for an adapter": (SQL, {}),
    "for an adapter, with a deadline": (SQL, {"x-lorafleet-timeout-s": "600"}),
    "with a deadline": (CHAT, {"x-lorafleet-timeout-s": "600"}),
    "as a stream": (CHAT | {"stream": True}, {}),
    "as a batch": ({"text": ["a", "b"], "sampling_params": {}}, {}),
}


def stop(listener) -> None:
    """As uvicorn and then the app do when the time to finish is over."""
    for task in asyncio.all_tasks():
        if task.get_coro().__qualname__ == "RequestIntake.answer":
            task.cancel()
    listener.stop()


@contextlib.asynccontextmanager
async def stoppable(monkeypatch, **settings):
    made = []
    monkeypatch.setattr(
        "router.app.HttpListener", lambda *args, **more: made.append(HttpListener(*args, **more)) or made[0]
    )
    engine, control = EngineDouble("w0", silent), with_sql()
    control.ensure = never
    engine.go_on.clear()
    async with fleet(engine, control=control, tokenizer="off", **settings) as (client, _, parts):
        yield client, parts, made[0], engine
        engine.go_on.set()


@pytest.mark.parametrize("wait", WAITS)
async def test_a_request_that_waits_when_its_router_stops_is_503_under_its_id(monkeypatch, wait):
    body, headers = WAITS[wait]
    path = "/generate" if "text" in body else "/v1/chat/completions"
    async with stoppable(monkeypatch) as (client, parts, listener, engine):
        asking = asyncio.create_task(client.post(path, json=body, headers=headers | {"x-request-id": "night"}))
        await until(lambda: engine.bodies or parts.cold_starts.held_bytes)
        stop(listener)
        async with within(10):
            answer = await asking
        assert error_of(answer) == (503, "stopping")
        assert (answer.headers["x-request-id"], answer.headers["retry-after"]) == ("night", "1")
        page = (await client.get("/metrics")).text
    assert counts(page) == {(path, "503", "stopping"): 1.0}


async def test_a_request_that_waits_in_the_queue_when_its_router_stops_is_503_under_its_id(monkeypatch):
    async with stoppable(monkeypatch, late_binding_s=0.0) as (client, parts, listener, _):
        asking = [
            asyncio.create_task(client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": f"n{number}"}))
            for number in range(12)
        ]
        await until(lambda: len(parts.scheduler.queue))
        stop(listener)
        async with within(10):
            answers = await asyncio.gather(*asking)
        assert [error_of(answer) for answer in answers] == [(503, "stopping")] * 12
        assert [answer.headers["x-request-id"] for answer in answers] == [f"n{number}" for number in range(12)]
        page = (await client.get("/metrics")).text
    assert counts(page) == {("/v1/chat/completions", "503", "stopping"): 12.0}


async def test_a_request_that_comes_when_its_router_has_stopped_is_503_under_its_id(monkeypatch):
    async with stoppable(monkeypatch) as (client, _, listener, engine):
        listener.stop()
        answer = await client.post("/v1/completions", json={"model": BASE, "prompt": "hi"})
        assert error_of(answer) == (503, "stopping")
        assert len(answer.headers["x-request-id"]) == 32
        page = (await client.get("/metrics")).text
        assert not engine.bodies
    assert counts(page) == {}
    assert sample_value(page, "lorafleet_router_refused_requests_total", code="stopping") == 1


def counts(page: str) -> dict[tuple[str, ...], float]:
    """Requests by route, status and code."""
    return {
        (sample.labels["route"], sample.labels["status"], sample.labels["code"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "lorafleet_router_requests_total"
    }


async def test_a_router_that_stops_while_it_learns_a_tokenizer_ends_that_work_in_silence():
    control = AgentDouble(files_due=asyncio.Event())
    with capture_logs() as said:
        async with fleet(EngineDouble("w0", echo), control=control, tokenizer="auto"):
            await until(lambda: control.files_asked)
        assert not [task for task in asyncio.all_tasks() if task.get_coro().__qualname__.endswith("._fetch_tokenizer")]
    control.files_due.set()
    assert not [line for line in said if "tokenizer" in line["event"]]
