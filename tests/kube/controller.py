"""A cluster's other half: pods are made of workloads, placed on nodes, run as processes, and told of in slices.

    async with KubeServer() as server, Controller(server, "default", folder, nodes={"node-a": "zone-a"}) as cluster:
        ...helm install...
        await cluster.settled()

Every pod has an address of its own in 127.0.0.0/8, every Service too, with a proxy on it; `podspec` says what else
differs from a cluster. Pods reach the API server by KUBECONFIG, as their ServiceAccount, with what its Roles allow.
"""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lorafleet.local.processes import tail_of
from tests.kube import workloads
from tests.kube.kinds import BY_PLURAL
from tests.kube.kubelet import PlayedPod, folder_for
from tests.kube.managers import FieldWriter
from tests.kube.podspec import PodPlace
from tests.kube.proxy import ServiceProxy
from tests.kube.server import KubeServer
from tests.kube.status import ApiError
from tests.kube.store import Object
from tests.kube.workloads import REVISION
from tests.patience import until

_FOLLOWED = ("deployments", "statefulsets", "services", "pods", "poddisruptionbudgets", "nodes")
_CRASH_LOOP = 5
_CONTROLLER = FieldWriter("kube-controller-manager", "status")
_OWNERS = {"deployments": workloads.deployment, "statefulsets": workloads.stateful_set}


