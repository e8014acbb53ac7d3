"""What holds for the requests of every route: JSON, content types, scopes, and what metrics count."""

import json

import pytest
import yaml

from lorafleet.keys.key_files import hash_key
from tests.orchestrator.api.answers import SPEC, code_of


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
    assert (answer.status_code, code_of(answer)) == (400, "invalid_request")
    assert answer.json()["error"]["message"].startswith("the body is not JSON: ")
    for listed in ("/v1/adapters", "/v1/catalog", "/v1/history", "/v1/policy"):
        assert (await service.http.get(listed)).status_code == 200


async def test_a_body_without_a_json_content_type_is_400(service):
    for said in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        answer = await service.http.post("/v1/adapters", content=json.dumps(SPEC), headers=said)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "content-type")
        assert "expected application/json" in answer.json()["error"]["message"]


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
