"""Pauses of a fleet: an orchestrator, a sim engine that decodes slowly and two routers, all on loopback."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import SmallFleet, small_fleet
from tests.patience import patience, until, within

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.fleet]

MODEL = "tiny-qwen"
# An adapter that takes some seconds to load, and is loaded when it is asked for.
SLOW = "slow/v1"
DECODE_TOKENS_PER_S = 50
# An answer of so many tokens lasts as long as any test.
ENDLESS = 1900


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SmallFleet]:
    folder: Path = tmp_path_factory.mktemp("pauses")
    make_adapter(folder / "shelf", SLOW, rank=8)
    model = make_model(folder / "model")
    engine = ("--sim-decode-tokens-per-s", str(DECODE_TOKENS_PER_S), "--sim-load-s", str(patience(2)))
    async with small_fleet(
        folder / "fleet", model, shelf=folder / "shelf", routers=2, engine=engine, tenants=("acme", "globex")
    ) as fleet:
        spec = {"lora_id": SLOW, "source": f"file://{folder}/shelf/{SLOW}"}
        (await fleet.http.post("/v1/adapters", json=spec)).raise_for_status()
        yield fleet


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_paused(fleet: SmallFleet) -> AsyncIterator[None]:
    yield
    for tenant in ("?tenant=", "?tenant=acme", "?tenant=globex"):
        (await fleet.http.delete(f"/v1/pauses{tenant}")).raise_for_status()
    for router in fleet.routers:
        await until(lambda router=router: _is_paused(fleet, router, "acme", False), what="no pause is left")


def _as(fleet: SmallFleet, who: str) -> dict[str, str]:
    return {"authorization": f"Bearer {fleet.keys[who]}"}


def _ask(fleet: SmallFleet, router: httpx.AsyncClient, who: str, **more) -> "asyncio.Task[httpx.Response]":
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2, **more}
    return asyncio.create_task(router.post("/v1/completions", json=body, headers=_as(fleet, who)))


async def _pause(fleet: SmallFleet, who: str, **params) -> dict:
    answer = await fleet.routers[0].post("/pause", params=params, headers=_as(fleet, who))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def _is_paused(fleet: SmallFleet, router: httpx.AsyncClient, who: str, wanted: bool = True) -> bool:
    found = (await router.get("/is_paused", headers=_as(fleet, who))).json()
    return found["is_paused"] is wanted


async def _figure(router: httpx.AsyncClient, name: str) -> float:
    text = (await router.get("/metrics")).text
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])


async def _holds(router: httpx.AsyncClient, count: int) -> None:
    await until(lambda: _is(router, "lorafleet_router_paused_requests", count), what=f"{count} requests are held")


async def _is(router: httpx.AsyncClient, name: str, value: float) -> bool:
    return await _figure(router, name) == value


@contextlib.asynccontextmanager
async def _running(fleet: SmallFleet, router: httpx.AsyncClient, who: str) -> AsyncIterator[AsyncIterator[dict]]:
    """An endless stream that has begun: its further events."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": ENDLESS, "stream": True, "ignore_eos": True}
    async with router.stream("POST", "/v1/completions", json=body, headers=_as(fleet, who)) as answer:
        events = _events(answer)
        await anext(events)
        yield events


async def _events(answer: httpx.Response) -> AsyncIterator[dict]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def test_a_pause_holds_its_tenant_at_every_router_and_no_other_until_it_is_resumed(fleet):
    told = await _pause(fleet, "acme", mode="keep")
    assert (told["status"], told["scope"], told["running"]) == ("paused", "tenant acme", 0)
    held = [_ask(fleet, router, "acme") for router in fleet.routers]
    for router in fleet.routers:
        assert await _is_paused(fleet, router, "acme")
        assert await _is_paused(fleet, router, "globex", False)
        assert (await _ask(fleet, router, "globex")).status_code == 200
        await _holds(router, 1)
    assert not any(task.done() for task in held)
    resumed = await fleet.routers[1].post("/resume", headers=_as(fleet, "acme"))
    assert (resumed.status_code, resumed.json()) == (200, {"status": "resumed"})
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]


async def test_with_mode_keep_what_runs_goes_on_and_the_answer_says_how_much_it_is(fleet):
    async with _running(fleet, fleet.routers[1], "acme") as events:
        told = await _pause(fleet, "acme", mode="keep")
        assert told["running"] == 1
        for _ in range(3):
            assert (await anext(events))["choices"][0]["text"] is not None


