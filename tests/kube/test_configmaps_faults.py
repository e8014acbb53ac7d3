"""The store on ConfigMaps under faults: outages, refusals, restores, conflicts, unseen deletions."""

import asyncio
import random
from dataclasses import replace

import pytest

from lorafleet.kube.errors import KubeError
from orchestrator.configmaps.objects import RECORD, adapter_object_name, alias_object_name
from orchestrator.core.errors import OrchestratorUnavailable, StoreError
from orchestrator.model.adapters import AdapterSpec
from orchestrator.model.served_names import AliasTarget, ServedName
from tests.patience import patience, until, within
from tests.registered import changed, registered

SQL = registered("sql/v1", source="hf://acme/sql", digest="d" * 64, rank=8, base_model="tiny")
PYTHON = changed(SQL, lora_id="python/v1", digest="e" * 64)


def shards(cluster):
    """What is remembered of adapters, as it stands on the server."""
    found = cluster.ours.objects.list("configmaps", cluster.namespace)
    return [it for it in found if "-adapters-" in it["metadata"]["name"]]


async def remembered(cluster, lora_id):
    await until(lambda: any(f'"{lora_id}"' in it["data"]["known.json"] for it in shards(cluster)))


def failed_creations(kube):
    """Grows with each creation that comes to nothing."""
    failed, post = [], kube.post

    async def counted(*args, **how):
        try:
            return await post(*args, **how)
        except KubeError:
            failed.append(args)
            raise

    kube.post = counted
    return failed


async def test_a_write_waits_until_the_api_server_is_back(instance, instances, kube):
    failed = failed_creations(instance.kube)
    await kube.faults.go_down()
    instance.store.put_adapter(SQL)
    saving = asyncio.create_task(instance.store.wait_durable())
    await until(lambda: failed)
    assert not saving.done()
    await kube.faults.come_back()
    await saving
    await instances.close(instance)
    assert dict((await instances.lead()).store.adapters) == {"sql/v1": SQL}


async def test_a_write_waits_while_a_starting_api_server_forbids_everything(instance, kube):
    failed = failed_creations(instance.kube)
    await kube.faults.go_down()
    instance.store.put_adapter(SQL)
    saving = asyncio.create_task(instance.store.wait_durable())
    await until(lambda: failed)
    kube.faults.refuse(403, times=4)
    await kube.faults.come_back()
    await saving
    assert adapter_object_name("sql/v1") in {it["metadata"]["name"] for it in kube.ours.objects.list("configmaps")}


async def test_a_write_that_is_never_accepted_is_given_up_and_taken_back(instances, kube):
    give_up_s = patience(0.2)
    instance = await instances.lead(give_up_s=give_up_s)
    instance.store.put_adapter(PYTHON)
    await instance.store.wait_durable()
    kube.faults.refuse(503)
    instance.store.put_adapter(SQL)
    instance.store.put_adapter(changed(PYTHON, priority=9))
    with pytest.raises(OrchestratorUnavailable, match=f"no answer from the API server in {give_up_s:g} s") as told:
        await instance.store.wait_durable()
    assert told.value.code == "store_unreachable"
    await until(lambda: dict(instance.store.adapters) == {"python/v1": PYTHON})
    kube.faults.refuse(None)
    instance.store.put_adapter(SQL)
    await instance.store.wait_durable()
    assert adapter_object_name("sql/v1") in {it["metadata"]["name"] for it in kube.ours.objects.list("configmaps")}


async def test_our_own_write_is_no_foreign_edit_when_the_watch_is_faster(instances, kube):
    instance = await instances.lead(is_looking=False)
    await instance.edits.apply_edits()
    name = adapter_object_name("sql/v1")
    for number in range(2):  # made, and changed
        before = instance.backend.mirror.edition
        kube.faults.hold_answers()
        instance.store.put_adapter(changed(SQL, priority=number))
        await until(lambda before=before: instance.backend.mirror.edition > before)
        kube.faults.give_answers()
        await instance.store.wait_durable()
        assert instance.backend.mirror.changed == set()
    instance.store.drop_adapter("sql/v1")
    await instance.store.wait_durable()
    await until(lambda: name not in instance.backend.mirror.objects)


@pytest.mark.parametrize("is_alias", [False, True])
async def test_an_object_deleted_before_a_new_leader_reads_it_stays_deleted(instances, kube, is_alias):
    before = await instances.lead()
    before.store.put_adapter(SQL)
    if is_alias:
        before.store.put_name(ServedName(name="prod", targets=(AliasTarget("sql/v1", 1.0),)))
    await before.store.wait_durable()
    await instances.close(before)
    instance = await instances.lead(is_looking=False)
    name = alias_object_name("prod") if is_alias else adapter_object_name("sql/v1")
    assert name in instance.backend.mirror.changed
    if is_alias:
        instance.store.drop_name("prod")
    else:
        instance.store.drop_adapter("sql/v1")
    await instance.edits.apply_edits()
    await instance.store.wait_durable()
    assert kube.ours.objects.get("configmaps", kube.namespace, name) is None
    assert (instance.store.names if is_alias else instance.store.adapters) == {}


