import asyncio
import json
import shutil
import socket
from math import inf
from random import Random

import httpx
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse
from structlog.testing import capture_logs

from lorafleet.http_server.listener import HttpListener
from lorafleet.identity import block_hashes, root_hash
from lorafleet.keys.key_files import hash_key
from orchestrator.model.catalog import CatalogAlias, Draining
from orchestrator.model.served_names import AliasTarget
from router.app import build
from router.config import RouterSettings
from router.core.errors import AdapterInspecting, RequestError, RouterError, TemporarilyUnavailable
from router.core.queue.fair_queue import FairQueue
from router.protocols.routes import ROUTES
from router.protocols.stored_responses import tagged_response_id
from router.request.engine_body import REFUSED_EXTRA_ARGS, REFUSED_FIELDS
from router.request.usage_report import usage_report
from tests.patience import patience, until
from tests.router.doubles import (
    BASE,
    CHAT,
    DIGEST,
    UNHEARD,
    AgentDouble,
    EngineDouble,
    chunk,
    counted,
    echo,
    error_of,
    fleet,
    with_sql,
)
from tests.serving import client_of, serving
from workers.wire import Load, Metadata

SQL = f"sql/v1@{DIGEST[:12]}"


async def test_adapter_has_the_engines_name_there_and_the_clients_in_answers():
    engine = EngineDouble("w0")
    async with fleet(engine, control=with_sql("w0")) as (client, _, _):
        for body in ({**CHAT, "lora_id": "sql/v1"}, {**CHAT, "model": "sql/v1"}, {**CHAT, "model": f"{BASE}:sql/v1"}):
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["model"] == body["model"]
            assert answer.headers["x-lorafleet-adapter"] == SQL
            assert answer.headers["x-lorafleet-worker"] == "w0"
    assert [b["model"] for b in engine.bodies] == [SQL] * 3
    assert all("lora_id" not in b for b in engine.bodies)


async def test_every_other_field_reaches_the_engine_as_it_was_sent():
    engine = EngineDouble("w0")
    odd = {"temperature": 1e-7, "seed": 2**53, "unknown": {"ключ": [None, True, "\u2028"]}, "logit_bias": {"1": -100}}
    async with fleet(engine) as (client, _, _):
        raw = json.dumps({**CHAT, **odd}, ensure_ascii=False)
        headers = {"authorization": "Bearer secret", "content-type": "application/json; charset=utf-8"}
        await client.post("/v1/chat/completions", content=raw, headers=headers)
    assert engine.bodies == [{**CHAT, **odd}]
    assert "authorization" not in engine.headers[0]


async def test_stream_has_the_clients_model_name_at_any_cut():
    async def cut(engine, body):
        async def pieces():
            whole = chunk(body["model"], "one")
            middle = whole.index(b"@")
            yield whole[:middle]
            await asyncio.sleep(0)
            yield whole[middle:]
            await engine.go_on.wait()
            yield chunk(body["model"], 'say "model":"x"') + b"data: [DONE]\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    engine = EngineDouble("w0", cut)
    engine.go_on.clear()
    async with fleet(engine, control=with_sql("w0")) as (client, _, _):
        ask = {**CHAT, "lora_id": "sql/v1", "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=ask) as answer:
            pieces = answer.aiter_bytes()
            first = await anext(pieces)
            assert json.loads(first.removeprefix(b"data: "))["model"] == BASE
            engine.go_on.set()
            rest = b"".join([piece async for piece in pieces])
    assert SQL.encode() not in first + rest
    assert rest.endswith(b"data: [DONE]\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")


@pytest.mark.parametrize("is_in_task", [True, False])
async def test_stream_cut_off_by_a_stopping_router_ends_with_its_error(monkeypatch, is_in_task):
    made = []
    monkeypatch.setattr(
        "router.app.HttpListener", lambda *args, **more: made.append(HttpListener(*args, **more)) or made[0]
    )
    engine = EngineDouble("w0")
    async with fleet(engine, tokenizer="off") as (client, _, parts):
        if not is_in_task:
            # With a connection to the engine there is nothing to wait for.
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        engine.go_on.clear()
        async with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            pieces = answer.aiter_bytes()
            await anext(pieces)
            # As uvicorn and then the app do when the time to finish is over.
            tasks = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "ClientConnection._answer"]
            assert bool(tasks) == is_in_task
            for task in tasks:
                task.cancel()
            made[0].stop()
            rest = b"".join([piece async for piece in pieces])
        assert json.loads(rest.split(b"\n\n")[0].removeprefix(b"data: "))["error"]["code"] == "stopping"
        assert not list(parts.scheduler.load.counts_by_name())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("how", ["refused", "503", "reset", "draining", "in_band", "empty"])
async def test_a_replica_that_fails_before_its_first_token_is_passed_over(how, streamed):
    async def fail(engine, body):
        if how == "503":
            return JSONResponse({"error": {"message": "busy"}}, 503)
        if how == "draining":
            return JSONResponse({"error": {"message": "cannot schedule new futures after shutdown"}}, 500)
        if how == "in_band":
            error = b'data: {"error": {"message": "dead", "code": 500}}\n\ndata: [DONE]\n\n'
            return (
                StreamingResponse(iter([error]), media_type="text/event-stream")
                if body.get("stream")
                else Response(status_code=502)
            )

        async def nothing():
            if how == "reset":
                yield b'{"half'
                raise ConnectionResetError
            return
            yield

        return (
            StreamingResponse(nothing(), media_type="text/event-stream")
            if streamed or how == "reset"
            else Response(status_code=503)
        )

    class First(Random):
        def getrandbits(self, k):
            return 0  # with this seed the first of two is chosen

    bad, good = EngineDouble("bad", fail, ids=[1, 2, 3]), EngineDouble("good", ids=[1, 2, 3])
    async with fleet(bad, good) as (client, control, parts):
        parts.scheduler.rng = First()  # ties fall at random: here they fall on the bad one, every time
        if how == "refused":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                control.workers["bad"] = f"http://127.0.0.1:{free.getsockname()[1]}"
            control.tell()
            await parts.discovery.changes.until(
                lambda: parts.discovery.fleet.replicas["bad"].engine_url == control.workers["bad"],
                timeout_s=patience(5),
            )
        for _ in range(6):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": streamed})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-lorafleet-worker"] == "good"
            if (how, streamed, len(bad.bodies)) == ("in_band", True, 5):
                # It is asked for something of the router's own, too, before its circuit opens.
                await until(lambda: parts.scheduler.breaker.open_incarnations(parts.clock()))
        assert list(parts.scheduler.load.counts_by_name()) == []
    # After five in a row its circuit is open.
    assert sum("messages" in body for body in bad.bodies) == (0 if how == "refused" else 5)


