"""Workers that are lost, moved, renamed or replaced, and those that only fall silent."""

import asyncio
import gc

from structlog.testing import capture_logs

from tests.orchestrator.doubles import EMPTY_DISK, FakeAgent, digest_of
from tests.orchestrator.reconcile.ready_adapters import ready
from tests.serving import serving


async def test_a_lost_workers_adapters_are_placed_elsewhere_at_once(service, clock):
    agents = [await service.worker(f"w{i}") for i in range(2)]
    await ready(service)
    (home,) = (await service.adapter())["status"]["workers"]
    gone = service.agents.pop(home)
    other = next(agent for agent in agents if agent is not gone)
    # The same worker, but neither its agent nor its engine answers any more.
    dead = "http://127.0.0.1:9"
    report = gone.metadata() | {"agent_url": dead, "transport": {"engine_url": dead}}
    await service.http.post("/v1/workers/register", json={"metadata": report, "files": EMPTY_DISK})
    clock.now += service.settings.lost_after_s + 1
    await service.turn()
    await service.settle()
    assert (await service.http.get(f"/v1/workers/{home}")).json()["state"] == "lost"
    assert (await service.adapter())["status"]["workers"] == [other.worker_id]
    assert "sql/v1" in other.loaded


async def test_a_worker_dropped_while_a_probe_is_due_breaks_no_task(open_service, clock):
    service = open_service(forget_after_s=60)
    agent = await service.worker()
    report = agent.metadata() | {"agent_url": "http://127.0.0.1:9", "transport": {"engine_url": "http://127.0.0.1:9"}}
    await service.http.post("/v1/workers/register", json={"metadata": report, "files": EMPTY_DISK})
    service.agents.clear()
    clock.now += service.settings.lost_after_s + 1
    await service.turn()
    assert (await service.http.get("/v1/workers/w0")).json()["state"] == "lost"
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
    clock.now += 61
    await service.turn()
    assert service.reconciler.reports.workers == {}
    gc.collect()
    assert unhandled == []


async def test_a_copy_on_a_worker_of_another_base_model_is_unloaded(service, clock):
    for name in ("w0", "w1"):
        await service.worker(name)
    await ready(service)
    (home,) = (await service.adapter())["status"]["workers"]
    # It was started again, under another name, and has brought back what its record says.
    service.agents[home].base_model, service.agents[home].engine_boot_id = "other", "e2"
    await service.beat()
    assert (await service.adapter())["status"]["state"] == "registered"
    assert (await service.ensure()).json()["ready"] == []
    await service.settle()
    clock.now += service.store.rules.drain_deadline_s
    await service.settle()
    assert service.agents[home].loaded == {}
    assert (await service.ensure()).json()["ready"] == [name for name in ("w0", "w1") if name != home]


async def test_a_worker_whose_address_was_reused_is_lost(service, clock):
    agent = await service.worker("w0")
    await service.register(policy={"loading": "eager"})
    await service.settle()
    # A pod's address that is used again: another agent, and an engine that holds nothing.
    agent.worker_id, agent.loaded, agent.engine_boot_id = "w1", {}, "e2"
    service.agents = {"w1": agent}
    clock.now += service.settings.lost_after_s + 1
    await service.turn()
    await service.settle()
    assert (await service.http.get("/v1/workers/w0")).json()["state"] == "lost"
    assert (await service.adapter())["status"]["workers"] == ["w1"]
    assert "sql/v1" in agent.loaded


async def test_a_renamed_worker_keeps_its_engines_adapters(service, clock):
    agent = await service.worker("w0")
    await ready(service)
    await service.worker("spare")
    agent.worker_id = "w1"
    service.agents = {"w1": agent, "spare": service.agents["spare"]}
    clock.now += service.settings.lost_after_s + 1
    await service.turn()
    assert await service.settle() == []
    assert (await service.http.get("/v1/workers/w0")).json()["state"] == "lost"
    assert (await service.adapter())["status"]["workers"] == ["w1"]


