"""The stages before the engine: resolve, tokenize, hash, match and decide, and the wait for a cold adapter."""

import asyncio

import pytest
from starlette.responses import JSONResponse, Response

from lorafleet.identity import block_hashes, root_hash
from router.protocols.stored_responses import tagged_response_id
from tests.patience import patience, until
from tests.router.doubles import (
    BASE,
    CHAT,
    DIGEST,
    AgentDouble,
    EngineDouble,
    error_of,
    fleet,
    with_sql,
)
from tests.router.sql_adapter import SQL
from tests.serving import serving


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
