"""Adapters over REST: registered, listed, changed and deleted."""

import pytest

from tests.orchestrator.api.answers import SPEC, code_of


async def test_registering_is_201_then_200_and_another_source_is_409(service):
    assert (await service.http.post("/v1/adapters", json=SPEC)).status_code == 201
    assert (await service.http.post("/v1/adapters", json=SPEC)).status_code == 200
    answer = await service.http.post("/v1/adapters", json=SPEC | {"source": "file:///other"})
    assert (answer.status_code, code_of(answer)) == (409, "immutable")
    assert "sql/v2" in answer.json()["error"]["message"]
    assert "alias" in answer.json()["error"]["message"]
    other = await service.http.post("/v1/adapters", json=SPEC | {"tenants": ["acme"]})
    assert (other.status_code, code_of(other)) == (409, "already_registered")


async def test_a_digest_can_be_added_later_but_not_changed(service):
    await service.register()
    assert (await service.http.post("/v1/adapters", json=SPEC | {"digest": "a" * 64})).status_code == 200
    assert (await service.adapter())["spec"]["digest"] == "a" * 64
    answer = await service.http.post("/v1/adapters", json=SPEC | {"digest": "b" * 64})
    assert (answer.status_code, code_of(answer)) == (409, "immutable")


@pytest.mark.parametrize(
    "body",
    [
        {"lora_id": "../x", "source": "s"},
        {"lora_id": "x/ensure", "source": "s"},
        {"lora_id": "x"},
        {"lora_id": "x", "source": "s", "sorce": "s"},
        {"lora_id": "x", "source": "s", "digest": "short"},
        {"lora_id": "x", "source": "s", "tenants": ["t"] * 1001},
        {"lora_id": "x", "source": "s", "tenants": ["t" * 101]},
        {"lora_id": "x", "source": "s", "policy": {"min_replicas": 3, "max_replicas": 2}},
        {"lora_id": "x", "source": "s", "policy": {"loading": "eagre"}},
    ],
)
async def test_a_body_that_is_wrong_is_400_and_registers_nothing(service, body):
    answer = await service.http.post("/v1/adapters", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await service.http.get("/v1/adapters")).json()["data"] == []


async def test_names_of_base_models_aliases_and_adapters_exclude_each_other(service):
    await service.worker(base_model="tiny-qwen")
    await service.register()
    assert (await service.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}]})).status_code == 201
    for name in ("tiny-qwen", "sql"):
        answer = await service.http.post("/v1/adapters", json=SPEC | {"lora_id": name})
        assert (answer.status_code, code_of(answer)) == (409, "name_taken")
    for name in ("tiny-qwen", "sql/v1"):
        answer = await service.http.put(f"/v1/aliases/{name}", json={"targets": [{"lora_id": "sql/v1"}]})
        assert (answer.status_code, code_of(answer)) == (409, "name_taken")


async def test_an_adapter_that_is_nowhere_is_deleted_at_once_and_then_unknown(service):
    await service.register()
    assert (await service.http.delete("/v1/adapters/sql/v1")).status_code == 204
    for answer in (
        await service.http.get("/v1/adapters/sql/v1"),
        await service.http.delete("/v1/adapters/sql/v1"),
        await service.ensure(),
        await service.http.post("/v1/adapters/sql/v1/retry"),
    ):
        assert (answer.status_code, code_of(answer)) == (404, "adapter_not_found")


@pytest.mark.parametrize(
    ("source", "what", "shown"),
    [
        ("https://me:hunter2@host/a.zip", "a user or password", "https://host/a.zip"),
        ("s3://key@bucket/a", "a user or password", "s3://bucket/a"),
        ("https://host/a.zip?X-Amz-Signature=hunter2", "a query", "https://host/a.zip"),
        ("https://host/a.zip#hunter2?x", "a fragment", "https://host/a.zip"),
    ],
)
async def test_a_source_with_credentials_is_refused_and_not_repeated(service, source, what, shown):
    answer = await service.http.post("/v1/adapters", json=SPEC | {"source": source})
    assert (answer.status_code, code_of(answer)) == (400, "source_has_credentials")
    assert f"{shown!r} has {what}" in answer.text
    assert "hunter2" not in answer.text
    batch = await service.http.post("/v1/adapters:batch", json={"adapters": [SPEC | {"source": source}]})
    assert [row["code"] for row in batch.json()["data"]] == ["source_has_credentials"]
    assert (await service.http.get("/v1/adapters")).json()["data"] == []


@pytest.mark.parametrize("source", ["hf://acme/sql@main", "file:///srv/odd?name#1", "/srv/me@home", "s3://bucket/a@b"])
async def test_a_source_that_only_resembles_credentials_is_registered(service, source):
    assert (await service.http.post("/v1/adapters", json=SPEC | {"source": source})).status_code == 201


async def test_a_patch_changes_only_the_named_fields(service):
    await service.register(policy={"pinned": True}, tenants=["acme"])
    item = (await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"priority": 4}})).json()
    assert (item["spec"]["policy"]["pinned"], item["spec"]["policy"]["priority"], item["spec"]["tenants"]) == (
        True,
        4,
        ["acme"],
    )
    item = (await service.http.patch("/v1/adapters/sql/v1", json={"tenants": None})).json()
    assert (item["spec"]["policy"]["priority"], item["spec"]["tenants"]) == (4, None)
    answer = await service.http.patch("/v1/adapters/sql/v1", json={"source": "file:///other"})
    assert answer.status_code == 400


