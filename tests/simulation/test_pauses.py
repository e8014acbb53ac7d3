"""Pauses of a fleet: an orchestrator, a sim engine that decodes slowly and two routers."""

import asyncio
import json

from tests.simulation.fleet import MODEL, adapter_of, until
from tests.simulation.programs import EngineFlags

SLOW = "slow/v1"
"""An adapter that takes twenty seconds to load, and is loaded when it is asked for."""
ENDLESS = 1900
"""An answer of so many tokens lasts half a minute, as long as any of these tests."""


async def paused_fleet(simulation):
    flags = EngineFlags(decode_tokens_per_s=50, load_s=20)
    fleet = await simulation.fleet(routers=2, engine=flags, tenants=("acme", "globex"))
    await fleet.register(SLOW, simulation.adapter(SLOW))
    return fleet


def ask(fleet, router, who, **more):
    """A request under way."""
    return asyncio.create_task(fleet.ask(more.pop("model", MODEL), router=router, headers=fleet.as_(who), **more))


async def pause(fleet, who, **params):
    answer = await fleet.routers[0].post("/pause", params=params, headers=fleet.as_(who))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def resume(fleet, who, *, router=0):
    return (await fleet.routers[router].post("/resume", headers=fleet.as_(who))).raise_for_status()


async def is_paused(fleet, router, who):
    return (await fleet.routers[router].get("/is_paused", headers=fleet.as_(who))).json()["is_paused"]


async def shows(fleet, router, name, count):
    """Wait until a router's metric has this value."""

    async def is_so():
        return await fleet.figure(router, f"lorafleet_router_{name}_requests") == count

    await until(is_so, what=f"{count} requests are {name}")


async def test_a_pause_holds_its_tenant_at_every_router_and_no_other_until_it_is_resumed(simulation):
    fleet = await paused_fleet(simulation)
    told = await pause(fleet, "acme", mode="keep")
    assert (told["status"], told["scope"], told["running"]) == ("paused", "tenant acme", 0)
    held = [ask(fleet, router, "acme") for router in (0, 1)]
    for router in (0, 1):
        assert await is_paused(fleet, router, "acme")
        assert not await is_paused(fleet, router, "globex")
        assert (await ask(fleet, router, "globex")).status_code == 200
        await shows(fleet, router, "paused", 1)
    await asyncio.sleep(30)
    assert not any(task.done() for task in held)
    assert (await resume(fleet, "acme", router=1)).json() == {"status": "resumed"}
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]


async def test_with_mode_keep_what_runs_goes_on_and_the_answer_says_how_much_it_is(simulation):
    fleet = await paused_fleet(simulation)
    async with fleet.streaming(MODEL, router=1, headers=fleet.as_("acme"), max_tokens=ENDLESS) as answer:
        told = await pause(fleet, "acme", mode="keep")
        assert told["running"] == 1
        for _ in range(3):
            assert json.loads(await answer.next_event())["choices"][0]["text"] is not None


async def test_a_request_that_waits_in_the_router_when_the_pause_begins_is_not_sent_before_its_end(simulation):
    fleet = await paused_fleet(simulation)
    asked = ask(fleet, 1, "acme", model=SLOW)
    await shows(fleet, 1, "held", 1)
    told = await pause(fleet, "acme", mode="wait", lease_s=300)
    assert told["running"] == 0, "it has not started"
    await shows(fleet, 1, "paused", 1)
    assert (await fleet.adapter(SLOW))["status"]["replicas"]["ready"] == 1
    await shows(fleet, 1, "in_flight", 0)
    await resume(fleet, "acme", router=1)
    answer = await asked
    assert (answer.status_code, adapter_of(answer)) == (200, SLOW)


async def test_with_mode_wait_nothing_of_the_tenant_runs_any_more_when_the_pause_is_answered(simulation):
    fleet = await paused_fleet(simulation)
    asked = [ask(fleet, router, "acme", max_tokens=500, ignore_eos=True) for router in (0, 1)]
    for router in (0, 1):
        await shows(fleet, router, "in_flight", 1)
    async with fleet.streaming(MODEL, headers=fleet.as_("globex"), max_tokens=ENDLESS):
        told = await pause(fleet, "acme", mode="wait")
        assert (told["mode"], told["running"]) == ("wait", 0)
        answers = await asyncio.gather(*asked)
        assert [len(answer.json()["choices"][0]["text"]) > 0 for answer in answers] == [True, True]
        assert {answer.json()["choices"][0]["finish_reason"] for answer in answers} == {"length"}


