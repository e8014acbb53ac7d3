"""Events: they follow from a revision, live and after a reconnect, within one leader's term."""

import asyncio
import json
import math

import httpx

from tests.orchestrator.api.answers import code_of, next_event
from tests.patience import patience, within
from tests.serving import client_of, serving


async def test_events_follow_from_a_revision_live_and_after_a_reconnect(service):
    await service.register("a")
    start = (await service.catalog())["revision"]
    await service.register("b")
    async with serving(service.built.app) as url, httpx.AsyncClient(base_url=url, timeout=patience(10)) as client:
        async with client.stream("GET", "/v1/events", params={"since": start}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.aiter_lines()
            event = await next_event(lines)
            body = json.loads(event["data"])
            assert (event["event"], body["lora_id"], int(event["id"])) == ("adapter_registered", "b", body["id"])
            await client.post("/v1/adapters", json={"lora_id": "c", "source": "s"})
            assert json.loads((await next_event(lines))["data"])["lora_id"] == "c"
        async with client.stream("GET", "/v1/events", headers={"last-event-id": event["id"]}) as answer:
            assert json.loads((await next_event(answer.aiter_lines()))["data"])["lora_id"] == "c"
        service.built.stop()


async def test_events_older_than_the_buffer_are_410(open_service):
    service = open_service(event_buffer=3)
    await service.catalog()
    start = service.reconciler.catalog.last_event_id
    for number in range(3):
        await service.register(f"a{number}")
    assert service.reconciler.catalog.events_since(start)
    await service.register("a9")
    for since in (start, 1, 10**18):
        answer = await service.http.get("/v1/events", params={"since": since})
        assert (answer.status_code, code_of(answer)) == (410, "events_expired")


async def test_a_reader_of_the_catalog_follows_it_where_events_that_changed_nothing_are_no_longer_kept(open_service):
    service = open_service(event_buffer=3)
    read_at = (await service.catalog())["revision"]
    for _ in range(9):
        last = service.reconciler.catalog.emit_event("incident")
    assert (await service.catalog())["revision"] == read_at
    assert service.reconciler.catalog.position_of(read_at) == last - 3
    answer = await service.http.get("/v1/events", headers={"last-event-id": str(read_at)})
    assert (answer.status_code, code_of(answer)) == (410, "events_expired")


async def test_an_event_stream_ends_with_its_leaders_term(open_service):
    service = open_service()
    async with (
        serving(service.built.app) as url,
        client_of() as client,
        client.stream("GET", f"{url}/v1/events") as it,
    ):
        lines = it.aiter_lines()
        assert (await anext(lines)).startswith(": following")
        service.built.leadership.on_newer_leader("another leads")
        async with within(5):
            assert [line async for line in lines if line] == []


async def test_events_of_another_leaders_term_are_410(open_service):
    service = open_service()
    before = (await service.catalog())["revision"]
    service.built.leadership.on_newer_leader("another leads")
    other = open_service()
    await other.register("told-by-the-other")
    between = (await other.catalog())["revision"]
    await other.built.leadership.release()
    await service.reconciler.prepare_term()
    service.built.leadership.lead_until(math.inf)
    for since in (before, between):
        answer = await service.http.get("/v1/events", params={"since": since})
        assert (answer.status_code, code_of(answer)) == (410, "events_expired")


async def test_an_idle_event_stream_sends_keep_alive_comments(open_service):
    service = open_service(keep_alive_s=0.01)
    stream = service.reconciler.catalog.event_stream(
        service.reconciler.catalog.last_event_id, keep_alive_s=0.01, is_stopping=lambda: False
    )
    texts = [await asyncio.wait_for(anext(stream), patience(5)) for _ in range(3)]
    assert all(text.startswith(":") for text in texts)
    await stream.aclose()
