"""Changes of the catalog, and the wait for routers that confirm them."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.copies import SentBytes
from orchestrator.core.errors import NotFound, StoreError
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.intent.uploads import AdapterUploads, KeptUpload, UploadAsk, UploadQuery
from orchestrator.model.catalog import Catalog
from orchestrator.model.changes import reader_of
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import AliasTarget, ServedName
from orchestrator.reconcile.catalog import CatalogBook
from router.fleet.catalog import router_catalog, with_changes
from tests.patience import patience, until
from tests.registered import registered
from workers.wire import WorkerAdapter

NAMES = ("a", "b", "c", "d")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("register", "delete", "mark", "alias", "unalias", "cache", "read", "event", "term", "full")),
        st.sampled_from(NAMES),
    ),
    max_size=30,
)


class StoreDouble:
    """The intent that a catalog is made of."""

    def __init__(self):
        self.adapters, self.names, self.revision = {}, {}, 7
        self.changed_adapters = set()
        self.rules = PlacementPolicy()
        self.fails = False
        self.rules = PlacementPolicy()

    def next_revision(self):
        self.revision += 1
        if self.fails:
            self.fails = False
            raise StoreError("the disk is full")
        return self.revision

    def targets_of(self, name):
        return self.names[name].targets if name in self.names else ()

    def published_as(self, _lora_id):
        return None


@given(STEPS, st.integers(1, 6))
def test_a_router_that_reads_changes_has_what_the_whole_catalog_says(steps, kept):
    store = StoreDouble()
    book = CatalogBook(store, wall=lambda: 0.0, buffer=kept)
    known = router_catalog(reader_of(Catalog).validate_json(book.catalog_json()[1]))
    for step, name in [*steps, ("read", "")]:
        store.changed_adapters.add(name)
        match step:
            case "register":
                store.adapters[name] = registered(name, source=f"file:///{store.revision}")
            case "mark" if name in store.adapters:
                store.adapters[name] = registered(name, source="file:///x", is_deleting=True)
            case "delete":
                store.adapters.pop(name, None)
            case "alias":
                targets = (AliasTarget(name, 1.0 + store.revision),)
                store.names[f"to-{name}"] = ServedName(name=f"to-{name}", targets=targets)
            case "unalias":
                store.names.pop(f"to-{name}", None)
            case "cache":
                cache = "tenant" if store.rules.cache == "shared" else "shared"
                store.rules = PlacementPolicy(cache=cache)
            case "event" if not store.fails:
                book.emit_event("load_failed", lora_id=name)
            case "full":
                store.fails = True
            case "term":
                book.begin_term()
        errors = dict.fromkeys(store.adapters)
        with contextlib.suppress(StoreError):
            book.refresh(errors, {}, ())
        if step == "read":
            book.refresh(errors, {}, ())
            changes = reader_of(Catalog).validate_json(book.changes_json(known.revision))
            known = router_catalog(changes) if changes.since is None else with_changes(known, changes)
            assert known == router_catalog(reader_of(Catalog).validate_json(book.catalog_json()[1]))


async def test_an_event_that_changes_nothing_in_the_catalog_leaves_its_revision_and_wakes_no_follower_of_changes():
    store = StoreDouble()
    book = CatalogBook(store, wall=lambda: 0.0, buffer=9)
    begin = book.last_event_id
    store.adapters["a"] = registered("a", source="file:///a")
    book.refresh({"a": None}, {}, ())
    changed = book.revision
    loaded = book.emit_event("loaded", lora_id="a")
    assert (book.revision, book.last_event_id) == (changed, loaded)
    book.refresh({"a": "files_lost: no worker has them"}, {}, ())
    assert book.revision == book.last_event_id > loaded
    stream = book.event_stream(begin, keep_alive_s=60, is_stopping=lambda: True, only_changes=True)
    told = [piece.partition("\ndata:")[0] async for piece in stream if piece.startswith("id:")]
    assert told == [f"id: {changed}\nevent: adapter_registered", f"id: {book.revision}\nevent: adapter_changed"]


def test_changes_that_do_not_follow_are_refused_and_repeated_ones_change_nothing():
    known = router_catalog(Catalog(revision=5))
    assert with_changes(known, Catalog(revision=9, since=6)) is None
    assert with_changes(known, Catalog(revision=9)) is None
    assert with_changes(known, Catalog(revision=4, since=2, gone_adapters=("a",))) is known


async def read_as(service, router_id, revision=None, **query):
    seen = {} if revision is None else {"revision_seen": revision}
    return await service.http.get("/v1/catalog", params={"router_id": router_id, **seen, **query})


async def test_a_change_is_answered_when_every_router_has_confirmed_it(open_service):
    service = open_service(confirm_wait_s=patience(30))
    before = (await read_as(service, "r0")).json()["revision"]
    await read_as(service, "r0", before)
    await read_as(service, "r1", before)
    for change in (
        lambda: service.register("sql/v1"),
        lambda: service.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}]}),
        lambda: service.http.delete("/v1/aliases/sql"),
        lambda: service.http.delete("/v1/adapters/sql/v1"),
    ):
        changing = asyncio.create_task(change())
        revision = await changed_revision(service, before)
        changes = (await read_as(service, "r0", before, since=before)).json()
        assert changes["since"] == before
        await read_as(service, "r0", revision)
        assert not changing.done(), "r1 has not confirmed"
        await read_as(service, "r1", revision)
        await changing
        before = revision


async def test_change_of_an_alias_that_another_call_deletes_before_it_is_confirmed_is_404(open_service):
    service = open_service(confirm_wait_s=patience(30))
    await service.register("sql/v1")
    before = (await read_as(service, "r0", service.reconciler.catalog.revision)).json()["revision"]
    body = {"targets": [{"lora_id": "sql/v1"}]}
    pointing = asyncio.create_task(service.http.put("/v1/aliases/sql", json=body))
    pointed = await changed_revision(service, before)
    deleting = asyncio.create_task(service.http.delete("/v1/aliases/sql"))
    await read_as(service, "r0", await changed_revision(service, pointed))
    answer = await pointing
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "alias_not_found")
    assert (await deleting).status_code == 204


async def test_upload_of_an_adapter_that_another_call_deletes_before_it_is_confirmed_is_not_found(open_service):
    service = open_service(confirm_wait_s=patience(30))
    reconciler = service.reconciler
    registry = AdapterRegistry(
        service.store, reconciler.reports, reconciler.names, forget_failures=lambda lora_id: None
    )
    uploads = AdapterUploads(registry, reconciler, None, agents=NoAgents(), relay=None, settings=service.settings)
    sent = SentBytes(None, 0, 4, is_resumed=False)
    found = WorkerAdapter(lora_id="sql/v1", path="/c", base_model="tiny-qwen", rank=8, digest="a" * 64)
    before = (await read_as(service, "r0", service.reconciler.catalog.revision)).json()["revision"]
    ask = UploadAsk(lora_id="sql/v1", owner="me", tenant="me", wanted=UploadQuery(), sent=sent)
    registering = asyncio.create_task(uploads.register(ask, KeptUpload(found, "file:///a", ()), "me"))
    registered = await changed_revision(service, before)
    deleting = asyncio.create_task(service.http.delete("/v1/adapters/sql/v1"))
    marked = await changed_revision(service, registered)
    registry.adapter("sql/v1")
    reconciler.finish_deletions()
    await read_as(service, "r0", marked)
    with pytest.raises(NotFound, match="not registered"):
        await registering
    assert (await deleting).status_code == 204


class NoAgents:
    """The client of agents where there is no worker."""


async def changed_revision(service, before):
    """The catalog's revision, once it is above this one."""
    await until(lambda: service.reconciler.catalog.revision > before, what="the catalog has changed")
    return service.reconciler.catalog.revision