async def test_the_end_of_a_term_fails_pending_writes_with_not_leading(instance, kube):
    kube.faults.freeze()
    instance.store.put_adapter(SQL)
    saving = asyncio.create_task(instance.store.wait_durable())
    await asyncio.sleep(0)
    instance.abdicate()
    with pytest.raises(OrchestratorUnavailable, match="does not lead any more") as told:
        await saving
    assert told.value.code == "not_leading"
    with pytest.raises(OrchestratorUnavailable, match="writes nothing"):
        instance.store.put_adapter(PYTHON)
    kube.faults.thaw()


async def test_a_missing_role_is_named_in_the_error(instances, kube):
    server = kube.ours
    server.tokens["t"] = "orchestrator"
    everything = {"apiGroups": [""], "resources": ["configmaps", "events"]}
    server.grant("orchestrator", kube.namespace, [everything | {"verbs": ["get", "list", "watch", "create", "update"]}])
    server.kubeconfig(kube.kubeconfig, token="t", namespace=kube.namespace)
    instance = await instances.lead()
    instance.store.put_adapter(SQL)
    await instance.store.wait_durable()
    instance.store.drop_adapter("sql/v1")
    with pytest.raises(StoreError, match="the Role needs get, list, watch, create, update and delete"):
        await instance.store.wait_durable()
    await until(has(instance, "sql/v1"))


def has(instance, lora_id):
    return lambda: lora_id in instance.store.adapters


async def test_an_object_with_an_annotation_that_cannot_be_read_holds_up_no_other(instance, manifests):
    await manifests.apply("a-sql", {"lora_id": "sql/v1", "source": "x"})
    await manifests.apply("b-prod", {"name": "prod", "targets": [{"lora_id": "sql/v1"}]}, kind="alias")
    await until(lambda: instance.store.targets_of("prod"))
    await manifests.said("b-prod", "accepted")
    record = (await manifests.get("b-prod"))["metadata"]["annotations"][RECORD]
    changed = record.replace("1.0", "2.0")
    assert changed != record
    await manifests.patch("b-prod", {"annotations": {RECORD: '{"of": "another release"}'}})
    await manifests.apply("c-late", {"name": "late", "targets": [{"lora_id": "sql/v1"}]}, kind="alias")
    await until(lambda: instance.store.targets_of("late"))
    assert instance.store.targets_of("prod") == (AliasTarget("sql/v1", 1.0),)

    async def is_written_again():
        return (await manifests.get("b-prod"))["metadata"]["annotations"][RECORD] == record

    await until(is_written_again)
    await manifests.patch("b-prod", {"annotations": {RECORD: changed}})
    await until(lambda: instance.store.targets_of("prod") == (AliasTarget("sql/v1", 2.0),))


async def test_a_fault_of_ours_at_one_object_holds_up_no_other(instance, manifests, monkeypatch):
    apply_spec, failures = instance.edits._registry.apply_spec, []

    def faulty(spec, actor):
        if spec.lora_id == "a/v1" and not failures:
            failures.append(spec)
            raise RuntimeError("a fault of ours")
        return apply_spec(spec, actor)

    monkeypatch.setattr(instance.edits._registry, "apply_spec", faulty)
    await asyncio.gather(*(manifests.apply(name, {"lora_id": f"{name}/v1", "source": "x"}) for name in ("a", "b")))
    await until(lambda: failures and "b/v1" in instance.store.adapters)
    await manifests.apply("c", {"lora_id": "c/v1", "source": "x"})
    await until(lambda: set(instance.store.adapters) == {"a/v1", "b/v1", "c/v1"})


async def test_a_caller_is_told_of_its_write_whatever_becomes_of_its_result(instance, monkeypatch):
    def faulty(_key):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(instance.backend.writer, "_on_written", faulty)
    instance.store.put_adapter(SQL)
    async with within(30):
        await instance.store.wait_durable()


async def test_a_forbidden_write_is_not_retried_without_end(instances, manifests, kube):
    await manifests.apply("my-sql", {"lora_id": "sql/v1", "source": "x"})
    server = kube.ours
    server.tokens["t"] = "orchestrator"
    rules = [
        {"apiGroups": [""], "resources": ["configmaps", "events"], "verbs": ["get", "list", "watch", "create"]},
        _update(kube, "lorafleet-counters"),
    ]
    server.grant("orchestrator", kube.namespace, rules)
    server.kubeconfig(kube.kubeconfig, token="t", namespace=kube.namespace)
    instance = await instances.lead()
    await until(lambda: server.count("update", "/my-sql"))
    for number in range(3):
        instance.store.put_adapter(changed(SQL, lora_id=f"a{number}/v1"))
        await instance.store.wait_durable([("adapters", f"a{number}/v1")])
        instance.backend.mirror.add_doubt(f"nobody-{number}")
        await until(lambda: not instance.backend.mirror.doubtful)
    assert server.count("update", "/my-sql") <= 2
    assert "sql/v1" not in instance.store.adapters


