"""`/v1/requests`: each request has a story, the refused ones too, at whichever router somebody asks."""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from lorafleet.keys.key_files import hash_key
from lorafleet.telemetry.request_log import KeptLines, RequestLine
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from router.api.questions import answer_questions
from router.api.requests import stage_seconds
from tests.patience import patience, until
from tests.router.doubles import CHAT, EngineDouble, counted, fleet, with_sql
from tests.serving import client_of, serving

SQL = CHAT | {"lora_id": "sql/v1"}


def keyed(folder, **keys):
    """(settings, headers by name) of keys; each is given by its entry's fields."""
    path = folder / "keys.yaml"
    entries = [{"sha256": hash_key(name), "scopes": ["infer", "view"], **entry} for name, entry in keys.items()]
    path.write_text(yaml.safe_dump({"keys": entries}))
    return {"key_files": (path,)}, {name: {"authorization": f"Bearer {name}"} for name in keys}


async def failing(engine, body):
    return JSONResponse({"error": {"message": "overloaded"}}, 503)


async def story(client, request_id, **headers):
    answer = await client.get(f"/v1/requests/{request_id}", **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]


async def test_an_answered_request_has_key_tenant_target_decision_and_the_seconds_of_its_stages(tmp_path):
    settings, headers = keyed(tmp_path, mine={"tenant": "acme"})
    async with fleet(EngineDouble("w0"), control=with_sql("w0"), tokenizer="off", **settings) as (client, _, _):
        named = headers["mine"] | {"x-request-id": "night"}
        assert (await client.post("/v1/chat/completions", json=SQL, headers=named)).status_code == 200
        found = await story(client, "night", headers=headers["mine"])
    assert (found["status"], found["code"], found["limit"], found["stage"]) == (200, "", "", "")
    assert (found["key"], found["tenant"]) == (hash_key("mine")[:12], "acme")
    assert (found["asked"], found["worker"], found["attempts"]) == ("sql/v1", "w0", 1)
    assert found["adapter"].startswith("sql/v1@")
    assert [decision["worker_id"] for decision in found["decisions"]] == ["w0"]
    assert sum(found["stages"].values()) == pytest.approx(found["duration_s"], abs=1e-4)
    assert found["stages"]["first_data"] > 0


async def test_a_refused_request_says_which_limit_it_reached_and_how_to_raise_it(tmp_path):
    settings, headers = keyed(tmp_path, mine={"tenant": "acme", "limits": {"concurrent_requests": 1}})
    engine = EngineDouble("w0", stays)
    async with fleet(engine, tokenizer="off", **settings) as (client, control, parts):
        first = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT, headers=headers["mine"]))
        await until(lambda: engine.bodies)
        named = headers["mine"] | {"x-request-id": "second"}
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=named)).status_code == 429
        found = await story(client, "second", headers=headers["mine"])
        engine.go_on.set()
        await first
        codes = [counts.codes for counts in counted(control, parts).values() if counts.codes]
    assert (found["status"], found["code"], found["limit"]) == (429, "rate_limited", "concurrent_requests")
    assert found["asked"] == CHAT["model"]
    assert f"limits.concurrent_requests of key {hash_key('mine')[:12]}" in found["next_step"]
    assert found["key"] == hash_key("mine")[:12]
    assert codes == [{"429 rate_limited concurrent_requests": 1}]


async def test_a_request_beyond_its_tenants_limit_says_where_to_raise_that(tmp_path):
    settings, headers = keyed(tmp_path, mine={"tenant": "acme"})
    (path,) = settings["key_files"]
    limits = {"tenants": {"acme": {"limits": {"requests_per_minute": 1}}}}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | limits))
    async with fleet(EngineDouble("w0"), tokenizer="off", **settings) as (client, _, _):
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers["mine"])).status_code == 200
        named = headers["mine"] | {"x-request-id": "second"}
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=named)).status_code == 429
        found = await story(client, "second", headers=headers["mine"])
    assert found["limit"] == "tenant_requests_per_minute"
    assert "raise tenants.acme.limits.requests_per_minute in the key file" in found["next_step"]