async def test_a_router_that_is_cut_off_delays_one_change_until_it_is_back(open_service):
    service = open_service(confirm_wait_s=0.2)
    before = (await read_as(service, "r0", 0)).json()["revision"]
    await service.register("sql/v1")  # after 0.2 s
    assert service.reconciler.confirmations.missing(before + 100) == [], "r0 is late"
    await read_as(service, "r0", 0)
    assert service.reconciler.confirmations.missing(before + 100) == [], "it still has the old one"
    await read_as(service, "r0", service.reconciler.catalog.revision)
    assert service.reconciler.confirmations.missing(before + 100) == ["r0"]


@pytest.mark.parametrize("way", ["silent", "stopped"])
async def test_a_router_that_is_gone_is_not_waited_for(service, clock, way):
    await read_as(service, "r0", 0)
    assert service.reconciler.confirmations.missing(10**15) == ["r0"]
    if way == "silent":
        clock.now += 11
    else:
        last = {"router_id": "r0", "boot_id": "b", "seq": 1, "revision_seen": 0, "is_last": True}
        await service.http.post("/v1/usage", json=last)
    assert service.reconciler.confirmations.missing(10**15) == []
    await service.register("sql/v1")


async def test_reports_keep_a_router_that_reads_rarely_in_mind(service, clock):
    await read_as(service, "r0", 0)
    clock.now += 9
    await service.usage(0, router_id="r0", seq=1)
    clock.now += 9
    assert service.reconciler.confirmations.missing(10**15) == ["r0"]
    await service.usage(0, router_id="of-an-older-version", seq=1)
    assert service.reconciler.confirmations.missing(10**15) == ["r0"], "it confirms nothing by reading"