async def test_a_second_agent_with_the_same_worker_id_is_refused(service, clock):
    first = await service.worker("worker-0")
    await service.register(policy={"loading": "eager"})
    await service.settle()
    second = FakeAgent("worker-0")
    second.url = await service.stack.enter_async_context(serving(second.app))
    second.agent_boot_id = "a2"
    answer = await service.http.post("/v1/workers/register", json=second.heartbeat())
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "worker_id_taken")
    assert first.url in answer.json()["error"]["message"]
    assert second.url in answer.json()["error"]["message"]
    assert (await service.http.get("/v1/workers/worker-0")).json()["agent_url"] == first.url
    # An agent that has another address since it started is the same one.
    first.url = first.url.replace("127.0.0.1", "localhost")
    await service.beat()
    service.agents = {}
    clock.now += service.settings.probe_after_s
    assert (await service.http.post("/v1/workers/register", json=second.heartbeat())).status_code == 200
    assert (await service.http.get("/v1/workers/worker-0")).json()["agent_url"] == second.url


async def test_a_worker_whose_engine_still_answers_keeps_its_adapters(service, clock):
    agent = await service.worker()
    await service.worker("w1")
    await ready(service)
    (home,) = (await service.adapter())["status"]["workers"]
    agent = service.agents.pop(home)
    report = agent.metadata() | {"agent_url": "http://127.0.0.1:9"}
    await service.http.post("/v1/workers/register", json={"metadata": report, "files": EMPTY_DISK})
    before = len(agent.calls)
    clock.now += service.settings.lost_after_s + 1
    await service.turn()
    assert await service.settle() == []
    assert (await service.http.get(f"/v1/workers/{home}")).json()["state"] == "unmanaged"
    assert (await service.adapter())["status"]["workers"] == [home]
    assert len(agent.calls) == before


async def test_a_silent_agent_that_answers_a_probe_is_still_ready(service, clock):
    await service.worker()
    service.agents.clear()
    clock.now += 100
    await service.turn()
    assert (await service.http.get("/v1/workers/w0")).json()["state"] == "ready"


async def test_an_engine_that_restarts_empty_gets_its_adapters_back(service):
    agent = await service.worker()
    await ready(service)
    agent.loaded.clear()
    agent.engine_boot_id = "e2"
    await service.settle()
    assert list(agent.loaded) == ["sql/v1"]


async def test_a_returning_worker_unloads_a_version_deleted_meanwhile_whose_name_has_new_bytes_now(service, clock):
    agent, other = await service.worker("w0"), await service.worker("w1")
    await service.register(source="file:///old")
    await service.ensure(replicas=2)
    await service.settle()
    assert list(agent.loaded) == list(other.loaded) == ["sql/v1"]
    del service.agents["w0"], service.reconciler.reports.workers["w0"]
    await service.http.delete("/v1/adapters/sql/v1")
    for _ in range(3):
        clock.now += 60
        await service.turn()
    assert "sql/v1" not in service.store.adapters
    await service.register(source="file:///new")
    await service.ensure()
    await service.settle()
    assert other.loaded["sql/v1"]["digest"] == digest_of("file:///new")

    service.agents["w0"] = agent
    for _ in range(3):
        clock.now += 60
        await service.turn()
    assert agent.loaded == {}
    assert other.loaded["sql/v1"]["digest"] == digest_of("file:///new")


async def test_a_returning_worker_unloads_adapters_deleted_meanwhile(service, clock):
    agent = await service.worker()
    await ready(service)
    copy = agent.loaded["sql/v1"]
    agent.loaded.clear()
    await service.http.delete("/v1/adapters/sql/v1")
    await service.settle()
    assert "sql/v1" not in service.store.adapters
    agent.loaded["sql/v1"] = copy
    await service.turn()
    clock.now += 1
    await service.settle()
    assert agent.loaded == {}


async def test_a_standby_tells_lost_adapters_from_the_leaders_unloads(service):
    await service.worker()
    await ready(service)
    report = service.reconciler.reports.workers["w0"].report
    empty = report.model_copy(update={"lora": report.lora.model_copy(update={"loaded_loras": ()})})
    await service.built.leadership.release()
    with capture_logs() as told:
        service.reconciler.monitor.record_heartbeat(empty)
        assert told == []
        service.reconciler.monitor.record_heartbeat(report)
        service.reconciler.monitor.record_heartbeat(empty.model_copy(update={"engine_boot_id": "another"}))
    assert [(line["event"], line["lora_id"]) for line in told] == [("adapter lost its place", "sql/v1")]
