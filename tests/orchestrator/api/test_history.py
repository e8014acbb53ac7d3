"""Concurrent writers (If-Match), repeated changes, the history's actors, and list filters."""

import pytest
import yaml

from lorafleet.keys.key_files import hash_key
from lorafleet.keys.roles import PROGRAM_HEADER, UP


def code(answer):
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_policy_is_replaced_only_over_the_version_read(service):
    seen = await service.http.get("/v1/policy")
    body = seen.json() | {"loading": "eager"}
    assert code(await service.http.put("/v1/policy", json=body)) == (428, "precondition_required")
    tag = {"if-match": seen.headers["etag"]}
    first = await service.http.put("/v1/policy", json=body, headers=tag)
    assert first.status_code == 200
    assert code(await service.http.put("/v1/policy", json=seen.json(), headers=tag)) == (412, "precondition_failed")
    again = await service.http.put("/v1/policy", json=body, headers={"if-match": first.headers["etag"]})
    assert again.headers["etag"] == first.headers["etag"]
    assert (await service.http.put("/v1/policy", json={}, headers={"if-match": "*"})).json() == seen.json()


async def test_a_policy_is_in_force_at_the_next_pass(service):
    agents = [await service.worker(f"w{n}") for n in range(2)]
    await service.register()
    await service.settle()
    assert [len(agent.loaded) for agent in agents] == [0, 0]
    await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"min_replicas": 2}})
    await service.settle()
    assert [len(agent.loaded) for agent in agents] == [1, 1]


async def test_tightened_policy_bounds_block_no_other_change_of_an_adapter(service):
    await service.register(policy={"min_replicas": 2})
    await service.http.patch("/v1/policy", json={"max_replicas": 1})
    changed = await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"priority": 3}})
    assert (changed.status_code, changed.json()["spec"]["policy"]["priority"]) == (200, 3)
    refused = await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"min_replicas": 3}})
    assert code(refused) == (400, "invalid_request")


async def test_if_match_guards_changes_and_deletion_of_an_adapter(service):
    await service.register()
    tag = {"if-match": (await service.http.get("/v1/adapters/sql/v1")).headers["etag"]}
    mine = await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"priority": 3}}, headers=tag)
    assert mine.status_code == 200
    late = await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"priority": 9}}, headers=tag)
    assert code(late) == (412, "precondition_failed")
    assert code(await service.http.delete("/v1/adapters/sql/v1", headers=tag)) == (412, "precondition_failed")
    assert (await service.adapter())["spec"]["policy"]["priority"] == 3
    now = {"if-match": mine.headers["etag"]}
    assert (await service.http.delete("/v1/adapters/sql/v1", headers=now)).status_code == 204


async def test_inspection_results_do_not_change_the_etag(service):
    await service.worker()
    await service.register()
    before = (await service.http.get("/v1/adapters/sql/v1")).headers["etag"]
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "ready"
    assert (await service.http.get("/v1/adapters/sql/v1")).headers["etag"] == before


async def test_if_match_guards_changes_of_an_alias(service):
    await service.register("a/v1")
    one = {"targets": [{"lora_id": "a/v1", "weight": 1.0}]}
    two = {"targets": [{"lora_id": "a/v1", "weight": 2.0}]}
    await service.http.put("/v1/aliases/a", json=one)
    tag = {"if-match": (await service.http.get("/v1/aliases/a")).headers["etag"]}
    assert (await service.http.put("/v1/aliases/a", json=two, headers=tag)).status_code in (200, 202)
    assert code(await service.http.put("/v1/aliases/a", json=one, headers=tag)) == (412, "precondition_failed")
    assert code(await service.http.delete("/v1/aliases/a", headers=tag)) == (412, "precondition_failed")
    assert code(await service.http.put("/v1/aliases/new", json=one, headers={"if-match": "*"})) == (
        412,
        "precondition_failed",
    )


