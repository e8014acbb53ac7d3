"""Placements over REST, and the global policy."""

from tests.orchestrator.api.answers import code_of


async def test_the_policy_is_replaced_only_with_a_matching_etag(service):
    seen = await service.http.get("/v1/policy")
    tag = {"if-match": seen.headers["etag"]}
    changed = await service.http.patch("/v1/policy", json={"loading": "eager"}, headers=tag)
    assert changed.json() == seen.json() | {"loading": "eager"}
    assert changed.headers["etag"] != seen.headers["etag"]
    answer = await service.http.put("/v1/policy", json={"loading": "weighted"}, headers=tag)
    assert (answer.status_code, code_of(answer)) == (412, "precondition_failed")
    assert (await service.http.get("/v1/policy")).json()["loading"] == "eager"
    for body in ({"loading": "eagre"}, {"lodaing": "eager"}, {"min_replicas": 9, "max_replicas": 2}):
        assert (await service.http.patch("/v1/policy", json=body)).status_code == 400


async def test_placements_show_present_and_desired_copies(service):
    agent = await service.worker()
    agent.put("orphan", "o")
    await service.register()
    await service.ensure()
    await service.settle()
    rows = (await service.http.get("/v1/placements")).json()["data"]
    assert [(row["lora_id"], row["worker_id"], row["state"], row["desired"]) for row in rows] == [
        ("orphan", "w0", "ready", False),
        ("sql/v1", "w0", "ready", True),
    ]
    rows = (await service.http.get("/v1/placements", params={"lora_id": "sql/v1"})).json()["data"]
    assert len(rows) == 1


async def test_who_shares_cached_prompts_reaches_routers_with_the_catalog(service):
    await service.register("sql/v1")

    async def told():
        catalog = (await service.http.get("/v1/catalog")).json()
        return catalog["cache"], {adapter["lora_id"]: adapter["cache"] for adapter in catalog["adapters"]}

    assert await told() == ("tenant", {"sql/v1": None})
    revision = (await service.http.get("/v1/catalog")).json()["revision"]
    assert (await service.http.patch("/v1/policy", json={"cache": "key"})).status_code == 200
    changed = await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"cache": "shared"}})
    assert changed.status_code == 200, changed.text
    assert await told() == ("key", {"sql/v1": "shared"})
    changes = (await service.http.get(f"/v1/catalog?since={revision}")).json()
    assert (changes["since"], changes["cache"]) == (revision, "key")
    assert (await service.http.patch("/v1/policy", json={"cache": "everyone"})).status_code == 400