async def stays(engine, body):
    engine.go_on.clear()
    await engine.go_on.wait()
    return JSONResponse({"id": "x", "model": body["model"], "choices": []})


async def test_a_request_that_its_limits_refuse_before_its_body_is_read_has_its_key(tmp_path):
    settings, headers = keyed(tmp_path, mine={"tenant": "acme", "limits": {"bytes_per_minute": 600}})
    large = CHAT | {"user": "x" * 900}
    async with fleet(EngineDouble("w0"), tokenizer="off", **settings) as (client, _, _):
        for name in ("one", "two"):
            await client.post("/v1/chat/completions", json=large, headers=headers["mine"] | {"x-request-id": name})
        found = await story(client, "two", headers=headers["mine"])
    assert (found["status"], found["limit"], found["tenant"]) == (429, "bytes_per_minute", "acme")
    assert (found["key"], found["stage"]) == (hash_key("mine")[:12], "read")


async def test_a_request_that_waits_for_a_slot_says_for_what_and_how_long(tmp_path):
    engine = EngineDouble("w0", stays)
    costs = {"max_in_flight_tokens": 1}
    async with fleet(engine, tokenizer="off", **costs) as (client, _, parts):
        first = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: engine.bodies)
        second = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "second"}))
        await until(lambda: len(parts.scheduler.queue))
        while not (first.done() and second.done()):
            engine.go_on.set()
            await asyncio.sleep(0.01)
        found = await story(client, "second")
    assert found["queued_for"] == "room at worker w0"
    assert found["stages"]["queue"] > 0


async def test_a_cold_start_and_a_failed_attempt_are_parts_of_the_story():
    control = with_sql()

    async def never(_control, _lora_id):
        await asyncio.Event().wait()

    control.ensure = never
    settings = {"cold_start_timeout_s": 0.2, "failover_wait_s": 0.05, "tokenizer": "off"}
    async with fleet(EngineDouble("w0", failing), control=control, **settings) as (client, _, _):
        await client.post("/v1/chat/completions", json=SQL, headers={"x-request-id": "cold"})
        cold = await story(client, "cold")
        await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "lost"})
        lost = await story(client, "lost")
    assert (cold["code"], cold["limit"], cold["stage"]) == ("adapter_loading", "cold_start_timeout_s", "hold")
    assert "no worker had it loaded" in cold["held_for"]
    assert cold["stages"]["hold"] >= 0.2
    assert "LORAFLEET_ROUTER_COLD_START_TIMEOUT_S" in cold["next_step"]
    assert (lost["status"], lost["worker"]) == (503, "w0")
    assert [failure["worker"] for failure in lost["failures"]] == ["w0"]
    assert lost["stages"]["failed_attempts"] > 0


