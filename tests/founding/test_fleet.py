"""What the documents ask of the orchestrator and of the fleet: placement, policy, metrics, security, open questions."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import OrchestratorSettings
from tests.e2e.fleets import until
from tests.founding.conftest import ACME, LEGAL, PYTHON, SQL, FoundingFleet, models

pytestmark = pytest.mark.fleet


def test_ensure_loads_an_adapter_on_as_many_workers_as_asked(fleet: FoundingFleet) -> None:
    assert sorted(fleet.ensure(SQL, replicas=2)) == ["w0", "w1"]
    placed = fleet.get(f"{fleet.orchestrator}/v1/placements")["data"]
    assert {item["worker_id"] for item in placed if item["lora_id"] == SQL and item["state"] == "ready"} == {"w0", "w1"}


def test_policy_is_read_and_changed_without_a_restart(fleet: FoundingFleet) -> None:
    address = f"{fleet.orchestrator}/v1/policy"
    before = fleet.get(address)
    assert (before["loading"], before["min_replicas"], before["max_replicas"]) == ("lazy", 1, 64)
    for loading in ("eager", "weighted", before["loading"]):
        changed = fleet.send("PATCH", address, json={"loading": loading})
        assert (changed.status_code, changed.json()["loading"]) == (200, loading)


def test_adapters_own_policy_pins_it_and_bounds_its_replicas(fleet: FoundingFleet) -> None:
    address = f"{fleet.orchestrator}/v1/adapters/{PYTHON}"
    changed = fleet.send("PATCH", address, json={"policy": {"pinned": True, "min_replicas": 1, "max_replicas": 2}})
    assert changed.status_code == 200, changed.text
    policy = fleet.get(address)["spec"]["policy"]
    assert (policy["pinned"], policy["min_replicas"], policy["max_replicas"]) == (True, 1, 2)
    fleet.send("PATCH", address, json={"policy": {"pinned": False, "min_replicas": None, "max_replicas": None}})


def test_adapter_that_nobody_asks_for_in_its_ttl_leaves_and_returns_on_demand(fleet: FoundingFleet) -> None:
    source = fleet.get(f"{fleet.orchestrator}/v1/adapters/{LEGAL}")["spec"]["source"]
    spec = {"lora_id": "rare/v1", "source": source, "policy": {"ttl_s": 1, "min_replicas": 0}}
    policy = f"{fleet.orchestrator}/v1/policy"
    before = fleet.get(policy)
    assert before["ttl_s"] == 0
    assert fleet.send("PATCH", policy, json={"min_residency_s": 0.1}).is_success
    assert fleet.post(f"{fleet.orchestrator}/v1/adapters", spec).status_code == 201
    assert fleet.chat(lora_id="rare/v1").is_success
    evicted = {"lora_id": "rare/v1", "reason": "ttl"}
    until(
        lambda: evicted in fleet.series(fleet.orchestrator).get("lora_evictions_total", []),
        within_s=60,
        what="it has expired",
    )
    assert fleet.chat(lora_id="rare/v1").is_success
    assert fleet.send("PATCH", policy, json={"min_residency_s": before["min_residency_s"]}).is_success


def test_lazy_waits_for_a_request_and_eager_does_not(fleet: FoundingFleet) -> None:
    adapters = f"{fleet.orchestrator}/v1/adapters"
    source = fleet.get(f"{adapters}/{LEGAL}")["spec"]["source"]
    for loading in ("lazy", "eager"):
        spec = {"lora_id": f"{loading}/v1", "source": source, "policy": {"loading": loading}}
        assert fleet.post(adapters, spec).status_code == 201
    until(lambda: fleet.fleet.held_by("eager/v1"), within_s=30, what="the eager one is loaded, and nobody asked")
    assert not fleet.fleet.held_by("lazy/v1")
    assert fleet.chat(lora_id="lazy/v1").is_success
    assert fleet.fleet.held_by("lazy/v1")


def test_plan_says_what_the_next_pass_would_do_and_rebalance_does_it(fleet: FoundingFleet) -> None:
    adapters = f"{fleet.orchestrator}/v1/adapters"
    source = fleet.get(f"{adapters}/{LEGAL}")["spec"]["source"]
    assert fleet.post(adapters, {"lora_id": "planned/v1", "source": source}).status_code == 201
    until(
        lambda: (
            fleet.get(f"{adapters}/planned/v1")["status"]["state"] == "registered"
            and fleet.get(f"{adapters}/planned/v1")["spec"]["digest"]
        ),
        within_s=30,
        what="it is inspected",
    )
    assert not fleet.fleet.held_by("planned/v1")
    supposed = {"adapter_policies": {"planned/v1": {"loading": "eager", "min_replicas": 2}}, "passes": 3}
    planned = fleet.post(f"{fleet.orchestrator}/v1/placements/plan", supposed).json()
    loads = [each for each in planned["actions"] if (each["operation"], each["lora_id"]) == ("load", "planned/v1")]
    assert {each["worker_id"] for each in loads} == {"w0", "w1"}
    assert not fleet.fleet.held_by("planned/v1"), "a plan does nothing"
    policy = {"policy": {"loading": "eager", "min_replicas": 2}}
    assert fleet.send("PATCH", f"{adapters}/planned/v1", json=policy).is_success
    assert fleet.post(f"{fleet.orchestrator}/v1/rebalance", {}).is_success
    until(lambda: len(fleet.fleet.held_by("planned/v1")) == 2, within_s=30, what="both workers have it")


def test_orchestrator_loads_by_the_workers_own_route(fleet: FoundingFleet) -> None:
    fleet.ensure(PYTHON, replicas=2)
    calls = [line for line in fleet.log_lines("w0") if line.get("path") == "/v1/admin/load_lora"]
    assert 200 in {line["status"] for line in calls}
    assert OrchestratorSettings().load_timeout_s == 300


def test_failed_load_is_logged_with_worker_and_error(fleet: FoundingFleet) -> None:
    adapters = f"{fleet.orchestrator}/v1/adapters"
    folder = Path(fleet.get(f"{adapters}/{LEGAL}")["spec"]["source"])
    broken = folder.parent / "broken"
    shutil.copytree(folder, broken)
    (broken / "adapter_model.safetensors").write_bytes(b"no weights")
    assert fleet.post(adapters, {"lora_id": "broken/v1", "source": str(broken)}).status_code == 201

    def said() -> list[dict[str, Any]]:
        return [line for line in fleet.log_lines("orchestrator") if line.get("lora_id") == "broken/v1"]

    until(lambda: any(line.get("outcome") == "refused" for line in said()), within_s=30, what="it is refused")
    line = next(line for line in said() if line.get("outcome") == "refused")
    assert (line["code"], line["worker_id"] in {"w0", "w1"}) == ("weights_corrupt", True)
    assert line["error"]
    assert fleet.send("DELETE", f"{adapters}/broken/v1").is_success


def test_load_by_vllms_own_call_at_the_router_reaches_every_worker(fleet: FoundingFleet) -> None:
    source = fleet.get(f"{fleet.orchestrator}/v1/adapters/{LEGAL}")["spec"]["source"]
    body = {"lora_name": "tenants-own", "lora_path": source}
    loaded = fleet.post(f"{fleet.router}/v1/load_lora_adapter", body)
    assert loaded.status_code == 200, loaded.text
    assert "tenants-own" in models(fleet)
    placed = fleet.get(f"{fleet.orchestrator}/v1/placements")["data"]
    held = {item["worker_id"] for item in placed if item["lora_id"].startswith("tenants-own")}
    assert held == {"w0", "w1"}
    assert fleet.chat(model="tenants-own").is_success
    assert fleet.post(f"{fleet.router}/v1/unload_lora_adapter", {"lora_name": "tenants-own"}).status_code == 200
    assert "tenants-own" not in models(fleet)


def test_workers_are_listed_with_state_capacity_and_adapters(fleet: FoundingFleet) -> None:
    workers = fleet.get(f"{fleet.orchestrator}/v1/workers")["data"]
    assert [item["id"] for item in workers] == ["w0", "w1"]
    assert all({"state", "capacity", "adapters", "agent_url", "base_model"} <= item.keys() for item in workers)


def test_services_answer_health_and_readiness(fleet: FoundingFleet) -> None:
    for service in (fleet.router, fleet.orchestrator, fleet.worker):
        assert fleet.send("GET", f"{service}/health", key="").status_code == 200
        assert fleet.send("GET", f"{service}/ready", key="").status_code == 200


def test_workers_have_the_designed_metrics(fleet: FoundingFleet) -> None:
    fleet.ensure(LEGAL, replicas=2)
    series = fleet.series(fleet.worker)
    for name in ("lora_load_duration_seconds_count", "lora_memory_usage_bytes", "lora_request_count"):
        assert {"lora_id": LEGAL, "worker_id": "w0"} in series[name], name
    for number in range(8):
        assert fleet.chat(lora_id=LEGAL, prompt=f"{number} " * 60).is_success
    count = f'lora_request_count{{lora_id="{LEGAL}",worker_id="w0"}} '
    page = f"{fleet.worker}/metrics"
    until(
        lambda: any(
            line.startswith(count) and float(line.split()[1]) > 0 for line in fleet.send("GET", page).text.splitlines()
        ),
        within_s=20,
        what="the worker has been told of its requests",
    )
    source = fleet.get(f"{fleet.orchestrator}/v1/adapters/{LEGAL}")["spec"]["source"]
    assert fleet.post(f"{fleet.orchestrator}/v1/adapters", {"lora_id": "short/v1", "source": source}).is_success
    assert "w0" in fleet.ensure("short/v1", replicas=2)
    assert fleet.send("DELETE", f"{fleet.orchestrator}/v1/adapters/short/v1").is_success
    until(lambda: not fleet.fleet.held_by("short/v1"), within_s=60, what="it is unloaded")
    unloads = fleet.series(fleet.worker)["lora_unload_duration_seconds_count"]
    assert {"lora_id": "short/v1", "worker_id": "w0"} in unloads
    fleet.post(f"{fleet.worker}/v1/admin/load_lora", {"lora_id": "stolen/v1", "lora_path": "/etc"})
    series = fleet.series(fleet.worker)
    assert {"lora_id": "stolen/v1", "worker_id": "w0"} in series["lora_load_failures_total"]
    assert {"code": "source_forbidden"} in series["lorafleet_workers_load_failures_total"]


def test_orchestrator_has_the_designed_metrics(fleet: FoundingFleet) -> None:
    fleet.ensure(LEGAL)
    source = fleet.get(f"{fleet.orchestrator}/v1/adapters/{LEGAL}")["spec"]["source"]
    assert fleet.post(f"{fleet.orchestrator}/v1/adapters", {"lora_id": "short/v2", "source": source}).is_success
    fleet.ensure("short/v2")
    assert fleet.send("DELETE", f"{fleet.orchestrator}/v1/adapters/short/v2").is_success
    until(lambda: not fleet.fleet.held_by("short/v2"), within_s=60, what="it is unloaded")
    series = fleet.series(fleet.orchestrator)
    operations = {labels["operation"] for labels in series["lora_placement_operations_total"]}
    assert {"load", "unload"} <= operations
    for name in ("lora_replicas_current", "lora_replicas_target"):
        assert {"lora_id": LEGAL} in series[name], name


def test_usage_is_counted_by_adapter(fleet: FoundingFleet) -> None:
    assert fleet.chat(lora_id=LEGAL).is_success
    until(
        lambda: {"lora_id": LEGAL} in fleet.series(fleet.orchestrator)["lora_usage_requests_total"],
        within_s=20,
        what="the router has reported the request",
    )


def test_worker_counts_where_requests_found_their_adapter(fleet: FoundingFleet) -> None:
    assert "w0" in fleet.ensure(LEGAL, replicas=2)
    for number in range(8):
        assert fleet.chat(lora_id=LEGAL, prompt=f"pool {number} " * 60).is_success
    until(
        lambda: (
            "device" in {each["found"] for each in fleet.series(fleet.worker)["lorafleet_workers_pool_requests_total"]}
        ),
        within_s=20,
        what="the worker has been told of its requests",
    )


def test_copy_that_leaves_a_drained_worker_is_an_eviction_for_capacity(fleet: FoundingFleet) -> None:
    worker = f"{fleet.orchestrator}/v1/workers/w1"
    assert "w1" in fleet.ensure(SQL, replicas=2)
    assert fleet.post(f"{worker}/drain", {}).is_success
    try:
        evicted = {"lora_id": SQL, "reason": "capacity"}
        until(
            lambda: evicted in fleet.series(fleet.orchestrator).get("lora_evictions_total", []),
            within_s=60,
            what="the drained worker has lost its copy",
        )
    finally:
        assert fleet.post(f"{worker}/uncordon", {}).is_success
        until(lambda: fleet.get(worker)["state"] == "ready", within_s=60, what="it serves again")


def test_router_counts_each_request_by_adapter_and_outcome(fleet: FoundingFleet) -> None:
    assert fleet.chat(lora_id=LEGAL, prompt="the same words again and again " * 20).is_success
    series = fleet.series(fleet.router)
    assert {"lora_id": LEGAL, "outcome": "success"} in series["lora_routing_decisions_total"]
    assert {"lora_id": LEGAL} in series["lora_request_latency_seconds_count"]
    assert {"lora_id": LEGAL} in series["lora_cache_hit_rate"]


def test_management_needs_an_operators_key(fleet: FoundingFleet) -> None:
    calls = [
        ("POST", f"{fleet.worker}/v1/admin/load_lora", {"lora_id": LEGAL}),
        ("POST", f"{fleet.worker}/v1/admin/unload_lora", {"lora_id": LEGAL}),
        ("POST", f"{fleet.orchestrator}/v1/adapters", {"lora_id": "mine/v1", "source": "/tmp/mine"}),
        ("DELETE", f"{fleet.orchestrator}/v1/adapters/{LEGAL}", None),
    ]
    for method, url, body in calls:
        assert fleet.send(method, url, key="", json=body).status_code == 401, url
        assert fleet.send(method, url, key="acme", json=body).status_code == 403, url


def test_every_load_is_in_the_history_with_who_asked_and_how_it_ended(fleet: FoundingFleet) -> None:
    fleet.ensure(PYTHON)
    entries = fleet.get(f"{fleet.orchestrator}/v1/history", kind="load", subject=PYTHON)["data"]
    assert entries
    assert all(entry["actor"] and entry["body"]["outcome"] == "ok" for entry in entries)


def test_adapter_of_a_tenant_is_there_for_nobody_else(fleet: FoundingFleet) -> None:
    assert ACME in models(fleet, key="acme")
    assert ACME not in models(fleet, key="other")
    answer = fleet.chat(lora_id=ACME, key="other")
    assert (answer.status_code, fleet.code(answer)) == (404, "model_not_found")


def test_versions_live_side_by_side_behind_an_alias(fleet: FoundingFleet) -> None:
    source = fleet.get(f"{fleet.orchestrator}/v1/adapters/{LEGAL}")["spec"]["source"]
    made = fleet.post(f"{fleet.orchestrator}/v1/adapters", {"lora_id": "legal/v3", "source": source})
    assert made.status_code == 201, made.text
    changed = fleet.send("PATCH", f"{fleet.orchestrator}/v1/adapters/{LEGAL}", json={"source": "/elsewhere"})
    assert changed.is_client_error
    targets = [{"lora_id": LEGAL, "weight": 1}, {"lora_id": "legal/v3", "weight": 1}]
    alias = fleet.send("PUT", f"{fleet.orchestrator}/v1/aliases/legal", json={"targets": targets})
    assert alias.is_success, alias.text
    seen = {fleet.chat(model="legal", prompt=f"question {n}").headers["x-lorafleet-adapter"] for n in range(16)}
    assert {name.partition("@")[0] for name in seen} == {LEGAL, "legal/v3"}


def test_registered_adapter_answers_everywhere_and_a_deleted_one_nowhere(fleet: FoundingFleet) -> None:
    source = fleet.get(f"{fleet.orchestrator}/v1/adapters/{SQL}")["spec"]["source"]
    assert fleet.post(f"{fleet.orchestrator}/v1/adapters", {"lora_id": "brief/v1", "source": source}).is_success
    answer = fleet.chat(lora_id="brief/v1")
    assert answer.is_success, answer.text
    assert fleet.send("DELETE", f"{fleet.orchestrator}/v1/adapters/brief/v1").is_success
    until(lambda: "brief/v1" not in models(fleet), within_s=20, what="the router knows of the deletion")
    gone = fleet.chat(lora_id="brief/v1")
    assert (gone.status_code, fleet.code(gone)) == (404, "model_not_found")
    until(lambda: not fleet.fleet.held_by("brief/v1"), within_s=60, what="every worker has unloaded it")


def test_load_at_one_engine_is_shown_as_an_orphan_and_adopted_with_one_call(fleet: FoundingFleet) -> None:
    engine = fleet.get(f"{fleet.worker}/metadata")["transport"]["engine_url"]
    source = fleet.get(f"{fleet.orchestrator}/v1/adapters/{LEGAL}")["spec"]["source"]
    body = {"lora_name": "script-made", "lora_path": source}
    assert fleet.send("POST", f"{engine}/v1/load_lora_adapter", json=body).is_success

    def is_verified() -> bool:
        orphans = fleet.get(f"{fleet.orchestrator}/v1/orphans")["data"]
        return any(item["lora_id"] == "script-made" and item["card"]["digest"] for item in orphans)

    until(is_verified, within_s=30, what="the load is seen and its files are read")
    adopted = fleet.post(f"{fleet.orchestrator}/v1/orphans/adopt", {"lora_ids": ["script-made"]})
    assert [item["status"] for item in adopted.json()["data"]] == [201], adopted.text
    until(lambda: "script-made" in models(fleet), within_s=20, what="the router lists it")
    assert fleet.chat(lora_id="script-made").is_success


def test_load_at_one_engine_reaches_the_fleet_by_policy(fleet: FoundingFleet) -> None:
    engine = fleet.get(f"{fleet.worker}/metadata")["transport"]["engine_url"]
    source = fleet.get(f"{fleet.orchestrator}/v1/adapters/{PYTHON}")["spec"]["source"]
    assert fleet.send("PATCH", f"{fleet.orchestrator}/v1/policy", json={"adopt": "all"}).is_success
    try:
        body = {"lora_name": "tenants-script", "lora_path": source}
        assert fleet.send("POST", f"{engine}/v1/load_lora_adapter", json=body).is_success
        until(lambda: "tenants-script" in models(fleet), within_s=30, what="it is registered without a call")
        assert sorted(fleet.ensure("tenants-script", replicas=2)) == ["w0", "w1"]
        assert fleet.chat(model="tenants-script").is_success
    finally:
        assert fleet.send("PATCH", f"{fleet.orchestrator}/v1/policy", json={"adopt": "configured"}).is_success


def test_record_is_exported_as_one_document(fleet: FoundingFleet) -> None:
    record = fleet.get(f"{fleet.orchestrator}/v1/export")
    adapters = {item["lora_id"]: item for item in record["adapters"]}
    assert len(adapters[SQL]["digest"]) == 64
    assert {"names", "policy"} <= record.keys()
