"""Intent that people write as ConfigMaps: accepted and refused edits, statuses, Events and deletions."""

import json

import pytest
import yaml

from orchestrator.configmaps.objects import FLEET, KIND, RECORD, adapter_object_name, alias_object_name
from orchestrator.core.errors import StateConflict
from orchestrator.model.adapters import AdapterSpec, SecretRef
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import AliasTarget, NameVersion, Publication, ServedName
from tests.kube.stores import FLEET as FLEET_NAME
from tests.patience import until
from tests.registered import changed

SQL = {"lora_id": "sql/v1", "source": "hf://acme/sql"}


def has(instance, lora_id):
    return lambda: lora_id in instance.store.adapters


async def test_an_applied_manifest_registers_an_adapter_and_keeps_its_text(instance, manifests):
    text = "# ours\nlora_id: sql/v1\nsource: hf://acme/sql\npolicy: {min_replicas: 2, pinned: yes}\ntenants: [b, a]\n"
    await manifests.apply("my-sql", None, text=text)
    await until(has(instance, "sql/v1"))
    adapter = instance.store.adapters["sql/v1"]
    assert (adapter.source, adapter.policy.min_replicas, adapter.policy.pinned, adapter.tenants) == (
        "hf://acme/sql",
        2,
        True,
        ("a", "b"),
    )
    await manifests.said("my-sql", "accepted")
    assert (await manifests.get("my-sql"))["data"] == {"adapter.yaml": text}
    assert instance.store.history(kinds=("adapter_registered",))[0].actor == "configmap"
    assert instance.taken


async def test_inspection_results_are_written_to_annotations_that_apply_leaves_alone(instance, instances, manifests):
    found = await manifests.apply("my-sql", SQL)
    await until(has(instance, "sql/v1"))
    known = instance.store.adapters["sql/v1"]
    instance.store.compare_and_set(known, _inspected(known))
    await instance.store.wait_durable()
    now = await manifests.get("my-sql")
    assert now["data"] == found["data"]
    assert json.loads(now["metadata"]["annotations"][RECORD])["row"]["spec"]["digest"] == "d" * 64
    assert await manifests.status("my-sql") == "accepted, and verified"
    await manifests.apply("my-sql", SQL | {"tenants": ["acme"]})
    await until(lambda: instance.store.adapters["sql/v1"].tenants)
    await instances.close(instance)
    again = await instances.lead()
    assert again.store.adapters["sql/v1"].digest == "d" * 64
    assert again.store.adapters["sql/v1"].tenants == ("acme",)


def _inspected(adapter):
    return changed(adapter, digest="d" * 64, rank=8, base_model="tiny", size_bytes=7)


async def test_an_edit_changes_policy_and_tenants_and_missing_fields_take_defaults(instance, manifests):
    await manifests.apply("my-sql", SQL | {"policy": {"min_replicas": 2, "priority": 7}, "tenants": ["a"]})
    await until(has(instance, "sql/v1"))
    await manifests.apply("my-sql", SQL | {"policy": {"priority": 8}})
    await until(lambda: instance.store.adapters["sql/v1"].policy.priority == 8)
    adapter = instance.store.adapters["sql/v1"]
    assert (adapter.policy.min_replicas, adapter.tenants) == (None, None)


async def test_another_digest_under_a_registered_name_is_refused(instance, instances, manifests):
    await manifests.apply("my-sql", SQL)
    await until(has(instance, "sql/v1"))
    await instance.store.wait_durable()
    await manifests.apply("my-sql", SQL | {"source": "hf://acme/other", "tenants": ["a"]})
    event = await manifests.event("my-sql", "Immutable")
    assert "cannot change to 'hf://acme/other': register a new version" in event["message"]
    assert event["type"] == "Warning"
    await manifests.said("my-sql", "refused: 'sql/v1' is registered with source")
    await manifests.said("my-sql", "it stays as it was accepted before")
    assert (instance.store.adapters["sql/v1"].source, instance.store.adapters["sql/v1"].tenants) == (
        "hf://acme/sql",
        None,
    )
    await instances.close(instance)
    again = await instances.lead()
    await manifests.said("my-sql", "refused")
    assert again.store.adapters["sql/v1"].source == "hf://acme/sql"
    await manifests.apply("my-sql", SQL | {"tenants": ["a"]})
    await until(lambda: again.store.adapters["sql/v1"].tenants == ("a",))
    await again.store.wait_durable()
    assert await manifests.status("my-sql") == "accepted"


