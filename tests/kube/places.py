"""Slices as a controller writes them, for workers that are servers of the test: each has ports of its own."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

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
    """One slice with one endpoint; `agent` and `engine` are URLs."""
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


def fleet_slices(
    workers: Sequence[str], *, ready: Sequence[bool] = (), size: int = 100, labels: Mapping[str, str] = LABELS
) -> list[dict]:
    """A fleet that nobody serves, a hundred endpoints a slice as the controller writes them."""
    endpoints = [
        {
            "addresses": [f"10.{1 + number // 65536}.{number // 256 % 256}.{number % 256}"],
            "conditions": {"ready": not ready or ready[number], "serving": True, "terminating": False},
            "targetRef": {"kind": "Pod", "name": worker, "namespace": "default"},
            "zone": f"zone-{number % 3}",
            "nodeName": f"node-{number // 8}",
        }
        for number, worker in enumerate(workers)
    ]
    ports = [{"name": "agent", "port": 8090, "protocol": "TCP"}, {"name": "engine", "port": 8100, "protocol": "TCP"}]
    return [
        _slice(f"fleet-{start // size:03}", endpoints[start : start + size], ports, labels, "default")
        for start in range(0, len(endpoints), size)
    ]


def _slice(name: str, endpoints: list[dict], ports: list[dict], labels: Mapping[str, str], namespace: str) -> dict:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": ports,
    }
