"""Orphans: an empty store unloads nothing, and adopts the fleet's adapters with one call."""

import pytest

from orchestrator.store.store import IntentStore
from tests.orchestrator.doubles import digest_of


async def filled(service, count=4):
    """A fleet of three workers with loaded adapters."""
    agents = [await service.worker(f"w{n}") for n in range(3)]
    for number in range(count):
        await service.register(f"a{number}/v1")
        await service.ensure(f"a{number}/v1")
    await service.settle()
    assert sum(len(agent.loaded) for agent in agents) == count
    return agents


async def move(agents, service):
    """The same agents, in front of another orchestrator."""
    for agent in agents:
        agent.calls.clear()
        await service.join(agent)


async def pass_by(service):
    """Run enough passes, with enough time, for all drains and unloads."""
    for _ in range(5):
        service.clock.now += 60
        await service.turn()


def state(agents):
    return {agent.worker_id: sorted(agent.loaded) for agent in agents}


@pytest.mark.parametrize("kind", ["empty", "another one's", "old backup"])
async def test_a_fresh_orchestrator_unloads_nothing_and_adopts_with_one_call(open_service, tmp_path, kind):
    service = open_service()
    agents = await filled(service)
    before = state(agents)
    path = tmp_path / "other.db"
    if kind == "another one's":
        store = IntentStore(path)
        store.close()
        other = open_service(path)
        await other.register("elsewhere/v1")
    elif kind == "old backup":
        service.store.backup(path)
        await service.register("later/v1")
        await service.ensure("later/v1")
        await service.settle()
        before = state(agents)
        fresh = open_service(path)
    if kind != "old backup":
        fresh = other if kind == "another one's" else open_service(path)
    await move(agents, fresh)
    await pass_by(fresh)
    assert state(agents) == before
    assert [verb for agent in agents for verb, _ in agent.calls if verb not in {"inspect_lora", "claim"}] == []

    there = {name for names in before.values() for name in names}
    known = {item["lora_id"] for item in (await fresh.http.get("/v1/adapters")).json()["data"]}
    listed = (await fresh.http.get("/v1/orphans")).json()["data"]
    assert {item["lora_id"] for item in listed} == there - known != set()
    adopted = (await fresh.http.post("/v1/orphans/adopt")).json()["data"]
    assert {(item["lora_id"], item["status"]) for item in adopted} == {(name, 201) for name in there - known}
    assert (await fresh.http.get("/v1/orphans")).json()["data"] == []
    await fresh.turn()
    assert (await fresh.adapter("a0/v1"))["status"]["state"] == "ready"
    assert (await fresh.adapter("a0/v1"))["spec"]["source"] == "file:///a0/v1"
    assert (await fresh.adapter("a0/v1"))["spec"]["tenants"] == (None if kind == "old backup" else [])
    assert state(agents) == before


async def test_a_backup_from_during_a_deletion_deletes_nothing_when_restored(open_service, tmp_path):
    service = open_service()
    agents = await filled(service, 2)
    await service.http.delete("/v1/adapters/a0/v1")
    service.store.backup(tmp_path / "middle.db")
    service.clock.now += 60
    await service.settle()
    assert "a0/v1" not in service.store.adapters
    service.store.backup(tmp_path / "after.db")
    await service.register("a0/v1")
    await service.ensure("a0/v1")
    await service.settle()
    before = state(agents)
    for name in ("middle.db", "after.db"):
        restored = open_service(tmp_path / name)
        await move(agents, restored)
        await pass_by(restored)
        assert state(agents) == before, name


async def test_an_orphan_that_cannot_be_adopted_does_not_stop_others(service):
    one, two = await service.worker("w0"), await service.worker("w1")
    one.put("two-kinds", "file:///x")
    two.put("two-kinds", "file:///y")
    one.put("sql/v1", "file:///other")
    one.put("fine/v1", "file:///fine")
    one.loaded["nameless"] = one.put("stranger", "file:///s") | {"source": "", "lora_id": "nameless"}
    del one.loaded["stranger"]
    await service.beat()
    await service.register(digest="f" * 64)
    asked = ["two-kinds", "sql/v1", "nameless", "fine/v1", "gone"]
    answer = (await service.http.post("/v1/orphans/adopt", json={"lora_ids": asked, "tenants": ["acme"]})).json()[
        "data"
    ]
    told = {item["lora_id"]: (item["status"], item["code"]) for item in answer}
    assert told == {
        "two-kinds": (409, "not_adoptable"),
        "sql/v1": (409, "not_adoptable"),
        "nameless": (409, "not_adoptable"),
        "fine/v1": (201, None),
        "gone": (404, "not_adoptable"),
    }
    problems = {item["lora_id"]: item["problem"] for item in (await service.http.get("/v1/orphans")).json()["data"]}
    assert "2 digests" in problems["two-kinds"]
    assert "by hand" in problems["nameless"]
    assert "registered with digest" in problems["sql/v1"]
    assert (await service.adapter("fine/v1"))["spec"]["tenants"] == ["acme"]
    history = (await service.http.get("/v1/history", params={"subject": "fine/v1"})).json()["data"]
    assert [entry["kind"] for entry in history] == ["adapter_adopted"]