async def test_with_mode_abort_running_answers_end_with_finish_reason_abort_and_others_go_on(simulation):
    fleet = await paused_fleet(simulation)
    router, key, endless = fleet.routers[1], fleet.as_("acme"), {"max_tokens": ENDLESS, "ignore_eos": True}
    whole = ask(fleet, 1, "acme", **endless, n=2, temperature=1, logprobs=1, return_tokens_as_token_ids=True)
    talk = ask(fleet, 1, "acme", **endless, messages=[{"role": "user", "content": "hello"}])
    native = {"text": "hello", "sampling_params": {"max_new_tokens": ENDLESS, "ignore_eos": True}}
    sglang, stream = [
        asyncio.create_task(router.post("/generate", json=native | more, headers=key))
        for more in ({"return_logprob": True}, {"stream": True})
    ]
    await shows(fleet, 1, "in_flight", 4)
    async with (
        fleet.streaming(MODEL, router=1, headers=fleet.as_("globex"), max_tokens=ENDLESS) as others,
        fleet.streaming(MODEL, router=1, headers=key, max_tokens=ENDLESS) as running,
    ):
        told = await fleet.routers[0].post("/areal_pause_generation", json={}, headers=key)
        assert (told.status_code, told.json()["success"], told.json()["running"]) == (200, True, 0)
        last = json.loads([event for event in await running.rest() if event.startswith("{")][-1])
        assert last["choices"][0]["finish_reason"] == "abort"
        choices = (await whole).json()["choices"]
        assert [each["finish_reason"] for each in choices] == ["abort", "abort"]
        assert [(each["index"], each["text"]) for each in choices] == [(0, ""), (1, "")]
        assert choices[0]["logprobs"]["tokens"] == []
        assert (await talk).json()["choices"][0]["finish_reason"] == "abort"
        meta = (await sglang).json()["meta_info"]
        assert (meta["finish_reason"], meta["output_token_logprobs"]) == ({"type": "abort"}, [])
        lines = [line for line in (await stream).text.splitlines() if line.startswith("data: {")]
        assert json.loads(lines[-1].removeprefix("data: "))["meta_info"]["finish_reason"] == {"type": "abort"}
        assert await others.next_event()
    again = ask(fleet, 1, "acme")
    await shows(fleet, 1, "paused", 1)
    resumed = await router.post("/areal_continue_generation", json={}, headers=key)
    assert resumed.json()["success"] is True
    assert (await again).status_code == 200


async def test_a_pause_whose_owner_is_gone_ends_by_itself_and_repeating_the_call_renews_it(simulation):
    fleet = await paused_fleet(simulation)
    await pause(fleet, "acme", mode="keep", lease_s=30)
    listed = (await fleet.http.get("/v1/pauses")).json()["data"]
    assert [(item["scope"], item["routers_behind"]) for item in listed] == [("tenant acme", 0)]
    await asyncio.sleep(20)
    renewed = await pause(fleet, "acme", mode="keep", lease_s=90)
    assert renewed["expires_at"] > listed[0]["expires_at"]
    held = ask(fleet, 1, "acme")
    await asyncio.sleep(85)
    assert not held.done()
    async with asyncio.timeout(10):
        assert (await held).status_code == 200
    assert (await fleet.http.get("/v1/pauses")).json() == {"data": []}


async def test_only_an_admin_pauses_the_whole_fleet_and_a_tenant_ends_no_other_pause(simulation):
    fleet = await paused_fleet(simulation)
    router = fleet.routers[0]
    refused = await router.post("/pause", headers=fleet.as_("register"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "scope_missing")
    refused = await router.post("/pause", headers=fleet.as_("load"))
    assert refused.status_code == 403
    told = await pause(fleet, "admin", mode="keep")
    assert told["scope"] == "the whole fleet"
    held = ask(fleet, 1, "globex")
    await shows(fleet, 1, "paused", 1)
    assert (await router.post("/resume", headers=fleet.as_("globex"))).status_code == 200
    refused = await fleet.http.delete("/v1/pauses?tenant=acme", headers=fleet.as_("globex"))
    assert refused.status_code == 403
    await asyncio.sleep(5)
    assert not held.done()
    await resume(fleet, "admin")
    assert (await held).status_code == 200


async def test_sglangs_words_pause_and_continue_and_a_wrong_mode_is_refused_with_the_right_ones(simulation):
    fleet = await paused_fleet(simulation)
    router, key = fleet.routers[0], fleet.as_("acme")
    told = await router.post("/pause_generation", json={"mode": "in_place"}, headers=key)
    assert (told.json()["status"], told.json()["mode"]) == ("ok", "keep")
    assert (await router.post("/continue_generation", json={}, headers=key)).json()["status"] == "ok"
    assert (await ask(fleet, 0, "acme")).status_code == 200
    wrong = await router.post("/pause_generation", json={"mode": "stop"}, headers=key)
    assert (wrong.status_code, "retract" in wrong.json()["error"]["message"]) == (400, True)
    assert (await router.post("/pause?mode=stop", headers=key)).status_code == 400


async def test_what_trainers_ask_of_one_engine_is_answered_for_the_fleet(simulation):
    fleet = await paused_fleet(simulation)
    router, key = fleet.routers[0], fleet.as_("acme")
    config = (await router.get("/server_info?config_format=json", headers=key)).json()["vllm_config"]
    report = (await fleet.agents["w0"].get("/metadata")).json()
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


async def test_a_pause_whose_owner_and_router_are_killed_ends_with_its_lease_and_the_fleet_goes_on(simulation):
    fleet = await paused_fleet(simulation)
    assert (await fleet.routers[0].post("/pause", params={"mode": "keep", "lease_s": 60})).is_success
    for router in ("router0", "router1"):
        fleet.kill(router, away_s=3)
    await until(fleet.is_whole, what="their successors are ready")
    loop = asyncio.get_running_loop()
    began = loop.time()
    answers = [(await ask(fleet, router, "acme")).status_code for router in (0, 1, 0, 1)]
    assert answers == [200] * 4
    assert loop.time() - began > 40, "the first one waits for the end of the lease"
    assert (await fleet.http.get("/v1/pauses")).json()["data"] == []