async def test_a_refused_edit_that_is_reverted_leaves_no_trace(instance, manifests):
    await manifests.apply("my-sql", SQL)
    await until(has(instance, "sql/v1"))
    await manifests.apply("my-sql", SQL | {"source": "hf://acme/other"})
    await manifests.said("my-sql", "refused: ")
    await manifests.apply("my-sql", SQL)

    async def is_accepted():
        return await manifests.status("my-sql") == "accepted"

    await until(is_accepted)


WRONG = {
    "no key": ("adapter", {"other": "x"}, "data has no 'adapter.yaml', found other"),
    "no yaml": ("adapter", "lora_id: [", "adapter.yaml is no YAML"),
    "a date that cannot be": ("adapter", "lora_id: 2020-13-45", "adapter.yaml is no YAML: month must be in 1..12"),
    "a number of 5000 digits": ("adapter", f"lora_id: {'1' * 5000}", "adapter.yaml is no YAML: Exceeds the limit"),
    "a deep nest": ("adapter", f"a: {'[' * 100_000}", "adapter.yaml is nested deeper than 32 levels"),
    "a book": ("adapter", "a" * 200_000, "adapter.yaml has 200,000 bytes, at most 131,072 are read"),
    "no fields": ("adapter", "just words", "adapter.yaml holds str, expected fields"),
    "a typo": (
        "adapter",
        "lora_id: a/v1\nsorce: x",
        "source: Field required; sorce: there is no such field",
    ),
    "a name that cannot be": ("adapter", "lora_id: a b\nsource: x", "lora_id 'a b' may hold letters"),
    "a base model's name": (
        "adapter",
        "lora_id: tiny-qwen\nsource: x",
        "name of a base model that a worker serves",
    ),
    "bounds": (
        "adapter",
        "lora_id: a/v1\nsource: x\npolicy: {min_replicas: 3, max_replicas: 2}",
        "min_replicas 3 is above max_replicas 2",
    ),
    "an unknown target": ("alias", "name: a\ntargets: [{lora_id: nobody/v1}]", "'nobody/v1' is not registered"),
    "far too much": (
        "adapter",
        "lora_id: a/v1\nsource: x\n" + "\n".join(f"{'k' * 40}{number}: 1" for number in range(2500)),
        "; and 2490 more",
    ),
    "a policy out of range": ("policy", "reserve_slots: -1", "reserve_slots: Input should be greater than"),
}


async def test_an_invalid_object_gets_one_event_with_the_rest_message(instance, instances, manifests):
    names = {case: case.replace(" ", "-").replace("'", "") for case in WRONG}
    for case, (kind, text, _) in WRONG.items():
        await manifests.apply(names[case], None, kind=kind, text=text)
    await manifests.apply("my-sql", SQL)
    await manifests.said("my-sql", "accepted")
    for case, (_, _, words) in WRONG.items():
        await manifests.said(names[case], words)
        (event,) = await until(lambda name=names[case]: manifests.events(name))
        assert words in event["message"], case
        assert event["count"] == 1
    assert list(instance.store.adapters) == ["sql/v1"]
    await instances.close(instance)
    again = await instances.lead()
    assert list(again.store.adapters) == ["sql/v1"]

    async def counted():
        return (await manifests.events("a-typo"))[0]["count"] == 2

    await until(counted)
    for name in names.values():
        assert len(await manifests.events(name)) == 1


async def test_an_object_that_is_still_refused_has_an_event_when_the_first_has_expired(instances, manifests):
    wall = [1_800_000_000.0]
    instance = await instances.open(wall=lambda: wall[0])
    await instance.lead()
    await manifests.apply("typo", None, text="lora_id: a/v1")
    (event,) = await until(lambda: manifests.events("typo"))

    async def retried(number):
        """The object's Events, once it has been checked again beside an accepted change."""
        await manifests.apply(f"other-{number}", {"lora_id": f"other/{number}", "source": "x"})
        await manifests.said(f"other-{number}", "accepted")
        await manifests.apply(f"typo-{number}", None, text=f"lora_id: typo/{number}")
        await until(lambda: manifests.events(f"typo-{number}"))  # Events are sent in their order
        return await manifests.events("typo")

    wall[0] += 2000.0
    assert await retried(0) == [event]
    wall[0] += 2000.0
    (again,) = await retried(1)
    assert (again["count"], again["firstTimestamp"]) == (2, event["firstTimestamp"])
    assert again["lastTimestamp"] > event["lastTimestamp"]