async def test_a_request_that_waits_in_the_router_when_the_pause_begins_is_not_sent_before_its_end(fleet):
    router = fleet.routers[1]
    asked = _ask(fleet, router, "acme", model=SLOW)
    await until(lambda: _is(router, "lorafleet_router_held_requests", 1), what="it waits for its adapter")
    told = await _pause(fleet, "acme", mode="wait")
    assert told["running"] == 0, "it has not started"
    await _holds(router, 1)
    assert (await fleet.adapter(SLOW))["status"]["replicas"]["ready"] == 1
    assert await _figure(router, "lorafleet_router_in_flight_requests") == 0
    (await router.post("/resume", headers=_as(fleet, "acme"))).raise_for_status()
    answer = await asked
    assert (answer.status_code, answer.headers["x-lorafleet-adapter"].split("@")[0]) == (200, SLOW)


async def test_with_mode_wait_nothing_of_the_tenant_runs_any_more_when_the_pause_is_answered(fleet):
    # They are to run on until both have been seen to run, and the pause has been asked for.
    tokens = min(ENDLESS, int(DECODE_TOKENS_PER_S * patience(2)))
    asked = [_ask(fleet, router, "acme", max_tokens=tokens, ignore_eos=True) for router in fleet.routers]

    async def both_run() -> bool:
        figures = [_figure(router, "lorafleet_router_in_flight_requests") for router in fleet.routers]
        return await asyncio.gather(*figures) == [1, 1]

    await until(both_run, what="both run")
    async with _running(fleet, fleet.routers[0], "globex"):
        told = await _pause(fleet, "acme", mode="wait")
        assert (told["mode"], told["running"]) == ("wait", 0)
        answers = await asyncio.gather(*asked)
        assert [len(answer.json()["choices"][0]["text"]) > 0 for answer in answers] == [True, True]
        assert {answer.json()["choices"][0]["finish_reason"] for answer in answers} == {"length"}


async def test_with_mode_abort_running_answers_end_with_finish_reason_abort_and_others_go_on(fleet):
    router = fleet.routers[1]
    whole = _ask(
        fleet, router, "acme", max_tokens=ENDLESS, ignore_eos=True, n=2, logprobs=1, return_tokens_as_token_ids=True
    )
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": ENDLESS}
    talk = asyncio.create_task(
        router.post("/v1/chat/completions", json=chat | {"ignore_eos": True}, headers=_as(fleet, "acme"))
    )
    native = {"text": "hello", "sampling_params": {"max_new_tokens": ENDLESS, "ignore_eos": True}}
    sglang, stream = [
        asyncio.create_task(router.post("/generate", json=native | more, headers=_as(fleet, "acme")))
        for more in ({"return_logprob": True}, {"stream": True})
    ]
    await until(lambda: _is(router, "lorafleet_router_in_flight_requests", 4), what="four run")
    async with _running(fleet, router, "globex") as others, _running(fleet, router, "acme") as events:
        told = await fleet.routers[0].post("/areal_pause_generation", json={}, headers=_as(fleet, "acme"))
        assert (told.status_code, told.json()["success"], told.json()["running"]) == (200, True, 0)
        last = [event async for event in events][-1]
        assert last["choices"][0]["finish_reason"] == "abort"
        choices = (await whole).json()["choices"]
        assert [(each["index"], each["text"], each["finish_reason"]) for each in choices] == [
            (0, "", "abort"), (1, "", "abort"),
        ]  # fmt: skip
        assert choices[0]["logprobs"]["tokens"] == []
        assert (await talk).json()["choices"][0]["finish_reason"] == "abort"
        meta = (await sglang).json()["meta_info"]
        assert (meta["finish_reason"], meta["output_token_logprobs"]) == ({"type": "abort"}, [])
        lines = [line for line in (await stream).text.splitlines() if line.startswith("data: {")]
        assert json.loads(lines[-1].removeprefix("data: "))["meta_info"]["finish_reason"] == {"type": "abort"}
        await anext(others)
    again = _ask(fleet, router, "acme")
    await _holds(router, 1)
    resumed = await router.post("/areal_continue_generation", json={}, headers=_as(fleet, "acme"))
    assert resumed.json()["success"] is True
    assert (await again).status_code == 200


