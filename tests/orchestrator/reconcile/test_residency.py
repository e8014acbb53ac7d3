"""Slot-seconds, loads and fetched bytes of adapters, in the ledger."""

import pytest

from orchestrator.core.errors import OrchestratorUnavailable
from orchestrator.model.ledger import UsageQuery
from orchestrator.reconcile.residency import ResidencyMeter


@pytest.fixture
def meter(service, clock):
    return ResidencyMeter(
        service.reconciler, service.built.ledger, clock=clock, wall=lambda: 1_800_000_000.0 + clock.now
    )


async def rows(service):
    """(tenant, adapter, base model) -> slot-seconds, loads and bytes."""
    found = await service.built.ledger.rows(UsageQuery(group_by=("tenant", "adapter", "base_model")))
    return {
        (key.tenant, key.adapter, key.base_model): (sums.slot_s, sums.loads, sums.fetched_bytes)
        for key, sums in found.items()
    }


async def loaded(service, lora_id, **spec):
    """An adapter that two workers have loaded."""
    await service.register(lora_id, policy={"min_replicas": 2}, **spec)
    await service.settle()


async def test_an_adapter_in_an_engine_counts_each_second_at_each_worker_and_a_load_once(service, clock, meter):
    for name in ("w0", "w1"):
        await service.worker(name)
    await meter.look()
    await loaded(service, "sql/v1", tenants=["acme"])
    await loaded(service, "open/v1")
    base = service.reconciler.reports.workers["w0"].report.model.base_model
    await meter.look()
    for _ in range(3):
        clock.now += 5
        await service.beat()
        await meter.look()
    found = await rows(service)
    assert {key: sums[:2] for key, sums in found.items()} == {
        ("acme", "sql/v1", base): (30, 2),
        ("", "open/v1", base): (30, 2),
    }
    await service.http.delete("/v1/adapters/sql/v1")
    await service.settle()
    clock.now += 60
    await service.settle()
    assert not any("sql/v1" in name for agent in service.agents.values() for name in agent.loaded)
    await meter.look()
    before = await rows(service)
    clock.now += 5
    await meter.look()
    after = await rows(service)
    assert after["acme", "sql/v1", base] == before["acme", "sql/v1", base]
    assert after["", "open/v1", base][0] == before["", "open/v1", base][0] + 10


async def test_time_in_which_another_orchestrator_led_or_this_one_stood_still_is_not_counted(service, clock, meter):
    await service.worker("w0")
    await service.worker("w1")
    await meter.look()
    await loaded(service, "sql/v1")
    clock.now += 10_000
    await service.beat()
    await meter.look()
    (before,) = (await rows(service)).values()
    assert before[:2] == (120, 2)
    service.built.leadership.lead_until(clock.now - 1)
    clock.now += 5
    await meter.look()
    service.built.leadership.lead_until(float("inf"))
    clock.now += 5
    await meter.look()
    (after,) = (await rows(service)).values()
    assert after == before


async def test_a_file_that_comes_to_a_disk_counts_its_bytes_and_a_refused_batch_comes_again_once(
    service, clock, meter, monkeypatch
):
    await service.worker("w0")
    await service.worker("w1")
    await loaded(service, "sql/v1")
    adapter = service.store.adapters["sql/v1"]
    await meter.look()
    before = sum(sums[2] for sums in (await rows(service)).values())
    backend, sent = service.built.ledger._backend, []

    async def refuse(batches, now):
        sent.append(batches)
        raise OrchestratorUnavailable("the disk is full", code="store_unreachable")

    with monkeypatch.context() as full:
        full.setattr(type(backend), "add_usage", lambda _, batches, now: refuse(batches, now))
        service.reconciler.files.arrived[adapter.digest] += 2
        for _ in range(2):
            clock.now += 5
            await service.beat()
            await meter.look()
    assert sent[0] == sent[1]
    clock.now += 5
    await service.beat()
    await meter.look()
    assert sum(sums[2] for sums in (await rows(service)).values()) - before == 2 * adapter.size_bytes