async def test_the_older_of_two_objects_for_one_adapter_counts_until_deleted(instance, manifests):
    await manifests.apply("first", SQL)
    await until(has(instance, "sql/v1"))
    await manifests.apply("second", SQL | {"source": "hf://acme/second"})
    event = await manifests.event("second", "NameTaken")
    assert "adapter 'sql/v1' stands in ConfigMap 'first' already; delete one of them" in event["message"]
    assert instance.store.adapters["sql/v1"].source == "hf://acme/sql"
    await manifests.delete("first")
    await until(lambda: instance.store.adapters["sql/v1"].is_deleting)
    instance.store.drop_adapter("sql/v1")
    await manifests.said("second", "accepted")
    assert instance.store.adapters["sql/v1"].source == "hf://acme/second"


@pytest.mark.parametrize("is_told_first", [True, False])
async def test_renaming_an_object_keeps_its_adapter(instance, manifests, is_told_first):
    """As tools do it that put a hash into the name: the new one is made, then the old one is deleted."""
    await manifests.apply("sql-1", SQL)
    await manifests.said("sql-1", "accepted")
    for old, new in (("sql-1", "sql-2"), ("sql-2", "sql-1")):
        await manifests.apply(new, SQL | {"tenants": [new]})
        if is_told_first:
            await manifests.event(new, "NameTaken")
        await manifests.delete(old)
        await manifests.said(new, "accepted")
        assert instance.store.adapters["sql/v1"].tenants == (new,)
    assert instance.store.history(kinds=["adapter_deleted"]) == []
    await manifests.delete("sql-1")
    await until(lambda: instance.store.adapters["sql/v1"].is_deleting)


async def test_a_copied_object_with_annotations_is_refused_as_a_duplicate(instance, manifests):
    await manifests.apply("first", SQL)
    await manifests.said("first", "accepted")
    copy = await manifests.get("first")
    meta = {"name": "second", "labels": copy["metadata"]["labels"], "annotations": copy["metadata"]["annotations"]}
    await manifests.api.post(f"{manifests.folder}/configmaps", copy | {"metadata": meta})
    await manifests.event("second", "NameTaken")
    await manifests.delete("second")
    await manifests.apply("my-python", {"lora_id": "python/v1", "source": "x"})
    await until(has(instance, "python/v1"))
    assert not instance.store.adapters["sql/v1"].is_deleting


async def test_an_alias_may_be_applied_before_its_adapters(instance, manifests):
    await manifests.apply("my-alias", {"name": "sql", "targets": [{"lora_id": "sql/v1"}]}, kind="alias")
    await manifests.said("my-alias", "refused: adapter 'sql/v1' is not registered")
    await manifests.apply("my-sql", SQL)
    await until(lambda: instance.store.targets_of("sql"))
    await manifests.said("my-alias", "accepted")
    await manifests.delete("my-alias")
    await until(lambda: not instance.store.targets_of("sql"))


async def test_the_object_of_a_published_name_comes_back_with_its_versions(instance, manifests):
    version = NameVersion(lora_id="run/v1", number=1, digest="d" * 64, registered_at=1.0, pointed_at=1.0)
    run = ServedName(
        name="run", targets=(AliasTarget("run/v1", 1.0),), published=Publication(next_number=2, versions=(version,))
    )
    instance.store.put_name(run)
    await instance.store.wait_durable()
    first = await manifests.get(alias_object_name("run"))
    await manifests.delete(alias_object_name("run"))

    async def is_made_again():
        made = {found["metadata"]["name"]: found for found in await manifests.all()}.get(alias_object_name("run"))
        return made is not None and made["metadata"]["uid"] != first["metadata"]["uid"]

    await until(is_made_again)
    again = await manifests.get(alias_object_name("run"))
    assert json.loads(again["metadata"]["annotations"][RECORD])["row"]["published"]["next_number"] == 2
    assert instance.store.names["run"] == run