async def test_reads_of_many_routers_look_for_untold_changes_ten_times_a_second_in_all(service, clock):
    before = (await read_as(service, "r0")).json()["revision"]
    service.store.put_adapter(registered("sql/v1", source="file:///x"))  # and nobody is told
    for router in range(5):
        assert (await read_as(service, f"r{router}", before)).json()["revision"] == before
    clock.now += 0.11
    assert (await read_as(service, "r0", before)).json()["revision"] > before


async def test_a_new_leader_answers_a_change_when_as_many_routers_as_before_go_by_it(open_service, clock):
    former = open_service()
    for router_id in ("r0", "r1"):
        await read_as(former, router_id, 0)
    await former.turn()
    leader = open_service(confirm_wait_s=patience(30))
    leader.reconciler.begin_term()
    before = leader.reconciler.catalog.revision
    changing = asyncio.create_task(leader.register("sql/v1"))
    revision = await changed_revision(leader, before)
    await read_as(leader, "r0", revision)
    assert not changing.done(), "r1 has not found the new leader"
    assert leader.reconciler.confirmations.count == 2, "the next leader waits for it, too"
    await read_as(leader, "r1", before)
    assert not changing.done(), "r1 has not confirmed"
    await read_as(leader, "r1", revision)
    await changing


async def test_a_new_leader_waits_for_routers_that_are_gone_in_its_first_moments_alone(open_service, clock):
    former = open_service()
    await read_as(former, "r0", 0)
    await former.turn()
    leader = open_service(confirm_wait_s=2.0)
    leader.reconciler.begin_term()
    assert leader.reconciler.confirmations.is_gathering
    clock.now += 2.0
    await leader.register("sql/v1")
    await leader.turn()
    assert (leader.reconciler.confirmations.count, leader.store.routers) == (0, 0)
    assert open_service().store.routers == 0


async def test_a_first_leader_waits_for_nobody(open_service):
    service = open_service(confirm_wait_s=patience(30))
    service.reconciler.begin_term()
    await service.register("sql/v1")


async def test_a_pass_goes_on_while_the_number_of_routers_cannot_be_stored(service, monkeypatch):
    def refused(count):
        raise StoreError("disk full")

    monkeypatch.setattr(service.store, "put_routers", refused)
    await service.worker()
    await service.register("sql/v1")
    assert "inspect" in [action.operation for action in await service.settle()]


async def test_drain_that_no_router_could_hear_of_counts_as_confirmed_by_none(service, monkeypatch):
    agent = await service.worker("w0")
    await service.register("sql/v1")
    await service.ensure("sql/v1")
    await service.settle()
    seen = service.reconciler.catalog.revision
    await service.usage(seen)
    service.store.put_adapter(replace(service.store.adapters["sql/v1"], is_deleting=True))
    service.reconciler.queries.refresh_catalog()
    with monkeypatch.context() as patch:

        def full():
            raise StoreError("the disk is full")

        patch.setattr(service.store, "next_revision", full)
        with pytest.raises(StoreError):
            service.reconciler.run_pass()
    for seq in (2, 3):
        await service.usage(seen, seq=seq)
        await service.turn()
        assert "sql/v1" in agent.loaded, "the router may send it requests still"
    await service.usage(service.reconciler.catalog.revision, seq=4)
    await service.turn()
    assert "sql/v1" not in agent.loaded