async def test_failing_fleet_is_503_and_no_replica_is_asked_twice():
    async def fail(engine, body):
        return JSONResponse({"error": {"message": "busy"}}, 503)

    engines = [EngineDouble(f"w{i}", fail) for i in range(2)]
    async with fleet(*engines) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert error_of(answer) == (503, "no_replica")
    assert int(answer.headers["retry-after"]) >= 1
    assert [len(e.bodies) for e in engines] == [1, 1]


async def test_a_request_whose_only_replica_died_waits_for_it_to_start_again():
    async def dies(engine, body):
        if engine.died:
            return await echo(engine, body)
        engine.died = True

        async def nothing():
            raise ConnectionResetError
            yield

        return StreamingResponse(nothing())

    for body in (CHAT, {**CHAT, "lora_id": "sql/v1"}):
        engine, control = EngineDouble("w0", dies), with_sql("w0")
        engine.died = False
        control.ensure = ready_on_w0
        control.figures = UNHEARD
        async with fleet(engine, control=control) as (client, _, parts):
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await until(lambda engine=engine: engine.died)
            await until(lambda parts=parts: not list(parts.scheduler.load.counts_by_name()))
            assert not asking.done()
            control.boot_id = "again"
            control.tell()
            assert (await asking).status_code == 200
        assert len(engine.bodies) == 2


async def ready_on_w0(control, lora_id):
    answer = {"lora_id": lora_id, "digest": DIGEST, "state": "ready", "ready": ["w0"], "loading": []}
    return JSONResponse(answer | {"expected_s": 0.0})


async def test_loads_are_told_at_once_and_all_agents_figures_make_one_snapshot():
    engines = [EngineDouble(f"w{number}") for number in range(4)]
    async with fleet(*engines, metadata_poll_s=3600, catalog_poll_s=3600) as (_, control, parts):
        discovery, load = parts.discovery, parts.scheduler.load
        await until(discovery.is_synced)
        before = discovery.fleet
        control.figures = Load(running=7)
        for follow in discovery.followed.values():
            follow.wake.set()
        await until(lambda: {load.replica_load(worker).others_in_flight for worker in before.replicas} == {7})
        assert discovery.fleet is before
        assert await discovery.changes.wait(5)
        assert {replica.report.running for replica in discovery.fleet.replicas.values()} == {7}


async def test_a_catalog_that_names_no_worker_takes_none_away_that_answers():
    engine, control = EngineDouble("w0"), with_sql("w0")
    async with fleet(engine, control=control, unreachable_after_s=0.1) as (client, _, parts):
        named, control.named = control.named, frozenset()
        control.tell()
        await until(lambda: parts.discovery.fleet.revision == control.revision)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        control.silent = True
        engine.healthy = False
        await until(lambda: not parts.discovery.fleet.replicas)
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert error_of(answer) == (503, "no_replica")
        control.silent, control.named = False, named
        control.tell()
        await until(lambda: parts.discovery.fleet.replicas)


async def test_an_agents_silence_takes_nothing_away_while_its_engine_answers():
    engine, control = EngineDouble("w0"), with_sql("w0")
    async with fleet(engine, control=control, unreachable_after_s=0.1) as (client, _, parts):
        control.silent = True
        await until(lambda: control.unanswered >= 4)
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
        assert answer.status_code == 200
        assert parts.metrics.loop_failures.labels("metadata").value == 0  # nothing of ours


@pytest.mark.parametrize("boot_id", ["first", "second"])
async def test_request_on_a_moved_worker_counts_until_it_ends(boot_id):
    engine = EngineDouble("w0")
    async with fleet(engine, control=with_sql("w0")) as (client, control, parts):

        def follow():
            return parts.discovery.followed.get("w0")

        def in_flight():
            return usage_report(parts, parts.clock()).in_flight.get("w0", {}).get(SQL, 0)

        engine.go_on.clear()
        before = follow()
        async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "model": "sql/v1", "stream": True}) as a:
            pieces = a.aiter_bytes()
            await anext(pieces)
            control.agents, control.boot_id = "elsewhere", boot_id
            control.tell()
            await until(lambda: follow() is not before and follow().metadata is not None)
            assert parts.discovery.fleet.replicas["w0"].agent_url.endswith("/elsewhere/w0")
            is_same_engine = boot_id == "first"
            assert in_flight() == (1 if is_same_engine else 0)
            engine.go_on.set()
            assert b"[DONE]" in b"".join([piece async for piece in pieces])
        await until(lambda: in_flight() == 0)
        counts = counted(control, parts)["sql/v1"]
        assert (counts.sent, sum(counts.first_token.values())) == (1, 1)


async def test_unreadable_report_is_counted_and_logged_with_its_worker():
    engine, control = EngineDouble("w0"), with_sql("w0")
    async with fleet(engine, control=control) as (_, _, parts):
        with capture_logs() as logs:
            control.metadata = lambda worker: Metadata.model_construct(instance_id=worker)
            control.tell()
            await until(lambda: parts.metrics.loop_failures.labels("metadata").value >= 1)
        (said,) = [line for line in logs if line["event"] == "loop step failed"]
        assert (said["loop"], said["worker"], said["exc_info"]) == ("metadata", "w0", True)


def lose_an_index(parts):
    parts.feeds.indexes["another model", 16] = None


def lose_the_rules(parts):
    parts.scheduler.breaker.rules = None


def lose_what_waits(parts):
    parts.usage.numbers = None


@pytest.mark.parametrize(
    ("loop", "breaks"),
    [
        ("sweep", lose_an_index),
        ("kv_feeds", lose_an_index),
        ("watch", lose_the_rules),
        ("usage", lose_what_waits),
    ],
)
async def test_a_fault_of_ours_in_a_loop_is_counted_under_its_name(loop, breaks):
    async with fleet(EngineDouble("w0")) as (_, _, parts):
        breaks(parts)
        await until(lambda: parts.metrics.loop_failures.labels(loop).value)


