"""Passes: what is wanted and what is there, brought together by passes, terms and restarts."""

import asyncio

import pytest

from orchestrator.core.errors import OrchestratorUnavailable, StoreError
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import AliasTarget, ServedName
from orchestrator.model.snapshot import WantedReplicas
from tests.orchestrator.doubles import EMPTY_DISK, FakeAgent
from tests.orchestrator.reconcile.ready_adapters import SQL, SQL_ENGINE, ready
from tests.patience import patience


async def test_an_adapter_registered_before_any_worker_is_inspected_when_one_appears(service):
    await service.register()
    assert await service.turn() == []
    agent = await service.worker()
    await service.settle()
    assert agent.operations() == [("inspect_lora", "sql/v1")]


async def test_eager_adapters_are_loaded_without_a_request(service):
    for name in ("w0", "w1", "w2"):
        await service.worker(name)
    await service.register(policy={"loading": "eager", "min_replicas": 2})
    await service.settle()
    assert len((await service.adapter())["status"]["workers"]) == 2
    assert await service.turn() == []


async def test_a_restored_store_never_leaves_an_agent_refusing_everyone(service):
    agent = await service.worker()
    agent.epoch = 41
    await service.beat()
    assert not service.reconciler.leadership.is_leading  # perhaps somebody newer leads: the lease is looked at first
    await service.built.leadership.check_lease()
    assert service.reconciler.leadership.is_leading
    assert service.store.epoch == 42
    await ready(service)
    assert agent.epoch == 42
    assert agent.refused == []


async def test_an_impossible_epoch_ends_no_term_and_is_not_stored(service):
    agent, liar = await service.worker("w0"), await service.worker("w1")
    liar.epoch = 2**63 - 1
    await service.beat()
    assert service.reconciler.leadership.is_leading
    service.reconciler.reload_intent()
    assert service.store.epoch == 2
    liar.state, liar.epoch = "draining", 2**70
    service.agents = {"w0": agent}
    await ready(service)
    assert (await service.adapter())["status"]["workers"] == ["w0"]


async def test_an_agent_that_refuses_every_epoch_ends_only_one_term(service):
    class ContraryAgent(FakeAgent):
        def metadata(self):
            return super().metadata() | {"epoch": 0}

    contrary = ContraryAgent("w1", slots=64)
    contrary.epoch = 10**9
    await service.worker("w0")
    await service.join(contrary)
    await service.register()
    while service.reconciler.leadership.is_leading:  # perhaps somebody newer leads: the lease is looked at
        service.reconciler.ensure_replicas("sql/v1", 2)
        await service.turn()
    await service.built.leadership.check_lease()
    await service.reconciler.wait_for_actions()
    assert service.reconciler.leadership.is_leading
    await service.ensure(replicas=2)
    await service.settle()
    assert (await service.adapter())["status"]["workers"] == ["w0"]
    assert "w1 refuses epoch" in (await service.adapter())["status"]["error"]
    assert service.store.epoch == 2


async def test_a_wait_begins_with_the_first_request(service):
    began_at = service.clock.now
    service.reconciler.ensure_replicas("sql/v1", 1)
    service.clock.now += 5.0
    service.reconciler.ensure_replicas("sql/v1", 2)
    assert service.reconciler.demand.open_wants(service.clock.now) == {
        "sql/v1": WantedReplicas(replicas=2, since=began_at)
    }