async def test_an_adapter_that_a_script_loaded_at_one_engine_is_adopted_fleet_wide_with_one_call(service):
    one, two = await service.worker("w0"), await service.worker("w1", slots=1)
    one.put_foreign("mine", "file:///mine")
    two.put_foreign("mine", "file:///mine")
    del service.agents["w1"], service.reconciler.reports.workers["w1"]
    await pass_by(service)
    assert set(one.loaded) == {"mine@"}, "kept until it is adopted"
    (orphan,) = (await service.http.get("/v1/orphans")).json()["data"]
    assert (orphan["lora_id"], orphan["card"]["digest"], orphan["problem"]) == ("mine", digest_of("file:///mine"), None)
    assert (orphan["is_foreign"], orphan["workers"]) == (True, ["w0"])
    counted = (await service.http.get("/metrics")).text
    assert 'lorafleet_orchestrator_orphans{origin="another_client"} 1.0' in counted
    assert 'lorafleet_orchestrator_orphans{origin="fleet"} 0.0' in counted

    adopted = (await service.http.post("/v1/orphans/adopt", json={"tenants": None})).json()["data"]
    assert [(item["lora_id"], item["status"]) for item in adopted] == [("mine", 201)]
    assert [item["lora_id"] for item in (await service.catalog())["adapters"]] == ["mine"]
    await service.settle()
    await pass_by(service)
    assert set(one.loaded) == {"mine"}, "loaded under the fleet's name, and then unloaded under the script's"
    assert (await service.adapter("mine"))["status"]["state"] == "ready"
    assert (await service.http.get("/v1/orphans")).json()["data"] == []

    service.agents["w1"] = two  # it was away when the adapter was adopted
    await pass_by(service)
    assert "mine@" not in two.loaded
    await service.http.delete("/v1/adapters/mine")
    one.put_foreign("mine", "file:///mine")
    await pass_by(service)
    assert (one.loaded, two.loaded) == ({}, {})


async def test_an_orphan_whose_files_are_not_read_yet_says_to_try_again(service):
    agent = await service.worker("w0")
    agent.put_foreign("mine", "file:///mine")
    agent.loaded["mine@"] |= {"files_digest": "", "source": "", "base_model": ""}
    await service.beat()
    (orphan,) = (await service.http.get("/v1/orphans")).json()["data"]
    assert "try again" in orphan["problem"]
    (refused,) = (await service.http.post("/v1/orphans/adopt")).json()["data"]
    assert (refused["status"], refused["error"]) == (409, orphan["problem"])
    agent.put_foreign("mine", "file:///mine")
    await service.beat()
    (orphan,) = (await service.http.get("/v1/orphans")).json()["data"]
    assert orphan["problem"] is None


async def test_a_copy_that_a_script_loaded_hides_no_copy_of_ours_and_takes_its_slot(service):
    agent = await service.worker("w0", slots=3)
    await service.register("mine", source="file:///mine", policy={"loading": "eager", "min_replicas": 1})
    await service.settle()
    agent.put_foreign("mine", "file:///other")
    await pass_by(service)
    assert (await service.adapter("mine"))["status"]["workers"] == ["w0"]
    assert [verb for verb, _ in agent.operations()] == ["inspect_lora", "load_lora"]
    placements = {row["lora_id"]: row for row in (await service.http.get("/v1/placements")).json()["data"]}
    assert (placements["mine"]["digest"], placements["mine"]["desired"]) == (digest_of("file:///mine"), True)
    assert placements["mine@"]["digest"] == digest_of("file:///other")
    refused = (await service.http.post("/v1/orphans/adopt")).json()["data"]
    assert [(item["status"], item["code"]) for item in refused] == [(409, "not_adoptable")]


async def test_adopting_a_copy_of_what_is_registered_already_removes_the_copy_alone(service):
    agent = await service.worker("w0")
    await service.register("mine", source="file:///mine")
    await service.ensure("mine")
    await service.settle()
    agent.put_foreign("mine", "file:///mine")
    await service.beat()
    adopted = (await service.http.post("/v1/orphans/adopt")).json()["data"]
    assert [item["status"] for item in adopted] == [201]
    await pass_by(service)
    assert set(agent.loaded) == {"mine"}
    assert (await service.adapter("mine"))["spec"]["tenants"] is None, "its registration has not changed"