async def test_engine_lost_after_its_first_token_ends_the_stream_with_an_error():
    async def breaks(engine, body):
        async def pieces():
            yield chunk(body["model"], "one")
            await asyncio.sleep(0.05)
            raise ConnectionResetError

        return StreamingResponse(pieces(), media_type="text/event-stream")

    engine, other = EngineDouble("w0", breaks), EngineDouble("w1", breaks)
    async with fleet(engine, other) as (client, _, parts):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert list(parts.scheduler.load.counts_by_name()) == []
        assert parts.metrics.requests.labels("/v1/chat/completions", 200, "stream_broken").value == 1
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert json.loads(events[-2])["error"]["code"] == "stream_broken"
    assert events[-1] == "[DONE]"
    assert len(engine.bodies) + len(other.bodies) == 1


async def test_a_client_that_leaves_aborts_the_engine():
    async def endless(engine, body):
        async def pieces():
            try:
                while True:
                    yield chunk(body["model"], "x")
                    await asyncio.sleep(0.005)
            finally:
                engine.aborted.set()

        return StreamingResponse(pieces(), media_type="text/event-stream")

    engine = EngineDouble("w0", endless)
    async with fleet(engine) as (client, _, parts):
        async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            assert await anext(answer.aiter_bytes())
        await asyncio.wait_for(engine.aborted.wait(), patience(5))
        await parts.discovery.changes.until(
            lambda: not list(parts.scheduler.load.counts_by_name()), timeout_s=patience(5)
        )
        assert list(parts.scheduler.load.counts_by_name()) == []


async def test_a_client_that_leaves_before_the_first_token_aborts_the_engine():
    async def silent(engine, body):
        async def pieces():
            try:
                await asyncio.Event().wait()
                yield b""
            finally:
                engine.aborted.set()

        engine.go_on.set()
        return StreamingResponse(pieces(), media_type="text/event-stream")

    engine = EngineDouble("w0", silent)
    engine.go_on.clear()
    async with fleet(engine) as (client, _, _):
        asking = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
        await asyncio.wait_for(engine.go_on.wait(), patience(5))
        asking.cancel()
        await asyncio.wait_for(engine.aborted.wait(), patience(5))


@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_engine_refusing_a_base_request_is_not_retried(status):
    async def refuse(engine, body):
        return JSONResponse({"error": {"message": "no", "code": status}}, status)

    engines = [EngineDouble(f"w{i}", refuse) for i in range(2)]
    async with fleet(*engines) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == status
    assert answer.json() == {"error": {"message": "no", "code": status}}
    assert sum(len(e.bodies) for e in engines) == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_only_answers_are_measured_and_show_that_an_engine_lives(streamed):
    statuses = [400, 200]

    async def answer(engine, body):
        status = statuses[len(engine.bodies) - 1]
        if status == 200 and streamed:
            events = iter([chunk(body["model"], "x"), b"data: [DONE]\n\n"])
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse({"id": "1", "model": body["model"], "choices": []}, status)

    async with fleet(EngineDouble("w0", answer)) as (client, _, parts):
        book = parts.scheduler.load.book("w0")
        for status, ended in zip(statuses, (0, 1), strict=True):
            assert (await client.post("/v1/chat/completions", json={**CHAT, "stream": streamed})).status_code == status
            await until(lambda: not parts.scheduler.load.total_in_flight)
            assert (book.ended, book.mean_request_s > 0, book.data_at > -inf) == (ended, ended == 1, ended == 1)
        assert not book.in_prefill
        assert not book.prefill_s


async def test_refusal_inside_a_200_stream_becomes_the_status():
    async def refuse(engine, body):
        event = b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n'
        return StreamingResponse(iter([event]), media_type="text/event-stream")

    async with fleet(EngineDouble("w0", refuse)) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "too long"


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'"x"', b"\xff\xfe", b'{"model": 3}', b'{"model": "tiny-qwen", "lora_id": []}']
)
async def test_a_malformed_body_is_a_400_and_reaches_no_engine(raw):
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        answer = await client.post("/v1/chat/completions", content=raw)
    assert error_of(answer) == (400, "invalid_request_body")
    assert engine.bodies == []


@pytest.mark.parametrize(
    "more", [*({name: 1} for name in REFUSED_FIELDS), *({"vllm_xargs": {name: 1}} for name in REFUSED_EXTRA_ARGS)]
)
async def test_a_field_that_steers_engine_or_index_is_refused(more):
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, **more})
    assert error_of(answer) == (400, "invalid_request_body")
    assert engine.bodies == []


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/chat/completions", {"n": 5}, "n"),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}, "n"),
        ("/v1/completions", {"prompt": ["a"] * 5}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 2, "n": "9" * 4300}, "n"),
        ("/v1/chat/completions/batch", {"messages": [CHAT["messages"]] * 5}, "messages"),
        ("/generate", {"text": "a", "sampling_params": {"n": 5}}, "n"),
    ],
)
async def test_too_many_sequences_are_400_with_the_limit(path, more, param):
    engine = EngineDouble("w0")
    async with fleet(engine, max_sequences=4) as (client, _, _):
        answer = await client.post(path, json={**CHAT, **more} if path != "/generate" else more)
        assert error_of(answer) == (400, "invalid_request_body")
        assert answer.json()["error"]["param"] == param
        assert "at most 4" in answer.json()["error"]["message"]
        assert engine.bodies == []
        assert (await client.post("/v1/chat/completions", json={**CHAT, "n": 4})).status_code == 200
        # A prefill each, whose work is known: these go on, to an engine that has no such route.
        answer = await client.post("/v1/embeddings", json={"model": BASE, "input": ["a"] * 5})
        assert answer.status_code == 404


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"messages": CHAT["messages"] * 500}),
        ("/v1/completions", {f"field{n}": n for n in range(2000)}),
        ("/generate", {"text": ["a"] * 2000}),
    ],
)
async def test_body_of_too_many_items_is_400_and_reaches_no_engine(path, more):
    engine = EngineDouble("w0")
    async with fleet(engine, max_body_items=1000) as (client, _, _):
        answer = await client.post(path, json={**CHAT, **more} if path != "/generate" else more)
        assert error_of(answer) == (400, "invalid_request_body")
        assert "more than 1000 texts, objects and lists" in answer.json()["error"]["message"]
        assert engine.bodies == []
        long = [{"role": "user", "content": '{"[' * 1000}]
        assert (await client.post("/v1/chat/completions", json={**CHAT, "messages": long})).status_code == 200


