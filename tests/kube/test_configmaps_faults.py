"""The store on ConfigMaps when things go wrong: away, refused, put back, fought over, deleted while nobody looked."""

import asyncio
import random
from dataclasses import replace

import pytest

from lorafleet.kube.errors import KubeError
from orchestrator.configmaps.objects import adapter_object_name, alias_object_name
from orchestrator.core.errors import OrchestratorUnavailable, StateConflict, StoreError
from orchestrator.core.state import RegisteredAdapter
from orchestrator.wire import AdapterSpec
from tests.patience import patience, until

SQL = RegisteredAdapter(lora_id="sql/v1", source="hf://acme/sql", digest="d" * 64, rank=8, base_model="tiny")
PYTHON = replace(SQL, lora_id="python/v1", digest="e" * 64)


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


async def test_a_write_waits_for_an_api_server_that_is_away_and_stands_when_it_is_back(seat, seats, kube):
    failed = failed_creations(seat.kube)
    await kube.faults.go_down()
    seat.store.put_adapter(SQL)
    saving = asyncio.create_task(seat.store.saved())
    await until(lambda: failed)
    assert not saving.done()
    await kube.faults.come_back()
    await saving
    await seats.close(seat)
    assert dict((await seats.lead()).store.adapters) == {"sql/v1": SQL}


async def test_a_write_waits_for_an_api_server_that_comes_back_and_has_not_read_its_roles_yet(seat, kube):
    failed = failed_creations(seat.kube)
    await kube.faults.go_down()
    seat.store.put_adapter(SQL)
    saving = asyncio.create_task(seat.store.saved())
    await until(lambda: failed)
    kube.faults.refuse(403, times=4)
    await kube.faults.come_back()
    await saving
    assert adapter_object_name("sql/v1") in {it["metadata"]["name"] for it in kube.ours.objects.list("configmaps")}


async def test_a_write_that_the_api_server_never_takes_is_given_up_and_not_known_any_more(seats, kube):
    give_up_s = patience(0.2)
    seat = await seats.lead(give_up_s=give_up_s)
    seat.store.put_adapter(PYTHON)
    await seat.store.saved()
    kube.faults.refuse(503)
    seat.store.put_adapter(SQL)
    seat.store.put_adapter(replace(PYTHON, priority=9))
    with pytest.raises(OrchestratorUnavailable, match=f"no answer from the API server in {give_up_s:g} s") as told:
        await seat.store.saved()
    assert told.value.code == "store_unreachable"
    await until(lambda: dict(seat.store.adapters) == {"python/v1": PYTHON})
    kube.faults.refuse(None)
    seat.store.put_adapter(SQL)
    await seat.store.saved()
    assert adapter_object_name("sql/v1") in {it["metadata"]["name"] for it in kube.ours.objects.list("configmaps")}


async def test_a_write_of_our_own_is_nobody_elses_where_the_watch_tells_of_it_first(seats, kube):
    seat = await seats.lead(is_looking=False)
    await seat.intake.turn()
    name = adapter_object_name("sql/v1")
    for number in range(2):  # made, and changed
        before = seat.backend.mirror.edition
        kube.faults.hold_answers()
        seat.store.put_adapter(replace(SQL, priority=number))
        await until(lambda before=before: seat.backend.mirror.edition > before)
        kube.faults.give_answers()
        await seat.store.saved()
        assert seat.backend.mirror.changed == set()
    seat.store.drop_adapter("sql/v1")
    await seat.store.saved()
    await until(lambda: name not in seat.backend.mirror.objects)


@pytest.mark.parametrize("is_alias", [False, True])
async def test_what_is_deleted_before_a_new_leader_has_looked_at_it_stays_deleted(seats, kube, is_alias):
    before = await seats.lead()
    before.store.put_adapter(SQL)
    if is_alias:
        before.store.put_alias("prod", (("sql/v1", 1.0),))
    await before.store.saved()
    await seats.close(before)
    seat = await seats.lead(is_looking=False)
    name = alias_object_name("prod") if is_alias else adapter_object_name("sql/v1")
    assert name in seat.backend.mirror.changed
    if is_alias:
        seat.store.drop_alias("prod")
    else:
        seat.store.drop_adapter("sql/v1")
    await seat.intake.turn()
    await seat.store.saved()
    assert kube.ours.objects.get("configmaps", kube.namespace, name) is None
    assert (seat.store.aliases if is_alias else seat.store.adapters) == {}


async def test_the_end_of_a_term_gives_up_what_is_not_written_and_says_so(seat, kube):
    kube.faults.freeze()
    seat.store.put_adapter(SQL)
    saving = asyncio.create_task(seat.store.saved())
    await asyncio.sleep(0)
    seat.abdicate()
    with pytest.raises(OrchestratorUnavailable, match="does not lead any more") as told:
        await saving
    assert told.value.code == "not_leading"
    with pytest.raises(OrchestratorUnavailable, match="writes nothing"):
        seat.store.put_adapter(PYTHON)
    kube.faults.thaw()


