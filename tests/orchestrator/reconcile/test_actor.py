"""Actions: an adapter is inspected, loaded and unloaded by calls to agents, each once and under the leader's epoch."""

import asyncio
import gc
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from tests.orchestrator.reconcile.ready_adapters import ready
from tests.patience import patience


async def test_an_adapter_is_inspected_and_loaded_once_on_request(service):
    agent = await service.worker()
    assert (await service.register())["status"]["state"] == "registered"
    await service.settle()
    item = await service.adapter()
    assert (item["status"]["state"], item["status"]["card"]["rank"], item["spec"]["base_model"]) == (
        "registered",
        8,
        "tiny-qwen",
    )
    assert agent.operations() == [("inspect_lora", "sql/v1")]

    answer = (await service.ensure()).json()
    assert answer["ready"] == []
    await service.settle()
    answer = (await service.ensure()).json()
    assert answer["ready"] == ["w0"]
    assert answer["state"] == "ready"
    assert answer["expected_s"] == 0.0
    assert agent.operations()[-1] == ("load_lora", "sql/v1")
    assert await service.turn() == []


async def test_a_finished_move_is_counted_as_a_rebalance(service, clock):
    for worker_id in ("w0", "w1"):
        await service.worker(worker_id)
    await service.register(policy={"min_replicas": 2})
    await service.settle()
    series = 'lora_placement_operations_total{operation="rebalance",outcome="ok"}'
    assert series not in (await service.http.get("/metrics")).text
    last = service.reconciler.queries.last_pass
    memory = replace(last.desired.memory, moves={("sql/v1", "w0"): "w1"})
    service.reconciler.queries.last_pass = replace(last, desired=replace(last.desired, memory=memory))
    await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"min_replicas": 1}})
    await service.turn()  # drains the old copy
    clock.now += 1
    await service.turn()
    assert f"{series} 1.0" in (await service.http.get("/metrics")).text


async def test_agents_are_called_directly_whatever_proxy_the_environment_names(open_service, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    service = open_service()
    agent = await service.worker()
    await service.register()
    await service.turn()
    assert agent.operations() == [("inspect_lora", "sql/v1")]


async def test_a_branch_is_fetched_from_its_inspected_commit(service):
    agent = await service.worker()
    commit, elsewhere = f"hf://acme/sql@{'c' * 40}", f"hf://acme/other@{'c' * 40}"
    agent.pins = {"hf://acme/sql@main": commit, "hf://acme/legal": elsewhere}
    await service.register("sql/v1", source="hf://acme/sql@main")
    await service.register("legal/v1", source="hf://acme/legal")
    await service.settle()
    catalog = (await service.http.get("/v1/catalog")).json()["adapters"]
    assert {item["lora_id"]: item["source"] for item in catalog} == {"sql/v1": commit, "legal/v1": "hf://acme/legal"}
    assert (await service.adapter("sql/v1"))["spec"][
        "source"
    ] == "hf://acme/sql@main"  # as it was registered, and may be again
    again = {"lora_id": "sql/v1", "source": "hf://acme/sql@main"}
    assert (await service.http.post("/v1/adapters", json=again)).status_code == 200
    await service.ensure("sql/v1")
    await service.settle()
    assert [body["source"] for verb, body in agent.calls if verb == "load_lora"] == [commit]


async def test_every_action_carries_the_epoch(service):
    agent = await service.worker()
    await ready(service)
    assert set(agent.epochs) == {service.store.epoch}


async def test_only_a_started_load_counts_as_a_tenants_turn(service):
    await service.worker()
    await service.register("a/v1")
    await service.register("b/v1")
    await service.ensure("a/v1", tenants=["acme"])
    await service.ensure("b/v1")
    assert {action.operation for action in await service.turn()} == {"inspect"}
    assert service.reconciler.demand.snapshot(service.clock.now).last_load_at == {}
    assert {action.lora_id for action in await service.settle()} == {"a/v1", "b/v1"}
    assert service.reconciler.demand.snapshot(service.clock.now).last_load_at == {"acme": service.clock.now}


async def test_an_agent_error_with_invalid_text_breaks_no_list(service):
    agent = await service.worker()
    await service.register()
    await service.settle()
    await service.ensure()
    agent.answers["load_lora"] = b'{"error": {"code": "adapter_refused", "message": "half a pair: \\ud800"}}'
    await service.turn()
    assert "\\ud800" in (await service.adapter())["status"]["error"]
    assert (await service.http.get("/v1/catalog")).status_code == 200


async def test_an_unload_in_progress_is_not_started_again(service, clock):
    agent = await service.worker()
    await ready(service)
    await service.http.patch("/v1/policy", json={"loads_per_worker": 3})
    agent.hold_unloads = asyncio.Event()
    await service.http.delete("/v1/adapters/sql/v1")
    clock.now += service.store.rules.drain_deadline_s + 1
    agent.has_called.clear()
    started = []
    for _ in range(4):
        await service.beat()
        started += service.reconciler.run_pass()
        await asyncio.wait_for(agent.has_called.wait(), patience(5))
    assert [action.operation for action in started] == ["unload"]
    agent.hold_unloads.set()
    await service.reconciler.wait_for_actions()
    await service.settle()
    assert [verb for verb, _ in agent.operations() if verb == "unload_lora"] == ["unload_lora"]


async def test_an_adapter_that_could_not_be_loaded_somewhere_can_be_deleted(service):
    agent = await service.worker()
    await service.register()
    await service.settle()
    digest = (await service.adapter())["spec"]["digest"]
    # Agents tell of a load that failed until they end, or another one of it succeeds.
    failed = {"lora_id": "sql/v1", "digest": digest, "engine_name": "", "state": "failed", "location": "disk"}
    agent.loading["sql/v1"] = failed | {"error": "the engine refuses it"}
    await service.turn()
    assert (await service.http.delete("/v1/adapters/sql/v1")).status_code == 204
    assert (await service.http.get("/v1/adapters/sql/v1")).status_code == 404


@pytest.fixture
def no_lock_wait(monkeypatch):
    """SQLite connections that do not wait for the locks of others."""
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **named: connect(path, **{**named, "timeout": 0}))