async def test_lists_are_paged_by_cursor_and_filtered(service):
    for number in range(5):
        await service.register(f"a{number}", base_model="qwen" if number % 2 else "llama")
    first = (await service.http.get("/v1/adapters", params={"limit": 2})).json()
    assert ([item["lora_id"] for item in first["data"]], first["next"]) == (["a0", "a1"], "a1")
    await service.http.delete("/v1/adapters/a1")
    second = (await service.http.get("/v1/adapters", params={"limit": 2, "cursor": first["next"]})).json()
    assert [item["lora_id"] for item in second["data"]] == ["a2", "a3"]
    last = (await service.http.get("/v1/adapters", params={"limit": 2, "cursor": second["next"]})).json()
    assert ([item["lora_id"] for item in last["data"]], last["next"]) == (["a4"], None)
    only = (await service.http.get("/v1/adapters", params={"base_model": "qwen", "state": "registered"})).json()
    assert [item["lora_id"] for item in only["data"]] == ["a3"]


async def test_a_batch_registers_what_it_can_and_reports_the_rest(service):
    await service.register("a")
    adapters = [
        {"lora_id": "a", "source": "file:///a"},
        {"lora_id": "a", "source": "file:///b"},
        {"lora_id": "b", "source": "file:///b"},
    ]
    answer = (await service.http.post("/v1/adapters:batch", json={"adapters": adapters})).json()
    assert [item["status"] for item in answer["data"]] == [200, 409, 201]
    assert answer["data"][1]["code"] == "immutable"


async def test_a_source_that_no_worker_may_read_is_refused_at_registration(service):
    a, b = await service.worker("a"), await service.worker("b")
    a.forbidden = b.forbidden = {SPEC["source"]}
    answer = await service.http.post("/v1/adapters", json=SPEC)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "source_forbidden", "source")
    assert "outside the folders" in error["message"]
    assert (await service.http.get(f"/v1/adapters/{SPEC['lora_id']}")).status_code == 404
    b.forbidden = set()
    assert (await service.http.post("/v1/adapters", json=SPEC)).status_code == 201
    b.forbidden = {SPEC["source"]}
    assert (await service.http.post("/v1/adapters", json=SPEC)).status_code == 200


async def test_a_dry_run_inspects_and_registers_nothing(service):
    answer = await service.http.post("/v1/adapters?dry_run=1", json=SPEC)
    assert (answer.status_code, code_of(answer)) == (503, "no_worker")
    assert "retry-after" in answer.headers
    agent = await service.worker()
    answer = await service.http.post("/v1/adapters?dry_run=1", json=SPEC)
    assert (answer.status_code, answer.json()["status"]["card"]["rank"]) == (200, 8)
    assert (await service.http.get("/v1/adapters")).json()["data"] == []
    agent.refuse["sql/v1"] = "adapter_invalid"
    answer = await service.http.post("/v1/adapters?dry_run=1", json=SPEC)
    assert (answer.status_code, code_of(answer)) == (400, "adapter_invalid")
    agent.refuse.clear()
    agent.ranks[SPEC["source"]] = 65
    answer = await service.http.post("/v1/adapters?dry_run=1", json=SPEC)
    assert (answer.status_code, code_of(answer)) == (400, "rank_too_big")
    await service.worker("w1", max_lora_rank=128)
    assert (await service.http.post("/v1/adapters?dry_run=1", json=SPEC)).json()["status"]["card"]["rank"] == 65


async def test_an_adapter_on_no_worker_is_deleted_without_a_pass(service):
    await service.register()
    await service.turn()
    before = (await service.http.get("/metrics")).text
    passes = [line for line in before.splitlines() if line.startswith("lorafleet_orchestrator_pass_seconds_count")]
    assert passes
    assert (await service.http.delete("/v1/adapters/sql/v1")).status_code == 204
    assert passes[0] in (await service.http.get("/metrics")).text.splitlines()
    assert (await service.catalog())["adapters"] == []


async def test_an_unserved_base_model_is_named_with_the_served_ones(service):
    await service.register("x/v1", base_model="tiny-qwne")
    await service.settle()
    assert (await service.adapter("x/v1"))["status"]["error"] is None  # there may be one in a moment
    await service.worker(base_model="tiny-qwen")
    await service.settle()
    says = "no ready worker serves 'tiny-qwne'; those there are serve ['tiny-qwen']"
    assert (await service.adapter("x/v1"))["status"]["error"] == says
    assert (await service.ensure("x/v1")).json()["error"] == says
    await service.worker("w1", base_model="tiny-qwne")
    await service.settle()
    assert (await service.adapter("x/v1"))["status"]["error"] is None


async def test_tenants_can_be_changed_despite_policy_bounds(service):
    await service.register("sql/v1", policy={"min_replicas": 100})
    answer = await service.http.patch("/v1/adapters/sql/v1", json={"tenants": ["acme"]})
    assert (answer.status_code, answer.json()["spec"]["tenants"]) == (200, ["acme"])
    wrong = await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"min_replicas": 65}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "policy.min_replicas")