async def test_generate_of_too_many_items_is_400():
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        answer = await client.post("/generate", json={"text": ["a"] * 10_001})
    assert error_of(answer) == (400, "invalid_request_body")
    assert engine.bodies == []


@pytest.mark.parametrize(("more", "sequences"), [({}, 7), ({"use_beam_search": True}, 1)])
async def test_request_counts_as_many_sequences_as_its_engine_runs(more, sequences):
    engine = EngineDouble("w0")
    engine.go_on.clear()
    async with fleet(engine) as (client, _, parts):
        body = {**CHAT, "n": 7, "stream": True, **more}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
            assert parts.scheduler.load.replica_load("w0").in_flight == sequences
            engine.go_on.set()
        await until(lambda: not parts.scheduler.load.replica_load("w0").in_flight)


async def test_a_body_over_the_limit_is_a_413():
    async with fleet(EngineDouble("w0"), max_body_bytes=100) as (client, _, _):
        assert error_of(await client.post("/v1/chat/completions", json={**CHAT, "x": "y" * 200})) == (
            413,
            "body_too_large",
        )

        async def pieces():
            yield b"{" + b" " * 200

        assert error_of(await client.post("/v1/chat/completions", content=pieces())) == (413, "body_too_large")


async def test_an_unknown_model_and_an_empty_fleet_have_their_own_codes():
    async with fleet(EngineDouble("w0")) as (client, _, _):
        assert error_of(await client.post("/v1/chat/completions", json={**CHAT, "model": "nope"})) == (
            404,
            "model_not_found",
        )
        assert error_of(await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "nope"})) == (
            404,
            "model_not_found",
        )
        assert error_of(await client.get("/v1/models/nope")) == (404, "model_not_found")
        assert error_of(await client.get("/nope")) == (404, "not_found")
        assert (await client.get("/v1/chat/completions")).status_code == 405
    async with fleet() as (client, _, parts):
        await parts.discovery.changes.until(lambda: parts.discovery.has_catalog, timeout_s=patience(5))
        assert (await client.get("/ready")).status_code == 200
        answer = await client.post("/v1/chat/completions", json={"model": "m/v1", "messages": []})
        assert answer.status_code == 404


async def test_posted_decisions_go_to_an_engine_and_got_ones_to_the_router():
    engine = EngineDouble("w0")
    async with fleet(engine, control=with_sql("w0")) as (client, _, _):
        asked = {"model": "sql/v1", "input": "x", "questions": [{"type": "predicate", "instructions": "?"}]}
        answer = await client.post("/v1/decisions", json=asked)
        assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (404, "w0"), "this engine has none"
        (decision,) = (await client.get("/v1/decisions")).json()["data"]
        assert decision["worker_id"] == "w0"
        refused = await client.delete("/v1/decisions")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET or POST")
        assert (await client.get("/openapi.json")).json()["paths"]["/v1/decisions"].keys() == {"get", "post"}


@pytest.mark.parametrize("named", [{}, {"lora_id": "sql/v1"}])
async def test_request_goes_where_its_prompt_and_answer_fit_the_context(named):
    control = with_sql("short", "long")
    control.max_model_lens = {"short": 100, "long": 2048}
    async with fleet(EngineDouble("short"), EngineDouble("long"), control=control, policy="round_robin") as (
        client,
        _,
        _,
    ):

        async def went_to(prompt_tokens, **more):
            body = {"model": BASE, "prompt": list(range(prompt_tokens)), **named, **more}
            answers = [await client.post("/v1/completions", json=body) for _ in range(4)]
            return {answer.headers["x-lorafleet-worker"] for answer in answers}

        assert await went_to(99) == {"short", "long"}
        assert await went_to(100) == {"long"}
        assert await went_to(10, max_tokens=90) == {"short", "long"}
        assert await went_to(10, max_tokens=91) == {"long"}
        assert await went_to(10, max_completion_tokens=91, max_tokens=4) == {"long"}
        # What no engine takes is for one that takes most to refuse, and what is no number for any.
        for more in (5000, 10**400):
            assert await went_to(10, max_tokens=more) == {"long"}
        assert await went_to(3000) == {"long"}
        for odd in (-1, 0, 1.5, "91", None, [91], True):
            assert await went_to(10, max_tokens=odd) == {"short", "long"}, odd
        cards = (await client.get("/v1/models")).json()["data"]
        assert {card["id"]: card["max_model_len"] for card in cards} == {BASE: 2048, "sql/v1": 2048}


async def test_long_request_is_not_given_to_a_short_replica_meanwhile():
    control = AgentDouble(starting=frozenset({"long"}), max_model_lens={"short": 100, "long": 2048})
    wait_s = patience(0.1)
    engines = EngineDouble("short"), EngineDouble("long")
    async with fleet(*engines, control=control, cold_start_timeout_s=wait_s) as (client, _, _):
        body = {"model": BASE, "prompt": list(range(200))}
        refused = await client.post("/v1/completions", json=body)
        assert error_of(refused) == (503, "no_replica")
        why = "takes 100 tokens, and this may come to 201"
        assert f"was ready within {wait_s:g} s (long: starting)" in refused.json()["error"]["message"]
        told = (await client.post("/v1/route", json=body)).json()
        rejected = {item["worker_id"]: item["reason"] for item in told["rejected"]}
        assert (told["worker_id"], rejected) == (None, {"short": why, "long": "starting"})


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