class WorkloadController:
    """Runs the workloads of one namespace. `pace`: see `kubelet.PlayedPod`.

    pods  those that are played, by name
    left  command lines of processes that outlived an orderly end of their pod, and were killed
    """

    def __init__(
        self,
        server: KubeServer,
        namespace: str,
        folder: Path,
        *,
        nodes: Mapping[str, str],
        environment: Mapping[str, str] | None = None,
        pace: float = 0.1,
    ) -> None:
        """nodes: name -> zone; environment: further variables of every pod; folder: short, sockets lie in it."""
        self.pods: dict[str, PlayedPod] = {}
        self.left: list[str] = []
        self._server, self._namespace, self._folder = server, namespace, folder
        self._zones, self._environment, self._pace = dict(nodes), dict(environment or {}), pace
        self._network = f"127.{random.randint(64, 254)}.{random.randint(0, 255)}"
        self._pod_numbers, self._service_numbers = itertools.count(1), itertools.count(200)
        self._proxies: dict[tuple[str, int], ServiceProxy] = {}
        self._living: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for node, zone in self._zones.items():
            labels = {"kubernetes.io/hostname": node, "topology.kubernetes.io/zone": zone}
            meta = {"name": node, "labels": labels}
            self._server.objects.put({"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {}})
        for plural in _FOLLOWED:
            self._tasks.append(asyncio.create_task(self._follow(plural)))
        self._tasks.append(asyncio.create_task(self._reconcile_for_ever()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in (*self._tasks, *self._living.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._living.values(), return_exceptions=True)
        await asyncio.gather(*(pod.kill() for pod in self.pods.values()))
        await asyncio.gather(*(proxy.stop() for proxy in self._proxies.values()))

    def url(self, service: str) -> str:
        """URL of a Service's first port, through its proxy."""
        found = self._server.objects.get("services", self._namespace, service)
        assert found is not None, service
        return f"http://{found['spec']['clusterIP']}:{found['spec']['ports'][0]['port']}"

    def pods_of(self, **labels: str) -> list[Object]:
        """Pods by labels of `app.kubernetes.io/`, such as `component="router"`."""
        wanted = {f"app.kubernetes.io/{name}": value for name, value in labels.items()}
        return workloads.selected(self._all("pods"), wanted)

    async def until(self, holds: Callable[[], bool], *, within_s: float, what: str) -> None:
        """Wait for a condition, checked fifty times a second; on timeout the error has the pods' output."""
        try:
            await until(lambda: holds() or self.checked(), within_s=within_s, what=what)
        except TimeoutError as exc:
            printed = "\n\n".join(pod.log() for pod in self.pods.values())
            raise AssertionError(f"{exc}\n{printed}") from None

    async def settled(self, *, within_s: float = 60.0) -> None:
        """Wait until every workload has exactly its pods, of its newest revision, all ready."""
        await self.until(self._is_settled, within_s=within_s, what="every pod of every workload is ready")

    def logs(self, *, lines: int = 200) -> str:
        """The last lines of each container's log, those of deleted pods included."""
        paths = sorted((self._folder / "logs").glob("*.log"))
        return "\n\n".join(f"{path.name}:\n{tail_of(path, lines)}" for path in paths)

    def checked(self) -> None:
        """Raise a failed task's error, or an error for a pod that keeps restarting."""
        for task in (*self._tasks, *self._living.values()):
            if task.done() and not task.cancelled():
                task.result()
        for pod in self.pods.values():
            assert pod.restarts < _CRASH_LOOP, f"{pod.name} was started {pod.restarts + 1} times:\n{pod.log()}"

    # --- following -----------------------------------------------------------------------------------------------

    async def _follow(self, plural: str) -> None:
        queue = self._server.registry.store.watch(BY_PLURAL[plural])
        while True:
            await queue.get()
            self._changed.set()

    async def _reconcile_for_ever(self) -> None:
        while True:
            self._changed.clear()
            await self._reconcile()
            await self._changed.wait()

    async def _reconcile(self) -> None:
        """One round: workloads to pods, pods to processes, processes to slices."""
        for plural, wishes in _OWNERS.items():
            for workload in self._all(plural):
                self._own(plural, workload, wishes)
        for pod in self._all("pods"):
            self._play(pod)
        for service in self._all("services"):
            await self._serve(service)
        for budget in self._all("poddisruptionbudgets"):
            chosen = workloads.selected(self._all("pods"), budget["spec"]["selector"].get("matchLabels"))
            self._say("poddisruptionbudgets", budget, workloads.budget_status(budget, chosen))

    def _own(self, plural: str, workload: Object, wishes: Callable[..., workloads.PodChanges]) -> None:
        uid = workload["metadata"]["uid"]
        pods = [
            pod
            for pod in self._all("pods")
            if any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences") or [])
        ]
        wished = wishes(workload, pods)
        for name in wished.make:
            self._make(workload, name)
        for name in wished.delete:
            self._server.registry.delete(BY_PLURAL["pods"], self._namespace, name, {})
        self._say(plural, workload, workloads.status(workload, pods))

    def _make(self, workload: Object, name: str) -> None:
        template = workload["spec"]["template"]
        meta = template.get("metadata") or {}
        node = self._node()
        labels = {
            **(meta.get("labels") or {}),
            REVISION: workloads.revision(workload),
            "topology.kubernetes.io/zone": self._zones[node],  # since Kubernetes 1.35
        }
        owner = {key: workload[key] for key in ("apiVersion", "kind")}
        owner |= {"name": workload["metadata"]["name"], "uid": workload["metadata"]["uid"], "controller": True}
        named = {"generateName": name} if name.endswith("-") else {"name": name}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": named
            | {"labels": labels, "annotations": meta.get("annotations") or {}, "ownerReferences": [owner]},
            "spec": {"terminationGracePeriodSeconds": 30} | template["spec"] | {"nodeName": node},
        }
        self._server.registry.create(BY_PLURAL["pods"], self._namespace, pod)

    def _node(self) -> str:
        """The node with the fewest pods, of those that are not cordoned."""
        open_ = [node["metadata"]["name"] for node in self._all("nodes") if not node["spec"].get("unschedulable")]
        taken = [pod["spec"].get("nodeName") for pod in self._all("pods") if not workloads.is_going(pod)]
        return min(sorted(open_), key=taken.count)

    # --- pods ----------------------------------------------------------------------------------------------------

    def _play(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            pod = self._server.objects.put(pod | {"spec": pod["spec"] | {"nodeName": self._node()}})
        if name not in self.pods and not workloads.is_going(pod):
            address = f"{self._network}.{next(self._pod_numbers)}"
            hosts = {s["metadata"]["name"]: s["spec"].get("clusterIP", "") for s in self._all("services")}
            folder = folder_for(self._folder, pod)
            place = PodPlace(pod, address, folder, {name: ip for name, ip in hosts.items() if ip not in ("", "None")})
            folder.mkdir(parents=True)
            played = PlayedPod(
                pod,
                place,
                lambda resource, name: self._server.objects.get(resource, self._namespace, name),
                self._tell,
                extra=self._environment | {"KUBECONFIG": str(self._account(pod, folder))},
                pace=self._pace,
            )
            self.pods[name] = played
            self._tell(played)
            self._living[name] = asyncio.create_task(played.live())
        elif workloads.is_going(pod) and name not in self._ending:
            self._ending.add(name)
            self._tasks.append(asyncio.create_task(self._end(pod)))

    async def _end(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        played = self.pods[name]
        await played.stop(pod["metadata"]["deletionGracePeriodSeconds"])
        self.left += played.left
        self._living[name].cancel()
        await asyncio.gather(self._living.pop(name), return_exceptions=True)
        del self.pods[name]
        self._ending.discard(name)
        self._server.objects.delete("pods", self._namespace, name)

    def _tell(self, played: PlayedPod) -> None:
        pod = self._server.objects.get("pods", self._namespace, played.name)
        if pod is not None:
            state = "True" if played.is_ready else "False"
            containers = [
                {"name": container["name"], "restartCount": played.restarts, "ready": played.is_ready}
                for container in pod["spec"]["containers"]
            ]
            found = {
                "phase": played.phase,
                "podIP": played.address,
                "podIPs": [{"ip": played.address}],
                "conditions": [{"type": "Ready", "status": state}],
                "containerStatuses": containers,
            }
            self._say("pods", pod, found)

    def _account(self, pod: Object, folder: Path) -> Path:
        """A kubeconfig with the token of the pod's ServiceAccount."""
        name = pod["spec"].get("serviceAccountName", "default")
        token = f"{name}.{pod['metadata']['uid']}"
        self._server.tokens[token] = f"system:serviceaccount:{self._namespace}:{name}"
        return self._server.kubeconfig(folder / "kubeconfig", token=token, namespace=self._namespace)

    # --- services ------------------------------------------------------------------------------------------------

    async def _serve(self, service: Object) -> None:
        name = service["metadata"]["name"]
        spec = service["spec"]
        if "clusterIP" not in spec:
            spec = spec | {"clusterIP": f"{self._network}.{next(self._service_numbers)}"}
            service = self._server.objects.put(service | {"spec": spec})
        chosen = sorted(
            workloads.selected(self._all("pods"), spec.get("selector")), key=lambda pod: pod["metadata"]["name"]
        )
        wanted = workloads.slice_of(service, chosen, self._zones)
        there = self._server.objects.get("endpointslices", self._namespace, wanted["metadata"]["name"])
        if there is None or any((there.get(key) or []) != wanted[key] for key in ("endpoints", "ports")):
            self._server.objects.put(wanted)
        for port in spec.get("ports") or [] if spec["clusterIP"] != "None" else []:
            if (name, port["port"]) not in self._proxies:
                proxy = ServiceProxy(spec["clusterIP"], port["port"], lambda port=port: self._targets(name, port))
                self._proxies[name, port["port"]] = proxy
                await proxy.start()

    def _targets(self, service: str, port: Object) -> list[tuple[str, int]]:
        """Addresses of ready pods; without any, of terminating pods that still serve."""
        found = self._server.objects.get("services", self._namespace, service)
        pods = workloads.selected(self._all("pods"), found["spec"]["selector"]) if found else []
        number = workloads.target_port(port, pods)
        ready = [pod for pod in pods if workloads.is_ready(pod) and not workloads.is_going(pod)]
        ready = ready or [pod for pod in pods if workloads.is_ready(pod)]
        return [(pod["status"]["podIP"], number) for pod in ready] if number is not None else []

    # --- the server ----------------------------------------------------------------------------------------------

    def _all(self, plural: str) -> list[Any]:
        return self._server.objects.list(plural, self._namespace if BY_PLURAL[plural].namespaced else "")

    def _say(self, plural: str, obj: Object, status: Mapping[str, Any]) -> None:
        if (obj.get("status") or {}) == status:
            return
        meta = obj["metadata"]
        with contextlib.suppress(ApiError):  # written meanwhile, or gone: the next round says it
            self._server.registry.replace(
                BY_PLURAL[plural], meta["namespace"], meta["name"], obj | {"status": dict(status)}, by=_CONTROLLER
            )

    def _is_settled(self) -> bool:
        found = [(plural, workload) for plural in _OWNERS for workload in self._all(plural)]
        return bool(found) and all(self._is_there(workload) for _, workload in found) and not self._ending

    def _is_there(self, workload: Object) -> bool:
        status, wanted = workload.get("status") or {}, workload["spec"].get("replicas", 1)
        counts = [status.get(key) for key in ("replicas", "readyReplicas", "updatedReplicas")]
        return counts == [wanted] * 3 and status["observedGeneration"] == workload["metadata"]["generation"]