async def test_a_role_that_is_missing_is_named(seats, kube):
    server = kube.ours
    server.tokens["t"] = "orchestrator"
    everything = {"apiGroups": [""], "resources": ["configmaps", "events"]}
    server.grant("orchestrator", kube.namespace, [everything | {"verbs": ["get", "list", "watch", "create", "update"]}])
    server.kubeconfig(kube.kubeconfig, token="t", namespace=kube.namespace)
    seat = await seats.lead()
    seat.store.put_adapter(SQL)
    await seat.store.saved()
    seat.store.drop_adapter("sql/v1")
    with pytest.raises(StoreError, match="the Role needs get, list, watch, create, update and delete"):
        await seat.store.saved()
    await until(has(seat, "sql/v1"))


def has(seat, lora_id):
    return lambda: lora_id in seat.store.adapters


async def test_an_object_that_may_not_be_written_is_not_tried_without_end(seats, people, kube):
    await people.apply("my-sql", {"lora_id": "sql/v1", "source": "x"})
    server = kube.ours
    server.tokens["t"] = "orchestrator"
    rules = [
        {"apiGroups": [""], "resources": ["configmaps", "events"], "verbs": ["get", "list", "watch", "create"]},
        _update(kube, "lorafleet-counters"),
    ]
    server.grant("orchestrator", kube.namespace, rules)
    server.kubeconfig(kube.kubeconfig, token="t", namespace=kube.namespace)
    seat = await seats.lead()
    await until(lambda: server.count("update", "/my-sql"))
    for number in range(3):
        seat.store.put_adapter(replace(SQL, lora_id=f"a{number}/v1"))
        await seat.store.saved([("adapters", f"a{number}/v1")])
        seat.backend.mirror.doubt(f"nobody-{number}")
        await until(lambda: not seat.backend.mirror.doubtful)
    assert server.count("update", "/my-sql") <= 2
    assert "sql/v1" not in seat.store.adapters


async def test_who_waits_for_one_object_is_not_told_of_what_is_refused_to_another(seat):
    too_large = replace(PYTHON, tenants=tuple(f"tenant-{number:07}" for number in range(80_000)))
    with seat.store.together():  # a batch: what is refused of it is refused to whoever asked for that alone
        seat.store.put_adapter(SQL)
        seat.store.put_adapter(too_large)
    sql, python = [("adapters", "sql/v1")], [("adapters", "python/v1")]
    found = await asyncio.gather(*map(seat.store.saved, (sql, python, sql + python, None)), return_exceptions=True)
    assert found[0] is None
    assert [type(error) for error in found[1:]] == [StoreError] * 3
    await until(lambda: dict(seat.store.adapters) == {"sql/v1": SQL})


async def test_no_object_goes_before_its_deletion_is_written_down(seats, kube):
    seat = await seats.lead(give_up_s=patience(0.2))
    seat.store.put_adapter(SQL)
    await seat.store.saved()
    await remembered(kube, "sql/v1")
    server, name = kube.ours, adapter_object_name("sql/v1")
    server.tokens["t"] = "orchestrator"
    # Everything but to write where deletions are written down.
    rules = [
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch", "create", "delete"]},
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["update"], "resourceNames": [name]},
    ]
    server.grant("orchestrator", kube.namespace, rules)
    await seats.close(seat)
    server.grant("orchestrator", kube.namespace, [*rules, _update(kube, "lorafleet-counters")])
    server.kubeconfig(kube.kubeconfig, token="t", namespace=kube.namespace)
    seat = await seats.lead(give_up_s=patience(0.2))
    seat.store.drop_adapter("sql/v1")
    with pytest.raises(StoreError):
        await seat.store.saved()
    await until(has(seat, "sql/v1"))
    assert server.objects.get("configmaps", kube.namespace, name) is not None
    assert server.count("delete", name) == 0


def _update(_cluster, name):
    return {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["update"], "resourceNames": [name]}


async def test_what_is_deleted_while_nobody_leads_is_noticed_by_whoever_leads_next(seat, seats, people, kube):
    await people.apply("my-sql", {"lora_id": "sql/v1", "source": "hf://acme/sql"})
    await until(has(seat, "sql/v1"))
    seat.store.put_adapter(replace(SQL))
    seat.store.put_adapter(PYTHON)
    await seat.store.saved()
    await remembered(kube, "python/v1")
    await seats.close(seat)
    await people.delete("my-sql")
    again = await seats.lead()
    await until(lambda: again.store.tombstones)
    assert again.store.tombstones == {"sql/v1": "d" * 64}
    assert list(again.store.adapters) == ["python/v1"]
    assert again.store.history(kinds=("adapter_deleted",))[0].actor == "configmap"
    await again.store.saved()
    await seats.close(again)
    last = await seats.lead()
    assert last.store.tombstones == {"sql/v1": "d" * 64}