async def test_a_replaced_leader_is_refused_by_claimed_agents_and_steps_down(open_service):
    old = open_service()
    agent = await old.worker()
    await ready(old, "a/v1", source="a")
    await old.register("c/v1", source="c")
    await old.settle()
    new = open_service()
    agent_of_new = agent.metadata()
    await new.http.post("/v1/workers/register", json={"metadata": agent_of_new, "files": EMPTY_DISK})
    new.agents[agent.worker_id] = agent
    await new.register("b/v1", source="b")
    await new.ensure("b/v1")
    await new.settle()
    assert agent.claims[-1] == agent.epoch == new.store.epoch > old.store.epoch

    # The old one knows nothing of that: its clock has stood still.
    with pytest.raises(OrchestratorUnavailable, match="leads no longer"):
        old.store.put_name(ServedName(name="live", targets=(AliasTarget("a/v1", 1.0),)))
    old.reconciler.ensure_replicas("c/v1", 1)
    assert [action.operation for action in old.reconciler.run_pass()] == ["load"]
    await old.reconciler.wait_for_actions()
    assert [verb for verb, _ in agent.refused] == ["load_lora"]
    assert set(agent.loaded) == {"a/v1", "b/v1"}
    assert not old.reconciler.leadership.is_leading
    assert old.reconciler.run_pass() == []


async def test_a_fresh_store_on_a_full_fleet_unloads_nothing_and_reports_orphans(service):
    agent = await service.worker(slots=2)
    agent.put("a/v1", "a")
    agent.put("b/v1", "b")
    await service.http.patch("/v1/policy", json={"loading": "eager"})
    await service.register("c/v1")
    await service.ensure("c/v1")
    await service.settle()
    assert set(agent.loaded) == {"a/v1", "b/v1"}
    assert [verb for verb, _ in agent.operations() if verb != "inspect_lora"] == []
    (item,) = (await service.http.get("/v1/workers")).json()["data"]
    assert item["orphans"] == ["a/v1", "b/v1"]
    assert "no free slot" in (await service.adapter("c/v1"))["status"]["error"]


async def test_an_orphan_becomes_ready_when_it_is_registered(service):
    agent = await service.worker()
    agent.put("sql/v1", SQL)
    await service.register()
    await service.settle()
    assert (await service.adapter())["status"]["workers"] == ["w0"]
    assert agent.operations() == [("inspect_lora", "sql/v1")]


async def test_a_requested_adapter_is_inspected_before_others(open_service):
    service = open_service(inspects_in_flight=1)
    agent = await service.worker()
    for lora_id in ("a/v1", "b/v1", "z/v1"):
        await service.register(lora_id)
    await service.ensure("z/v1")
    await service.settle()
    inspected = [lora_id for verb, lora_id in agent.operations() if verb == "inspect_lora"]
    assert inspected == ["z/v1", "a/v1", "b/v1"]


async def test_store_takes_no_writes_after_a_term_that_could_not_be_prepared(service, monkeypatch):
    reconciler, store = service.reconciler, service.store
    reconciler.end_term()

    def full(_above):
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "raise_epoch", full)
        with pytest.raises(StoreError):
            await reconciler.prepare_term()
    with pytest.raises(OrchestratorUnavailable, match="leads no longer"):
        store.put_rules(PlacementPolicy(reserve_slots=1))
    await reconciler.prepare_term()
    store.put_rules(PlacementPolicy(reserve_slots=1))


async def test_a_deletion_survives_a_restart(open_service):
    service = open_service()
    agent = await service.worker()
    await ready(service)
    agent.running = 1
    await service.beat()
    await service.http.delete("/v1/adapters/sql/v1")
    await service.settle()
    service.store.close()

    again = open_service()
    await again.join(agent)
    await again.settle()
    assert (await again.adapter())["status"]["state"] == "deleting"
    agent.running = 0
    again.clock.now += 1
    await again.settle()
    assert agent.loaded == {}
    assert "sql/v1" not in again.store.adapters


