"""Server-side apply and field ownership of the test server; the suite also holds on a real one."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kube.api import KubeApi, connected
from tests.kube.conftest import KubeCluster
from tests.kube.fields import as_fields_v1, from_fields_v1, leaves, merged, without
from tests.kube.kinds import BY_PLURAL
from tests.kube.managers import FieldWriter, applied
from tests.properties import examples

MAPS = "/api/v1/namespaces/{namespace}/configmaps"
SETS = "/apis/apps/v1/namespaces/{namespace}/statefulsets"
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"


@pytest.fixture
async def api(kube: KubeCluster) -> AsyncIterator[KubeApi]:
    async with connected(kube.kubeconfig) as api:
        yield api


def config_map(**data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}, "data": data}


def stateful_set(*, env: Any = (), **spec: Any) -> dict[str, Any]:
    """Of a pause container; a server without controllers makes no pods of it."""
    labels = {"app": "x"}
    container = {"name": "c", "image": "registry.k8s.io/pause:3.10", **({"env": list(env)} if env else {})}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    said = {"serviceName": "x", "selector": {"matchLabels": labels}, "template": template, **spec}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "s"}, "spec": said}


async def apply(api: KubeApi, path: str, body: dict[str, Any], manager: str, **query: Any) -> tuple[int, Any]:
    where = f"{path}/{body['metadata']['name']}"
    return await api.ask("PATCH", where, body, kind=APPLY, fieldManager=manager, **query)


def owners(obj: dict[str, Any], field: str) -> set[str]:
    """Managers of `data.<field>`."""
    return {
        entry["manager"]
        for entry in obj["metadata"]["managedFields"]
        if f"f:{field}" in entry["fieldsV1"].get("f:data", {})
    }


async def test_another_managers_field_conflicts_until_it_is_forced(api: KubeApi) -> None:
    code, made = await apply(api, MAPS, config_map(k="1", other="1"), "helm")
    assert (code, owners(made, "k")) == (201, {"helm"})
    code, said = await apply(api, MAPS, config_map(k="2"), "argocd")
    assert (code, said["reason"]) == (409, "Conflict")
    assert said["message"] == 'Apply failed with 1 conflict: conflict with "helm": .data.k'
    assert [(it["reason"], it["field"]) for it in said["details"]["causes"]] == [("FieldManagerConflict", ".data.k")]
    code, forced = await apply(api, MAPS, config_map(k="2"), "argocd", force="true")
    assert (code, forced["data"]) == (200, {"k": "2", "other": "1"})
    assert (owners(forced, "k"), owners(forced, "other")) == ({"argocd"}, {"helm"})


async def test_the_same_value_is_shared_and_stays_until_nobody_applies_it(api: KubeApi) -> None:
    await apply(api, MAPS, config_map(k="1", other="1"), "helm")
    code, shared = await apply(api, MAPS, config_map(k="1"), "argocd")
    assert (code, owners(shared, "k")) == (200, {"helm", "argocd"})
    _, left = await apply(api, MAPS, config_map(other="1"), "helm")
    assert (left["data"], owners(left, "k")) == ({"k": "1", "other": "1"}, {"argocd"})
    _, gone = await apply(api, MAPS, config_map(), "argocd")
    assert gone["data"] == {"other": "1"}


async def test_an_update_owns_what_it_changes_and_nothing_else(api: KubeApi) -> None:
    _, made = await apply(api, MAPS, config_map(k="1", other="1"), "helm")
    changed = made | {"data": {"k": "2", "other": "1"}}
    _, written = await api.ask("PUT", f"{MAPS}/m", changed, fieldManager="lorafleet")
    assert (owners(written, "k"), owners(written, "other")) == ({"lorafleet"}, {"helm"})
    code, said = await apply(api, MAPS, config_map(k="1", other="1"), "helm")
    assert code == 409
    assert said["message"].startswith('Apply failed with 1 conflict: conflict with "lorafleet" using v1')
    lean = {**written, "metadata": {k: it for k, it in written["metadata"].items() if k != "managedFields"}}
    _, again = await api.ask("PUT", f"{MAPS}/m", lean, fieldManager="another")
    assert again["metadata"]["managedFields"] == written["metadata"]["managedFields"]
    assert again["metadata"]["resourceVersion"] == written["metadata"]["resourceVersion"]


async def test_a_client_that_names_no_manager_is_called_as_it_calls_itself(api: KubeApi) -> None:
    made = await api.make(MAPS, config_map(k="1"))
    assert owners(made, "k") == {"python-httpx"}


async def test_replicas_that_are_not_applied_any_more_fall_to_one(api: KubeApi) -> None:
    _, made = await apply(api, SETS, stateful_set(replicas=6), "helm")
    assert made["spec"]["replicas"] == 6
    _, fallen = await apply(api, SETS, stateful_set(), "helm")
    assert fallen["spec"]["replicas"] == 1


async def test_who_scales_owns_the_replicas_that_were_another_number_before(kube: KubeCluster, api: KubeApi) -> None:
    await apply(api, SETS, stateful_set(replicas=2), "helm")
    await asyncio.to_thread(kube.kubectl, "scale", "statefulset", "s", "--replicas", "2")
    code, _ = await apply(api, SETS, stateful_set(replicas=3), "helm")
    assert code == 200  # to scale to what is there changes nothing
    await asyncio.to_thread(kube.kubectl, "scale", "statefulset", "s", "--replicas", "5")
    code, said = await apply(api, SETS, stateful_set(replicas=3), "helm")
    assert code == 409
    begins = 'Apply failed with 1 conflict: conflict with "kubectl" with subresource "scale" using apps/v1'
    assert said["message"].startswith(begins)
    assert said["message"].endswith(": .spec.replicas")
    code, kept = await apply(api, SETS, stateful_set(replicas=5), "helm")
    assert (code, kept["spec"]["replicas"]) == (200, 5)
    code, kept = await apply(api, SETS, stateful_set(), "helm")
    assert (code, kept["spec"]["replicas"]) == (200, 5)  # whoever scaled owns it


async def test_an_item_of_a_list_is_owned_by_its_name(api: KubeApi) -> None:
    await apply(api, SETS, stateful_set(env=[{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]), "helm")
    patch = {"spec": {"template": {"spec": {"containers": [{"name": "c", "env": [{"name": "B", "value": "2"}]}]}}}}
    kind = "application/strategic-merge-patch+json"
    await api.ask("PATCH", f"{SETS}/s", patch, kind=kind, fieldManager="kubectl-set")
    code, said = await apply(api, SETS, stateful_set(env=[{"name": "B", "value": "1"}]), "helm")
    assert code == 409
    assert said["message"].endswith('.spec.template.spec.containers[name="c"].env[name="B"].value')
    code, left = await apply(api, SETS, stateful_set(env=[{"name": "B", "value": "2"}]), "helm")
    assert code == 200
    assert left["spec"]["template"]["spec"]["containers"][0]["env"] == [{"name": "B", "value": "2"}]


async def test_a_variable_that_is_there_twice_is_refused(api: KubeApi) -> None:
    twice = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    code, said = await apply(api, SETS, stateful_set(env=twice), "helm")
    assert code == 500
    assert 'duplicate entries for key [name="A"]' in said["message"]


async def test_what_is_applied_names_its_manager_and_no_owners(api: KubeApi) -> None:
    code, said = await api.ask("PATCH", f"{MAPS}/m", config_map(), kind=APPLY)
    assert (code, said["reason"]) == (422, "Invalid")
    body = config_map()
    body["metadata"]["managedFields"] = [{"manager": "x", "operation": "Apply"}]
    code, _ = await apply(api, MAPS, body, "helm")
    assert code == 400


async def test_kubectl_hands_over_from_one_way_of_applying_to_the_other(kube: KubeCluster, api: KubeApi) -> None:
    async def kubectl(*words: str, **data: str) -> str:
        text = yaml.safe_dump(config_map(**data))
        return await asyncio.to_thread(kube.kubectl, "apply", *words, "-f", "-", stdin=text)

    await kubectl(k="1", old="1")
    assert "serverside-applied" in await kubectl("--server-side", k="2")
    _, found = await api.ask("GET", f"{MAPS}/m")
    assert (found["data"], owners(found, "k")) == ({"k": "2"}, {"kubectl"})


def test_what_is_no_longer_applied_goes_and_what_others_wrote_stays() -> None:
    head, helm = {"metadata": {"name": "s"}}, FieldWriter("helm")
    first = {"spec": {"replicas": 2, "list": [1], "containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}]}}
    stored = applied(BY_PLURAL["statefulsets"], None, head | first, helm, force=False) | {"status": {"replicas": 2}}
    second = {"spec": {"containers": [{"name": "a", "env": [{"name": "Y", "value": "1"}]}]}}
    left = applied(BY_PLURAL["statefulsets"], stored, head | second, helm, force=False)
    assert {key: left[key] for key in ("spec", "status")} == {**second, "status": {"replicas": 2}}


_trees = st.recursive(
    st.sampled_from(["1", "2"]), lambda below: st.dictionaries(st.sampled_from("abc"), below, max_size=3), max_leaves=8
)


@settings(max_examples=examples(100))
@given(_trees.filter(lambda tree: isinstance(tree, dict)), _trees.filter(lambda tree: isinstance(tree, dict)))
def test_fields_are_written_and_read_again_and_what_is_applied_is_there(live: Any, config: Any) -> None:
    fields = frozenset(leaves(config))
    assert from_fields_v1(as_fields_v1(fields)) == fields
    both = merged(live, config)
    assert leaves(both).items() >= {path: it for path, it in leaves(config).items() if it != {}}.items()
    assert not leaves(without(both, frozenset(leaves(both))))
