"""List and watch without faults, on the test server or a real one."""

import asyncio

import pytest

from lorafleet.kube.client import connect
from lorafleet.kube.errors import KubeConflict, KubeForbidden, KubeGone, KubeNotFound
from lorafleet.kube.watch import WatchTimes
from tests.kube.seen import seeing

BRIEF = WatchTimes(watch_s=(1.0, 1.0), silent_s=5.0, pause_s=(0.02, 0.1), steady_s=0.2, call_s=5.0)


@pytest.fixture
async def client(kube):
    client = await connect(kube.kubeconfig, environ={})
    assert client.namespace == kube.namespace
    yield client
    await client.close()


@pytest.fixture
def path(kube):
    return f"/api/v1/namespaces/{kube.namespace}/configmaps"


def configmap(name, value="0", **labels):
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels},
        "data": {"value": value},
    }


async def test_the_list_comes_first_and_then_each_change(client, path):
    await client.post(path, configmap("a", "1", app="x"))
    await client.post(path, configmap("other", app="y"))
    async with seeing(client, path, selector="app=x") as seen:
        await seen.until(lambda: seen.lists)
        assert seen.state == {"a": "1"}
        await client.put(f"{path}/a", configmap("a", "2", app="x"))
        await client.post(path, configmap("b", "1", app="x"))
        await client.post(path, configmap("c", "1", app="y"))
        await client.patch(f"{path}/b", {"metadata": {"labels": {"app": "y"}}})
        await client.delete(f"{path}/a")
        await seen.until(lambda: len(seen.events) == 4)
        assert seen.events == [("MODIFIED", "a"), ("ADDED", "b"), ("DELETED", "b"), ("DELETED", "a")]
        assert seen.state == {}, "of b the label went: it is not ours any more"
        assert (seen.lists, seen.failures) == (1, 0)


async def test_a_list_of_several_pages_is_one_list(client, path):
    for number in range(7):
        await client.post(path, configmap(f"m{number}"))
    async with seeing(client, path, page=3) as seen:
        await seen.until(lambda: seen.lists)
        assert (sorted(seen.state), seen.lists) == ([f"m{number}" for number in range(7)], 1)


async def test_a_watch_that_ends_in_order_is_resumed_without_a_list(client, path):
    await client.post(path, configmap("a", "0"))
    async with seeing(client, path, times=BRIEF) as seen:
        await seen.until(lambda: seen.lists)
        for number in range(1, 16):
            await client.put(f"{path}/a", configmap("a", str(number)))
            await asyncio.sleep(0.1)
        await seen.until(lambda: seen.state == {"a": "15"})
        assert (seen.lists, seen.failures) == (1, 0)
        assert len(seen.events) == 15, "each of them once, over two watches"


async def test_refusals_are_distinguished_by_what_a_caller_can_do(client, kube, path, tmp_path):
    made = await client.post(path, configmap("a"))
    with pytest.raises(KubeConflict) as exists:
        await client.post(path, configmap("a"))
    assert exists.value.reason == "AlreadyExists"
    await client.put(f"{path}/a", made | {"data": {"value": "1"}})
    with pytest.raises(KubeConflict) as stale:
        await client.put(f"{path}/a", made | {"data": {"value": "2"}})
    assert stale.value.reason == "Conflict"
    with pytest.raises(KubeConflict):
        await client.delete(f"{path}/a", {"preconditions": {"resourceVersion": made["metadata"]["resourceVersion"]}})
    with pytest.raises(KubeNotFound, match="not found"):
        await client.get(f"{path}/b")
    kube.faults.compact()  # a real one does so every five minutes
    with pytest.raises(KubeGone):
        await client.get(
            path, limit=1, **{"continue": "eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiJhXHUwMDAwIn0"}
        )
    kube.ours.tokens["good"] = "nobody"
    stranger = await connect(kube.ours.kubeconfig(tmp_path / "stranger", token="bad"), environ={})
    with pytest.raises(KubeForbidden) as unknown:
        await stranger.get(path)
    assert unknown.value.status == 401
    await stranger.close()