async def test_a_tenant_sees_its_own_requests_alone_and_filters_work(tmp_path):
    settings, headers = keyed(tmp_path, acme={"tenant": "acme"}, rival={"tenant": "rival"}, root={})
    async with fleet(EngineDouble("w0"), control=with_sql("w0"), tokenizer="off", **settings) as (client, _, _):
        for tenant, body in (("acme", SQL), ("rival", SQL), ("rival", CHAT | {"model": "nobody"})):
            named = headers[tenant] | {"x-request-id": f"{tenant}-{body.get('model')}"}
            await client.post("/v1/chat/completions", json=body, headers=named)
        await client.post("/v1/chat/completions", json=SQL, headers={"authorization": "Bearer unknown"})

        async def listed(name, **query):
            answer = await client.get("/v1/requests", params=query, headers=headers[name])
            return [(item["tenant"], item["status"]) for item in answer.json()["data"]]

        assert await listed("acme") == [("acme", 200)]
        assert await listed("acme", tenant="rival") == []
        assert await listed("root") == [("", 401), ("rival", 404), ("rival", 200), ("acme", 200)]
        assert await listed("root", status="failed") == [("", 401), ("rival", 404)]
        assert await listed("root", status="4xx", key=hash_key("rival")[:12]) == [("rival", 404)]
        assert await listed("root", adapter="sql/v1", limit=1) == [("rival", 200)]
        other = f"acme-{SQL.get('model')}"
        answer = await client.get(f"/v1/requests/{other}", headers=headers["rival"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
        shared = await story(client, other, headers=headers["acme"])
    assert shared["terms"] is None is shared["cached_tokens"], "a hit on a shared adapter discloses others' prompts"


async def test_a_request_is_found_from_a_router_that_did_not_have_it(tmp_path):
    orchestrator = build(OrchestratorSettings(store=tmp_path / "store.db", settle_s=0))
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(orchestrator.app))
        first, _, parts = await stack.enter_async_context(fleet(EngineDouble("w0"), control=with_sql("w0")))
        second, _, _ = await stack.enter_async_context(fleet(orchestrator_url=url, first_sync_wait_s=0.0))
        control = await stack.enter_async_context(client_of())
        answering = asyncio.create_task(answer_questions(control, url, "r0", parts))
        reader = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=patience(20)))
        await until(lambda: "r0" in orchestrator.mailbox.listening())
        await first.post("/v1/chat/completions", json=SQL, headers={"x-request-id": "elsewhere"})
        await first.post("/v1/chat/completions", json={"model": "nobody"}, headers={"x-request-id": "wrong"})
        here, there = await story(second, "elsewhere"), await story(reader, "elsewhere")
        listed = (await reader.get("/v1/requests", params={"status": "failed"})).json()["data"]
        absent = await second.get("/v1/requests/absent")
        orchestrator.stop()
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
    assert here == there
    assert (there["router"], there["worker"], len(there["decisions"])) == ("r0", "w0", 1)
    assert [item["request_id"] for item in listed] == ["wrong"]
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "request_not_found")


async def test_requests_that_are_not_kept_cost_no_line():
    async with fleet(EngineDouble("w0"), tokenizer="off", kept_requests=0) as (client, _, parts):
        await client.post("/v1/chat/completions", json=CHAT)
        assert len(parts.requests.kept) == 0
        assert (await client.get("/v1/requests")).json()["data"] == []


@given(st.lists(st.sampled_from([200, 401, 429]), max_size=60), st.integers(1, 20))
def test_kept_lines_are_bounded_newest_first_and_failures_outlive_successes(statuses, most):
    kept = KeptLines(most)
    for number, status in enumerate(statuses):
        kept.add(RequestLine(request_id="x", method="POST", path="/", status=status, duration_s=0.0, at=float(number)))
    lines = [each.line for each in kept]
    assert len(lines) == len(kept)
    assert all(before.at >= after.at for before, after in pairwise(lines))
    for status, room in ((200, most), (429, most), (401, -(-most // 10))):
        numbers = [float(number) for number, each in enumerate(statuses) if each == status][-room:]
        assert sorted(line.at for line in lines if line.status == status) == numbers


@given(st.tuples(*[st.floats(0, 100)] * 6), st.floats(0, 100) | st.none())
def test_stages_sum_up_to_the_duration(waits, first_data_s):
    read_s, paused_s, held_s, queued_s, failed_s, rest_s = waits
    waited_s = paused_s + held_s + queued_s + failed_s + rest_s
    line = RequestLine(
        request_id="x",
        method="POST",
        path="/",
        status=200,
        duration_s=read_s + waited_s + (first_data_s or 0.0) + rest_s,
        read_s=read_s,
        paused_s=paused_s,
        held_s=held_s,
        queued_s=queued_s,
        failed_s=failed_s,
        waited_s=waited_s,
        first_data_s=first_data_s,
    )
    assert sum(stage_seconds(line).values()) == pytest.approx(line.duration_s, abs=1e-3)
