"""A request through the router: failed engines are passed over, answers relayed, and clients that leave abort."""

import asyncio
import json
import socket
from random import Random

import httpx
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from lorafleet.http_server.listener import HttpListener
from tests.patience import patience, until
from tests.router.doubles import (
    BASE,
    CHAT,
    DIGEST,
    UNHEARD,
    EngineDouble,
    chunk,
    echo,
    error_of,
    fleet,
    with_sql,
)
from tests.router.sql_adapter import SQL


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
            tasks = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "RequestIntake.answer"]
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


async def test_refusal_inside_a_200_stream_becomes_the_status():
    async def refuse(engine, body):
        event = b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n'
        return StreamingResponse(iter([event]), media_type="text/event-stream")

    async with fleet(EngineDouble("w0", refuse)) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "too long"


async def test_the_routers_own_request_id_is_the_clients_when_that_is_safe():
    engine = EngineDouble("w0")
    async with fleet(engine) as (client, _, _):
        given = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "abc-1"})
        odd = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "a b"})
    assert given.headers["x-request-id"] == engine.headers[0]["x-request-id"] == "abc-1"
    assert odd.headers["x-request-id"] == engine.headers[1]["x-request-id"] != "a b"


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
