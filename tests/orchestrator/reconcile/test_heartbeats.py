"""Reports and answers of one agent may arrive in any order; the orchestrator goes by the order of the agent."""

import asyncio

import pytest

from tests.patience import patience


async def registered(service, *lora_ids):
    """Register adapters, and have them inspected."""
    for lora_id in lora_ids:
        await service.register(lora_id)
    await service.settle()


async def post(service, body):
    answer = await service.http.post("/v1/workers/register", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def holders(service, lora_id="sql/v1"):
    """Workers that have the adapter ready; its state agrees on whether there are any."""
    status = (await service.adapter(lora_id))["status"]
    assert (status["state"] == "ready") == bool(status["workers"])
    return status["workers"]


async def finish_actions(service):
    """Run one pass without a heartbeat, and its actions to their end; returns the actions."""
    actions = service.reconciler.run_pass()
    await service.reconciler.wait_for_actions()
    return actions


async def delete(service, clock, heartbeat):
    """Delete the adapter: that begins its drain, the heartbeat comes, and it is unloaded."""
    assert (await service.http.delete("/v1/adapters/sql/v1")).is_success
    clock.now += 1
    await post(service, heartbeat)
    assert [action.operation for action in await finish_actions(service)] == ["unload"]


async def test_heartbeat_of_before_a_load_does_not_take_the_load_back(service):
    agent = await service.worker()
    await registered(service, "sql/v1")
    await service.ensure()
    agent.hold_loads = asyncio.Event()
    service.reconciler.run_pass()
    async with asyncio.timeout(patience(10)):
        while ("load_lora", "sql/v1") not in agent.operations():
            await agent.has_called.wait()
            agent.has_called.clear()
    held = agent.heartbeat()  # composed before the load is done
    agent.hold_loads.set()
    await service.reconciler.wait_for_actions()
    assert await holders(service) == ["w0"]
    await post(service, held)
    assert await holders(service) == ["w0"]
    assert (await service.adapter())["status"]["state"] == "ready"
    assert await finish_actions(service) == []  # no second load
    assert await service.settle() == []
    assert agent.operations().count(("load_lora", "sql/v1")) == 1


async def test_heartbeat_of_before_an_unload_does_not_bring_the_adapter_back(service, clock):
    agent = await service.worker()
    await registered(service, "sql/v1")
    await service.ensure()
    await service.settle()
    held = agent.heartbeat()
    await delete(service, clock, held)
    assert agent.loaded == {}
    await post(service, held)
    report = (await service.http.get("/v1/workers/w0/report")).json()
    assert report["lora"]["loaded_loras"] == []
    assert report["lora"]["capacity"]["available_slots"] == agent.slots
    assert await finish_actions(service) == []
    assert await service.settle() == []


async def test_unload_of_an_adapter_that_was_gone_already_is_an_answer_like_any_other(service, clock):
    agent = await service.worker()
    await registered(service, "sql/v1")
    await service.ensure()
    await service.settle()
    held = agent.heartbeat()
    agent.loaded.clear()  # the engine lost it, and the agent has not said so yet
    agent.changes += 1
    await delete(service, clock, held)
    await post(service, held)
    assert (await service.http.get("/v1/workers/w0/report")).json()["lora"]["loaded_loras"] == []


async def test_heartbeats_that_overtake_each_other_count_in_the_order_of_their_agent(service):
    agent = await service.worker()
    await registered(service, "sql/v1")
    late = agent.heartbeat()
    await service.ensure()
    await service.settle()
    assert await holders(service) == ["w0"]
    await post(service, late)
    assert await holders(service) == ["w0"]
    assert await finish_actions(service) == []


async def test_report_read_by_a_probe_does_not_take_back_a_heartbeat_that_came_meanwhile(service, clock):
    agent = await service.worker()
    await registered(service, "sql/v1")
    old = agent.metadata()
    await service.ensure()
    await service.settle()
    agent.metadata = lambda: old  # what the probe reads was composed before
    service.agents = {}
    clock.now += service.settings.probe_after_s
    await service.turn()
    assert await holders(service) == ["w0"]
    assert agent.operations().count(("load_lora", "sql/v1")) == 1


async def test_worker_whose_drain_has_ended_is_not_drained_again_by_an_old_heartbeat(service):
    agent = await service.worker()
    await service.http.post("/v1/workers/w0/drain", json={"deadline_s": 0})
    await service.settle()
    assert agent.drained
    held = agent.heartbeat()
    await service.http.post("/v1/workers/w0/uncordon")
    await service.reconciler.wait_for_actions()
    assert (await service.http.get("/v1/workers/w0")).json()["state"] == "ready"  # by the answer alone
    await post(service, held)
    assert (await service.http.get("/v1/workers/w0")).json()["state"] == "ready"


async def test_restarted_agent_begins_its_numbers_anew(service):
    agent = await service.worker()
    await registered(service, "sql/v1")
    await service.ensure()
    await service.settle()
    agent.agent_boot_id, agent.changes, agent.loaded = "a2", 1, {}
    await service.beat()
    assert await holders(service) == []


async def test_agent_without_numbers_is_believed_in_the_order_of_arrival(service):
    agent = await service.worker()
    agent.numbers_reports = False
    agent.agent_boot_id = "old"
    await service.beat()
    await registered(service, "sql/v1")
    held = agent.heartbeat()
    await service.ensure()
    await finish_actions(service)
    assert await holders(service) == ["w0"]
    await post(service, held)
    assert await holders(service) == []
    await service.beat()
    assert await holders(service) == ["w0"]


@pytest.mark.parametrize("is_whole", [True, False])
async def test_heartbeat_of_before_an_inspection_does_not_take_its_files_back(service, is_whole):
    agent = await service.worker()
    agent.disk = {}
    await service.beat()
    await service.register("sql/v1")
    held = agent.heartbeat()
    if not is_whole:
        held["files"]["since"] = held["files"]["upto"]
    await finish_actions(service)
    (digest,) = agent.disk
    assert service.reconciler.files.holders[digest] == {"w0"}
    await post(service, held)
    assert service.reconciler.files.holders.get(digest) == {"w0"}


async def test_answer_and_overtaken_report_are_no_count_of_what_the_engine_runs(service, clock):
    agent = await service.worker()
    await registered(service, "sql/v1")
    late = agent.heartbeat()
    await service.ensure()
    clock.now += 1
    agent.changes += 1
    await service.beat()
    counted_at = clock.now
    clock.now += 1
    await finish_actions(service)  # a load, whose answer shows that the agent is there
    await post(service, late)
    worker = service.reconciler.queries.observe().workers["w0"]
    assert worker.reported_at == counted_at
    assert service.reconciler.reports.workers["w0"].heard_at == clock.now