async def test_a_cold_adapter_is_ensured_once_however_many_wait():
    async def load(control, lora_id):
        await asyncio.sleep(0.05)
        control.residents["w1"] = [lora_id]
        return JSONResponse(
            {"lora_id": lora_id, "digest": DIGEST, "state": "ready", "ready": ["w1"], "loading": [], "expected_s": 0}
        )

    engines, control = [EngineDouble("w0"), EngineDouble("w1")], with_sql()
    control.ensure = load
    async with fleet(*engines, control=control) as (client, _, _):
        asks = [client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"}) for _ in range(8)]
        answers = await asyncio.gather(*asks)
    assert [a.headers["x-lorafleet-worker"] for a in answers] == ["w1"] * 8
    assert control.ensured == ["sql/v1"]
    assert {b["model"] for b in engines[1].bodies} == {SQL}
    assert engines[0].bodies == []


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (409, "adapter_failed", (409, "adapter_failed")),
        (404, "adapter_not_found", (404, "model_not_found")),
    ],
)
async def test_what_the_orchestrator_says_of_a_cold_adapter_reaches_every_waiting_client(status, code, expected):
    async def refuse(control, lora_id):
        return JSONResponse({"error": {"message": "because", "code": code}}, status, {"retry-after": "7"})

    engine, control = EngineDouble("w0"), with_sql()
    control.ensure = refuse
    async with fleet(engine, control=control) as (client, _, _):
        asks = [client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"}) for _ in range(3)]
        for answer in await asyncio.gather(*asks):
            assert error_of(answer) == expected
            assert "because" in answer.json()["error"]["message"]
    assert engine.bodies == []


async def test_adapter_without_room_in_time_is_503_no_capacity():
    async def full(control, lora_id):
        answer = {"lora_id": lora_id, "digest": DIGEST, "state": "registered", "ready": [], "loading": []}
        return JSONResponse(answer | {"expected_s": None, "error": "no free slot on 1 workers"})

    control = with_sql()
    control.ensure = full
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=patience(0.1)) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
    assert error_of(answer) == (503, "no_capacity")
    assert "no free slot" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]


async def test_too_long_load_is_503_with_retry_after():
    async def slow(control, lora_id):
        return JSONResponse(
            {"lora_id": lora_id, "digest": DIGEST, "state": "loading", "ready": [], "loading": ["w0"], "expected_s": 3}
        )

    engine, control = EngineDouble("w0"), with_sql()
    control.ensure = slow
    async with fleet(engine, control=control, cold_start_timeout_s=patience(0.1)) as (client, _, parts):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
        assert error_of(answer) == (503, "adapter_loading")
        assert answer.headers["retry-after"] == "3"
        assert parts.cold_starts.loading == {}
    assert engine.bodies == []


async def test_while_the_orchestrator_is_away_the_adapters_home_loads_it():
    engines, control = [EngineDouble("w0"), EngineDouble("w1")], with_sql()

    async def unreachable(control, lora_id):
        return Response(status_code=500)

    control.ensure = unreachable
    async with fleet(*engines, control=control) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
    assert answer.status_code == 200
    assert [load["lora_id"] for load in control.loads] == ["sql/v1"]


async def test_requests_beyond_the_hold_are_shed():
    async def never(control, lora_id):
        await asyncio.Event().wait()

    control = with_sql()
    control.ensure = never
    async with fleet(EngineDouble("w0"), control=control, max_held_requests=1, cold_start_timeout_s=patience(0.3)) as (
        client,
        _,
        parts,
    ):
        ask = {**CHAT, "lora_id": "sql/v1"}
        held = asyncio.create_task(client.post("/v1/chat/completions", json=ask))
        await until(lambda: parts.cold_starts.held)
        assert error_of(await client.post("/v1/chat/completions", json=ask)) == (429, "saturated")
        assert error_of(await held) == (503, "adapter_loading")


async def test_keys_scopes_and_tenants(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n"
        f"- {{sha256: {hash_key('user')}, tenant: acme, scopes: [infer]}}\n"
        f"- {{sha256: {hash_key('other')}, tenant: rival, scopes: [infer]}}\n"
        f"- {{sha256: {hash_key('root')}, scopes: [admin]}}\n"
    )
    control = with_sql("w0")
    control.add_adapter("secret/v1", on=["w0"], tenants=("acme",))

    def bearer(key):
        return {"headers": {"authorization": f"Bearer {key}"}}

    async with fleet(EngineDouble("w0"), control=control, key_files=(keys,)) as (client, _, _):
        for headers in ({}, bearer("wrong"), {"headers": {"authorization": "Basic user"}}):
            for ask in (client.post("/v1/chat/completions", json=CHAT, **headers), client.get("/v1/models", **headers)):
                assert error_of(await ask) == (401, "invalid_api_key")
        assert (await client.post("/v1/chat/completions", json=CHAT, **bearer("user"))).status_code == 200
        secret = {**CHAT, "lora_id": "secret/v1"}
        assert (await client.post("/v1/chat/completions", json=secret, **bearer("user"))).status_code == 200
        refused = await client.post("/v1/chat/completions", json=secret, **bearer("other"))
        absent = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "absent/v1"}, **bearer("other"))
        assert error_of(refused) == error_of(absent) == (404, "model_not_found")
        assert refused.json()["error"]["message"].replace("secret", "absent") == absent.json()["error"]["message"]
        seen = {
            key: {c["id"] for c in (await client.get("/v1/models", **bearer(key))).json()["data"]}
            for key in ("user", "other", "root")
        }
        assert seen == {
            "user": {BASE, "sql/v1", "secret/v1"},
            "other": {BASE, "sql/v1"},
            "root": {BASE, "sql/v1", "secret/v1"},
        }
        assert error_of(await client.post("/v1/route", json=CHAT, **bearer("user"))) == (403, "scope_missing")
        assert error_of(await client.get("/v1/decisions", **bearer("user"))) == (403, "scope_missing")
        assert (await client.post("/v1/route", json=CHAT, **bearer("root"))).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_a_tenants_viewer_sees_its_own_decisions_and_no_cached_prompts_of_others(tmp_path):
    keys = tmp_path / "keys.yaml"
    rows = [f"- {{sha256: {hash_key(name)}, tenant: {name}, scopes: [infer, view]}}\n" for name in ("acme", "rival")]
    keys.write_text("keys:\n" + "".join(rows) + f"- {{sha256: {hash_key('viewer')}, scopes: [view]}}\n")
    control = with_sql("w0")
    control.add_adapter("secret/v1", on=["w0"], tenants=("acme",))

    def bearer(key):
        return {"headers": {"authorization": f"Bearer {key}"}}

    async with fleet(EngineDouble("w0"), control=control, key_files=(keys,)) as (client, _, _):
        for lora_id, key in (("secret/v1", "acme"), ("sql/v1", "acme"), ("sql/v1", "rival")):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": lora_id}, **bearer(key))
            assert answer.status_code == 200
        seen = {
            key: (await client.get("/v1/decisions", **bearer(key))).json()["data"]
            for key in ("acme", "rival", "viewer")
        }
        assert {key: [item["adapter"].partition("@")[0] for item in items] for key, items in seen.items()} == {
            "acme": ["sql/v1", "secret/v1"],
            "rival": ["sql/v1"],
            "viewer": ["sql/v1", "sql/v1", "secret/v1"],
        }
        shared, own = seen["acme"]
        assert own["scores"]
        assert not shared["scores"]
        assert own["record"] is None is shared["record"]
        assert all(item["scores"] and item["record"] for item in seen["viewer"])
        secret = {**CHAT, "lora_id": "secret/v1"}
        assert (await client.post("/v1/route", json=secret, **bearer("viewer"))).json()["scores"]
        assert (await client.post("/v1/route", json=secret, **bearer("acme"))).json()["scores"]
        assert not (await client.post("/v1/route", json=CHAT, **bearer("rival"))).json()["scores"]
        assert error_of(await client.post("/v1/route", json=secret, **bearer("rival"))) == (404, "model_not_found")