async def test_a_pause_whose_owner_is_gone_ends_by_itself_and_repeating_the_call_renews_it(fleet):
    await _pause(fleet, "acme", mode="keep", lease_s=30)
    listed = (await fleet.http.get("/v1/pauses")).json()["data"]
    assert [(item["scope"], item["routers_behind"]) for item in listed] == [("tenant acme", 0)]
    renewed = await _pause(fleet, "acme", mode="keep", lease_s=90)
    assert renewed["expires_at"] > listed[0]["expires_at"]
    (await fleet.routers[0].post("/resume", headers=_as(fleet, "acme"))).raise_for_status()

    await _pause(fleet, "acme", mode="keep", lease_s=0.3)
    async with within(10):
        assert (await _ask(fleet, fleet.routers[1], "acme")).status_code == 200
    assert (await fleet.http.get("/v1/pauses")).json() == {"data": []}


async def test_only_an_admin_pauses_the_whole_fleet_and_a_tenant_ends_no_other_pause(fleet):
    router = fleet.routers[0]
    refused = await router.post("/pause", headers=_as(fleet, "register"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "scope_missing")
    refused = await router.post("/pause", headers=_as(fleet, "load"))
    assert refused.status_code == 403
    told = await _pause(fleet, "admin", mode="keep")
    assert told["scope"] == "the whole fleet"
    held = _ask(fleet, fleet.routers[1], "globex")
    await _holds(fleet.routers[1], 1)
    assert (await router.post("/resume", headers=_as(fleet, "globex"))).status_code == 200
    refused = await fleet.http.delete("/v1/pauses?tenant=acme", headers=_as(fleet, "globex"))
    assert refused.status_code == 403
    assert not held.done()
    (await router.post("/resume", headers=_as(fleet, "admin"))).raise_for_status()
    assert (await held).status_code == 200


async def test_the_command_line_lists_pauses_and_ends_one(fleet):
    await _pause(fleet, "acme", mode="keep")
    status, output = await fleet.cli("pauses", "list")
    assert (status, "tenant acme" in output, "keep" in output) == (0, True, True), output
    status, output = await fleet.cli("pauses", "end", "--tenant", "acme")
    assert (status, "ended: tenant acme" in output) == (0, True), output
    status, output = await fleet.cli("pauses", "end", "--tenant", "acme")
    assert (status, "nothing was paused" in output) == (0, True), output


async def test_sglangs_words_pause_and_continue_and_a_wrong_mode_is_refused_with_the_right_ones(fleet):
    router, key = fleet.routers[0], _as(fleet, "acme")
    told = await router.post("/pause_generation", json={"mode": "in_place"}, headers=key)
    assert (told.json()["status"], told.json()["mode"]) == ("ok", "keep")
    assert (await router.post("/continue_generation", json={}, headers=key)).json()["status"] == "ok"
    assert (await _ask(fleet, router, "acme")).status_code == 200
    wrong = await router.post("/pause_generation", json={"mode": "stop"}, headers=key)
    assert (wrong.status_code, "retract" in wrong.json()["error"]["message"]) == (400, True)
    assert (await router.post("/pause?mode=stop", headers=key)).status_code == 400


async def test_what_trainers_ask_of_one_engine_is_answered_for_the_fleet(fleet):
    router, key = fleet.routers[0], _as(fleet, "acme")
    config = (await router.get("/server_info?config_format=json", headers=key)).json()["vllm_config"]
    (report,) = [(await agent.get("/metadata")).json() for agent in fleet.agents.values()]
    assert config["lora_config"]["max_lora_rank"] == report["lora"]["max_lora_rank"]
    assert config["lora_config"]["max_loras"] == report["lora"]["max_cpu_loras"]
    assert config["parallel_config"] == {"data_parallel_size": 1}
    assert config["weight_transfer_config"] is None
    assert "dtype" not in config["model_config"]
    first = (await router.get("/v1/models", headers=key)).json()["data"][0]
    assert (first["id"], first["max_model_len"]) == (MODEL, config["model_config"]["max_model_len"])
    assert (await router.get("/get_server_info", headers=key)).json()["max_lora_rank"] > 0
    assert (await router.get("/model_info", headers=key)).json()["model_path"] == MODEL
    assert (await router.get("/is_sleeping", headers=key)).json() == {"is_sleeping": False}
    assert (await router.post("/reset_prefix_cache", json={}, headers=key)).json()["success"] is True
    for path in ("/sleep", "/init_weight_transfer_engine", "/collective_rpc", "/art/capabilities"):
        answer = await router.post(path, json={}, headers=key)
        assert answer.status_code == 404, path
    assert "/v1/load_lora_adapter" in (await router.post("/update_weights", headers=key)).json()["error"]["message"]
