"""What is said of an adapter: its state, its last error, and the catalog."""

import asyncio

import pytest

from tests.orchestrator.reconcile.ready_adapters import ready
from tests.patience import patience, until, within


async def test_ensure_reports_a_misfit_at_once_and_later_succeeds(service):
    agent = await service.worker()
    agent.ranks["file:///sql"] = 128
    await service.register(source="file:///sql")
    await service.settle()
    says = "rank 128 is above every worker's max_lora_rank (at most 64)"
    assert says in (await service.adapter())["status"]["error"]
    # It waits for nothing: no pass runs here until this is answered.
    told = (await asyncio.wait_for(service.ensure(wait_s=600), patience(10))).json()
    assert (told["fits_nowhere"], told["ready"], told["loading"]) == (True, [], [])
    assert says in told["error"]
    larger = await service.worker("w1", max_lora_rank=128)
    await service.settle()
    told = (await asyncio.wait_for(service.ensure(wait_s=600), patience(10))).json()
    assert (told["fits_nowhere"], told["ready"], told["error"]) == (False, ["w1"], None)
    assert list(larger.loaded) == ["sql/v1"]


async def test_ensure_reports_at_once_that_every_worker_refuses_adapters(service):
    agent = await service.worker()
    agent.refusal = "KV connector ExampleConnector"
    await service.register(source="file:///sql")
    await service.settle()
    told = (await asyncio.wait_for(service.ensure(wait_s=600), patience(10))).json()
    assert (told["fits_nowhere"], told["ready"], told["loading"]) == (True, [], [])
    assert "(w0: KV connector ExampleConnector)" in told["error"]
    assert "load_lora" not in {verb for verb, _ in agent.operations()}
    (item,) = (await service.http.get("/v1/workers")).json()["data"]
    assert (item["refusal"], item["adapters"]) == ("KV connector ExampleConnector", [])
    (shown,) = (await service.http.get("/v1/adapters")).json()["data"]
    assert "(w0: KV connector ExampleConnector)" in shown["status"]["error"]
    (entry,) = (await service.http.get("/v1/catalog")).json()["adapters"]
    assert entry["error"] is None  # routers refuse requests by it, and another worker may come
    dry = await service.http.post("/v1/adapters?dry_run=1", json={"lora_id": "b/v1", "source": "file:///b"})
    assert (dry.status_code, dry.json()["error"]["code"]) == (400, "adapters_refused")

    agent.refusal = ""
    await service.settle()
    assert (await service.ensure(wait_s=600)).json()["ready"] == ["w0"]


async def test_the_catalog_shows_a_drain_once_adapters_are_elsewhere(service, clock):
    agent = await service.worker()
    await ready(service)

    async def told():
        return {worker["id"]: worker["state"] for worker in (await service.catalog())["workers"]}

    answer = await service.http.post("/v1/workers/w0/drain", json={"deadline_s": 60})
    assert answer.json()["state"] == "draining"
    await service.settle()
    # Nobody else has it: until then its requests are answered where it is.
    assert (await told(), agent.drained) == ({"w0": "cordoned"}, False)
    await service.worker("w1")
    clock.now += 1
    await service.settle()
    clock.now += 1
    await service.settle()
    assert ((await told())["w0"], agent.drained) == ("draining", True)

    await service.http.post("/v1/workers/w1/drain", json={"deadline_s": 60})
    await service.settle()
    assert (await told())["w1"] == "cordoned"
    clock.now += 61
    await service.settle()
    assert (await told())["w1"] == "draining"


async def test_ensure_waits_until_the_adapter_is_ready(open_service):
    service = open_service(pass_interval_s=30)
    await service.worker()
    loop = asyncio.create_task(service.reconciler.run())
    await service.register()
    answer = (await asyncio.wait_for(service.ensure(wait_s=20), patience(10))).json()
    assert answer["ready"] == ["w0"]
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


GONE = ["source_not_found", "source_unauthorized", "source_forbidden", "digest_mismatch"]


@pytest.mark.parametrize("code", GONE)
async def test_an_adapter_whose_source_went_on_every_worker_fails_at_once_and_is_tried_on_a_new_one(service, code):
    agents = [await service.worker("w0"), await service.worker("w1")]
    await service.register()
    await service.settle()
    for agent in agents:
        agent.refuse["sql/v1"] = code
    asking = asyncio.create_task(service.ensure(wait_s=600))
    await until(lambda: service.reconciler.demand.open_wants(service.clock.now))
    await service.settle()
    async with within(5):
        answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_failed")
    assert f"{code}: {code} by the double" in answer.json()["error"]["message"]
    assert "lorafleet adapters retry sql/v1" in answer.json()["error"]["message"]
    assert (await service.ensure(wait_s=600)).status_code == 409  # without a further try
    await service.worker("w2")
    asking = asyncio.create_task(service.ensure(wait_s=600))
    await until(lambda: service.reconciler.demand.open_wants(service.clock.now))
    await service.settle()
    assert (await asking).json()["ready"] == ["w2"]


@pytest.mark.parametrize("code", ["source_failed", "disk_full"])
async def test_a_load_that_failed_on_every_worker_says_why_and_when_it_is_tried_again(service, clock, code):
    agents = [await service.worker("w0"), await service.worker("w1")]
    await service.register()
    await service.settle()
    for agent in agents:
        agent.refuse["sql/v1"] = code
    asking = asyncio.create_task(service.ensure(wait_s=600))
    await until(lambda: service.reconciler.demand.open_wants(service.clock.now))
    await service.settle()
    async with within(5):
        answer = (await asking).json()
    assert (answer["error"].rpartition(": source ")[0], answer["loading"]) == (f"{code}: {code} by the double", [])
    assert 0 < answer["retry_in_s"] <= service.store.rules.failure_expiry_s
    for agent in agents:
        agent.refuse.clear()
    clock.now += answer["retry_in_s"] + 0.001  # it is rounded
    asking = asyncio.create_task(service.ensure(wait_s=600))
    await until(lambda: service.reconciler.queries.failure_everywhere("sql/v1") is None)
    await service.settle()
    assert len((await asking).json()["ready"]) == 1


async def test_a_fetch_without_a_byte_is_told_while_it_goes_on(service, clock):
    agent = await service.worker("w0")
    await service.register()
    await service.settle()
    agent.hold_loads = asyncio.Event()
    await service.ensure()
    service.reconciler.run_pass()
    await until(lambda: ("load_lora", "sql/v1") in agent.operations())
    agent.loading["sql/v1"] = {
        "lora_id": "sql/v1", "digest": "", "engine_name": "", "state": "downloading", "location": "remote",
        "fetched_bytes": 0,
    }  # fmt: skip
    await service.beat()
    clock.now += 58
    answer = (await service.ensure()).json()
    assert answer["progress"] == "worker w0 has fetched 0 bytes from its source in 58 s"
    agent.loading["sql/v1"]["fetched_bytes"] = 4096
    await service.beat()
    clock.now += 30
    answer = (await service.ensure()).json()
    assert answer["progress"] == "worker w0 has fetched 4096 bytes from its source in 88 s, and none for 30 s"
    agent.loading.clear()
    agent.hold_loads.set()
    await service.settle()
