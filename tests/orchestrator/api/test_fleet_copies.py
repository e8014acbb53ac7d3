"""One copy is unloaded from one worker over REST, and kept out of it until an operator lets it in again."""

from lorafleet.keys.key_files import hash_key
from orchestrator.intent.registry import MOST_KEPT_OUT
from tests.orchestrator.api.answers import code_of

COPY = "/v1/workers/w0/adapters/sql/v1"


async def drained(service, clock):
    """Run passes before and after a report that is newer than the drains."""
    await service.settle()
    clock.now += 1
    await service.settle()


async def test_a_copy_is_unloaded_and_kept_out_until_it_is_let_in_again(service, clock):
    agent = await service.worker("w0")
    await service.register()
    await service.ensure()
    await service.settle()
    answer = await service.http.delete(COPY)
    assert (answer.status_code, answer.json()["kept_out"]) == (202, ["sql/v1"])
    await drained(service, clock)
    assert agent.loaded == {}
    again = await service.http.delete(COPY)
    assert (again.status_code, again.json()["adapters"]) == (200, [])
    status = (await service.adapter())["status"]
    assert (status["kept_out_of"], status["workers"]) == (["w0"], [])
    asked = (await service.ensure()).json()
    assert (asked["fits_nowhere"], "lets it in again" in asked["error"]) == (True, True)
    await drained(service, clock)
    assert agent.loaded == {}
    assert (await service.http.post(COPY)).json()["kept_out"] == []
    assert service.store.workers == {}
    await service.ensure()
    await service.settle()
    assert list(agent.loaded) == ["sql/v1"]
    entries = service.store.history(kinds=["copy_kept_out", "copy_allowed"], limit=9)
    assert [(entry.kind, entry.subject, entry.body) for entry in entries] == [
        ("copy_allowed", "sql/v1", {"worker_id": "w0"}),
        ("copy_kept_out", "sql/v1", {"worker_id": "w0"}),
    ]


async def test_another_worker_gets_the_adapter_that_one_keeps_out(service, clock):
    first = await service.worker("w0")
    await service.register(policy={"loading": "eager", "min_replicas": 1, "pinned": True})
    await service.settle()
    second = await service.worker("w1")
    await service.http.delete(COPY)
    await drained(service, clock)
    assert (list(first.loaded), list(second.loaded)) == ([], ["sql/v1"])
    catalog = await service.catalog()
    assert {worker["id"]: worker["kept_out"] for worker in catalog["workers"]} == {"w0": ["sql/v1"], "w1": []}


async def test_what_is_kept_out_survives_restarts_of_the_orchestrator_and_of_the_worker(open_service, clock):
    first = open_service()
    agent = await first.worker("w0")
    await first.register()
    await first.ensure()
    await first.settle()
    await first.http.delete(COPY)
    second = open_service()
    agent.put("sql/v1", "file:///sql/v1")  # as a worker has it that was away, and restored what it had
    await second.join(agent)
    await drained(second, clock)
    assert agent.loaded == {}
    assert (await second.http.get("/v1/workers/w0")).json()["kept_out"] == ["sql/v1"]


async def test_a_cordon_that_ends_lets_nothing_in(service):
    await service.worker("w0")
    await service.register()
    await service.http.delete(COPY)
    for verb, state in (("cordon", "cordoned"), ("uncordon", "ready"), ("drain", "draining"), ("uncordon", "ready")):
        item = (await service.http.post(f"/v1/workers/w0/{verb}")).json()
        assert (item["state"], item["kept_out"]) == (state, ["sql/v1"])


async def test_an_orphan_and_a_copy_of_another_client_leave_by_the_same_call(service, clock):
    agent = await service.worker("w0")
    agent.put("lost/v1", "file:///lost/v1")
    agent.put_foreign("mine", "file:///mine")
    await service.settle()
    assert {item["lora_id"] for item in (await service.http.get("/v1/orphans")).json()["data"]} == {"lost/v1", "mine"}
    assert (await service.http.delete("/v1/workers/w0/adapters/lost/v1")).status_code == 202
    assert (await service.http.delete("/v1/workers/w0/adapters/mine")).status_code == 202
    await drained(service, clock)
    assert agent.loaded == {}


async def test_a_deleted_adapter_is_kept_out_nowhere(service):
    await service.worker("w0")
    await service.register()
    await service.http.delete(COPY)
    await service.http.delete("/v1/adapters/sql/v1")
    await service.settle()
    assert service.store.workers == {}


async def test_an_unknown_name_or_worker_is_404_and_a_worker_keeps_a_bounded_number_out(service):
    await service.worker("w0")
    nowhere = await service.http.delete("/v1/workers/w0/adapters/typo/v1")
    assert (nowhere.status_code, code_of(nowhere)) == (404, "adapter_not_found")
    await service.register()
    away = await service.http.delete("/v1/workers/w9/adapters/sql/v1")
    assert (away.status_code, code_of(away)) == (404, "worker_not_found")
    await service.http.delete(COPY)
    order = service.store.workers["w0"]
    service.store.put_worker("w0", order.with_kept_out(f"a{number}" for number in range(MOST_KEPT_OUT)))
    full = await service.http.delete(COPY)
    assert (full.status_code, code_of(full)) == (409, "too_many_kept_out")


async def test_a_tenants_key_unloads_no_copy(open_service, tmp_path):
    path = tmp_path / "keys.yaml"
    rows = [("root", "scopes: [admin]"), ("acme", "tenant: acme, scopes: [tenant-admin]")]
    path.write_text("keys:\n" + "".join(f"- {{sha256: {hash_key(key)}, {more}}}\n" for key, more in rows))
    service = open_service(key_files=[path])
    service.http.headers["authorization"] = "Bearer root"
    await service.worker("w0")
    await service.register(tenants=["acme"])
    refused = await service.http.delete(COPY, headers={"authorization": "Bearer acme"})
    assert (refused.status_code, service.store.workers) == (403, {})
    assert (await service.http.delete(COPY)).status_code == 200
    await service.register("other/v1", tenants=["globex"])
    await service.http.delete("/v1/workers/w0/adapters/other/v1")
    seen = (await service.http.get("/v1/workers/w0", headers={"authorization": "Bearer acme"})).json()
    assert seen["kept_out"] == ["sql/v1"]