async def test_an_adapter_stays_while_an_alias_points_at_it(instance, manifests):
    await manifests.apply("my-sql", SQL)
    await manifests.apply("my-alias", {"name": "sql", "targets": [{"lora_id": "sql/v1"}]}, kind="alias")
    await until(lambda: instance.store.targets_of("sql"))
    await manifests.delete("my-sql")
    event = await manifests.event("my-alias", "TargetDeleted")
    assert "'sql/v1' is the target of alias 'sql'; change or delete that first" in event["message"]
    assert not instance.store.adapters["sql/v1"].is_deleting
    await manifests.delete("my-alias")
    await until(lambda: instance.store.adapters["sql/v1"].is_deleting)


async def test_the_policy_object_can_be_changed_but_not_deleted(instance, manifests):
    await manifests.apply("our-policy", {"loading": "eager", "loads_per_worker": 2}, kind="policy")
    await until(lambda: instance.store.rules == PlacementPolicy(loading="eager", loads_per_worker=2))
    await manifests.said("our-policy", "accepted")
    await manifests.delete("our-policy")

    async def is_made_again():
        return "our-policy" in {found["metadata"]["name"] for found in await manifests.all()}

    await until(is_made_again)
    assert instance.store.rules.loads_per_worker == 2


async def test_deleting_an_object_drains_its_adapter_and_leaves_a_tombstone(instance, instances, manifests):
    await manifests.apply("my-sql", SQL)
    await until(has(instance, "sql/v1"))
    instance.store.put_adapter(_inspected(instance.store.adapters["sql/v1"]))
    await instance.store.wait_durable()
    await manifests.delete("my-sql")
    await until(lambda: instance.store.adapters["sql/v1"].is_deleting)
    await manifests.apply("my-sql", SQL)
    await manifests.said("my-sql", "refused: adapter 'sql/v1' is being deleted; register it again when that is done")
    instance.store.drop_adapter("sql/v1")
    assert instance.store.tombstones == {"sql/v1": {"d" * 64}}
    await manifests.said("my-sql", "accepted")
    assert not instance.store.intent.is_deleted("sql/v1", "d" * 64)
    await manifests.delete("my-sql")
    await until(lambda: instance.store.adapters["sql/v1"].is_deleting)
    instance.store.drop_adapter("sql/v1")
    await instance.store.wait_durable()
    await instances.close(instance)
    again = await instances.lead()
    assert dict(again.store.adapters) == {}


async def test_registrations_and_changes_over_rest_are_written_to_the_object(instance, manifests):
    instance.registry.register(AdapterSpec(lora_id="legal/v2", source="s3://b/legal"), "me")
    await instance.store.wait_durable()
    name = adapter_object_name("legal/v2")
    assert name.startswith("lora-")
    assert (await manifests.get(name))["data"] == {"adapter.yaml": "lora_id: legal/v2\nsource: s3://b/legal\n"}
    instance.registry.patch_adapter("legal/v2", {"policy": {"priority": 5}, "tenants": ["a"]}, "me")
    await instance.store.wait_durable()
    said = yaml.safe_load((await manifests.get(name))["data"]["adapter.yaml"])
    assert said == {"lora_id": "legal/v2", "source": "s3://b/legal", "policy": {"priority": 5}, "tenants": ["a"]}
    instance.registry.delete_adapter("legal/v2", "me")
    await instance.store.wait_durable()
    assert await manifests.status(name) == "deleting"
    instance.store.drop_adapter("legal/v2")
    await instance.store.wait_durable()
    assert name not in {found["metadata"]["name"] for found in await manifests.all()}


async def test_a_rest_change_never_overwrites_an_unprocessed_edit(instance, manifests):
    await manifests.apply("my-sql", SQL)
    await manifests.said("my-sql", "accepted")
    await instance.store.wait_durable()
    instance.is_leading = False  # so that the edit is not looked at
    await manifests.apply("my-sql", SQL | {"tenants": ["edited"]})
    instance.registry.patch_adapter("sql/v1", {"tenants": ("rest",)}, "me")
    with pytest.raises(StateConflict, match="ConfigMap my-sql has been changed meanwhile"):
        await instance.store.wait_durable()
    assert instance.store.adapters["sql/v1"].tenants is None
    # What agents find is written, and the edit still stands to be looked at.
    instance.store.put_adapter(_inspected(instance.store.adapters["sql/v1"]))
    await instance.store.wait_durable()
    instance.is_leading = True
    await manifests.apply("another", {"lora_id": "a/v1", "source": "x"})
    await until(lambda: instance.store.adapters["sql/v1"].tenants == ("edited",))
    assert instance.store.adapters["sql/v1"].digest == "d" * 64