async def test_what_is_deleted_while_the_api_server_cannot_be_watched_is_noticed_too(seat, kube):
    seat.store.put_adapter(SQL)
    seat.store.put_adapter(PYTHON)
    await seat.store.saved()
    await remembered(kube, "sql/v1")
    await remembered(kube, "python/v1")
    server = kube.ours
    await kube.faults.go_down()
    server.objects.delete("configmaps", kube.namespace, adapter_object_name("sql/v1"))
    await kube.faults.come_back()
    await until(lambda: seat.store.adapters["sql/v1"].is_deleting)
    assert not seat.store.adapters["python/v1"].is_deleting


async def test_a_store_that_is_put_back_from_before_an_adapter_deletes_it_nowhere(seat, kube):
    seat.store.put_adapter(PYTHON)
    await seat.store.saved()
    await remembered(kube, "python/v1")
    before = [dict(it) for it in shards(kube)]
    seat.store.put_adapter(SQL)
    await seat.store.saved()
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
    assert not seat.store.adapters["sql/v1"].is_deleting
    assert seat.store.tombstones == {}


@pytest.mark.parametrize("seed", range(6))  # by which the API server's answers come in another order each time
async def test_a_store_that_loses_everything_takes_nothing_from_the_fleet(seat, seats, kube, seed):
    kube.faults.slow_down(random.Random(seed), requests_s=0.02, answers_s=0.04)
    seat.store.put_adapter(SQL)
    seat.store.put_alias("sql", (("sql/v1", 1.0),))
    await seat.store.saved()
    await remembered(kube, "sql/v1")
    server = kube.ours
    await kube.faults.go_down()
    for found in server.objects.list("configmaps", kube.namespace):
        server.objects.delete("configmaps", kube.namespace, found["metadata"]["name"])
    await kube.faults.come_back()
    await until(lambda: server.objects.get("configmaps", kube.namespace, adapter_object_name("sql/v1")))
    assert (dict(seat.store.adapters), list(seat.store.aliases), seat.store.tombstones) == (
        {"sql/v1": SQL},
        ["sql"],
        {},
    )
    seat.abdicate()
    for found in server.objects.list("configmaps", kube.namespace):
        server.objects.delete("configmaps", kube.namespace, found["metadata"]["name"])
    again = await seats.lead()
    assert (dict(again.store.adapters), again.store.tombstones) == ({}, {})


async def test_what_is_remembered_in_a_copy_of_the_store_proves_no_deletion(seat, seats, kube):
    seat.store.put_adapter(SQL)
    await seat.store.saved()
    await remembered(kube, "sql/v1")
    await seats.close(seat)
    server = kube.ours
    copies = shards(kube)
    for found in server.objects.list("configmaps", kube.namespace):
        server.objects.delete("configmaps", kube.namespace, found["metadata"]["name"])
    for copy in copies:  # as a tool puts them back: the same data, another uid, and the adapters perhaps a minute later
        meta = {name: copy["metadata"][name] for name in ("name", "namespace", "labels")}
        server.objects.put(copy | {"metadata": meta})
    again = await seats.lead()
    again.store.put_adapter(PYTHON)
    await again.store.saved()
    await remembered(kube, "python/v1")
    again.backend.mirror.doubt("nobody")
    await until(lambda: not again.backend.mirror.doubtful)
    assert again.store.tombstones == {}


async def test_of_two_who_raise_the_epoch_at_once_the_lower_and_the_later_do_not_lead(seats):
    a, b = await seats.open(), await seats.open()
    for seat in (a, b):
        await until(lambda seat=seat: seat.backend.is_read)
        await seat.store.catch_up()
        seat.store.reload()
    a.store.raise_epoch(0)
    await a.store.saved()
    b.store.raise_epoch(0)
    with pytest.raises(StateConflict, match="somebody else has written epoch 1, so we do not lead"):
        await b.store.saved()
    assert (await seats.lead()).store.epoch == 2


async def test_what_the_last_leader_wrote_at_the_very_end_is_taken_over_by_the_next(seats, kube):
    old, new = await seats.lead(), await seats.open()
    await new.lead()
    # The old one is slow: it does not know yet that it does not lead, and its write goes through.
    old.store.put_adapter(SQL)
    await old.store.saved()
    await until(has(new, "sql/v1"))
    assert new.store.adapters["sql/v1"] == SQL
    changed = replace(SQL, priority=5)
    old.store.put_adapter(changed)
    await old.store.saved()
    await until(lambda: new.store.adapters["sql/v1"] == changed)


@pytest.mark.slow
async def test_many_refused_objects_and_a_busy_store_cost_few_requests(seat, people, kube):
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
        seat.registry.register(AdapterSpec(lora_id=f"good/v{number}", source="x"))
        await seat.store.saved()
    await people.said("bad-7", "refused: source: Field required")
    assert server.count("create", events) == 100
    assert server.count("update", "/bad-") == 100