async def test_a_repeated_change_is_one_history_entry(service):
    alias = {"targets": [{"lora_id": "sql/v1"}]}
    await service.worker()
    for _ in range(2):
        await service.register()
    for _ in range(2):
        assert (await service.http.put("/v1/aliases/sql", json=alias)).status_code in (200, 201)
        await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"priority": 3}})
        await service.http.patch("/v1/policy", json={"loading": "eager"})
        assert (await service.http.post("/v1/workers/w0/cordon")).json()["state"] == "cordoned"
    for _ in range(2):
        assert (await service.http.post("/v1/workers/w0/uncordon")).json()["state"] == "ready"
    kinds = [entry["kind"] for entry in (await service.http.get("/v1/history")).json()["data"]]
    intent = ["adapter_changed", "adapter_registered", "alias_set", "policy_changed"]
    assert sorted(kinds) == sorted([*intent, "leader_changed", "worker_cordoned", "worker_uncordoned"])


async def test_a_second_deletion_changes_nothing(service):
    agent = await service.worker()
    await service.register()
    await service.ensure()
    await service.settle()
    assert [(await service.http.delete("/v1/adapters/sql/v1")).status_code for _ in range(2)] == [202, 202]
    deleted = (await service.http.get("/v1/history", params={"kind": "adapter_deleted"})).json()["data"]
    assert len(deleted) == 1
    service.clock.now += 60
    await service.settle()
    assert agent.loaded == {}


async def test_the_history_shows_each_change_and_its_actor(open_service, tmp_path):
    keys = [
        {"sha256": hash_key("mine"), "scopes": ["admin"], "tenant": "acme"},
        {"sha256": hash_key("root"), "scopes": ["admin"]},
    ]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    service = open_service(key_files=(tmp_path / "keys.yaml",))
    mine, root = ({"authorization": f"Bearer {key}"} for key in ("mine", "root"))
    spec = {"lora_id": "sql/v1", "source": "file:///sql"}
    await service.http.post("/v1/adapters", json=spec, headers=mine)
    await service.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}]}, headers=mine)
    await service.http.delete("/v1/aliases/sql", headers=root)
    await service.http.patch("/v1/policy", json={"reserve_slots": 1}, headers=root)

    async def lines(path, **query):
        answer = (await service.http.get(path, params=query, headers=root)).json()
        return [(entry["kind"], entry["actor"].partition(" (")[0], entry["body"]) for entry in answer["data"]]

    assert await lines("/v1/aliases/sql/history") == [
        ("alias_deleted", "operator", {"was": [["sql/v1", 1.0]]}),
        ("alias_set", "tenant acme", {"targets": [["sql/v1", 1.0]], "was": None}),
    ]
    assert await lines("/v1/history", kind="policy_changed") == [
        ("policy_changed", "operator", {"reserve_slots": [0, 1]})
    ]
    first = (await service.http.get("/v1/history", params={"limit": 3}, headers=root)).json()
    second = (await service.http.get("/v1/history", params={"cursor": first["next"]}, headers=root)).json()
    assert [entry["kind"] for entry in first["data"] + second["data"]] == [
        "policy_changed",
        "alias_deleted",
        "alias_set",
        "adapter_registered",
        "leader_changed",
    ]
    assert second["next"] is None


async def test_list_filters_are_combined_with_and(service):
    await service.worker()
    await service.register("sql/v1", tenants=["acme"])
    await service.register("sql/v2", base_model="llama")
    await service.register("tax/v1", tenants=["other"])
    await service.ensure("sql/v1")
    await service.settle()

    async def ids(**query):
        return [item["lora_id"] for item in (await service.http.get("/v1/adapters", params=query)).json()["data"]]

    assert await ids(prefix="sql/") == ["sql/v1", "sql/v2"]
    assert await ids(tenant="acme") == ["sql/v1", "sql/v2"]
    assert await ids(worker="w0") == ["sql/v1"]
    assert await ids(state="ready") == ["sql/v1"]
    assert await ids(base_model="llama", prefix="sql") == ["sql/v2"]
    assert await ids(quarantined="true") == []
    assert await ids(worker="w9") == []
    assert len(await ids(quarantined="false")) == 3
    # No worker has this base model: the reason is shown although the state is not `failed`.
    assert await ids(has_error="true") == ["sql/v2"]
    assert await ids(has_error="false") == ["sql/v1", "tax/v1"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/adapters?state=raedy", ("'raedy'", "'ready'")),
        ("/v1/adapters?limit=0", ("'0'", "greater than or equal to 1")),
        ("/v1/history?cursor=x", ("'x'", "integer")),
    ],
)
async def test_an_invalid_parameter_is_400_with_found_and_allowed_values(service, path, says):
    answer = await service.http.get(path)
    assert code(answer) == (400, "invalid_request")
    assert all(text in answer.json()["error"]["message"] for text in says)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/adapters", {"lora_id": "law/v1", "source": "file:///law"}), ("/v1/adapters/sql/v1/ensure", {})],
)
async def test_tenants_of_a_wrong_type_are_refused_in_json_terms(service, path, body):
    await service.register("sql/v1")
    answer = await service.http.post(path, json=body | {"tenants": "acme"})
    assert code(answer) == (400, "invalid_request")
    assert answer.json()["error"]["message"] == "tenants: Input should be a list, found 'acme'"


