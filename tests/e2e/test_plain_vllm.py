"""A real vLLM without an agent: served by a router that has nothing else, and loaded into by an orchestrator."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from tests.engines import RunningEngine, start_engine
from tests.patience import patience, within
from tests.serving import client_of, serving

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BASE = "tiny-qwen"
LONG = "The quick brown fox jumps over the lazy dog, again and again and again. " * 20
DIGEST = "ef" * 32
KEY = "the-engines-own"
SHOWN = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("own", "late", "placed"):
        make_adapter(folder, name)
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory, shelf) -> Iterator[RunningEngine]:
    flags = ("--lora-modules", f"own={shelf / 'own'}", "--api-key", KEY)
    running = start_engine("vllm", make_model(tmp_path_factory.mktemp("model")), flags=flags)
    yield running
    running.stop()


async def until(parts, holds) -> None:
    assert await parts.discovery.changes.until(holds, timeout_s=patience(20))


async def ask(client: httpx.AsyncClient, model: str, prompt: str = LONG) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return await client.post("/v1/completions", json=body, timeout=patience(20))


async def test_a_router_alone_serves_what_a_real_vllm_lists_and_knows_what_it_has_cached(engine, shelf) -> None:
    app, parts = build_router(RouterSettings(engines=(f"e0={engine.url}",), engine_key=KEY, metadata_poll_s=0.1))
    async with serving(app, http=app.state.http) as url, client_of(url) as client:
        await until(parts, parts.discovery.is_synced)
        cards = {card["id"]: card.get("parent") for card in (await client.get("/v1/models")).json()["data"]}
        assert cards == {BASE: None, "own": BASE}
        replica = parts.discovery.fleet.replicas["e0"]
        assert (replica.block_size, replica.total_kv_blocks, replica.max_model_len) == (32, 256, 2048)

        own, base = await ask(client, "own"), await ask(client, BASE)
        assert (own.status_code, base.status_code) == (200, 200)
        assert own.json()["choices"][0]["text"] != base.json()["choices"][0]["text"]
        async with within(20):
            while parts.accuracy.state("e0") != "exact" or not parts.feeds.index(BASE, 32).block_counts().get("e0"):
                await asyncio.sleep(0.02)
        again = await ask(client, "own")
        told = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert told > 128
        assert int(again.headers["x-lorafleet-cached-tokens"]) == told

        assert (await ask(client, "late")).status_code == 404
        async with client_of(engine.url, headers=SHOWN) as direct:
            body = {"lora_name": "late", "lora_path": str(shelf / "late")}
            (await direct.post("/v1/load_lora_adapter", json=body, timeout=patience(20))).raise_for_status()
            await until(parts, lambda: "late" in parts.discovery.fleet.adapters)
            assert (await ask(client, "late")).json()["choices"][0]["text"] != own.json()["choices"][0]["text"]
            await until(parts, lambda: parts.discovery.fleet.replicas["e0"].max_loras == 2)
            (await direct.post("/v1/unload_lora_adapter", json={"lora_name": "late"})).raise_for_status()
            await until(parts, lambda: "late" not in parts.discovery.fleet.adapters)
        assert (await ask(client, "late")).status_code == 404


async def test_predictions_stay_exact_on_a_real_vllm_whose_prompts_are_salted(engine) -> None:
    settings = RouterSettings(
        engines=(f"e0={engine.url}",), engine_key=KEY, engine_salt="always", metadata_poll_s=0.1, send_prompt_ids="all"
    )
    app, parts = build_router(settings)
    async with serving(app, http=app.state.http) as url, client_of(url) as client:
        await until(parts, parts.discovery.is_synced)
        assert parts.discovery.fleet.replicas["e0"].is_salted
        async with within(20):
            while parts.accuracy.state("e0") != "exact":
                await asyncio.sleep(0.02)
        index = parts.feeds.index(BASE, 32)
        text = "Salted by somebody, and by us. " * 20
        # Another salt finds no block; each salt finds its own blocks.
        for model, salt in (("own", None), ("own", "a"), ("own", "b"), (BASE, "a"), (BASE, None)):
            for path, prompt in (
                ("/v1/completions", {"prompt": text}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ):
                body = (
                    {"model": model, "max_tokens": 1, "temperature": 0}
                    | prompt
                    | ({"cache_salt": salt} if salt else {})
                )
                for is_second in (False, True):
                    before = index.block_counts().get("e0", 0)
                    answer = await client.post(path, json=body, timeout=patience(20))
                    assert answer.status_code == 200, answer.text
                    details = answer.json()["usage"]["prompt_tokens_details"] or {}
                    told = details.get("cached_tokens") or 0
                    assert (model, salt, int(answer.headers["x-lorafleet-cached-tokens"])) == (model, salt, told)
                    assert (told > 128) == is_second
                    async with within(20):
                        while not is_second and index.block_counts().get("e0", 0) == before:
                            await asyncio.sleep(0.02)


async def test_an_orchestrator_loads_into_a_real_vllm_from_its_own_disk_and_unloads_again(
    engine, shelf, tmp_path
) -> None:
    settings = OrchestratorSettings(
        store=tmp_path / "store.db",
        settle_s=0.2,
        engines=(f"e0={engine.url}",),
        engine_key=KEY,
        engine_slots=4,
        engine_roots=(shelf,),
    )
    async with serving(build_orchestrator(settings).app) as url, client_of(url) as operator:
        spec = {"source": f"file://{shelf}/placed", "base_model": BASE, "digest": DIGEST}
        (await operator.post("/v1/adapters", json={"lora_id": "team/placed"} | spec)).raise_for_status()
        app, parts = build_router(RouterSettings(orchestrator_url=url, engine_key=KEY, metadata_poll_s=0.1))
        async with serving(app, http=app.state.http) as router, client_of(router) as client:
            await until(parts, lambda: "e0" in parts.discovery.fleet.replicas)
            placed, base = await ask(client, "team/placed"), await ask(client, BASE)
            assert placed.status_code == 200, placed.text
            assert placed.headers["x-lorafleet-adapter"] == f"team/placed@{DIGEST[:12]}"
            assert placed.json()["choices"][0]["text"] != base.json()["choices"][0]["text"]
            (await operator.delete("/v1/adapters/team/placed")).raise_for_status()
            name = f"team/placed@{DIGEST[:12]}"
            await until(parts, lambda: name not in parts.discovery.fleet.replicas["e0"].residents)
        models = httpx.get(f"{engine.url}/v1/models", headers=SHOWN, timeout=patience(10)).json()["data"]  # noqa: ASYNC210  (nobody else waits)
        assert {model["id"] for model in models} == {BASE, "own"}
