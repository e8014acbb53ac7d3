"""Adapters that come with a release, and are changed over REST between its upgrades."""

import json

import pytest
import yaml

from orchestrator.configmaps.objects import STATUS
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import AliasSpec, AliasTarget
from tests.helm.rendering import CHART, RELEASE
from tests.kube.api import connected
from tests.kube.stores import FLEET
from tests.patience import until

pytestmark = pytest.mark.fleet

# As the stores of the tests call their fleet.
NAMED = ("--set", f"fullnameOverride={FLEET}")
ADAPTERS = [{"lora_id": "sql/v1", "source": "hf://acme/sql", "policy": {"min_replicas": 2}, "tenants": ["acme"]}]
WAYS = pytest.mark.parametrize("way", ["--server-side=true", "--server-side=false"])
MAPS = "/api/v1/namespaces/{namespace}/configmaps"


@pytest.fixture
def upgrade(release, tmp_path, way):
    """Install or upgrade with these adapters."""
    file = tmp_path / "adapters.yaml"

    async def upgrade(verb: str, adapters: list[dict] = ADAPTERS) -> None:
        file.write_text(yaml.safe_dump({"adapters": adapters}))
        await release.helm(verb, RELEASE, str(CHART), *NAMED, "--values", str(file), way)

    return upgrade


async def the_object(kube):
    async with connected(kube.kubeconfig) as api:
        _, listed = await api.ask("GET", MAPS, labelSelector="lorafleet.io/kind=adapter")
    assert len(listed["items"]) == 1
    return listed["items"][0]


def adapter(instance):
    return instance.store.adapters["sql/v1"]


@WAYS
async def test_a_change_over_rest_is_in_no_upgrades_way_and_outlives_those_that_change_others(
    upgrade, instance, instances, kube
):
    await upgrade("install")
    await until(lambda: "sql/v1" in instance.store.adapters)
    await instance.store.wait_durable()
    text = (await the_object(kube))["data"]["adapter.yaml"]

    instance.registry.patch_adapter("sql/v1", {"policy": {"min_replicas": 5}}, "me")
    await instance.store.wait_durable()
    found = await the_object(kube)
    assert found["data"]["adapter.yaml"] == text
    said = found["metadata"]["annotations"][STATUS]
    assert said == "accepted; set over REST, beside the text of Helm release fleet: policy"
    managers = {entry["manager"] for entry in found["metadata"]["managedFields"]}
    assert managers == {"helm", "lorafleet"}

    await upgrade("upgrade", [*ADAPTERS])
    assert adapter(instance).policy.min_replicas == 5
    await instances.close(instance)
    again = await instances.lead()
    assert (adapter(again).policy.min_replicas, adapter(again).tenants) == (5, ("acme",))

    await upgrade("upgrade", [ADAPTERS[0] | {"policy": {"min_replicas": 3}}])
    await until(lambda: adapter(again).policy.min_replicas == 3)
    await again.store.wait_durable()
    assert (await the_object(kube))["metadata"]["annotations"][STATUS] == "accepted"


@WAYS
async def test_what_is_deleted_over_rest_and_stays_in_the_values_comes_back_with_the_next_upgrade(upgrade, instance):
    await upgrade("install")
    await until(lambda: "sql/v1" in instance.store.adapters)
    await instance.store.wait_durable()
    instance.registry.delete_adapter("sql/v1", "me")
    instance.store.drop_adapter("sql/v1")
    await instance.store.wait_durable()
    await upgrade("upgrade")
    await until(lambda: "sql/v1" in instance.store.adapters)


@WAYS
async def test_a_backup_that_is_put_back_takes_no_field_from_the_release(upgrade, release, instance, kube, tmp_path):
    await upgrade("install")
    await until(lambda: "sql/v1" in instance.store.adapters)
    instance.registry.patch_adapter("sql/v1", {"policy": {"min_replicas": 5}}, "me")
    await instance.store.wait_durable()
    before = await the_object(kube)
    instance.store.backup(tmp_path / "backup.json")
    copies = json.loads((tmp_path / "backup.json").read_text())["items"]
    kept = next(it for it in copies if it["metadata"]["name"] == before["metadata"]["name"])
    assert kept["data"] == before["data"]
    assert kept["metadata"]["labels"] == before["metadata"]["labels"]

    await release.kubectl("apply", "-f", str(tmp_path / "backup.json"))
    assert (await the_object(kube))["data"] == before["data"]
    await upgrade("upgrade", [ADAPTERS[0] | {"policy": {"min_replicas": 3}}])
    await until(lambda: adapter(instance).policy.min_replicas == 3)


async def test_a_text_that_is_applied_on_the_server_stays_its_owners(release, instance, manifests):
    async def apply(*targets: str) -> None:
        said = {"name": "sql", "targets": [{"lora_id": name} for name in targets]}
        labels = {"lorafleet.io/kind": "alias", "lorafleet.io/fleet": FLEET}
        head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "sql", "labels": labels}}
        text = yaml.safe_dump(head | {"data": {"alias.yaml": yaml.safe_dump(said)}})
        await release.kubectl("apply", "--server-side", "-f", "-", stdin=text)

    for number in (1, 2, 3):
        await manifests.apply(f"sql-{number}", {"lora_id": f"sql/v{number}", "source": f"hf://acme/sql-{number}"})
    await apply("sql/v1")
    await until(lambda: instance.store.targets_of("sql"))
    instance.registry.put_alias("sql", AliasSpec(targets=(AliasTarget("sql/v2"),)), "me")
    await instance.store.wait_durable()
    await manifests.said("sql", "set over REST, beside the text of the client that applies it: targets")
    assert "sql/v1" in (await manifests.get("sql"))["data"]["alias.yaml"]
    await apply("sql/v1")
    assert instance.store.targets_of("sql") == (AliasTarget("sql/v2", 1.0),)
    await apply("sql/v3")
    await until(lambda: instance.store.targets_of("sql") == (AliasTarget("sql/v3", 1.0),))


async def test_aliases_and_the_policy_of_the_values_are_in_force_and_follow_upgrades(release, instance, tmp_path):
    file = tmp_path / "intent.yaml"

    async def upgrade(verb: str, weight: int, copies: int) -> None:
        aliases = {"sql": {"targets": [{"lora_id": "sql/v1", "weight": weight}]}}
        values = {"adapters": ADAPTERS, "aliases": aliases, "policy": {"min_replicas": copies}}
        file.write_text(yaml.safe_dump(values))
        await release.helm(verb, RELEASE, str(CHART), *NAMED, "--values", str(file))
        await until(lambda: instance.store.targets_of("sql") == (AliasTarget("sql/v1", float(weight)),))
        await until(lambda: instance.registry.policy().min_replicas == copies)

    await upgrade("install", 1, 2)
    await upgrade("upgrade", 3, 4)


async def test_a_policy_that_was_set_over_rest_is_taken_over_as_the_guide_says(release, instance, tmp_path):
    instance.registry.put_policy(PlacementPolicy(max_replicas=7), "*", "me")
    await instance.store.wait_durable()
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump({"policy": {"min_replicas": 2}}))
    words = (RELEASE, str(CHART), *NAMED, "--values", str(file))
    refused = await release.tried("install", *words)
    assert "cannot be imported into the current release" in refused.stderr
    await release.helm("install", *words, "--take-ownership", "--force-conflicts")
    await until(lambda: instance.registry.policy() == PlacementPolicy(min_replicas=2))
    await release.helm("upgrade", *words)