async def test_a_foreign_object_is_never_overwritten(instance, manifests):
    name = adapter_object_name("legal/v2")
    await manifests.apply(name, None, text="precious", labels={})
    instance.registry.register(AdapterSpec(lora_id="legal/v2", source="x"), "me")
    with pytest.raises(StateConflict, match=f"ConfigMap {name} has been changed meanwhile"):
        await instance.store.wait_durable()
    assert "legal/v2" not in instance.store.adapters
    assert (await manifests.get(name))["data"] == {"adapter.yaml": "precious"}


@pytest.mark.parametrize("label", [FLEET, KIND])
async def test_removing_the_label_deletes_nothing(instance, instances, manifests, label):
    await manifests.apply("my-sql", SQL)
    await manifests.said("my-sql", "accepted")
    await manifests.patch("my-sql", {"labels": {label: None}})
    if label == FLEET:
        event = await manifests.event("my-sql", "LabelRemoved")
        assert "nothing is deleted by that" in event["message"]
    await manifests.apply("my-python", {"lora_id": "python/v1", "source": "x"})
    await until(has(instance, "python/v1"))
    assert not instance.store.adapters["sql/v1"].is_deleting
    await instances.close(instance)
    again = await instances.lead()
    await manifests.apply("another", {"lora_id": "a/v1", "source": "x"})
    await until(has(again, "a/v1"))
    assert again.store.tombstones == {}
    await manifests.patch("my-sql", {"labels": {label: {FLEET: FLEET_NAME, KIND: "adapter"}[label]}})
    await until(has(again, "sql/v1"))


@pytest.mark.parametrize("sign", ["-", "."])
async def test_an_object_with_a_long_name_gets_its_event(instance, manifests, sign):
    name = f"{'a' * 199}{sign}{'b' * 30}"
    await manifests.apply(name, {"lora_id": "a/v1"})
    assert (await manifests.event(name, "InvalidRequest"))["message"] == "source: Field required"


async def test_an_unknown_kind_gets_an_event(instance, manifests):
    await manifests.apply("odd", None, text="x", labels={KIND: "adaptor", FLEET: FLEET_NAME})
    event = await manifests.event("odd", "UnknownKind")
    assert "'adaptor', expected adapter, alias or policy" in event["message"]
    assert not instance.store.adapters


async def test_a_secret_is_referenced_and_never_read(instance, manifests, kube):
    ref = {"name": "acme-hub", "key": "token"}
    await manifests.apply("my-sql", SQL | {"secretRef": ref})
    await until(has(instance, "sql/v1"))
    assert instance.store.adapters["sql/v1"].secret == "acme-hub/token"
    instance.registry.register(AdapterSpec(lora_id="b/v1", source="hf://acme/b", secret_ref=SecretRef(**ref)), "me")
    await instance.store.wait_durable()
    said = yaml.safe_load((await manifests.get(adapter_object_name("b/v1")))["data"]["adapter.yaml"])
    assert said["secretRef"] == ref
    assert kube.ours.count("", "/secrets") == 0


async def test_an_object_applied_and_deleted_at_once_is_deleted(instance, manifests):
    """However that falls into the middle of our own writes of the object."""
    for number in range(12):
        await manifests.apply(f"short-{number}", {"lora_id": f"short/v{number}", "source": "x"})
        if number % 3:
            await until(has(instance, f"short/v{number}"))
        await manifests.delete(f"short-{number}")

    async def all_gone():
        held = [adapter for adapter in instance.store.adapters.values() if not adapter.is_deleting]
        return not held and not [it for it in await manifests.all() if it["metadata"]["name"].startswith("short-")]

    await until(all_gone)


async def test_managed_fields_are_neither_kept_nor_sent(instance, manifests, kube):
    managed = [{"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:data": {}}}]
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "my-sql",
            "namespace": kube.namespace,
            "labels": {KIND: "adapter", FLEET: FLEET_NAME},
            "managedFields": managed,
        },
        "data": {"adapter.yaml": yaml.safe_dump(SQL)},
    }
    kube.ours.objects.put(body)
    await until(has(instance, "sql/v1"))
    await instance.store.wait_durable()
    assert "managedFields" not in instance.backend.mirror.objects["my-sql"]["metadata"]
