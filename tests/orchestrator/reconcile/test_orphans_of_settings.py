"""What workers' settings name is registered without a call, and stays as its operators want it."""

import pytest

from tests.orchestrator.doubles import digest_of

DAY_S = 86_400.0


async def look(service, times=3):
    """Run so many passes that new lists are read and looked at."""
    for _ in range(times):
        await service.turn()


async def names(service):
    return [item["lora_id"] for item in (await service.catalog())["adapters"]]


async def listed(service):
    return {item["lora_id"]: item for item in (await service.http.get("/v1/orphans")).json()["data"]}


async def history(service, lora_id):
    found = (await service.http.get("/v1/history", params={"subject": lora_id})).json()["data"]
    return [entry["kind"] for entry in found if entry["kind"].startswith("adapter_")]


async def set_policy(service, **changes):
    assert (await service.http.patch("/v1/policy", json=changes)).is_success


async def test_what_settings_name_is_registered_for_everyone_loaded_or_not_and_a_strangers_load_is_not(service):
    agent = await service.worker("w0")
    agent.put("sql/v1", "file:///sql")["is_configured"] = True
    agent.configure("sql/v1", "file:///sql")
    agent.configure("legal/v2", "/adapters/legal/v2")
    agent.put("loaded-by-a-router/v1", "file:///other")
    agent.put_foreign("script", "file:///script")
    await look(service)
    assert await names(service) == ["legal/v2", "sql/v1"]
    assert (await listed(service)).keys() == {"loaded-by-a-router/v1", "script"}
    assert (await service.adapter("sql/v1"))["status"]["state"] == "ready"
    found = (await service.adapter("legal/v2"))["spec"]
    assert (found["source"], found["base_model"], found["tenants"]) == ("/adapters/legal/v2", "tiny-qwen", None)
    assert (await service.adapter("legal/v2"))["status"]["card"]["rank"] == 8
    assert await history(service, "legal/v2") == ["adapter_adopted"]
    await service.ensure("legal/v2")
    await service.settle()
    assert (await service.adapter("legal/v2"))["status"]["state"] == "ready", "loaded with its first request"


@pytest.mark.parametrize(("rule", "wanted"), [("none", []), ("configured", ["own/v1"]), ("all", ["mine", "own/v1"])])
async def test_the_policy_says_which_adapters_are_registered_without_a_call(service, rule, wanted):
    await set_policy(service, adopt=rule)
    agent = await service.worker("w0")
    agent.configure("own/v1", "/adapters/own/v1")
    agent.put("mine", "file:///mine")
    await look(service)
    assert await names(service) == wanted
    if rule == "all":
        assert (await service.adapter("mine"))["spec"]["tenants"] == [], "nobody knows whose it is"
    if rule == "none":
        assert (await listed(service))["own/v1"]["is_configured"] is True
        assert (await service.http.post("/v1/orphans/adopt", json={"lora_ids": ["own/v1"]})).is_success
        assert await names(service) == ["own/v1"]


async def test_an_unknown_rule_is_refused_with_those_that_there_are(service):
    refused = await service.http.patch("/v1/policy", json={"adopt": "some"})
    assert refused.status_code in (400, 422)
    assert "configured" in refused.json()["error"]["message"]


async def test_other_bytes_under_a_registered_name_are_shown_and_replace_nothing(service):
    await service.register("sql/v1", digest="f" * 64)
    agent = await service.worker("w0")
    agent.configure("sql/v1", "/adapters/sql/v1")
    await look(service)
    assert (await service.adapter("sql/v1"))["spec"]["digest"] == "f" * 64
    shown = (await listed(service))["sql/v1"]
    assert "registered with digest" in shown["problem"]
    metrics = (await service.http.get("/metrics")).text
    assert 'lorafleet_orchestrator_orphans{origin="settings"} 1.0' in metrics


async def test_two_workers_with_different_bytes_under_one_name_are_both_shown_and_neither_is_chosen(service):
    one, two = await service.worker("w0"), await service.worker("w1")
    one.configure("sql/v1", "/one")
    two.configure("sql/v1", "/two")
    await look(service)
    assert await names(service) == []
    problems = {item["problem"] for item in (await service.http.get("/v1/orphans")).json()["data"]}
    assert problems == {"workers hold 2 digests of 'sql/v1'; register the one that is meant"}
    await service.register("sql/v1", source="/one", digest=digest_of("/one"))
    await look(service)
    (other,) = (await service.http.get("/v1/orphans")).json()["data"]
    assert other["workers"] == ["w1"]


async def test_a_name_that_an_alias_has_is_shown_and_not_given(service):
    await service.register("other/v1")
    await service.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "other/v1"}]})
    agent = await service.worker("w0")
    agent.configure("sql", "/adapters/sql")
    await look(service)
    assert "an alias" in (await listed(service))["sql"]["problem"]


async def test_a_faulty_adapter_is_failed_with_its_cause_and_ready_once_it_is_mended(service):
    agent = await service.worker("w0")
    agent.configure("sql/v1", "/adapters/sql/v1", digest="", state="failed", error="weights_corrupt: cut off")
    agent.refuse["sql/v1"] = "weights_corrupt"
    await look(service, times=5)
    status = (await service.adapter("sql/v1"))["status"]
    assert (status["state"], "weights_corrupt" in status["error"]) == ("failed", True)
    agent.refuse.clear()
    agent.configure("sql/v1", "/adapters/sql/v1")
    service.clock.now += 3600
    await look(service, times=5)
    assert (await service.adapter("sql/v1"))["status"]["card"]["rank"] == 8