@pytest.mark.usefixtures("no_lock_wait")
@pytest.mark.parametrize("refusal", [None, "adapter_refused"])
async def test_a_locked_store_refuses_writes_and_breaks_no_action(open_service, tmp_path, refusal):
    service = open_service()
    agents = [await service.worker(name) for name in (("w0", "w1") if refusal else ("w0",))]
    await service.register()
    await service.settle()
    if refusal:
        for agent in agents:
            agent.refuse["sql/v1"] = refusal
        await service.ensure()
        await service.turn()  # the first of two; the second would quarantine it
    may_load = asyncio.Event()
    for agent in agents:
        agent.hold_loads = may_load
    await service.ensure()
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        service.reconciler.run_pass()
        other.execute("BEGIN IMMEDIATE")
        refused = await service.http.post("/v1/adapters", json={"lora_id": "late/v1", "source": "file:///late"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unreachable")
        assert int(refused.headers["retry-after"]) > 0
        may_load.set()
        await service.reconciler.wait_for_actions()
    gc.collect()
    assert unhandled == []
    assert (await service.adapter("late/v1"))["error"]["code"] == "adapter_not_found"
    assert service.reconciler.queries.loading_workers("sql/v1") == []
    await service.turn()
    answer = (await service.ensure()).json()
    assert answer["error"]["code"] == "adapter_failed" if refusal else answer["ready"] == ["w0"]


@pytest.mark.parametrize("operation", ["inspect", "load"])
async def test_an_action_cancelled_at_a_terms_end_is_started_in_the_next(service, operation):
    agent = await service.worker()
    await service.register()
    if operation == "load":
        await service.settle()
        await service.ensure()
    await service.beat()
    assert [action.operation for action in service.reconciler.run_pass()] == [operation]
    service.reconciler.end_term()  # as of a leader that wakes after its lease is over: a pass was due, too
    await service.reconciler.wait_for_actions()
    calls = len(agent.calls)
    await service.reconciler.prepare_term()
    service.reconciler.begin_term()
    await service.settle()
    assert agent.operations()[calls:] == [(f"{operation}_lora", "sql/v1")]


async def test_one_slow_load_delays_other_workers_by_no_more_than_the_spread(service):
    fast, slow = await service.worker("w0"), await service.worker("w1")  # w1 is the adapter's home
    slow.hold_loads = asyncio.Event()
    await service.register("a/v1", source="a", policy={"loading": "eager", "min_replicas": 2})
    await service.turn()
    await service.beat()
    service.reconciler.run_pass()
    assert service.reconciler.queries.loading_workers("a/v1") == ["w1"]
    assert service.reconciler.run_pass() == []
    service.clock.now += 2.1
    await service.beat()
    service.reconciler.run_pass()
    while service.reconciler.queries.loading_workers("a/v1") != ["w1"]:
        assert await service.reconciler.catalog.changed.wait(5)
    assert list(fast.loaded) == ["a/v1"]
    assert service.reconciler.run_pass() == []
    assert (await service.ensure("a/v1", replicas=2)).json()["loading"] == ["w1"]
    slow.hold_loads.set()
    await service.reconciler.wait_for_actions()
    assert await service.settle() == []
    assert (await service.adapter("a/v1"))["status"]["replicas"] == {"desired": 2, "ready": 2}


async def test_loads_stay_within_worker_and_fleet_budgets(service):
    for name in ("w0", "w1", "w2"):
        await service.worker(name, slots=8)
    await service.http.patch("/v1/policy", json={"loads_fleet_wide": 2})
    for number in range(6):
        await service.register(f"a{number}", policy={"loading": "eager", "min_replicas": 3})
    inspected = await service.turn()
    assert {action.operation for action in inspected} == {"inspect"}
    await service.beat()
    actions = service.reconciler.run_pass()
    assert len(actions) == 2
    assert len({action.worker_id for action in actions}) == 2
    await service.reconciler.wait_for_actions()
    await service.settle()
    assert all(len(agent.loaded) == 6 for agent in service.agents.values())


async def test_a_worker_with_a_hanging_load_gets_nothing_new(service):
    agent = await service.worker()
    report = service.reconciler.reports.workers["w0"].report
    service.reconciler.monitor.record_heartbeat(report.model_copy(update={"is_suspect": True}))
    assert service.reconciler.queries.observe().workers["w0"].state == "cordoned"
    service.reconciler.monitor.record_heartbeat(report)
    assert service.reconciler.queries.observe().workers["w0"].state == "ready"
    assert agent.calls == []
