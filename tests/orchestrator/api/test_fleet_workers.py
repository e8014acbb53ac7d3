"""Workers over REST: their heartbeats, and those that are unknown or dropped."""

import pytest

from tests.orchestrator.api.answers import code_of


async def test_a_heartbeat_that_says_nothing_new_changes_no_revision(service):
    await service.worker()
    await service.turn()
    before = (await service.catalog())["revision"]
    await service.settle()
    assert (await service.catalog())["revision"] == before


@pytest.mark.parametrize("name", ["", "w0\r\nset-cookie: a=b", "w0\n", "w\x1b[31m0", "w\u2192", "w" * 254])
async def test_a_worker_id_invalid_in_a_header_is_refused(service, name):
    agent = await service.worker()
    beat = agent.heartbeat() | {"metadata": {**agent.metadata(), "instance_id": name}}
    answer = await service.http.post("/v1/workers/register", json=beat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata.instance_id")
    assert [worker["id"] for worker in (await service.http.get("/v1/workers")).json()["data"]] == [agent.worker_id]


async def test_an_unknown_worker_is_404_with_the_known_ones(service):
    await service.worker()
    answer = await service.http.post("/v1/workers/w9/cordon")
    assert (answer.status_code, code_of(answer)) == (404, "worker_not_found")
    assert "w0" in answer.json()["error"]["message"]
    assert (await service.http.get("/v1/workers/w9")).status_code == 404


async def test_a_dropped_worker_can_still_be_uncordoned(open_service):
    before = open_service()
    await before.worker("w0")
    await before.http.post("/v1/workers/w0/cordon")
    await before.close()
    service = open_service()
    answer = await service.http.post("/v1/workers/w0/uncordon")
    assert (answer.status_code, answer.json()["id"], answer.json()["state"]) == (200, "w0", "lost")
    assert service.store.workers == {}
    assert (await service.http.post("/v1/workers/w0/uncordon")).status_code == 404