async def test_a_deleted_adapter_stays_deleted_for_as_long_as_settings_name_it(open_service, clock):
    service = open_service()
    agent = await service.worker("w0")
    agent.configure("sql/v1", "/adapters/sql/v1")
    agent.configure("broken/v1", "/adapters/broken/v1", digest="", state="failed", error="weights_corrupt: cut off")
    agent.refuse["broken/v1"] = "weights_corrupt"
    await look(service)
    for lora_id in ("sql/v1", "broken/v1"):
        assert (await service.http.delete(f"/v1/adapters/{lora_id}")).is_success
    for _ in range(20):
        clock.now += DAY_S
        await look(service, times=1)
        service.reconciler.reload_intent()  # as a new leader does, which drops what was deleted a week ago
    assert await names(service) == []
    assert await listed(service) == {}
    agent.configure("sql/v1", "/adapters/sql/v1-new")
    await look(service)
    assert await names(service) == ["sql/v1"], "other bytes were not deleted"


async def test_a_registration_of_an_adopted_adapter_makes_it_its_registrants(service):
    agent = await service.worker("w0")
    agent.configure("sql/v1", "/adapters/sql/v1")
    agent.configure("legal/v2", "/adapters/legal/v2")
    await look(service)
    spec = {"lora_id": "sql/v1", "source": "file:///adapters/sql/v1", "tenants": ["acme"]}
    answer = await service.http.post("/v1/adapters", json=spec)
    assert answer.status_code == 201, answer.text
    found = await service.adapter("sql/v1")
    assert (found["spec"]["tenants"], found["spec"]["digest"]) == (["acme"], digest_of("/adapters/sql/v1"))
    assert (await service.http.patch("/v1/adapters/legal/v2", json={"tenants": ["acme"]})).is_success
    agent.configured.clear()
    service.reconciler.demand.begin_term(service.clock.now)
    for _ in range(20):
        service.clock.now += DAY_S
        await look(service, times=1)
    assert await names(service) == ["legal/v2", "sql/v1"]


async def test_an_adopted_adapter_that_is_left_nowhere_goes_and_is_back_with_its_setting(service):
    agent = await service.worker("w0")
    for lora_id in ("idle/v1", "aliased/v1", "loaded/v1"):
        agent.configure(lora_id, f"/adapters/{lora_id}")
    await look(service)
    await service.http.put("/v1/aliases/name", json={"targets": [{"lora_id": "aliased/v1"}]})
    await service.ensure("loaded/v1")
    await service.settle()
    agent.configured.clear()
    for day in range(10):
        service.clock.now += DAY_S
        await look(service, times=1)
        assert ("idle/v1" in await names(service)) is (day < 7), day
    assert await names(service) == ["aliased/v1", "loaded/v1"]
    assert await history(service, "idle/v1") == ["adapter_deleted", "adapter_adopted"]
    agent.configure("idle/v1", "/adapters/idle/v1")
    await look(service)
    assert "idle/v1" in await names(service)


async def test_a_new_leader_and_a_restart_adopt_nothing_twice(open_service):
    service = open_service()
    agent = await service.worker("w0")
    agent.configure("sql/v1", "/adapters/sql/v1")
    await look(service)
    again = open_service()
    await again.join(agent)
    await look(again)
    assert await history(again, "sql/v1") == ["adapter_adopted"]


async def test_an_orchestrator_that_does_not_lead_adopts_nothing(service):
    agent = await service.worker("w0")
    agent.configure("sql/v1", "/adapters/sql/v1")
    service.built.leadership.lead_until(0.0)
    service.reconciler.run_pass()
    await service.reconciler.wait_for_actions()
    service.reconciler.run_pass()
    assert service.store.adapters == {}


async def test_what_an_engine_had_at_its_start_is_loaded_under_the_fleets_name_and_keeps_its_own_while_there_is_room(
    service,
):
    agent = await service.worker("w0", slots=3)
    agent.put_foreign("own", "file:///own")
    agent.loaded["own@"]["is_configured"] = True
    await look(service)
    await service.settle()
    assert await names(service) == ["own"]
    assert set(agent.loaded) == {"own", "own@"}, "clients that call the engine directly are served on"
    assert (await service.adapter("own"))["status"]["state"] == "ready"
    assert await listed(service) == {}


async def test_what_a_full_engine_had_at_its_start_makes_room_for_the_fleets_copy(service):
    agent = await service.worker("w0", slots=1)
    agent.put_foreign("own", "file:///own")
    agent.loaded["own@"]["is_configured"] = True
    for _ in range(5):
        service.clock.now += 60
        await look(service, times=1)
    await service.ensure("own")
    await service.settle()
    assert set(agent.loaded) == {"own"}


async def test_a_worker_gets_ready_only_when_what_its_settings_name_is_registered(service):
    agent = await service.worker("w0")
    agent.configure("sql/v1", "/adapters/sql/v1")
    agent.state = "starting"
    beat = agent.heartbeat()
    beat["metadata"] |= {"is_warming": True}
    is_warm, registered = [], []
    for _ in range(4):
        answer = await service.http.post("/v1/workers/register", json=beat)
        is_warm.append(answer.json()["is_warm"])
        registered.append("sql/v1" in service.store.adapters)
        service.reconciler.run_pass()
        await service.reconciler.wait_for_actions()
    assert is_warm[0] is False
    assert is_warm[-1] is True
    assert all(there for warm, there in zip(is_warm, registered, strict=True) if warm)


async def test_workers_with_the_same_list_are_asked_once_and_a_list_that_was_not_read_is_read_from_another(service):
    one, two = await service.worker("w0"), await service.worker("w1")
    for agent in (one, two):
        agent.configure("sql/v1", "/adapters/sql/v1")
    one.url = f"{one.url}/nowhere"
    await service.beat()
    for _ in range(4):
        service.clock.now += 2
        await look(service, times=1)
    assert await names(service) == ["sql/v1"]
