"""What an operator looks at closely: a worker's report, its agent's log, and the keys."""

from lorafleet.keys.key_files import hash_key


async def test_a_workers_report_is_that_of_its_last_heartbeat(service):
    agent = await service.worker()
    report = (await service.http.get("/v1/workers/w0/report")).json()
    assert report == agent.heartbeat()["metadata"] | report
    assert (await service.http.get("/v1/workers/none/report")).status_code == 404


async def test_an_agent_without_a_log_is_said_and_not_a_500(service):
    await service.worker()
    answer = await service.http.get("/v1/workers/w0/log")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "agent_unreachable")


async def test_a_workers_item_has_its_load(service):
    await service.worker()
    load = (await service.http.get("/v1/workers/w0")).json()["load"]
    assert {"running", "kv_usage", "prefill_tokens_per_s"} <= load.keys()


async def test_a_workers_item_names_its_engines_lora_kernels(service):
    agent = await service.worker()
    assert (await service.http.get("/v1/workers/w0")).json()["punica"] == ""
    agent.punica = "PunicaWrapperGPU"
    await service.beat()
    (item,) = (await service.http.get("/v1/workers")).json()["data"]
    assert item["punica"] == "PunicaWrapperGPU"


async def test_keys_are_listed_by_id_and_never_shown(open_service, tmp_path):
    path = tmp_path / "keys.yaml"
    secret = "lf-operator"
    path.write_text(
        f"keys:\n- {{sha256: {hash_key(secret)}, scopes: [operate], note: ' Ann,  on call'}}\n"
        f"- {{sha256: {hash_key('lf-acme')}, tenant: acme, scopes: [infer], limits: {{requests_per_minute: 60}}}}\n"
    )
    service = open_service(key_files=[path])
    refused = await service.http.get("/v1/keys")
    assert refused.status_code == 401
    answer = await service.http.get("/v1/keys", headers={"authorization": f"Bearer {secret}"})
    found = {item["key_id"]: item for item in answer.json()["data"]}
    assert found.keys() == {hash_key(secret)[:12], hash_key("lf-acme")[:12]}
    assert found[hash_key("lf-acme")[:12]]["spec"]["limits"] == {"requests_per_minute": 60}
    assert found[hash_key(secret)[:12]]["spec"]["note"] == "Ann, on call"
    assert secret not in answer.text
    assert hash_key(secret) not in answer.text


async def test_a_tenants_key_learns_no_workers_load_and_of_keys_its_own_alone(open_service, tmp_path):
    path = tmp_path / "keys.yaml"
    rows = [
        ("root", "scopes: [admin]"),
        ("acme", "tenant: acme, scopes: [view], note: late payer"),
        ("other", "scopes: [view]"),
    ]
    path.write_text("keys:\n" + "".join(f"- {{sha256: {hash_key(key)}, {more}}}\n" for key, more in rows))
    service = open_service(key_files=[path])
    service.http.headers["authorization"] = "Bearer root"
    await service.worker()
    assert (await service.http.get("/v1/workers/w0")).json()["load"] is not None
    service.http.headers["authorization"] = "Bearer acme"
    assert (await service.http.get("/v1/workers/w0")).json()["load"] is None
    (item,) = (await service.http.get("/v1/keys")).json()["data"]
    assert (item["key_id"], item["spec"]["note"]) == (hash_key("acme")[:12], "")
    for path_ in ("/v1/workers/w0/report", "/v1/workers/w0/log", "/v1/routers"):
        assert (await service.http.get(path_)).status_code == 403, path_
