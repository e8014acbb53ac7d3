"""What routers call: usage, the catalog, and ensure."""

import asyncio

import pytest

from tests.orchestrator.api.answers import code_of
from tests.patience import until
from tests.serving import client_of, serving


@pytest.mark.parametrize("count", ["NaN", "1e400", "1e308", "-1", "1" + 400 * "0"])
@pytest.mark.parametrize("name", ["work_s", "requests", "first_token_sum_s"])
async def test_an_impossible_usage_report_is_refused(service, clock, name, count):
    await service.worker()
    await service.register()
    await service.settle()
    batch = '{"number": 1, "rows": [{"adapter": "sql/v1", "worker": "w0", "counts": {"%s": %s}}]}'
    body = '{"router_id": "r", "boot_id": "b", "seq": %d, "revision_seen": 1, "batches": [%s]}'
    for seq, said in ((1, "0"), (2, count)):
        clock.now += 1
        text = body % (seq, batch % (name, said))
        answer = await service.http.post("/v1/usage", content=text, headers={"content-type": "application/json"})
    assert (answer.status_code, code_of(answer)) == (400, "invalid_request")
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "ready"


async def test_the_catalog_is_304_until_something_changes(service):
    await service.register()
    first = await service.http.get("/v1/catalog")
    tag = {"if-none-match": first.headers["etag"]}
    assert first.headers["etag"] == f'"{first.json()["revision"]}"'
    assert (await service.http.get("/v1/catalog", headers=tag)).status_code == 304
    await service.register("b")
    second = await service.http.get("/v1/catalog", headers=tag)
    assert second.status_code == 200
    assert second.json()["revision"] > first.json()["revision"]
    assert [item["lora_id"] for item in second.json()["adapters"]] == ["b", "sql/v1"]


async def test_ensure_needs_no_body_and_respects_max_replicas(service):
    await service.worker()
    await service.register(policy={"max_replicas": 1})
    assert (await service.http.post("/v1/adapters/sql/v1/ensure")).status_code == 200
    await service.settle()
    assert (await service.ensure(replicas=5)).json()["expected_s"] == 0.0


async def test_a_client_that_leaves_abandons_its_want(service):
    def waited_for():
        return [
            name for name, want in service.reconciler.demand.open_wants(service.clock.now).items() if want.is_waited_for
        ]

    await service.register()
    async with serving(service.built.app) as url, client_of(url) as client:
        waiting = asyncio.create_task(client.post("/v1/adapters/sql/v1/ensure", json={"wait_s": 600}, timeout=None))
        await until(lambda: waited_for() == ["sql/v1"])
        waiting.cancel()
        await until(lambda: not waited_for())
        service.reconciler.catalog.changed.notify()  # nobody is woken who would ask on
        await client.get("/health")
        assert not waited_for()
        # It is asked for still, and waited for as soon as somebody asks again.
        assert service.reconciler.demand.open_wants(service.clock.now).keys() == {"sql/v1"}
        await client.post("/v1/adapters/sql/v1/ensure")
        assert waited_for() == ["sql/v1"]


@pytest.mark.parametrize(
    ("registered", "said", "waits"),
    [
        (["acme"], {"tenants": ["bolt", "", "bolt"]}, {"bolt", ""}),
        (["acme"], {}, {"acme"}),  # by a router that does not say yet
        (["acme", "bolt"], {}, set()),
        (None, {}, set()),
        ([], {"tenants": [], "unheard_of": 1}, set()),
    ],
)
async def test_ensure_names_tenants_or_defaults_to_the_only_one(service, registered, said, waits):
    await service.register(tenants=registered)
    assert (await service.ensure(**said)).status_code == 200
    assert service.reconciler.demand.open_wants(service.clock.now)["sql/v1"].tenants == waits