async def test_a_caller_waiting_for_one_object_gets_no_error_of_another(instance):
    too_large = changed(PYTHON, tenants=tuple(f"tenant-{number:07}" for number in range(80_000)))
    with instance.store.together():  # a batch: what is refused of it is refused to whoever asked for that alone
        instance.store.put_adapter(SQL)
        instance.store.put_adapter(too_large)
    sql, python = [("adapters", "sql/v1")], [("adapters", "python/v1")]
    found = await asyncio.gather(
        *map(instance.store.wait_durable, (sql, python, sql + python, None)), return_exceptions=True
    )
    assert found[0] is None
    assert [type(error) for error in found[1:]] == [StoreError] * 3
    await until(lambda: dict(instance.store.adapters) == {"sql/v1": SQL})


async def test_no_object_is_deleted_before_its_tombstone_is_written(instances, kube):
    instance = await instances.lead(give_up_s=patience(0.2))
    instance.store.put_adapter(SQL)
    await instance.store.wait_durable()
    await remembered(kube, "sql/v1")
    server, name = kube.ours, adapter_object_name("sql/v1")
    server.tokens["t"] = "orchestrator"
    # Everything but to write where deletions are written down.
    rules = [
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch", "create", "delete"]},
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["update"], "resourceNames": [name]},
    ]
    server.grant("orchestrator", kube.namespace, rules)
    await instances.close(instance)
    server.grant("orchestrator", kube.namespace, [*rules, _update(kube, "lorafleet-counters")])
    server.kubeconfig(kube.kubeconfig, token="t", namespace=kube.namespace)
    instance = await instances.lead(give_up_s=patience(0.2))
    instance.store.drop_adapter("sql/v1")
    with pytest.raises(StoreError):
        await instance.store.wait_durable()
    await until(has(instance, "sql/v1"))
    assert server.objects.get("configmaps", kube.namespace, name) is not None
    assert server.count("delete", name) == 0


def _update(_cluster, name):
    return {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["update"], "resourceNames": [name]}


async def test_an_object_deleted_without_a_leader_is_noticed_by_the_next(instance, instances, manifests, kube):
    await manifests.apply("my-sql", {"lora_id": "sql/v1", "source": "hf://acme/sql"})
    await until(has(instance, "sql/v1"))
    instance.store.put_adapter(replace(SQL))
    instance.store.put_adapter(PYTHON)
    await instance.store.wait_durable()
    await remembered(kube, "python/v1")
    await instances.close(instance)
    await manifests.delete("my-sql")
    again = await instances.lead()
    await until(lambda: again.store.tombstones)
    assert again.store.tombstones == {"sql/v1": {"d" * 64}}
    assert list(again.store.adapters) == ["python/v1"]
    assert again.store.history(kinds=("adapter_deleted",))[0].actor == "configmap"
    await again.store.wait_durable()
    await instances.close(again)
    last = await instances.lead()
    assert last.store.tombstones == {"sql/v1": {"d" * 64}}


async def test_an_object_deleted_while_the_watch_is_down_is_noticed(instance, kube):
    instance.store.put_adapter(SQL)
    instance.store.put_adapter(PYTHON)
    await instance.store.wait_durable()
    await remembered(kube, "sql/v1")
    await remembered(kube, "python/v1")
    server = kube.ours
    await kube.faults.go_down()
    server.objects.delete("configmaps", kube.namespace, adapter_object_name("sql/v1"))
    await kube.faults.come_back()
    await until(lambda: instance.store.adapters["sql/v1"].is_deleting)
    assert not instance.store.adapters["python/v1"].is_deleting


async def test_restoring_a_cluster_from_before_an_adapter_deletes_it_nowhere(instance, kube):
    instance.store.put_adapter(PYTHON)
    await instance.store.wait_durable()
    await remembered(kube, "python/v1")
    before = [dict(it) for it in shards(kube)]
    instance.store.put_adapter(SQL)
    await instance.store.wait_durable()
    await remembered(kube, "sql/v1")
    server, name = kube.ours, adapter_object_name("sql/v1")
    await kube.faults.go_down()
    server.objects.delete("configmaps", kube.namespace, name)
    for shard in before:
        server.objects.put(shard)
    for shard in shards(kube):
        if shard["metadata"]["name"] not in {it["metadata"]["name"] for it in before}:
            server.objects.delete("configmaps", kube.namespace, shard["metadata"]["name"])
    await kube.faults.come_back(rewound=True)
    await until(lambda: server.objects.get("configmaps", kube.namespace, name))
    assert not instance.store.adapters["sql/v1"].is_deleting
    assert instance.store.tombstones == {}


