"""Pauses over REST: when they are in force, what ends them, and what a new leader knows of them."""

import asyncio

import pytest

from orchestrator.core.demand import DemandBook
from orchestrator.core.errors import StateConflict
from orchestrator.model.catalog import Catalog
from orchestrator.model.changes import reader_of
from orchestrator.model.pauses import PauseScope
from orchestrator.reconcile.catalog import CatalogBook
from orchestrator.reconcile.confirmations import FleetPauses
from orchestrator.store.store import IntentStore
from tests.patience import within


async def report(service, seq, *, router="r0", sees=True, running=0):
    """A router's report: whether it sees the catalog as it is now, and how many paused requests run there."""
    catalog = reader_of(Catalog).validate_json((await service.http.get("/v1/catalog")).content)
    held = {pause.key: running for pause in catalog.pauses}
    body = {"router_id": router, "boot_id": "b0", "seq": seq, "revision_seen": catalog.revision if sees else 0}
    answer = await service.http.post("/v1/usage", json=body | {"running_in_pause": held})
    assert answer.status_code == 200, answer.text
    return catalog


async def begun(service, body):
    """The call that pauses, once the catalog has its pause."""
    asking = asyncio.create_task(service.http.post("/v1/pauses", json=body))
    while not service.store.pauses and not asking.done():
        await asyncio.sleep(0)
    return asking


async def test_a_pause_with_mode_wait_is_answered_once_the_last_router_says_that_nothing_runs(service):
    for router in ("r0", "r1"):
        await report(service, 1, router=router)
    asking = await begun(service, {"mode": "wait"})
    await report(service, 2, router="r0", running=0)
    await report(service, 2, router="r1", running=2)
    (item,) = (await service.http.get("/v1/pauses")).json()["data"]
    assert (item["running"], item["routers_behind"], item["scope"]) == (2, 0, "the whole fleet")
    assert not asking.done()
    await report(service, 3, router="r1", running=0)
    async with within(5):
        answer = await asking
    assert (answer.status_code, answer.json()["running"]) == (200, 0)


async def test_a_pause_that_a_router_never_confirms_is_refused_and_nothing_is_paused(service, clock):
    await report(service, 1)
    asking = await begun(service, {"mode": "keep"})
    seq = 1
    while not asking.done():
        seq += 1
        clock.now += 5
        await report(service, seq, sees=False)
        await asyncio.sleep(0)
        service.reconciler.pauses.reported.notify()
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "pause_not_reached")
    assert "1 routers did not confirm" in answer.json()["error"]["message"]
    assert (await service.http.get("/v1/pauses")).json() == {"data": []}
    assert (await report(service, seq + 1)).pauses == ()


async def test_a_pause_that_is_ended_while_it_begins_is_a_conflict(service):
    await report(service, 1)
    asking = await begun(service, {"mode": "keep"})
    ended = await service.http.delete("/v1/pauses")
    assert [item["scope"] for item in ended.json()["data"]] == ["the whole fleet"]
    service.reconciler.pauses.reported.notify()
    async with within(5):
        answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "pause_ended")
    assert (await service.http.delete("/v1/pauses")).json() == {"data": []}


class StoreThatWrites(IntentStore):
    """A store whose writes are under way until `are_written`."""

    def __init__(self, where):
        super().__init__(where)
        self.are_written = asyncio.Event()

    async def wait_durable(self, about=None):
        """Wait for the event."""
        await self.are_written.wait()


async def test_pause_that_is_ended_while_it_is_written_is_a_conflict(tmp_path):
    store, catalogs, demand = StoreThatWrites(tmp_path / "store.db"), [], DemandBook()
    catalog = CatalogBook(store, wall=lambda: 0.0, buffer=9)

    def refresh():
        pauses = dict(store.pauses)
        catalog.refresh({}, {}, (), pauses)
        catalogs.append(list(pauses))

    pauses = FleetPauses(
        store=store,
        demand=demand,
        catalog=catalog,
        refresh_catalog=refresh,
        has_heard_routers=lambda: True,
        wait_s=5.0,
        clock=lambda: 0.0,
        wall=lambda: 0.0,
    )
    scope = PauseScope("acme")
    calls = [asyncio.create_task(pauses.pause(scope, "keep", "me", 60.0, lambda: False))]
    while len(catalogs) < 1:
        await asyncio.sleep(0)
    calls.append(asyncio.create_task(pauses.end(scope)))
    while len(catalogs) < 2:
        await asyncio.sleep(0)
    store.are_written.set()
    async with within(5):
        with pytest.raises(StateConflict, match="ended by another call"):
            await calls[0]
        assert (await calls[1]).tenant == "acme"
    store.close()


async def test_a_lease_that_has_ended_is_in_no_answer_and_no_catalog_even_before_the_next_pass(service, clock):
    assert (await service.http.post("/v1/pauses", json={"lease_s": 30})).status_code == 200
    assert len((await report(service, 1)).pauses) == 1
    clock.now += 29
    assert len((await service.http.get("/v1/pauses")).json()["data"]) == 1
    clock.now += 1
    assert (await service.http.get("/v1/pauses")).json() == {"data": []}
    assert (await report(service, 2)).pauses == ()
    assert len(service.store.pauses) == 1
    service.reconciler.run_pass()
    assert service.store.pauses == {}


async def test_the_next_leader_goes_on_with_a_pause_and_its_end(open_service, clock):
    first = open_service()
    told = (await first.http.post("/v1/pauses", json={"lease_s": 30})).json()
    await first.close()
    clock.now += 10
    second = open_service()
    (item,) = (await second.http.get("/v1/pauses")).json()["data"]
    assert (item["began_at"], item["expires_at"]) == (told["began_at"], told["expires_at"])
    clock.now += 20
    assert (await second.http.get("/v1/pauses")).json() == {"data": []}


async def test_a_lease_longer_than_allowed_is_refused_with_the_setting(service):
    refused = await service.http.post("/v1/pauses", json={"lease_s": 4000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lease_s")
    assert "pause_max_lease_s" in refused.json()["error"]["message"]
