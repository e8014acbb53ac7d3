"""The REST contract: responses, errors, scopes."""

import asyncio
import json
import math
import os
import signal
import sys

import httpx
import pytest
import yaml

from lorafleet.keys.key_files import hash_key
from orchestrator.core.errors import OrchestratorError
from tests.patience import patience, until, within
from tests.serving import client_of, serving

SPEC = {"lora_id": "sql/v1", "source": "file:///sql/v1"}


def code(answer):
    return answer.json()["error"]["code"]


async def test_registering_is_201_then_200_and_another_source_is_409(service):
    assert (await service.http.post("/v1/adapters", json=SPEC)).status_code == 201
    assert (await service.http.post("/v1/adapters", json=SPEC)).status_code == 200
    answer = await service.http.post("/v1/adapters", json=SPEC | {"source": "file:///other"})
    assert (answer.status_code, code(answer)) == (409, "immutable")
    assert "sql/v2" in answer.json()["error"]["message"]
    assert "alias" in answer.json()["error"]["message"]
    other = await service.http.post("/v1/adapters", json=SPEC | {"tenants": ["acme"]})
    assert (other.status_code, code(other)) == (409, "already_registered")


async def test_a_digest_can_be_added_later_but_not_changed(service):
    await service.register()
    assert (await service.http.post("/v1/adapters", json=SPEC | {"digest": "a" * 64})).status_code == 200
    assert (await service.adapter())["digest"] == "a" * 64
    answer = await service.http.post("/v1/adapters", json=SPEC | {"digest": "b" * 64})
    assert (answer.status_code, code(answer)) == (409, "immutable")


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


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/adapters", '{"lora_id": "x", "source": "s", "tenants": ["\\ud800"]}'),
        ("POST", "/v1/adapters", '{"lora_id": "x", "source": "s", "base_model": "\\udfff"}'),
        ("POST", "/v1/orphans/adopt", '{"lora_ids": ["\\ud800"]}'),
        ("PATCH", "/v1/policy", '{"target_utilisation": NaN}'),
        ("POST", "/v1/adapters", "[" * 100_000),
        ("POST", "/v1/adapters", "{"),
        ("POST", "/v1/adapters", '{"lora_id": "x", "source": "s"}'.encode("utf-16")),
    ],
)
@pytest.mark.parametrize("said", ["application/json", "Application/JSON; charset=utf-8"])
async def test_json_that_only_python_accepts_is_400(service, method, path, body, said):
    answer = await service.http.request(method, path, content=body, headers={"content-type": said})
    assert (answer.status_code, code(answer)) == (400, "invalid_request")
    assert answer.json()["error"]["message"].startswith("the body is not JSON: ")
    for listed in ("/v1/adapters", "/v1/catalog", "/v1/history", "/v1/policy"):
        assert (await service.http.get(listed)).status_code == 200


async def test_a_body_without_a_json_content_type_is_400(service):
    for said in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        answer = await service.http.post("/v1/adapters", content=json.dumps(SPEC), headers=said)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-type")
        assert "expected application/json" in answer.json()["error"]["message"]


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
    assert (answer.status_code, code(answer)) == (400, "invalid_request")
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["state"] == "ready"


async def test_names_of_base_models_aliases_and_adapters_exclude_each_other(service):
    await service.worker(base_model="tiny-qwen")
    await service.register()
    assert (await service.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}]})).status_code == 201
    for name in ("tiny-qwen", "sql"):
        answer = await service.http.post("/v1/adapters", json=SPEC | {"lora_id": name})
        assert (answer.status_code, code(answer)) == (409, "name_taken")
    for name in ("tiny-qwen", "sql/v1"):
        answer = await service.http.put(f"/v1/aliases/{name}", json={"targets": [{"lora_id": "sql/v1"}]})
        assert (answer.status_code, code(answer)) == (409, "name_taken")


