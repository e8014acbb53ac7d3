"""Loads and unloads that agents did without the orchestrator are in its history, each once."""


def operation(number, **more):
    known = {"id": number, "at": "2026-11-26T10:00:00.000Z", "operation": "load", "lora_id": "sql/v1", "digest": "d"}
    return known | {"asked_by": "router", "reason": "asked at the agent", "duration_s": 0.4, "memory_mb": 12.5} | more


async def beat(service, agent, *operations):
    answer = await service.http.post("/v1/workers/register", json=agent.heartbeat() | {"operations": operations})
    return answer.json()["recorded"]


async def history(service):
    return (await service.http.get("/v1/history", params={"kind": ["load", "unload"]})).json()["data"]


async def test_an_agents_own_loads_and_unloads_are_in_the_history_with_who_asked(service):
    agent = await service.worker()
    failed = operation(2, operation="unload", asked_by="operator", error="engine_failed: no", duration_s=None)
    assert await beat(service, agent, operation(1), failed) == 2
    newest, first = await history(service)
    assert (first["kind"], first["subject"], first["actor"]) == ("load", "sql/v1", "router")
    assert first["body"] == {
        "worker_id": "w0",
        "outcome": "ok",
        "at": "2026-11-26T10:00:00.000Z",
        "reason": "asked at the agent",
        "memory_mb": 12.5,
        "duration_sec": 0.4,
    }
    assert (newest["kind"], newest["actor"], newest["body"]["outcome"]) == ("unload", "operator", "failed")
    assert newest["body"]["error"] == "engine_failed: no"


async def test_a_repeated_operation_is_recorded_once_and_a_restarted_agents_anew(service):
    agent = await service.worker()
    assert await beat(service, agent) == 0
    assert await beat(service, agent, operation(1)) == 1
    assert await beat(service, agent, operation(1), operation(2)) == 2
    assert await beat(service, agent) == 2
    agent.agent_boot_id = "a2"
    assert await beat(service, agent, operation(1, asked_by="agent")) == 1
    assert [entry["actor"] for entry in await history(service)] == ["agent", "router", "router"]


async def test_operations_are_sent_again_while_the_store_cannot_be_written(service):
    agent = await service.worker()
    service.store.end_term()  # a store that takes no writes
    assert await beat(service, agent, operation(1)) == 0
    await service.store.catch_up()
    assert await beat(service, agent, operation(1)) == 1
    assert len(await history(service)) == 1
