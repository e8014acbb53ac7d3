"""What many versions of a name leave behind at the orchestrator: everything is counted after a few and after many."""

import asyncio
import re
import sqlite3
from contextlib import closing

import pytest

from lorafleet.identity import engine_name
from tests.orchestrator.doubles import digest_of


async def publish(service, name, source):
    call = asyncio.create_task(service.http.post(f"/v1/published/{name}", json={"source": source}))
    while not call.done():
        await service.turn()
        service.clock.now += 0.2
        await asyncio.wait([call], timeout=0.001)
    assert call.result().status_code == 200, call.result().text
    return call.result().json()


async def use(service, item, seq):
    """A router's report of a request for the version, which is over."""
    now = item["status"]
    digest = digest_of(f"/run/{now['version']}")
    uses = [{"worker_id": "w0", "engine_name": engine_name(now["lora_id"], digest), "requests": 1, "work_s": 0.1}]
    await service.usage((await service.catalog())["revision"], *uses, seq=seq)


async def left_behind(service):
    """How much there is of everything that a version could leave behind."""
    text = (await service.http.get("/metrics")).text
    with closing(sqlite3.connect(service.settings.store)) as db:
        rows = dict(db.execute("SELECT table_name, count(*) FROM intent GROUP BY table_name").fetchall())
    catalog, demand = await service.catalog(), service.reconciler.demand.snapshot(service.clock())
    return rows | {
        "catalog": len(catalog["adapters"]) + len(catalog["aliases"]) + len(catalog["draining"]),
        "series": sum(not line.startswith("#") for line in text.splitlines()),
        "loaded": sum(len(agent.loaded) for agent in service.agents.values()),
        "rates": len(demand.rates),
        "last requests": len(demand.last_request_at),
        "failures": len(service.reconciler.operations.failures.by_pair),
        "drains": len(service.reconciler.operations.drains),
        "versions": len((await service.http.get("/v1/published")).json()["data"][0]["status"]["versions"]),
        # Without numbers: they have more digits after many versions.
        "answer": len(re.sub(r"[0-9]+", "", (await service.http.get("/v1/published")).text)) // 100,
    }


async def leftovers(service, versions, *, names):
    """What is left after so many publishes, under one name or each under its own, which the trainer then unloads."""
    for number in range(1, versions + 1):
        name = "policy" if names == "one" else f"policy-v{number}"
        await use(service, await publish(service, name, f"/run/{number}"), number)
        if names == "many" and number > 2:
            assert (await service.http.delete(f"/v1/published/policy-v{number - 2}")).status_code == 204
        if number % 50 == 0:
            service.clock.now += 40
            await service.settle()
    for _ in range(4):
        service.clock.now += 40
        await service.settle()
    return await left_behind(service)


async def _grown(open_service, tmp_path, few, many, *, names):
    """what -> (after a few versions, after many), of all that is more after many."""
    counts = []
    for versions in (few, many):
        service = open_service(tmp_path / f"{versions}.db")
        await service.worker("w0", slots=4)
        counts.append(await leftovers(service, versions, names=names))
    return {what: (counts[0][what], counts[1][what]) for what in counts[0] if counts[1][what] > counts[0][what]}


@pytest.mark.slow
async def test_versions_of_one_name_leave_nothing_behind(open_service, tmp_path):
    assert await _grown(open_service, tmp_path, 6, 30, names="one") == {}


@pytest.mark.slow
async def test_names_that_are_unloaded_leave_tombstones_alone(open_service, tmp_path):
    grown = await _grown(open_service, tmp_path, 6, 24, names="many")

    assert grown.keys() <= {"tombstones"}, grown


@pytest.mark.thorough
@pytest.mark.timeout(3600)
async def test_ten_thousand_versions_of_one_name_leave_nothing_behind(open_service, tmp_path):
    assert await _grown(open_service, tmp_path, 10, 10_000, names="one") == {}