async def test_an_alias_needs_existing_targets_and_protects_them_from_deletion(service):
    answer = await service.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}]})
    assert (answer.status_code, code(answer)) == (404, "adapter_not_found")
    await service.register()
    body = {"targets": [{"lora_id": "sql/v1", "weight": 2.0}]}
    assert (await service.http.put("/v1/aliases/sql", json=body)).status_code == 201
    assert (await service.http.put("/v1/aliases/sql", json=body)).status_code == 200
    (item,) = (await service.http.get("/v1/aliases")).json()["data"]
    assert item == {"name": "sql", "spec": body | {"place_s": 300.0}, "status": body | {"pending": None}}
    answer = await service.http.delete("/v1/adapters/sql/v1")
    assert (answer.status_code, code(answer)) == (409, "in_use")
    assert (await service.http.delete("/v1/aliases/sql")).status_code == 204
    answer = await service.http.get("/v1/aliases/sql")
    assert (answer.status_code, code(answer)) == (404, "alias_not_found")
    assert (await service.http.delete("/v1/adapters/sql/v1")).status_code == 204


async def test_an_adapter_that_is_nowhere_is_deleted_at_once_and_then_unknown(service):
    await service.register()
    assert (await service.http.delete("/v1/adapters/sql/v1")).status_code == 204
    for answer in (
        await service.http.get("/v1/adapters/sql/v1"),
        await service.http.delete("/v1/adapters/sql/v1"),
        await service.ensure(),
        await service.http.post("/v1/adapters/sql/v1/retry"),
    ):
        assert (answer.status_code, code(answer)) == (404, "adapter_not_found")


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
    assert (answer.status_code, code(answer)) == (400, "source_has_credentials")
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
    assert (item["policy"]["pinned"], item["policy"]["priority"], item["tenants"]) == (True, 4, ["acme"])
    item = (await service.http.patch("/v1/adapters/sql/v1", json={"tenants": None})).json()
    assert (item["policy"]["priority"], item["tenants"]) == (4, None)
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
    assert (answer.status_code, code(answer)) == (503, "no_worker")
    assert "retry-after" in answer.headers
    agent = await service.worker()
    answer = await service.http.post("/v1/adapters?dry_run=1", json=SPEC)
    assert (answer.status_code, answer.json()["rank"]) == (200, 8)
    assert (await service.http.get("/v1/adapters")).json()["data"] == []
    agent.refuse["sql/v1"] = "adapter_invalid"
    answer = await service.http.post("/v1/adapters?dry_run=1", json=SPEC)
    assert (answer.status_code, code(answer)) == (400, "adapter_invalid")
    agent.refuse.clear()
    agent.ranks[SPEC["source"]] = 65
    answer = await service.http.post("/v1/adapters?dry_run=1", json=SPEC)
    assert (answer.status_code, code(answer)) == (400, "rank_too_big")
    await service.worker("w1", max_lora_rank=128)
    assert (await service.http.post("/v1/adapters?dry_run=1", json=SPEC)).json()["rank"] == 65


async def test_the_policy_is_replaced_only_with_a_matching_etag(service):
    seen = await service.http.get("/v1/policy")
    tag = {"if-match": seen.headers["etag"]}
    changed = await service.http.patch("/v1/policy", json={"loading": "eager"}, headers=tag)
    assert changed.json() == seen.json() | {"loading": "eager"}
    assert changed.headers["etag"] != seen.headers["etag"]
    answer = await service.http.put("/v1/policy", json={"loading": "weighted"}, headers=tag)
    assert (answer.status_code, code(answer)) == (412, "precondition_failed")
    assert (await service.http.get("/v1/policy")).json()["loading"] == "eager"
    for body in ({"loading": "eagre"}, {"lodaing": "eager"}, {"min_replicas": 9, "max_replicas": 2}):
        assert (await service.http.patch("/v1/policy", json=body)).status_code == 400


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


async def test_a_heartbeat_that_says_nothing_new_changes_no_revision(service):
    await service.worker()
    await service.turn()
    before = (await service.catalog())["revision"]
    await service.settle()
    assert (await service.catalog())["revision"] == before


