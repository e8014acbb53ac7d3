"""What a client can do to the router, to an engine or to its neighbours by sending something odd."""

import asyncio
import gc
import json
from itertools import pairwise

import pytest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from lorafleet.keys.key_files import hash_key
from router.core.kv.cache_disclosure import CacheDisclosure
from router.core.schedule.request import HashedRequest
from router.request.record import Decisions
from router.request.usage_report import usage_report
from router.tokenizing.tokenizers import Tokenizers
from tests.patience import until
from tests.router.doubles import BASE, CHAT, AgentDouble, EngineDouble, chunk, echo, error_of, fleet, with_sql
from tests.serving import client_of


@pytest.mark.parametrize("depth", [850, 100_000])
@pytest.mark.parametrize("name", ["unknown", "messages", "tools"])
async def test_a_body_nested_without_end_is_never_a_500(name, depth):
    nested = b"[" * depth + b"]" * depth
    async with fleet(EngineDouble("w0")) as (client, _, _):
        raw = b'{"model": "%s", "messages": [], "%s": %s}' % (BASE.encode(), name.encode(), nested)
        answer = await client.post("/v1/chat/completions", content=raw)
        assert answer.status_code in (200, 400), answer.text
        if depth > 1000:
            assert error_of(answer) == (400, "invalid_request_body")


async def test_prompt_that_cannot_become_json_again_is_routed_without_ids():
    async with client_of() as client:
        tokenizers = Tokenizers(client, mode="remote")
        for odd in ("\ud800", float("nan"), 10**5000):
            tokens = await tokenizers.ids({"prompt": odd}, base_model=BASE, engine_url="http://127.0.0.1:1")
            assert tokens.ids is None


@pytest.mark.parametrize(
    "answered", [None, [], [{"id": 1}], "ids", {"tokens": "1"}, {"tokens": [-1]}, {"tokens": [[]]}]
)
async def test_request_is_served_whatever_form_its_engines_tokenize_answers_in(answered):
    class OddEngine(EngineDouble):
        @property
        def app(self):
            app = super().app
            app.router.routes.insert(0, Route("/tokenize", lambda _: JSONResponse(answered), methods=["POST"]))
            return app

    async with fleet(OddEngine("w0")) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200, answer.text


async def test_decisions_kept_for_explaining_hold_no_prompts():
    async with fleet(EngineDouble("w0")) as (client, _, parts):
        await client.post("/v1/completions", json={"model": BASE, "prompt": list(range(1000))})
        (kept,) = parts.decisions
        assert not any(isinstance(getattr(kept, name), HashedRequest) for name in kept.__struct_fields__)
        assert (kept.prompt.ids, kept.hashes, kept.pending, kept.estimate) == (None, (), None, None)
        answer = await client.get("/v1/decisions")
        assert len(answer.content) < 3000
        (told,) = answer.json()["data"]
        assert (told["prompt_tokens"], told["tokens_from"]) == (1000, "given")


def test_kept_decisions_are_a_sample_under_load():
    kept = Decisions()
    for i in range(20_000):  # in four seconds
        kept.add(i, 100 + i / 5000)
    assert len(kept) == 1000
    assert kept[0] < 1000 < kept[-300]
    assert all(49 <= b - a <= 51 for a, b in pairwise(list(kept)[-300:])), "evenly"
    for i in range(500):
        kept.add(-i, 110 + i / 5000)
    assert list(kept)[-500:] == [-i for i in range(500)]


async def test_long_session_names_take_little_memory_and_stay_distinct():
    async with fleet(EngineDouble("w0")) as (client, _, parts):
        for user in ("a" * 100_000 + "1", "a" * 100_000 + "2", "short", "é" * 150):
            assert (await client.post("/v1/chat/completions", json={**CHAT, "user": user})).status_code == 200
        names = [kept.decision.request.session for kept in parts.decisions]
    assert len(set(names)) == 4
    assert max(map(len, names)) <= 200
    assert names[2:] == ["short", "é" * 150]


@pytest.mark.parametrize("priority", [True, 1e308, -(10**300), "high", None, [1]])
async def test_any_priority_is_taken_or_ignored_and_nobody_waits_for_ever(priority):
    async with fleet(EngineDouble("w0"), late_binding_s=0.0) as (client, _, parts):
        asks = [{"model": BASE, "prompt": [1] * 64, "priority": p} for p in (priority, 0, priority, 3)]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in asks))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert not len(parts.scheduler.queue)


async def test_a_prompt_that_the_engine_refused_is_not_taken_for_cached_there():
    async def refuse(engine, body):
        return JSONResponse({"error": {"message": "too long"}}, 400)

    async with fleet(EngineDouble("w0", refuse), EngineDouble("w1", refuse)) as (client, _, parts):
        body = {"model": BASE, "prompt": list(range(160))}
        for _ in range(3):
            assert (await client.post("/v1/completions", json=body)).status_code == 400
        assert [kept.decision.score.cached_tokens for kept in parts.decisions] == [0, 0, 0]