async def test_a_backup_over_rest_is_the_store_as_a_file(service, tmp_path):
    await service.register()
    answer = await service.http.get("/v1/backup")
    assert answer.headers["content-type"] == "application/vnd.sqlite3"
    assert answer.content.startswith(b"SQLite format 3")


async def test_a_secret_reference_is_passed_to_the_fetching_worker(service):
    agent = await service.worker()
    ref = {"name": "acme-hub", "key": "token"}
    item = await service.register("sql/v1", source="hf://acme/sql", secretRef=ref)
    assert item["spec"]["secret_ref"] == ref
    await service.ensure("sql/v1")
    await service.settle()
    said = {verb: body.get("secret") for verb, body in agent.calls}
    assert said == {"inspect_lora": "acme-hub/token", "load_lora": "acme-hub/token"}
    assert (await service.catalog())["adapters"][0]["secret"] == "acme-hub/token"
    changed = await service.http.patch("/v1/adapters/sql/v1", json={"secret_ref": {"name": "acme-hub", "key": "new"}})
    assert changed.json()["spec"]["secret_ref"]["key"] == "new"
    assert (await service.http.patch("/v1/adapters/sql/v1", json={"secret_ref": None})).json()["spec"][
        "secret_ref"
    ] is None


@pytest.mark.parametrize(
    ("source", "ref", "why"),
    [
        ("s3://bucket/sql", {"name": "acme-hub", "key": "token"}, "secret_ref counts for hf:// and https:// sources"),
        ("hf://acme/sql", {"name": "../acme", "key": "token"}, "secret_ref.name: String should match pattern"),
        ("hf://acme/sql", {"name": "acme", "key": ".."}, "secret_ref.key: String should match pattern"),
        ("hf://acme/sql", {"name": "acme", "key": "k", "value": "hunter2"}, "value: there is no such field"),
    ],
)
async def test_an_impossible_secret_reference_is_refused(service, source, ref, why):
    answer = await service.http.post("/v1/adapters", json={"lora_id": "sql/v1", "source": source, "secretRef": ref})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
    assert "Value error" not in answer.text


async def test_a_program_of_the_operators_names_itself_in_the_history_and_a_tenants_cannot(open_service, tmp_path):
    path = tmp_path / "keys.yaml"
    tenant = {"sha256": hash_key("acme"), "tenant": "acme", "scopes": ["tenant-admin", "view"]}
    path.write_text(yaml.safe_dump({"keys": [{"sha256": hash_key("root"), "scopes": ["admin"]}, tenant]}))
    service = open_service(key_files=(path,))
    for key, program, lora_id in (
        ("root", UP, "a/v1"),
        ("root", "anything", "b/v1"),
        ("acme", UP, "acme/v1"),
    ):
        headers = {"authorization": f"Bearer {key}", PROGRAM_HEADER: program}
        answer = await service.http.post("/v1/adapters", json={"lora_id": lora_id, "source": "/a"}, headers=headers)
        assert answer.status_code == 201, answer.text
    history = await service.http.get("/v1/history", headers={"authorization": "Bearer root"})
    actors = {item["subject"]: item["actor"] for item in history.json()["data"] if item["kind"] == "adapter_registered"}
    root, acme = (hash_key(key)[:12] for key in ("root", "acme"))
    assert actors == {
        "a/v1": f"{UP}, operator (key {root})",
        "b/v1": f"operator (key {root})",
        "acme/v1": f"tenant acme (key {acme})",
    }