@pytest.mark.parametrize("name", ["", "w0\r\nset-cookie: a=b", "w0\n", "w\x1b[31m0", "w\u2192", "w" * 254])
async def test_a_worker_id_invalid_in_a_header_is_refused(service, name):
    agent = await service.worker()
    beat = agent.heartbeat() | {"metadata": {**agent.metadata(), "instance_id": name}}
    answer = await service.http.post("/v1/workers/register", json=beat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata.instance_id")
    assert [worker["id"] for worker in (await service.http.get("/v1/workers")).json()["data"]] == [agent.worker_id]


async def test_ensure_needs_no_body_and_respects_max_replicas(service):
    await service.worker()
    await service.register(policy={"max_replicas": 1})
    assert (await service.http.post("/v1/adapters/sql/v1/ensure")).status_code == 200
    await service.settle()
    assert (await service.ensure(replicas=5)).json()["expected_s"] == 0.0


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


async def test_an_unknown_worker_is_404_with_the_known_ones(service):
    await service.worker()
    answer = await service.http.post("/v1/workers/w9/cordon")
    assert (answer.status_code, code(answer)) == (404, "worker_not_found")
    assert "w0" in answer.json()["error"]["message"]
    assert (await service.http.get("/v1/workers/w9")).status_code == 404


async def test_an_adapter_on_no_worker_is_deleted_without_a_pass(service):
    await service.register()
    await service.turn()
    before = (await service.http.get("/metrics")).text
    passes = [line for line in before.splitlines() if line.startswith("lorafleet_orchestrator_pass_seconds_count")]
    assert passes
    assert (await service.http.delete("/v1/adapters/sql/v1")).status_code == 204
    assert passes[0] in (await service.http.get("/metrics")).text.splitlines()
    assert (await service.catalog())["adapters"] == []


async def test_a_dropped_worker_can_still_be_uncordoned(open_service):
    before = open_service()
    await before.worker("w0")
    await before.http.post("/v1/workers/w0/cordon")
    await before.close()
    service = open_service()
    answer = await service.http.post("/v1/workers/w0/uncordon")
    assert (answer.status_code, answer.json()["id"], answer.json()["state"]) == (200, "w0", "lost")
    assert service.store.workers == {}
    assert (await service.http.post("/v1/workers/w0/uncordon")).status_code == 404


async def test_an_unserved_base_model_is_named_with_the_served_ones(service):
    await service.register("x/v1", base_model="tiny-qwne")
    await service.settle()
    assert (await service.adapter("x/v1"))["error"] is None  # there may be one in a moment
    await service.worker(base_model="tiny-qwen")
    await service.settle()
    says = "no ready worker serves 'tiny-qwne'; those there are serve ['tiny-qwen']"
    assert (await service.adapter("x/v1"))["error"] == says
    assert (await service.ensure("x/v1")).json()["error"] == says
    await service.worker("w1", base_model="tiny-qwne")
    await service.settle()
    assert (await service.adapter("x/v1"))["error"] is None


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ([{"lora_id": "sql/v1"}, {"lora_id": "sql/v1", "weight": 3}], "'sql/v1' is named twice"),
        ([{"lora_id": "sql/v1", "weight": 1e308}, {"lora_id": "sql/v2", "weight": 1e308}], "add up"),
    ],
)
async def test_an_alias_whose_targets_do_not_add_up_is_refused(service, targets, says):
    await service.register("sql/v1")
    await service.register("sql/v2")
    answer = await service.http.put("/v1/aliases/sql", json={"targets": targets})
    assert (answer.status_code, code(answer)) == (400, "invalid_request")
    assert says in answer.json()["error"]["message"]


async def test_tenants_can_be_changed_despite_policy_bounds(service):
    await service.register("sql/v1", policy={"min_replicas": 100})
    answer = await service.http.patch("/v1/adapters/sql/v1", json={"tenants": ["acme"]})
    assert (answer.status_code, answer.json()["tenants"]) == (200, ["acme"])
    wrong = await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"min_replicas": 65}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "policy.min_replicas")