async def test_who_may_not_infer_is_refused_on_every_route(tmp_path):
    keys, engine = tmp_path / "keys.yaml", EngineDouble("w0")
    keys.write_text(f"keys:\n- {{sha256: {hash_key('agent')}, scopes: [register]}}\n")
    headers = {"authorization": "Bearer agent", "content-type": "application/json"}
    async with fleet(engine, key_files=(keys,)) as (client, _, _):
        for method, path in (*ROUTES, ("POST", "/generate"), ("GET", "/v1/models"), ("GET", f"/v1/models/{BASE}")):
            answer = await client.request(method, path.replace("{id}", "resp_1"), json=CHAT, headers=headers)
            assert error_of(answer) == (403, "scope_missing"), path
    assert engine.bodies == []


async def test_metrics_need_their_scope_and_health_needs_no_key(tmp_path):
    keys, control = tmp_path / "keys.yaml", AgentDouble()
    rows = "".join(f"- {{sha256: {hash_key(name)}, scopes: [{name}]}}\n" for name in ("infer", "metrics", "admin"))
    keys.write_text(f"keys:\n{rows}")
    async with fleet(control=control, key_files=(keys,)) as (client, _, _):

        async def status(path, key=None):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await client.get(path, headers=headers)).status_code

        found = {key: await status("/metrics", key) for key in (None, "guess", "infer", "metrics", "admin")}
        assert found == {None: 401, "guess": 401, "infer": 403, "metrics": 200, "admin": 200}
        for path in ("/v1/models", "/v1/decisions"):
            assert await status(path, "metrics") == 403, path
        assert await status("/health") == await status("/ready") == 200
    opened = {"key_files": (keys,), "metrics_need_key": False}
    for settings in ({}, opened):
        async with fleet(control=control, **settings) as (client, _, _):
            assert (await client.get("/metrics")).status_code == 200, settings


async def test_an_open_router_answers_no_page_whose_name_was_pointed_at_it():
    engine, strange = EngineDouble("w0"), {"host": "evil.example:8000"}
    async with fleet(engine) as (client, _, _):
        for path in ("/v1/models", "/metrics", "/ready"):
            assert error_of(await client.get(path, headers=strange)) == (421, "unknown_host")
        assert error_of(await client.post("/v1/chat/completions", json=CHAT, headers=strange)) == (421, "unknown_host")
        assert engine.bodies == []
        assert (await client.post("/v1/chat/completions", json=CHAT, headers={"host": "localhost"})).status_code == 200
    async with fleet(engine, allow_open=True) as (client, _, _):
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=strange)).status_code == 200


async def test_a_worker_that_is_still_starting_disturbs_nobody():
    engines, control = [EngineDouble("w0", ids=[1, 2, 3] * 20), EngineDouble("w1")], with_sql("w0")
    control.starting = frozenset({"w1"})
    async with fleet(*engines, control=control) as (client, _, _):
        for body in (CHAT, {**CHAT, "lora_id": "sql/v1"}):
            answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (200, "w0")
        explained = (await client.post("/v1/route", json=CHAT)).json()
        assert (explained["tokens_from"], explained["prompt_tokens"]) == ("remote", 60)
        assert explained["rejected"] == [{"worker_id": "w1", "reason": "starting"}]


async def test_route_explains_and_sends_nothing():
    engines = [EngineDouble("w0"), EngineDouble("w1")]
    async with fleet(*engines, control=with_sql("w1")) as (client, control, _):
        base = (await client.post("/v1/route", json={**CHAT, "prompt": None})).json()
        assert {s["worker_id"] for s in base["scores"]} == {"w0", "w1"}
        adapter = (await client.post("/v1/route", json={**CHAT, "lora_id": "sql/v1"})).json()
        assert adapter["worker_id"] == "w1"
        assert adapter["adapter"] == SQL
        assert adapter["rejected"] == [{"worker_id": "w0", "reason": "adapter not resident"}]
        control.residents.clear()
        control.tell()

        async def nowhere():
            told = (await client.post("/v1/route", json={**CHAT, "lora_id": "sql/v1"})).json()
            return None if told["worker_id"] else told

        cold = await until(nowhere)
        assert "wait for a load" in cold["note"]
        assert (await client.get("/v1/decisions")).json()["data"] == []
        await client.post("/v1/chat/completions", json=CHAT)
        kept = (await client.get("/v1/decisions", params={"adapter": "base"})).json()["data"]
        assert [d["worker_id"] for d in kept] == [("w0", "w1")[bool(engines[1].bodies)]]
    assert sum(len(e.bodies) for e in engines) == 1
    assert control.ensured == []


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


async def test_the_routers_own_request_id_is_the_clients_when_that_is_safe():
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        given = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "abc-1"})
        odd = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "a b"})
    assert given.headers["x-request-id"] == engine.headers[0]["x-request-id"] == "abc-1"
    assert odd.headers["x-request-id"] == engine.headers[1]["x-request-id"] != "a b"


def test_every_error_has_its_code_and_temporary_ones_retry_after():
    def tree(cls):
        return [cls, *(below for sub in cls.__subclasses__() for below in tree(sub))]

    # For a client an adapter that is being inspected is one without a replica.
    codes = [cls.code for cls in tree(RouterError) if cls is not AdapterInspecting]
    assert len(set(codes)) == len(codes)
    assert all(cls.status < 500 for cls in tree(RequestError))
    assert all(cls("x").retry_after_s for cls in tree(TemporarilyUnavailable))