@pytest.mark.parametrize("seed", range(6))  # by which the API server's answers come in another order each time
async def test_losing_all_configmaps_removes_nothing_from_the_fleet(instance, instances, kube, seed):
    kube.faults.slow_down(random.Random(seed), requests_s=0.02, answers_s=0.04)
    instance.store.put_adapter(SQL)
    instance.store.put_name(ServedName(name="sql", targets=(AliasTarget("sql/v1", 1.0),)))
    await instance.store.wait_durable()
    await remembered(kube, "sql/v1")
    server = kube.ours
    await kube.faults.go_down()
    for found in server.objects.list("configmaps", kube.namespace):
        server.objects.delete("configmaps", kube.namespace, found["metadata"]["name"])
    await kube.faults.come_back()
    await until(lambda: server.objects.get("configmaps", kube.namespace, adapter_object_name("sql/v1")))
    assert (dict(instance.store.adapters), list(instance.store.names), instance.store.tombstones) == (
        {"sql/v1": SQL},
        ["sql"],
        {},
    )
    instance.abdicate()
    for found in server.objects.list("configmaps", kube.namespace):
        server.objects.delete("configmaps", kube.namespace, found["metadata"]["name"])
    again = await instances.lead()
    assert (dict(again.store.adapters), again.store.tombstones) == ({}, {})


async def test_a_copied_state_object_proves_no_deletion(instance, instances, kube):
    instance.store.put_adapter(SQL)
    await instance.store.wait_durable()
    await remembered(kube, "sql/v1")
    await instances.close(instance)
    server = kube.ours
    copies = shards(kube)
    for found in server.objects.list("configmaps", kube.namespace):
        server.objects.delete("configmaps", kube.namespace, found["metadata"]["name"])
    for copy in copies:  # as a tool puts them back: the same data, another uid, and the adapters perhaps a minute later
        meta = {name: copy["metadata"][name] for name in ("name", "namespace", "labels")}
        server.objects.put(copy | {"metadata": meta})
    again = await instances.lead()
    again.store.put_adapter(PYTHON)
    await again.store.wait_durable()
    await remembered(kube, "python/v1")
    again.backend.mirror.add_doubt("nobody")
    await until(lambda: not again.backend.mirror.doubtful)
    assert again.store.tombstones == {}


async def test_when_two_raise_the_epoch_at_once_only_one_leads(instances):
    a, b = await instances.open(), await instances.open()
    for instance in (a, b):
        await until(lambda instance=instance: instance.backend.is_read)
        await instance.store.catch_up()
        instance.store.reload()
    a.store.raise_epoch(0)
    await a.store.wait_durable()
    b.store.raise_epoch(0)
    with pytest.raises(OrchestratorUnavailable, match="another process has written epoch 1, so we do not lead"):
        await b.store.wait_durable()
    assert (await instances.lead()).store.epoch == 2


async def test_the_last_writes_of_a_leader_are_taken_over_by_the_next(instances, kube):
    old, new = await instances.lead(), await instances.open()
    await new.lead()
    # The old one is slow: it does not know yet that it does not lead, and its write goes through.
    old.store.put_adapter(SQL)
    await old.store.wait_durable()
    await until(has(new, "sql/v1"))
    assert new.store.adapters["sql/v1"] == SQL
    first = changed(SQL, priority=5)
    old.store.put_adapter(first)
    await old.store.wait_durable()
    await until(lambda: new.store.adapters["sql/v1"] == first)


@pytest.mark.slow
async def test_many_refused_objects_and_a_busy_store_cost_few_requests(instance, manifests, kube):
    server = kube.ours
    for number in range(100):
        server.objects.put(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {
                    "name": f"bad-{number}",
                    "namespace": kube.namespace,
                    "labels": {"lorafleet.io/kind": "adapter", "lorafleet.io/fleet": "lorafleet"},
                },
                "data": {"adapter.yaml": f"lora_id: bad/v{number}"},
            }
        )
    events = f"/namespaces/{kube.namespace}/events"
    await until(lambda: server.count("create", events) == 100, within_s=20)
    await until(lambda: server.count("update", "/bad-") == 100, within_s=20)
    for number in range(20):
        instance.registry.register(AdapterSpec(lora_id=f"good/v{number}", source="x"))
        await instance.store.wait_durable()
    await manifests.said("bad-7", "refused: source: Field required")
    assert server.count("create", events) == 100
    assert server.count("update", "/bad-") == 100