async def test_metrics_count_operations_and_replicas_and_bound_their_labels(service):
    await service.worker()
    await service.register()
    await service.ensure()
    await service.settle()
    text = (await service.http.get("/metrics")).text
    assert 'lora_placement_operations_total{operation="load",outcome="ok"} 1.0' in text
    assert 'lora_replicas_current{lora_id="sql/v1"} 1.0' in text
    assert 'lorafleet_orchestrator_workers{state="ready"} 1.0' in text


async def test_scopes_limit_callers_to_their_routes(open_service, tmp_path):
    keys = [{"sha256": hash_key(name), "scopes": [name]} for name in ("admin", "load", "infer", "register", "worker")]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    service = open_service(key_files=(tmp_path / "keys.yaml",))

    async def status(key, method, path):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return (await service.http.request(method, path, headers=headers)).status_code

    for_admins = [
        ("GET", "/v1/adapters"),
        ("POST", "/v1/adapters"),
        ("POST", "/v1/adapters:batch"),
        ("GET", "/v1/adapters/a"),
        ("PATCH", "/v1/adapters/a"),
        ("DELETE", "/v1/adapters/a"),
        ("POST", "/v1/adapters/a/retry"),
        ("GET", "/v1/aliases"),
        ("GET", "/v1/policy"),
        ("PUT", "/v1/policy"),
        ("GET", "/v1/placements"),
        ("POST", "/v1/placements/plan"),
        ("POST", "/v1/rebalance"),
        ("POST", "/v1/workers/w0/cordon"),
    ]
    for_routers = [
        ("GET", "/v1/catalog"),
        ("POST", "/v1/usage"),
        ("POST", "/v1/adapters/a/ensure"),
        ("GET", "/v1/workers"),
    ]
    for method, path in for_admins + for_routers:
        assert await status(None, method, path) == 401, path
        assert await status("infer", method, path) == 403, path
        assert await status("admin", method, path) not in (401, 403), path
    for method, path in for_admins:
        assert await status("load", method, path) == 403, path
        assert await status("register", method, path) == 403, path
    for method, path in for_routers:
        assert await status("load", method, path) not in (401, 403), path
        assert await status("register", method, path) == 403, path
    heartbeat = ("POST", "/v1/workers/register")
    refused = {None: 401, "infer": 403, "load": 403, "register": 403}
    assert {key: await status(key, *heartbeat) for key in refused} == refused
    assert not {await status(key, *heartbeat) for key in ("worker", "admin")} & {401, 403}
    for path in ("/health", "/ready"):
        assert await status(None, "GET", path) == 200
    refused |= {"worker": 403, "admin": 200}
    assert {key: await status(key, "GET", "/metrics") for key in refused} == refused
    service = open_service(key_files=(tmp_path / "keys.yaml",), metrics_need_key=False)
    assert await status(None, "GET", "/metrics") == 200


async def _next_event(lines):
    event = {}
    async for line in lines:
        if not line and event:
            return event
        name, _, value = line.partition(": ")
        if name in ("id", "event", "data"):
            event[name] = value
    return None


