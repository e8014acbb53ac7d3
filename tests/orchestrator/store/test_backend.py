"""The contract of store backends: one suite for each backend."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lorafleet.kube.client import connect
from orchestrator.core.errors import OrchestratorUnavailable, StoreError
from orchestrator.model.pauses import PauseLease
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import (
    AliasTarget,
    NameVersion,
    Publication,
    PublishedSpec,
    RequestTally,
    Rollout,
    RolloutSpec,
    RolloutStep,
    ServedName,
)
from orchestrator.model.snapshot import WorkerIntent
from orchestrator.store.store import IntentStore
from orchestrator.store_copy import copy_store
from tests.kube.conftest import kube  # noqa: F401  (a fixture)
from tests.kube.stores import StoreInstances
from tests.orchestrator.postgres.instances import DatabaseStoreInstances
from tests.patience import until
from tests.postgres import postgres_server  # noqa: F401  (a fixture)
from tests.registered import registered

ADAPTER = registered(
    lora_id="sql/v1",
    source="hf://acme/sql",
    base_model="qwen",
    digest="d" * 64,
    rank=8,
    size_bytes=12,
    loading="eager",
    min_replicas=2,
    max_replicas=3,
    pinned=True,
    priority=-5,
    weight=2.5,
    tenants=("acme",),
    secret="acme-hub/token",
    pinned_source="hf://acme/sql@" + "c" * 40,
    quarantine="adapter_invalid: no",
)

PAUSE = PauseLease(
    tenant="acme", namespace="run-1", mode="wait", owner="tenant acme", began_at=5.0, expires_at=65.5, lease_s=60.5,
    renewals=2,
)  # fmt: skip
ROLLOUT = Rollout(
    before=(AliasTarget("sql/v1", 1.0),),
    after=(AliasTarget("sql/v2", 1.0),),
    spec=RolloutSpec(to="sql/v2", steps=(RolloutStep(0.1, 60.0), RolloutStep(1.0, 0.0)), min_requests=7),
    began_at=5.0,
    since=6.0,
    phase="watching",
    scale=3,
    new=RequestTally(10, 1, 9, 0.5),
)


PUBLISHED = Publication(
    spec=PublishedSpec(tenant="acme", replicas=2, keep_versions=4, max_staleness_s=60.0),
    next_number=3,
    versions=(NameVersion(lora_id="run@3/v2", number=2, digest="b" * 64, registered_at=7.0, pointed_at=8.5),),
    published_at=8.5,
    shadows_base=True,
)
SQL = ServedName(name="sql", targets=(AliasTarget("sql/v1", 2.0),), rollout=ROLLOUT)
RUN = ServedName(name="run@3", targets=(AliasTarget("run@3/v2", 1.0),), published=PUBLISHED)


class SqliteStores:
    """Stores on one SQLite file."""

    def __init__(self, folder):
        self._folder = folder

    async def open(self, **options):
        return IntentStore(self._folder / "s.db", **options)

    async def look(self):
        """Open the store without leading."""
        return IntentStore(self._folder / "s.db")

    async def close(self, store):
        store.close()

    async def restored(self, backup):
        backup.rename(self._folder / "s.db")
        return await self.open()

    async def close_all(self):
        pass


class ConfigMapStores:
    """Stores on the ConfigMaps of one namespace."""

    def __init__(self, cluster):
        self._cluster = cluster
        self._seats = StoreInstances(cluster)
        self._by_store = {}

    async def open(self, **options):
        instance = await self._seats.lead(**options)
        self._by_store[instance.store] = instance
        return instance.store

    async def look(self):
        instance = await self._seats.open()
        self._by_store[instance.store] = instance
        return instance.store

    async def close(self, store):
        await self._seats.close(self._by_store.pop(store))

    async def restored(self, backup):
        api = await connect(self._cluster.kubeconfig, environ={})
        folder = f"/api/v1/namespaces/{self._cluster.namespace}/configmaps"
        for found in (await api.get(folder))["items"]:
            await api.delete(f"{folder}/{found['metadata']['name']}")
        for copy in msgspec.json.decode(backup.read_bytes())["items"]:
            await api.post(folder, copy)
        await api.close()
        return await self.open()

    async def close_all(self):
        await self._seats.close_all()


class PostgresStores:
    """Stores in one schema of a PostgreSQL database."""

    def __init__(self, server):
        self._server = server
        self._seats = DatabaseStoreInstances(server.new_schema())
        self._by_store = {}

    async def open(self, **options):
        return self._remember(await self._seats.lead(**options))

    async def look(self):
        return self._remember(await self._seats.open())

    def _remember(self, instance):
        self._by_store[instance.store] = instance
        return instance.store

    async def close(self, store):
        await self._seats.close(self._by_store.pop(store))

    async def restored(self, backup):
        """The backup in another, empty schema."""
        await self._seats.close_all()
        self._seats = DatabaseStoreInstances(self._server.new_schema())
        await copy_store(f"{backup}", self._seats.address)
        return await self.open()

    async def close_all(self):
        await self._seats.close_all()


@pytest.fixture(params=["sqlite", "postgresql", "configmaps"])
async def stores(request, tmp_path, kube):  # noqa: F811
    if request.param == "sqlite":
        yield SqliteStores(tmp_path)
        return
    shared = request.getfixturevalue("postgres_server") if request.param == "postgresql" else None
    instances = ConfigMapStores(kube) if shared is None else PostgresStores(shared)
    yield instances
    await instances.close_all()


async def test_all_intent_survives_a_restart(stores):
    store = await stores.open()
    store.put_adapter(ADAPTER)
    store.put_name(SQL)
    store.put_name(RUN)
    store.put_rules(PlacementPolicy(loading="weighted", loads_per_worker=3))
    store.put_worker("w0", WorkerIntent(state="draining", since=7.5, until=17.5))
    store.put_pause(PAUSE.scope.key, PAUSE)
    store.put_adapter(registered("old", source="x", digest="e" * 64))
    await store.wait_durable()
    store.drop_adapter("old")
    store.raise_epoch(6)
    await store.wait_durable()
    await stores.close(store)

    again = await stores.open()
    assert dict(again.adapters) == {"sql/v1": ADAPTER}
    assert dict(again.names) == {"sql": SQL, "run@3": RUN}
    assert (again.published_as("run@3/v2"), again.next_numbers) == ("run@3", {"run@3": 3})
    assert again.rules == PlacementPolicy(loading="weighted", loads_per_worker=3)
    assert again.workers == {"w0": WorkerIntent(state="draining", since=7.5, until=17.5)}
    assert again.pauses == {PAUSE.scope.key: PAUSE}
    assert again.tombstones == {"old": {"e" * 64}}
    assert again.epoch >= 7
    again.drop_name("sql")
    again.drop_name("run@3")
    again.put_worker("w0", None)
    again.put_pause(PAUSE.scope.key, None)
    await again.wait_durable()
    await stores.close(again)
    last = await stores.open()
    assert (dict(last.names), last.next_numbers, last.workers) == ({}, {}, {})
    assert last.pauses == {}
    await stores.close(last)


async def test_revisions_grow_over_a_restart_with_a_clock_set_back(stores):
    store = await stores.open(wall=lambda: 2_000_000.0)
    last = [store.next_revision() for _ in range(2500)][-1]
    await store.wait_durable()
    await stores.close(store)
    again = await stores.open(wall=lambda: 1_000_000.0)
    assert again.next_revision() > last
    await stores.close(again)


async def test_compare_and_set_refuses_an_adapter_changed_in_between(stores):
    store = await stores.open()
    store.put_adapter(ADAPTER)
    seen = store.adapters["sql/v1"]
    store.put_adapter(registered("sql/v1", source="file:///sql", priority=7))
    assert not store.compare_and_set(seen, ADAPTER)
    assert store.adapters["sql/v1"].policy.priority == 7
    await stores.close(store)


async def test_registering_a_name_again_drops_its_tombstone(stores):
    store = await stores.open()
    store.put_adapter(ADAPTER)
    store.drop_adapter("sql/v1")
    assert store.tombstones == {"sql/v1": {"d" * 64}}
    store.put_adapter(ADAPTER)
    assert store.tombstones == {}
    await store.wait_durable()
    await stores.close(store)
    again = await stores.open()
    assert (list(again.adapters), again.tombstones) == (["sql/v1"], {})
    await stores.close(again)


async def test_registering_other_bytes_under_a_name_keeps_the_tombstones_of_all_that_was_deleted(stores):
    store = await stores.open()
    for digest in ("d" * 64, "e" * 64):
        store.put_adapter(registered("sql/v1", source="file:///sql", digest=digest))
        await store.wait_durable()
        store.drop_adapter("sql/v1")
        await store.wait_durable()
    store.put_adapter(registered("sql/v1", source="file:///sql", digest="f" * 64))
    await store.wait_durable()
    await stores.close(store)
    again = await stores.open()
    assert again.tombstones == {"sql/v1": {"d" * 64, "e" * 64}}
    again.put_adapter(registered("sql/v1", source="file:///sql", digest="e" * 64))
    assert again.tombstones == {"sql/v1": {"d" * 64}}
    await again.wait_durable()
    await stores.close(again)


async def test_old_tombstones_are_forgotten(stores):
    now = [1000.0]
    store = await stores.open(wall=lambda: now[0])
    store.put_adapter(ADAPTER)
    store.drop_adapter("sql/v1")
    now[0] = 1100.0
    store.expire_tombstones(200)
    assert store.tombstones
    store.expire_tombstones(50)
    assert store.tombstones == {}
    await stores.close(store)


async def test_history_is_kept_over_a_restart_and_found_by_kind_and_subject(stores):
    store = await stores.open(wall=lambda: 5.0)
    store.record("alias_set", "sql", {"targets": [["sql/v1", 1.0]]}, "tenant acme")
    for number in range(20):
        store.record("load", f"a{number}", {"worker_id": "w0"})
    await store.wait_durable()
    await stores.close(store)
    again = await stores.open()
    loads = again.history(kinds=("load",))
    assert [entry.subject for entry in loads] == [f"a{number}" for number in reversed(range(20))]
    assert loads == sorted(loads, key=lambda entry: -entry.id)
    (entry,) = again.history(subject="sql")
    assert (entry.kind, entry.actor, entry.at, entry.body) == (
        "alias_set",
        "tenant acme",
        5.0,
        {"targets": [["sql/v1", 1.0]]},
    )
    assert again.history(kinds=("load",), before=loads[3].id, limit=1) == [loads[4]]
    again.record("load", "later")
    assert again.history(limit=1)[0].id > loads[0].id
    await stores.close(again)


async def test_writes_made_together_all_fail_with_one(stores):
    store = await stores.open()
    store.put_name(ServedName(name="keep", targets=(AliasTarget("x", 1.0),)))

    def fail_in_the_middle():
        with store.together():
            store.put_adapter(ADAPTER)
            store.drop_name("keep")
            store.record("adapter_registered", "sql/v1")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        fail_in_the_middle()
    assert (dict(store.adapters), list(store.names), store.history()) == ({}, ["keep"], [])
    with store.together():
        store.put_adapter(ADAPTER)
    await store.wait_durable()
    await stores.close(store)
    again = await stores.open()
    assert (list(again.adapters), list(again.names)) == (["sql/v1"], ["keep"])
    await stores.close(again)


async def test_a_standby_reads_the_leaders_writes_and_counts_on(stores):
    leader = await stores.open()
    standby = await stores.look()
    leader.put_adapter(ADAPTER)
    leader.record("load", "sql/v1")
    last = [leader.next_revision() for _ in range(2500)][-1]
    await leader.wait_durable()
    await stores.close(leader)
    next_leader = await stores.open()

    def sees_it():
        standby.refresh()
        return dict(standby.adapters) == {"sql/v1": ADAPTER} and standby.history()

    await until(sees_it)
    assert [entry.subject for entry in standby.history()] == ["sql/v1"]
    assert next_leader.next_revision() > last
    assert next_leader.epoch >= leader.epoch
    await stores.close(next_leader)
    await stores.close(standby)


async def test_after_a_term_nothing_is_written_until_the_next_one(stores):
    store = await stores.open()
    store.put_adapter(ADAPTER)
    await store.wait_durable()
    store.end_term()
    with pytest.raises(OrchestratorUnavailable) as caught:
        store.put_rules(PlacementPolicy(loads_per_worker=9))
    assert caught.value.code == "not_leading"
    assert store.rules == PlacementPolicy()
    await store.catch_up()
    store.put_rules(PlacementPolicy(loads_per_worker=9))
    await store.wait_durable()
    assert store.rules.loads_per_worker == 9


async def test_a_backup_leaves_out_deletions_drains_rollouts_and_pauses(stores, tmp_path):
    store = await stores.open()
    store.put_adapter(ADAPTER)
    store.put_adapter(registered("going", source="x", digest="e" * 64, is_deleting=True))
    store.put_adapter(registered("gone", source="x", digest="f" * 64))
    store.drop_adapter("gone")
    store.put_name(SQL)
    store.put_name(RUN)
    store.put_rules(PlacementPolicy(loading="eager"))
    store.put_worker("w0", WorkerIntent(state="draining", since=7.5, until=17.5))
    store.put_worker("w1", WorkerIntent(state="cordoned", since=7.5))
    store.put_pause(PAUSE.scope.key, PAUSE)
    path = tmp_path / store.backup_name
    store.backup(path)
    with pytest.raises(StoreError, match="new file"):
        store.backup(path)
    assert sorted(store.adapters) == ["going", "sql/v1"]
    await stores.close(store)
    copy = await stores.restored(Path(path))
    assert (copy.adapters["sql/v1"], copy.tombstones, copy.pauses) == (ADAPTER, {}, {})
    assert not copy.adapters["going"].is_deleting
    assert dict(copy.names) == {"sql": replace(SQL, rollout=None), "run@3": RUN}
    assert copy.workers == {"w1": WorkerIntent(state="cordoned", since=7.5)}
    assert copy.rules == PlacementPolicy(loading="eager")
    await stores.close(copy)