async def test_a_shadow_policy_that_fails_costs_the_request_nothing_and_is_counted():
    class BrokenPolicy:
        name = "broken"

        def choose(self, ask, scene):
            raise RuntimeError("broken")

    async with fleet(EngineDouble("w0")) as (client, _, parts):
        parts.scheduler.shadows = [BrokenPolicy()]
        answer = await client.post("/v1/completions", json={"model": BASE, "prompt": list(range(160))})
        assert answer.status_code == 200
        assert not list(parts.scheduler.load.counts_by_name())
        counted = 'lorafleet_router_shadow_decisions_total{agrees="failed",policy="broken"} 1.0'
        assert counted in (await client.get("/metrics")).text


async def test_gone_worker_leaves_no_series_in_the_metrics():
    engine = EngineDouble("w0")
    engine.go_on.clear()
    async with fleet(engine) as (client, _, parts):
        body = {"model": BASE, "prompt": list(range(160)), "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            parts.discovery.stop_following("w0")
            parts.discovery.rebuild_fleet()
            engine.go_on.set()
            await answer.aread()
        assert 'worker="w0"' not in (await client.get("/metrics")).text


async def test_route_missing_at_the_engine_is_404_and_no_missing_adapter():
    async def no_route(engine, body):
        return JSONResponse({"detail": "Not Found"}, 404)

    engine = EngineDouble("w0", no_route)
    async with fleet(engine, control=with_sql("w0"), cold_start_timeout_s=60) as (client, control, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Not Found")
        assert control.ensured == []
    assert len(engine.bodies) == 1


async def test_adapters_of_the_catalog_are_read_once_and_not_at_every_report():
    async with fleet(EngineDouble("w0"), control=with_sql("w0")) as (_, _, parts):
        before, adapters = parts.discovery.fleet, parts.discovery.fleet.adapters
        parts.discovery.poll_now("w0")
        await until(lambda: parts.discovery.fleet is not before)
        if parts.discovery.fleet.adapters is not adapters:
            # A catalog came in between; the next report brings none.
            adapters = parts.discovery.fleet.adapters
        parts.discovery.rebuild_fleet()
        assert parts.discovery.fleet.adapters is adapters


async def test_stream_requested_by_a_string_arrives_in_pieces():
    async def pieces(engine, body):
        return await echo(engine, {**body, "stream": True})

    engine = EngineDouble("w0", pieces)
    engine.go_on.clear()
    async with (
        fleet(engine, control=with_sql("w0")) as (client, _, _),
        client.stream("POST", "/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1", "stream": "true"}) as answer,
    ):
        assert json.loads((await anext(answer.aiter_bytes())).removeprefix(b"data: "))["model"] == BASE
        engine.go_on.set()


@pytest.mark.parametrize("asked", [{}, {"lora_id": "sql/v1"}])
async def test_engine_lost_inside_an_event_leaves_a_readable_error(asked):
    async def breaks(engine, body):
        async def pieces():
            yield chunk(body["model"], "one") + b'data: {"half'
            await asyncio.sleep(0.05)
            raise ConnectionResetError

        return StreamingResponse(pieces(), media_type="text/event-stream")

    async with fleet(EngineDouble("w0", breaks), control=with_sql("w0")) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, **asked, "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert json.loads(events[0])["model"] == BASE
    assert json.loads(events[1])["error"]["code"] == "stream_broken"
    assert events[2:] == ["[DONE]"]


async def test_events_may_end_in_crlf_and_follow_comments():
    async def crlf(engine, body):
        async def pieces():
            yield b": here, data: soon\r\n\r\n"
            await asyncio.sleep(0)
            yield chunk(body["model"], "one").replace(b"\n", b"\r\n")
            await engine.go_on.wait()
            yield b"data: [DONE]\r\n\r\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    engine = EngineDouble("w0", crlf)
    engine.go_on.clear()
    async with (
        fleet(engine, control=with_sql("w0")) as (client, _, _),
        client.stream("POST", "/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1", "stream": True}) as answer,
    ):
        got = answer.aiter_lines()
        lines = [await anext(got) for _ in range(3)]
        assert lines[0].startswith(":")
        assert json.loads(lines[2].removeprefix("data: "))["model"] == BASE
        engine.go_on.set()


async def test_a_refusal_after_a_comment_is_still_the_answers_status():
    async def refuse(engine, body):
        events = b': data: hello\n\ndata: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n'
        return StreamingResponse(iter([events]), media_type="text/event-stream")

    async with fleet(EngineDouble("w0", refuse)) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too long")


