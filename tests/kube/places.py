"""EndpointSlices for workers that are servers of the test, each with ports of its own."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from lorafleet.kube.client import connect
from lorafleet.kube.errors import KubeNotFound
from tests.kube.conftest import KubeCluster

SELECTOR = "app.kubernetes.io/instance=fleet,app.kubernetes.io/component=worker"
LABELS = {"app.kubernetes.io/instance": "fleet", "app.kubernetes.io/component": "worker"}


def slice_of(
    worker: str,
    *,
    agent: str = "",
    engine: str = "",
    ready: bool = True,
    terminating: bool = False,
    zone: str = "",
    node: str = "",
    labels: Mapping[str, str] = LABELS,
    namespace: str = "default",
) -> dict:
    """A slice with one endpoint; `agent` and `engine` are URLs."""
    urls = {"agent": agent, "engine": engine}
    endpoint = {
        "addresses": [next(urlsplit(url).hostname for url in urls.values() if url)],
        "conditions": {"ready": ready and not terminating, "serving": ready, "terminating": terminating},
        "targetRef": {"kind": "Pod", "name": worker, "namespace": namespace},
        **({"zone": zone} if zone else {}),
        **({"nodeName": node} if node else {}),
    }
    ports = [{"name": name, "port": urlsplit(url).port, "protocol": "TCP"} for name, url in urls.items() if url]
    return _slice(f"workers-{worker}", [endpoint], ports, labels, namespace)


async def put_slice(kube: KubeCluster, slice_: dict) -> None:
    """Create the object, or replace the one of its name."""
    if kube.server is not None:  # also while it is down, or refuses
        kube.server.objects.put(slice_)
        return
    client, meta = await connect(kube.kubeconfig), slice_["metadata"]
    path = f"/apis/discovery.k8s.io/v1/namespaces/{meta['namespace']}/endpointslices"
    try:
        await client.put(f"{path}/{meta['name']}", slice_)
    except KubeNotFound:
        await client.post(path, slice_)
    finally:
        await client.close()


async def drop_slice(kube: KubeCluster, slice_: dict) -> None:
    meta = slice_["metadata"]
    if kube.server is not None:
        kube.server.objects.delete("endpointslices", meta["namespace"], meta["name"])
        return
    client = await connect(kube.kubeconfig)
    await client.delete(f"/apis/discovery.k8s.io/v1/namespaces/{meta['namespace']}/endpointslices/{meta['name']}")
    await client.close()


def _slice(name: str, endpoints: list[dict], ports: list[dict], labels: Mapping[str, str], namespace: str) -> dict:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": ports,
    }