async def test_events_follow_from_a_revision_live_and_after_a_reconnect(service):
    await service.register("a")
    start = (await service.catalog())["revision"]
    await service.register("b")
    async with serving(service.built.app) as url, httpx.AsyncClient(base_url=url, timeout=patience(10)) as client:
        async with client.stream("GET", "/v1/events", params={"since": start}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.aiter_lines()
            event = await _next_event(lines)
            body = json.loads(event["data"])
            assert (event["event"], body["lora_id"], int(event["id"])) == ("adapter_registered", "b", body["id"])
            await client.post("/v1/adapters", json={"lora_id": "c", "source": "s"})
            assert json.loads((await _next_event(lines))["data"])["lora_id"] == "c"
        async with client.stream("GET", "/v1/events", headers={"last-event-id": event["id"]}) as answer:
            assert json.loads((await _next_event(answer.aiter_lines()))["data"])["lora_id"] == "c"
        service.built.stop()


async def test_events_older_than_the_buffer_are_410(open_service):
    service = open_service(event_buffer=3)
    start = (await service.catalog())["revision"]
    for number in range(3):
        await service.register(f"a{number}")
    assert service.reconciler.catalog.events_since(start)
    await service.register("a9")
    for since in (start, 1, 10**18):
        answer = await service.http.get("/v1/events", params={"since": since})
        assert (answer.status_code, code(answer)) == (410, "events_expired")


async def test_an_event_stream_ends_with_its_leaders_term(open_service):
    service = open_service()
    async with (
        serving(service.built.app) as url,
        client_of() as client,
        client.stream("GET", f"{url}/v1/events") as it,
    ):
        lines = it.aiter_lines()
        assert (await anext(lines)).startswith(": following")
        service.built.leadership.on_newer_leader("another leads")
        async with within(5):
            assert [line async for line in lines if line] == []


async def test_events_of_another_leaders_term_are_410(open_service):
    service = open_service()
    before = (await service.catalog())["revision"]
    service.built.leadership.on_newer_leader("another leads")
    other = open_service()
    await other.register("told-by-the-other")
    between = (await other.catalog())["revision"]
    await other.built.leadership.release()
    await service.reconciler.prepare_term()
    service.built.leadership.lead_until(math.inf)
    for since in (before, between):
        answer = await service.http.get("/v1/events", params={"since": since})
        assert (answer.status_code, code(answer)) == (410, "events_expired")


async def test_an_idle_event_stream_sends_keep_alive_comments(open_service):
    service = open_service(keep_alive_s=0.01)
    stream = service.reconciler.catalog.event_stream(
        service.reconciler.catalog.revision, keep_alive_s=0.01, is_stopping=lambda: False
    )
    texts = [await asyncio.wait_for(anext(stream), patience(5)) for _ in range(3)]
    assert all(text.startswith(":") for text in texts)
    await stream.aclose()


async def test_the_openapi_document_has_an_example_for_every_body_that_people_write(service):
    paths = (await service.http.get("/openapi.json")).json()["paths"]
    for path, method in (("/v1/adapters", "post"), ("/v1/aliases/{name}", "put"), ("/v1/policy", "put")):
        schema = paths[path][method]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["examples"], path


def test_every_error_has_a_status_and_a_code():
    tree = [OrchestratorError]
    for error in tree:
        tree += error.__subclasses__()
        assert 400 <= error.status < 600
        assert error.code
        assert error.__name__ in sys.modules[error.__module__].__doc__


@pytest.fixture
async def start(tmp_path):
    """Starts `python -m orchestrator` on one store; yields the process and its first log line."""
    processes = []

    async def begun(*flags):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "orchestrator", "--port", "0", "--store", str(tmp_path / "s.db")),
            *("--port-file", str(tmp_path / "port"), *flags),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONWARNINGS": "default"},
        )
        processes.append(process)
        line = await asyncio.wait_for(process.stderr.readline(), patience(30))
        return process, line.decode()

    yield begun
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.fleet
async def test_sigterm_ends_the_process_despite_waiting_and_following_clients(start):
    process, line = await start("--settle-s", "0")
    url = f"http://127.0.0.1:{json.loads(line)['port']}"
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        await client.post("/v1/adapters", json=SPEC)
        waiting = asyncio.create_task(client.post("/v1/adapters/sql/v1/ensure", json={"wait_s": 600}))
        async with client.stream("GET", "/v1/events") as follower:
            lines = follower.aiter_lines()
            assert (await anext(lines)).startswith(":")
            process.send_signal(signal.SIGTERM)
            assert (await asyncio.wait_for(waiting, patience(10))).json()["ready"] == []
            assert await _next_event(lines) is None
    await asyncio.wait_for(process.wait(), patience(10))
    assert b"Traceback" not in await process.stderr.read()
    again, line = await start()
    assert json.loads(line)["adapters"] == 1
    again.terminate()
    await again.wait()


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


@pytest.mark.fleet
async def test_a_store_that_cannot_be_used_ends_the_process_with_one_line(start, tmp_path):
    (tmp_path / "s.db").write_text("not a database " * 500)
    process, line = await start()
    rest = await process.stderr.read()
    assert await process.wait() == 2
    assert "python -m orchestrator: store" in line
    assert rest == b""
