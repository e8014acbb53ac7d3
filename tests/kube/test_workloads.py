"""The workload controllers of the test cluster."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from tests.kube import workloads
from tests.kube.controller import WorkloadController
from tests.kube.server import KubeServer
from tests.kube.workloads import REVISION, PodChanges

TEMPLATE: dict[str, Any] = {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": []}}


def workload(kind: str, replicas: int, **spec: Any) -> dict[str, Any]:
    meta = {"name": "w", "generation": 1}
    return {"kind": kind, "metadata": meta, "spec": {"replicas": replicas, "template": TEMPLATE} | spec}


def pod(name: str, *, ready: bool = True, new: bool = True, going: bool = False) -> dict[str, Any]:
    revision = workloads.revision(workload("", 0)) if new else "old"
    meta = {"name": name, "labels": {REVISION: revision}, "creationTimestamp": "2026-01-01T00:00:00Z"}
    status = {"conditions": [{"type": "Ready", "status": str(ready)}]}
    return {"metadata": meta | ({"deletionTimestamp": "now"} if going else {}), "status": status}


class TestDeployment:
    def test_it_surges_first_and_replaces_pods_as_new_ones_are_ready(self) -> None:
        rolling = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        wanted = workload("Deployment", 2, strategy=rolling)
        old = [pod("a", new=False), pod("b", new=False)]
        first = workloads.deployment(wanted, old)
        assert (len(first.make), first.delete) == (1, ())
        assert workloads.deployment(wanted, [*old, pod("c", ready=False)]) == PodChanges()
        assert workloads.deployment(wanted, [*old, pod("c")]).delete == ("a",)
        assert len(workloads.deployment(wanted, [pod("b", new=False), pod("c"), pod("a", going=True)]).make) == 1

    def test_pods_that_are_not_ready_go_first_when_it_shrinks(self) -> None:
        shrunk = workloads.deployment(workload("Deployment", 1), [pod("a"), pod("b", ready=False)])
        assert shrunk.delete == ("b",)


class TestStatefulSet:
    def test_it_makes_its_pods_in_turn_or_all_at_once(self) -> None:
        assert workloads.stateful_set(workload("StatefulSet", 2), []).make == ("w-0",)
        assert workloads.stateful_set(workload("StatefulSet", 2), [pod("w-0", ready=False)]) == PodChanges()
        parallel = workload("StatefulSet", 2, podManagementPolicy="Parallel")
        assert workloads.stateful_set(parallel, []).make == ("w-0", "w-1")

    def test_it_replaces_one_pod_at_a_time_from_the_highest_number_down(self) -> None:
        wanted = workload("StatefulSet", 3)
        old = [pod(f"w-{number}", new=False) for number in range(3)]
        assert workloads.stateful_set(wanted, old).delete == ("w-2",)
        assert workloads.stateful_set(wanted, [*old[:2], pod("w-2", new=False, going=True)]) == PodChanges()
        assert workloads.stateful_set(wanted, [*old[:2], pod("w-2", ready=False)]) == PodChanges()
        assert workloads.stateful_set(wanted, [*old[:2], pod("w-2")]).delete == ("w-1",)


def test_a_budget_lets_as_many_go_as_it_says_and_no_more() -> None:
    budget = {"metadata": {"generation": 1}, "spec": {"maxUnavailable": 1}}
    assert workloads.budget_status(budget, [pod("a"), pod("b")])["disruptionsAllowed"] == 1
    assert workloads.budget_status(budget, [pod("a"), pod("b", ready=False)])["disruptionsAllowed"] == 0


PAGE = """
import http.server, os, signal, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.environ["SAYS"].encode())
    def log_message(self, *words): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.ThreadingHTTPServer((sys.argv[1], 8080), Page).serve_forever()
"""


def page(says: str) -> dict[str, Any]:
    env = [
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "SAYS", "value": f"{says} of $(ZONE)"},
    ]
    zone = {"fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"}}
    container = {
        "name": "page",
        "command": ["python3", "-S", "-c", PAGE, "$(IP)"],
        "env": [{"name": "ZONE", "valueFrom": zone}, *env],
        "ports": [{"name": "http", "containerPort": 8080}],
        # Its end is heard of before it comes: the usual trick of servers that end at once.
        "lifecycle": {"preStop": {"exec": {"command": ["python3", "-S", "-c", "import time; time.sleep(0.5)"]}}},
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
    }
    labels = {"app.kubernetes.io/component": "page"}
    rolling = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "strategy": rolling, "template": template}
    meta = {"name": "page", "namespace": "default"}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="k", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[tuple[KubeServer, WorkloadController]]:
    async with (
        KubeServer() as server,
        WorkloadController(server, "default", folder, nodes={"n": "zone-1"}) as controller,
    ):
        yield server, controller


@pytest.mark.fleet
async def test_pods_run_are_reached_through_their_service_and_replaced_without_a_gap(
    cluster: tuple[KubeServer, WorkloadController],
) -> None:
    server, controller = cluster
    labels = {"app.kubernetes.io/component": "page"}
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "page", "namespace": "default"}}
    server.objects.put(service | {"spec": {"selector": labels, "ports": ports}})
    server.objects.put(page("first"))
    await controller.settled(within_s=20)
    slice_ = server.objects.get("endpointslices", "default", "page-slice")
    assert slice_ is not None
    assert [endpoint["conditions"]["ready"] for endpoint in slice_["endpoints"]] == [True, True]
    assert slice_["ports"] == [{"name": "http", "protocol": "TCP", "port": 8080}]

    says: list[str] = []

    async def ask() -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                says.append((await client.get(controller.url("page"), headers={"connection": "close"})).text)

    asking = asyncio.create_task(ask())
    server.objects.put(page("second"))
    await controller.until(lambda: says[-1:] == ["second of zone-1"], within_s=20, what="the new one answers")
    await controller.settled(within_s=20)
    assert not asking.done()
    asking.cancel()
    assert set(says) == {"first of zone-1", "second of zone-1"}
    assert len(controller.pods_of(component="page")) == 2
    left = [pid for played in controller.pods.values() for pid in played.processes()]
    assert len(left) == 2
