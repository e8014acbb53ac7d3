"""Pools at zero at an API server: who is scaled, and what a refusal of one costs the others."""

from dataclasses import replace

import pytest
import pytest_asyncio

from lorafleet.engine.settings import PoolFromZero
from lorafleet.kube.client import connect
from lorafleet.kube.errors import KubeNotFound
from orchestrator.reconcile.pool_starter import PoolStarter
from tests.kube.server import KubeServer


@pytest_asyncio.fixture
async def server():
    async with KubeServer() as server:
        yield server


def stateful_set(name, replicas):
    template = {"metadata": {"labels": {"a": name}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    spec = {"replicas": replicas, "serviceName": name, "selector": {"matchLabels": {"a": name}}, "template": template}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }


@pytest.fixture
def replicas(server):
    return lambda name: server.objects.get("statefulsets", "default", name)["spec"]["replicas"]


@pytest_asyncio.fixture
async def starter(service, server, tmp_path):
    """Looks after three pools: `gone` has no workload."""
    kube = await connect(server.kubeconfig(tmp_path / "kubeconfig"))
    pools = {
        name: PoolFromZero(base_model=model, workload=f"statefulsets/{name}")
        for name, model in (("gone", "tiny-qwen"), ("a", "tiny-qwen"), ("other", "other"))
    }
    for name in ("a", "other"):
        server.objects.put(stateful_set(name, 0))
    context = service.built.reconciler._context
    settings = context.settings.model_copy(update={"scale_from_zero": pools})
    yield PoolStarter(replace(context, settings=settings), kube, namespace="default")
    await kube.close()


async def report(service, seq, **held):
    body = {"router_id": "r", "boot_id": "b", "seq": seq, "revision_seen": 0, "held_from_zero": held}
    (await service.http.post("/v1/usage", json=body)).raise_for_status()


async def test_a_pool_is_started_for_held_requests_though_another_cannot_be(service, starter, replicas):
    await starter.start_awaited()
    assert replicas("a") == 0
    await report(service, 1, **{"tiny-qwen": 2})
    with pytest.raises(KubeNotFound):
        await starter.start_awaited()
    assert (replicas("a"), replicas("other")) == (1, 0)


async def test_a_number_that_somebody_has_set_stays(service, server, starter, replicas):
    server.objects.put(stateful_set("other", 4))
    await report(service, 1, other=2)
    await starter.start_awaited()
    assert replicas("other") == 4


async def test_only_the_leader_starts_pools(service, starter, replicas):
    await report(service, 1, other=2)
    service.built.leadership.lead_until(0.0)
    await starter.start_awaited()
    assert replicas("other") == 0