async def test_the_connection_is_kept_and_answers_do_not_mix_under_concurrency():
    async def named(engine, body):
        await asyncio.sleep(0.001)
        return JSONResponse({"model": body["model"], "seen": body["messages"][0]["content"]})

    async with fleet(EngineDouble("w0", named), EngineDouble("w1", named)) as (client, _, parts):

        async def ask(n):
            body = {**CHAT, "messages": [{"role": "user", "content": str(n)}]}
            return (await client.post("/v1/chat/completions", json=body)).json()["seen"]

        assert await asyncio.gather(*(ask(n) for n in range(80))) == [str(n) for n in range(80)]
        assert list(parts.scheduler.load.counts_by_name()) == []
        assert isinstance(client, httpx.AsyncClient)


async def test_engine_without_events_keeps_its_prompts_and_corrects_the_estimate():
    async def with_usage(engine, body):
        usage = {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": engine.cached}}
        return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": usage})

    engines = [EngineDouble(f"w{i}", with_usage) for i in range(4)]
    for engine in engines:
        engine.cached = 0
    body = {"model": BASE, "prompt": list(range(1, 65))}
    async with fleet(*engines) as (client, _, parts):
        first = await client.post("/v1/completions", json=body)
        home = first.headers["x-lorafleet-worker"]
        assert parts.accuracy.state(home) == "estimate"
        parts.feeds.index(BASE, 16).sweep(1000)
        await until(lambda: not list(parts.scheduler.load.counts_by_name()))
        by_name = {engine.name: engine for engine in engines}
        by_name[home].cached = 48
        for _ in range(5):
            again = await client.post("/v1/completions", json=body)
            assert again.headers["x-lorafleet-worker"] == home
            assert again.headers["x-lorafleet-cached-tokens"] == "48"
        last, *_ = (await client.get("/v1/decisions")).json()["data"]
        assert (last["cached_tokens"], last["engine_cached_tokens"], last["trust"]) == (48, 48, "estimate")


@pytest.mark.parametrize(
    ("asked", "seen"),
    [({}, False), ({"stream_options": {"include_usage": True}}, True), ({"stream_options": {"x": 1}}, False)],
)
async def test_stream_usage_reaches_the_router_and_only_asking_clients(asked, seen):
    async def stream(engine, body):
        assert body["stream_options"]["include_usage"] is True
        usage = {"prompt_tokens": 64, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}
        last = {"id": "1", "model": body["model"], "choices": [], "usage": usage}
        text = json.dumps(last, separators=(",", ":")).encode()
        pieces = [
            chunk(body["model"], 'no "choices":[] here') + chunk(body["model"], "b"),
            b"data: " + text + b"\n\ndata: [DONE]\n\n",
        ]
        return StreamingResponse(iter(pieces), media_type="text/event-stream")

    async with fleet(EngineDouble("w0", stream)) as (client, _, parts):
        body = {"model": BASE, "prompt": list(range(64)), "stream": True, **asked}
        answer = await client.post("/v1/completions", json=body)
        assert answer.text.count("data: ") == 3 + seen
        assert ('"usage"' in answer.text) is seen
        assert answer.text.endswith("data: [DONE]\n\n")
        await until(lambda: parts.decisions[0].cached_tokens == 32)


async def test_each_replica_is_matched_at_its_own_block_size():
    ids = list(range(1, 101))
    control = AgentDouble(block_sizes={"w1": 32})
    async with fleet(EngineDouble("w0"), EngineDouble("w1"), control=control) as (client, _, parts):
        for worker, block_size, blocks in (("w0", 16, 2), ("w1", 32, 2)):
            chain = block_hashes(ids, block_size=block_size, root=root_hash(BASE))
            parts.feeds.index(BASE, block_size).add(worker, chain[:blocks])
        told = (await client.post("/v1/route", json={"model": BASE, "prompt": ids})).json()
        found = {score["worker_id"]: (score["depth_blocks"], score["cached_tokens"]) for score in told["scores"]}
        assert found == {"w0": (2, 32), "w1": (2, 64)}
        assert told["worker_id"] == "w1"
        # The same blocks under an adapter are nobody's.
        other = block_hashes(ids, block_size=16, root=root_hash(BASE, "sql/v1@abababababab"))
        assert parts.feeds.index(BASE, 16).match(other) == {}


@pytest.mark.parametrize(
    ("given", "header", "known_as"),
    [("mine", {}, "mine"), ("mine", {"x-request-id": "theirs"}, "theirs"), ("not plain", {}, None), (5, {}, None)],
)
async def test_request_id_in_the_body_counts_where_no_header_has_one(given, header, known_as):
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json=CHAT | {"request_id": given}, headers=header)
    told = answer.headers["x-request-id"]
    assert engine.headers[0]["x-request-id"] == told
    assert engine.bodies[0]["request_id"] == given
    assert told == known_as if known_as else len(told) == 32


@pytest.mark.parametrize("given", [None, "text/plain", "application/x-www-form-urlencoded", "application/vnd.api+json"])
async def test_body_without_a_json_content_type_is_400(given):
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        for path in ("/v1/chat/completions", "/generate"):
            headers = {} if given is None else {"content-type": given}
            raw = json.dumps(CHAT if path != "/generate" else {"text": "hi"})
            assert error_of(await client.post(path, content=raw, headers=headers)) == (400, "invalid_request_body")
    assert engine.bodies == []


async def test_byte_order_mark_is_accepted_and_not_sent_on():
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        raw = b"\xef\xbb\xbf" + json.dumps(CHAT).encode()
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        assert (await client.post("/v1/chat/completions", content=raw, headers=headers)).status_code == 200
    assert engine.bodies == [CHAT]


@pytest.mark.parametrize(
    ("text", "half", "at"),
    [
        (r"\ud83d", r"\ud83d", 0),
        (r"a \uDC00", r"\uDC00", 2),
        (r"\ud83d\u0041", r"\ud83d", 0),
        (r"\ud83d\ude00\ud83d", r"\ud83d", 12),
        (r"\ud83d\ude00\ude00", r"\ude00", 12),
        (r"\\ud83d \udc00", r"\udc00", 8),
    ],
)
async def test_half_a_character_is_named_with_its_place(text, half, at):
    async with fleet(EngineDouble("w0")) as (client, _, _):
        for path, name in ((CHATS, "user"), (COMPLETIONS, "prompt"), ("/generate", "text")):
            before = f'{{"model": "{BASE}", "{name}": "'
            answer = await client.post(path, content=f'{before}{text}"}}', headers=AS_JSON)
            assert error_of(answer) == (400, "invalid_request_body")
            assert f"{half} (byte {len(before) + at}) is half a character" in answer.json()["error"]["message"]