async def test_a_restart_keeps_everything_and_moves_nothing(open_service):
    service = open_service()
    agent = await service.worker()
    await ready(service, policy={"pinned": True, "priority": 3}, tenants=["acme"])
    await service.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}]})
    await service.http.patch("/v1/policy", json={"loads_per_worker": 2})
    before, revision = await service.adapter(), (await service.catalog())["revision"]
    calls = len(agent.calls)
    service.store.close()

    again = open_service()
    await again.join(agent)
    assert await again.settle() == []
    assert await again.adapter() == before
    assert (await again.http.get("/v1/aliases/sql")).json()["spec"]["targets"][0]["lora_id"] == "sql/v1"
    assert (await again.http.get("/v1/policy")).json()["loads_per_worker"] == 2
    assert (await again.catalog())["revision"] > revision
    assert len(agent.calls) == calls


async def test_nothing_is_loaded_before_workers_had_time_to_report(tmp_path, open_service, clock):
    service = open_service()
    service.reconciler.settings = service.settings.model_copy(update={"settle_s": 5.0})
    agent = await service.worker()
    await service.register(policy={"loading": "eager"})
    assert await service.turn() == []
    assert (await service.http.get("/ready")).status_code == 503
    clock.now += 5
    await service.settle()
    assert (await service.http.get("/ready")).status_code == 200
    assert list(agent.loaded) == ["sql/v1"]


async def test_the_loop_survives_a_pass_that_raises(service, monkeypatch):
    passes = []

    def worst():
        passes.append(1)
        if len(passes) == 1:
            raise RuntimeError("the worst iteration")
        loop.cancel()
        return []

    service.reconciler.run_pass = worst
    loop = asyncio.create_task(service.reconciler.run())
    await asyncio.wait([loop], timeout=patience(5))
    assert len(passes) == 2


async def test_repeated_and_late_usage_reports_change_nothing(service):
    await service.worker()
    use = {"worker_id": "w0", "engine_name": SQL_ENGINE, "requests": 6, "in_flight": 0}
    now = service.clock()
    assert (await service.usage(1, use, seq=1))["accepted"]
    assert service.reconciler.demand.request_rate("sql/v1", now) == 0.0  # history before we knew this router
    assert (await service.usage(1, use | {"requests": 12}, seq=2))["accepted"]
    rate = service.reconciler.demand.request_rate("sql/v1", now)
    assert rate > 0.1
    assert not (await service.usage(1, use | {"requests": 12}, seq=2))["accepted"]
    assert not (await service.usage(1, use | {"requests": 9}, seq=1))["accepted"]
    assert (await service.usage(1, use | {"requests": 6}, boot_id="b1", seq=1))["accepted"]
    assert not (await service.usage(1, use | {"requests": 99}, boot_id="b0", seq=9))["accepted"]
    assert service.reconciler.demand.request_rate("sql/v1", now) == pytest.approx(2 * rate)


async def test_a_plan_shows_the_next_pass_and_starts_nothing(service):
    agent = await service.worker()
    await service.register(policy={"loading": "eager"})
    await service.settle()
    agent.loaded.clear()
    agent.engine_boot_id = "e2"
    await service.beat()
    calls = len(agent.calls)
    plan = (await service.http.post("/v1/placements/plan")).json()["actions"]
    assert [(step["operation"], step["lora_id"], step["worker_id"]) for step in plan] == [("load", "sql/v1", "w0")]
    assert "eager" in plan[0]["reason"]
    assert len(agent.calls) == calls
    assert (await service.http.post("/v1/rebalance")).json()["actions"] == plan
    await service.reconciler.wait_for_actions()
    assert list(agent.loaded) == ["sql/v1"]


async def test_a_weighted_fleet_shares_its_slots_by_weight(service):
    for number in range(4):
        await service.worker(f"w{number}", slots=2)
    await service.http.patch("/v1/policy", json={"loading": "weighted", "reserve_slots": 0})
    await service.register("a", policy={"weight": 3, "max_replicas": 4})
    await service.register("b", policy={"weight": 1})
    await service.register("c", policy={"weight": 1})
    await service.settle()
    counts = {name: (await service.adapter(name))["status"]["replicas"]["ready"] for name in "abc"}
    assert counts == {"a": 4, "b": 2, "c": 2}
