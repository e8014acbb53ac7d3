"""What each request counts in the metrics of its adapter: outcome, latency and cached tokens."""

import asyncio
import contextlib

import httpx
import pytest
from starlette.responses import JSONResponse, StreamingResponse

from tests.patience import patience, until
from tests.router.doubles import CHAT, DIGEST, AgentDouble, EngineDouble, chunk, echo, error_of, fleet, sample_value

USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


async def by_kind(engine: EngineDouble, body: dict):
    """The answer that the request's `user` names."""
    kind = body.get("user")
    if kind == "refused":
        return JSONResponse({"error": {"message": "too long"}}, 400)
    if kind == "failed":
        return JSONResponse({"error": {"message": "out of memory"}}, 500)
    if kind == "broken":

        async def pieces():
            yield chunk(body["model"], "one")
            await engine.go_on.wait()
            raise ConnectionResetError

        return StreamingResponse(pieces(), media_type="text/event-stream")
    if kind == "erring":
        error = b'data: {"error": {"message": "out of memory", "code": 500}}\n\ndata: [DONE]\n\n'
        return StreamingResponse(iter([chunk(body["model"], "one"), error]), media_type="text/event-stream")
    if kind == "slow":
        await engine.go_on.wait()
    if kind == "used" or "messages" not in body:
        return JSONResponse({"id": "1", "model": body["model"], "choices": [{"text": "hi"}], "usage": USAGE})
    return await echo(engine, body)


class Asker:
    """Sends requests for an adapter, and reads what its metrics have counted since the last time."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.seen: dict[str, float] = {}

    async def post(self, path="/v1/chat/completions", **fields) -> httpx.Response:
        return await self.client.post(path, json=CHAT | {"lora_id": "sql/v1"} | fields)

    async def counted(self, lora_id="sql/v1") -> dict[str, float]:
        """What has grown since the last call; without what has not."""
        text = (await self.client.get("/metrics")).text
        found = {
            outcome: sample_value(text, "lora_routing_decisions_total", lora_id=lora_id, outcome=outcome) or 0.0
            for outcome in ("success", "not_loaded", "error")
        }
        found["whole"] = sample_value(text, "lora_request_latency_seconds_count", lora_id=lora_id) or 0.0
        grown = {name: value - self.seen.get(name, 0.0) for name, value in found.items()}
        self.seen = found
        return {name: value for name, value in grown.items() if value}


@contextlib.asynccontextmanager
async def asking(control: AgentDouble, **settings):
    engine = EngineDouble("w0", by_kind)
    async with fleet(engine, control=control, max_tries=1, **settings) as (client, _, parts):
        yield Asker(client), engine, parts


def loaded() -> AgentDouble:
    control = AgentDouble()
    control.add_adapter("sql/v1", on=["w0"])
    control.add_adapter("bad/v1", error="rank 512 is more than 64", digest=None)
    return control


async def test_each_request_counts_once_by_what_became_of_it():
    async with asking(loaded()) as (asker, engine, _):
        assert (await asker.post()).status_code == 200
        assert await asker.counted() == {"success": 1, "whole": 1}
        assert (await asker.post(stream=True)).status_code == 200
        assert await asker.counted() == {"success": 1, "whole": 1}
        assert (await asker.post(user="refused")).status_code == 400
        assert await asker.counted() == {"success": 1}, "it was routed: what was wrong is the client's"
        assert (await asker.post(user="failed")).status_code == 500
        assert await asker.counted() == {"error": 1}
        assert "stream_broken" in (await asker.post(user="broken", stream=True)).text
        assert await asker.counted() == {"error": 1}
        assert "out of memory" in (await asker.post(user="erring", stream=True)).text
        assert await asker.counted() == {"error": 1}
        answer = await asker.client.post("/generate", json={"text": ["a", "b"], "lora_path": "sql/v1"})
        assert answer.status_code == 200, answer.text
        assert await asker.counted() == {"success": 2, "whole": 2}
        assert error_of(await asker.post(lora_id="bad/v1")) == (409, "adapter_failed")
        assert await asker.counted() == {}
        assert await Asker(asker.client).counted("bad/v1") == {"error": 1}
        # What is about no adapter, or wrong in itself.
        for wrong, status in (
            ({"lora_id": None}, 200),
            ({"lora_id": "no/v1"}, 404),
            ({"temperature": "x" * 9, "n": 99999}, 400),
        ):
            assert (await asker.post(**wrong)).status_code == status
        assert await asker.counted() == {}
        engine.go_on.clear()
        async with asker.client.stream(
            "POST", "/v1/chat/completions", json=CHAT | {"lora_id": "sql/v1", "stream": True}
        ) as answer:
            await anext(answer.aiter_bytes())
        assert await until(asker.counted) == {"success": 1}, "a client that left in the middle was routed"
        sent = len(engine.bodies)
        post = asyncio.create_task(asker.post(user="slow"))
        await until(lambda: len(engine.bodies) > sent)
        post.cancel()
        await asyncio.wait([post])
        assert await until(asker.counted) == {"success": 1}, "and so was one that left before its answer began"
        engine.go_on.set()


async def test_tokens_that_engines_report_as_cached_are_the_hit_rate():
    async with asking(loaded()) as (asker, _, _):
        for _ in range(2):
            assert (await asker.post(user="used")).status_code == 200
        text = (await asker.client.get("/metrics")).text
        assert sample_value(text, "lora_prompt_tokens_total", lora_id="sql/v1") == 20
        assert sample_value(text, "lora_cached_tokens_total", lora_id="sql/v1") == 8
        assert sample_value(text, "lora_cache_hit_rate", lora_id="sql/v1") == pytest.approx(0.4)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_request_that_ends_before_its_adapter_is_loaded_is_not_loaded(leaves):
    async def slow(control, lora_id):
        answer = {"lora_id": lora_id, "digest": DIGEST, "state": "loading", "ready": [], "loading": ["w0"]}
        return JSONResponse(answer | {"expected_s": 3})

    control = AgentDouble()
    control.add_adapter("sql/v1")
    control.ensure = slow
    timeout_s = patience(60) if leaves else 0.1
    async with asking(control, cold_start_timeout_s=timeout_s) as (asker, _, parts):
        post = asyncio.create_task(asker.post())
        if leaves:
            await until(lambda: parts.cold_starts.held)
            post.cancel()
            await asyncio.wait([post])
            await until(lambda: not parts.cold_starts.held)
        else:
            assert error_of(await post) == (503, "adapter_loading")
            headers = {"x-lorafleet-timeout-s": "0.05"}
            parts.cold_starts.timeout_s = patience(60)
            answer = await asker.client.post("/v1/chat/completions", json=CHAT | {"lora_id": "sql/v1"}, headers=headers)
            assert error_of(answer) == (504, "deadline_exceeded")
        assert await until(asker.counted) == {"not_loaded": 1 if leaves else 2}