async def test_body_cut_between_characters_is_not_called_half_a_character():
    async with fleet(EngineDouble("w0")) as (client, _, _):
        answer = await client.post(CHATS, content=r'{"user": "\ud83d\ude00 \\ud83d"', headers=AS_JSON)
        assert error_of(answer) == (400, "invalid_request_body")
        assert "half" not in answer.json()["error"]["message"]


AS_JSON = {"content-type": "application/json"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "more", "cached_tokens"),
    [
        (COMPLETIONS, {}, 64),
        (COMPLETIONS, {"logprobs": 1}, 64),
        (COMPLETIONS, {"echo": True}, 64),
        (COMPLETIONS, {"echo": False, "logprobs": 0}, 64),
        (COMPLETIONS, {"echo": True, "logprobs": None}, 64),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, 0),
        (COMPLETIONS, {"prompt_logprobs": None}, 64),
        (COMPLETIONS, {"prompt_logprobs": 0}, 0),
        (COMPLETIONS, {"n": 2}, 64),
        (CHATS, {"logprobs": True, "top_logprobs": 2}, 64),
        (CHATS, {"echo": True}, 0),
        (CHATS, {"echo": True, "logprobs": True, "top_logprobs": 2}, 0),
        (CHATS, {"echo": True, "top_logprobs": None}, 0),
        (CHATS, {"prompt_logprobs": 1}, 0),
    ],
)
async def test_no_hit_is_expected_where_an_engine_computes_the_whole_prompt(path, more, cached_tokens):
    ids = list(range(1, 101))
    async with fleet(EngineDouble("w0", ids=ids)) as (client, _, parts):
        chain = block_hashes(ids, block_size=16, root=root_hash(BASE))
        parts.feeds.index(BASE, 16).add("w0", chain[:4])
        body = {**CHAT, "prompt": ids} | more
        answer = await client.post(path, json=body)
        assert int(answer.headers["x-lorafleet-cached-tokens"]) == cached_tokens


@pytest.mark.parametrize(
    ("more", "is_compared"),
    [({}, True), ({"n": 1}, True), ({"n": None}, True), ({"n": 2}, False), ({"use_beam_search": True}, False)],
)
async def test_cached_tokens_of_one_sequence_of_many_are_not_compared(more, is_compared):
    async def with_usage(engine, body):
        usage = {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 48}}
        return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": usage})

    async with fleet(EngineDouble("w0", with_usage)) as (client, _, parts):
        answer = await client.post("/v1/completions", json={"model": BASE, "prompt": list(range(1, 65)), **more})
        assert answer.status_code == 200
        await until(lambda: not list(parts.scheduler.load.counts_by_name()))
        assert parts.decisions[0].cached_tokens == (48 if is_compared else None)


async def test_the_length_of_an_answer_counts_for_its_tenant_and_its_adapter(monkeypatch):
    told = []
    monkeypatch.setattr(FairQueue, "charge_answer", lambda _, *what: told.append(what))
    monkeypatch.setattr(FairQueue, "__len__", lambda _: 1)  # somebody waits, as far as others look

    async def with_usage(engine, body):
        usage = {"prompt_tokens": 4, "completion_tokens": 100}
        return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": usage})

    control = AgentDouble()
    control.add_adapter("sql/v1", on=["w0"], priority=1)
    control.figures = Load(decode_tokens_per_s=50.0, running=2)
    async with fleet(EngineDouble("w0", with_usage), control=control) as (client, _, _):
        assert (await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})).status_code == 200
        await until(lambda: told)
    assert told == [("", "sql/v1", 2.0, pytest.approx(1.0))]


async def test_engine_with_missing_events_is_asked_for_full_reports():
    class WithEvents(AgentDouble):
        def metadata(self, worker):
            told = super().metadata(worker)
            transport = told.transport.model_copy(update={"kv_events": ("tcp://127.0.0.1:1",)})
            return told.model_copy(update={"transport": transport})

    engine = EngineDouble("w0")
    async with fleet(engine, control=WithEvents()) as (client, _, parts):
        await until(lambda: parts.feeds.may_repeat("w0"))
        await client.post("/v1/chat/completions", json=CHAT)
        parts.accuracy.record_lost_events("w0")
        await client.post("/v1/chat/completions", json=CHAT)
    assert [body.get("vllm_xargs") for body in engine.bodies] == [None, {"kv_cache_report_mode": "full"}]


async def test_response_cannot_be_continued_after_its_adapter_left_the_worker():
    control = AgentDouble()
    control.add_adapter("a/v1", on=("w0",))
    earlier = tagged_response_id("r", "", tenant=None, worker="w0")
    ask = {"model": "a/v1", "input": "more", "previous_response_id": earlier}
    async with fleet(EngineDouble("w0"), EngineDouble("w1"), control=control) as (client, _, parts):
        assert (await client.post("/v1/responses", json=ask)).headers["x-lorafleet-worker"] == "w0"
        control.residents = {"w1": ["a/v1"]}
        control.tell()
        await until(lambda: parts.discovery.fleet.replicas["w1"].residents)
        await until(lambda: not parts.discovery.fleet.replicas["w0"].residents)
        refused = await client.post("/v1/responses", json=ask)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "response_not_found")
        assert "send the whole conversation" in refused.json()["error"]["message"]
        assert not control.ensured


async def test_no_model_is_denied_before_any_worker_was_heard():
    engine = EngineDouble("w0")
    async with serving(engine.app) as url, fleet(control=AgentDouble(workers={"w0": url}, silent=True)) as got:
        client, control, parts = got
        await until(parts.discovery.is_synced)
        for ask in (client.post("/v1/chat/completions", json=CHAT), client.get(f"/v1/models/{BASE}")):
            refused = await ask
            assert error_of(refused) == (503, "no_replica")
            assert "retry-after" in refused.headers
        control.silent = False
        await until(lambda: parts.discovery.fleet.replicas)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "absent"})).status_code == 404