async def test_a_request_that_kills_engines_meets_two_of_them_and_no_more():
    async def dies(engine, body):
        async def half():
            yield b'{"half'
            raise ConnectionResetError

        return StreamingResponse(half())

    engines = [EngineDouble(f"w{i}", dies) for i in range(4)]
    async with fleet(*engines, max_tries=4) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert error_of(answer) == (503, "no_replica")
    assert sum(len(e.bodies) for e in engines) == 2


async def test_request_without_an_answer_in_time_is_not_retried():
    async def slow(engine, body):
        await asyncio.Event().wait()

    engines = [EngineDouble(f"w{i}", slow) for i in range(3)]
    async with fleet(*engines, first_data_timeout_s=0.1) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert error_of(answer) == (504, "no_answer_in_time")
    assert sum(len(e.bodies) for e in engines) == 1


async def test_a_worker_that_left_leaves_nothing_in_any_index():
    async with fleet(EngineDouble("w0")) as (client, _, parts):
        await client.post("/v1/completions", json={"model": BASE, "prompt": list(range(64))})
        assert parts.feeds.index(BASE, 16).block_counts() == {"w0": 4}
        parts.feeds.forget("w0")
        await until(lambda: len(parts.feeds.index(BASE, 16)) == 0)
        assert parts.feeds.index(BASE, 16).block_counts() == {}


async def test_a_usage_report_forgets_what_nobody_used_for_long_unless_it_runs():
    engine = EngineDouble("w0")
    engine.go_on.clear()
    async with fleet(engine, control=with_sql("w0")) as (client, _, parts):
        ask = {**CHAT, "lora_id": "sql/v1", "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=ask) as answer:
            await anext(answer.aiter_bytes())
            assert usage_report(parts, parts.clock() + 10_000).in_flight.keys() == {"w0"}
            engine.go_on.set()
        await until(lambda: not list(parts.scheduler.load.counts_by_name()))
        assert usage_report(parts, parts.clock()).asked_age_s.keys() == {"sql/v1"}
        assert usage_report(parts, parts.clock() + 10_000).asked_age_s == {}


async def test_a_load_that_fails_after_its_last_client_left_complains_to_nobody():
    async def refuse(control, lora_id):
        await asyncio.sleep(0)
        return JSONResponse({"error": {"message": "because", "code": "adapter_failed"}}, 409)

    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    control = with_sql()
    control.ensure = refuse
    async with fleet(EngineDouble("w0"), control=control) as (_, _, parts):
        waiting = asyncio.create_task(parts.cold_starts.until_resident("sql/v1"))
        await asyncio.sleep(0)
        task = parts.cold_starts.loading["sql/v1"].task
        task.add_done_callback(lambda _: waiting.cancel())
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        del task
        gc.collect()
    assert complaints == []


async def test_refused_prompt_is_not_cached_for_its_tenant(tmp_path):
    async def refusing(engine, body):
        return JSONResponse({"error": {"message": "no"}}, 400) if "temperature" in body else await echo(engine, body)

    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n" + "".join(f"- {{sha256: {hash_key(of)}, tenant: {of}, scopes: [infer]}}\n" for of in ("one", "other"))
    )
    async with fleet(EngineDouble("w0", refusing), key_files=(keys,)) as (client, _, _):
        body = {"model": BASE, "prompt": list(range(64))}
        told = []
        for tenant, more in (("one", {}), ("one", {}), ("other", {"temperature": -1}), ("other", {})):
            headers = {"authorization": f"Bearer {tenant}"}
            answer = await client.post("/v1/completions", json=body | more, headers=headers)
            told.append((answer.status_code, answer.headers["x-lorafleet-cached-tokens"]))
        assert told == [(200, "0"), (200, "48"), (400, "0"), (200, "0")]


@pytest.mark.parametrize("cache", ["shared", "tenant"])
async def test_tenant_sees_cached_tokens_of_its_own_prompts_only(tmp_path, cache):
    keys = tmp_path / "keys.yaml"
    names = ("one", "other"), ("two", "acme"), ("three", "acme")
    entries = [f"- {{sha256: {hash_key(key)}, tenant: {tenant}, scopes: [infer]}}\n" for key, tenant in names]
    keys.write_text("keys:\n" + "".join(entries) + f"- {{sha256: {hash_key('root')}, scopes: [admin]}}\n")
    control = AgentDouble(cache=cache)
    async with fleet(EngineDouble("w0"), control=control, key_files=(keys,)) as (client, _, parts):

        async def told(key, tokens):
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": BASE, "prompt": list(range(tokens))}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            return int(answer.headers["x-lorafleet-cached-tokens"])

        assert await told("one", 64) == 0
        assert await told("root", 64) == (48 if cache == "shared" else 0)
        assert await told("two", 32) == 0
        assert await told("three", 64) == 32
        assert await told("one", 64) == 48
        # A cache of its own discloses nothing of others, so nothing needs to be remembered for that.
        parts.cache_disclosure = CacheDisclosure()
        assert await told("one", 64) == (0 if cache == "shared" else 48)
