"""Controllers of Deployments, StatefulSets, Services and disruption budgets as pure functions of pods.

source  kubernetes 1.36 pkg/controller/{deployment,statefulset,endpointslice,disruption}; ReplicaSets are left out
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]
REVISION = "controller-revision-hash"


@dataclass(frozen=True, slots=True)
class PodChanges:
    """Pods to create, by name or name prefix, and pods to delete, by name."""

    make: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()


def revision(workload: Object) -> str:
    """Hash of the pod template; pods with another one are old."""
    return hashlib.sha256(json.dumps(workload["spec"]["template"], sort_keys=True).encode()).hexdigest()[:10]


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def is_going(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def deployment(workload: Object, pods: Sequence[Object]) -> PodChanges:
    """Changes of a Deployment: new pods within the surge, old ones deleted while enough others are ready."""
    wanted = workload["spec"].get("replicas", 1)
    rolling = (workload["spec"].get("strategy") or {}).get("rollingUpdate") or {}
    surge = _share(rolling.get("maxSurge", "25%"), wanted, up=True)
    away = _share(rolling.get("maxUnavailable", "25%"), wanted, up=False)
    staying = [pod for pod in pods if not is_going(pod)]
    now = revision(workload)
    new = [pod for pod in staying if pod["metadata"]["labels"][REVISION] == now]
    old = [pod for pod in staying if pod["metadata"]["labels"][REVISION] != now]
    room = max(0, min(wanted - len(new), wanted + surge - len(staying)))
    spare = sum(map(is_ready, staying)) - (wanted - away)
    leaving = _first_to_go(new)[: max(0, len(new) - wanted)]
    for pod in _first_to_go(old):
        if is_ready(pod):
            if spare <= 0:
                continue
            spare -= 1
        leaving.append(pod)
    return PodChanges((f"{workload['metadata']['name']}-{now[:5]}-",) * room, tuple(map(_name, leaving)))


def stateful_set(workload: Object, pods: Sequence[Object]) -> PodChanges:
    """Changes of a StatefulSet: pods keep their names and are replaced one at a time, the highest number first."""
    name, wanted = workload["metadata"]["name"], workload["spec"].get("replicas", 1)
    at_once = workload["spec"].get("podManagementPolicy") == "Parallel"
    there = {_name(pod): pod for pod in pods}
    names = [f"{name}-{number}" for number in range(wanted)]
    missing = [name for name in names if name not in there]
    extra = sorted((pod for pod in there if pod not in names), key=_number, reverse=True)
    extra = [pod for pod in extra if not is_going(there[pod])]
    is_calm = all(is_ready(pod) and not is_going(pod) for pod in there.values())
    if missing or extra:
        if at_once:
            return PodChanges(tuple(missing), tuple(extra))
        return (
            PodChanges(tuple(missing[:1]), ())
            if missing and is_calm
            else PodChanges((), tuple(extra[:1] if is_calm else ()))
        )
    old = [name for name in reversed(names) if there[name]["metadata"]["labels"][REVISION] != revision(workload)]
    # One of an old revision that never became ready may go too: it is what the new one mends.
    others_are_well = all(is_ready(pod) and not is_going(pod) for name, pod in there.items() if name not in old[:1])
    return PodChanges((), tuple(old[:1]) if others_are_well and old and not is_going(there[old[0]]) else ())


def status(workload: Object, pods: Sequence[Object]) -> dict[str, Any]:
    """The status that `kubectl rollout status` and `helm --wait` read."""
    staying = [pod for pod in pods if not is_going(pod)]
    new = [pod for pod in staying if pod["metadata"]["labels"][REVISION] == revision(workload)]
    ready = sum(map(is_ready, staying))
    wanted = workload["spec"].get("replicas", 1)
    found: dict[str, Any] = {
        "observedGeneration": workload["metadata"]["generation"],
        "replicas": len(pods),
        "readyReplicas": ready,
        "availableReplicas": ready,
        "updatedReplicas": len(new),
    }
    if workload["kind"] == "StatefulSet":
        is_done = len(new) == wanted and not (set(map(_name, pods)) - set(map(_name, new)))
        now = revision(workload)
        return found | {"updateRevision": now, "currentReplicas": len(new), "currentRevision": now if is_done else ""}
    is_there = len(new) >= wanted and ready >= wanted and len(pods) == len(new)
    progress = "NewReplicaSetAvailable" if is_there else "ReplicaSetUpdated"
    available = {"type": "Available", "status": "True" if ready >= wanted else "False", "reason": "Played"}
    return found | {"conditions": [{"type": "Progressing", "status": "True", "reason": progress}, available]}


def budget_status(budget: Object, pods: Sequence[Object]) -> dict[str, Any]:
    """Number of the budget's pods that may be evicted now."""
    spec, expected = budget["spec"], len(pods)
    healthy = sum(is_ready(pod) and not is_going(pod) for pod in pods)
    if "maxUnavailable" in spec:
        least = expected - _share(spec["maxUnavailable"], expected, up=True)
    else:
        least = _share(spec.get("minAvailable", 1), expected, up=True)
    allowed = max(0, healthy - least)
    return {
        "currentHealthy": healthy,
        "desiredHealthy": least,
        "disruptionsAllowed": allowed,
        "expectedPods": expected,
        "observedGeneration": budget["metadata"]["generation"],
    }


def slice_of(service: Object, pods: Sequence[Object], zones: Mapping[str, str]) -> dict[str, Any]:
    """The EndpointSlice of a Service. The server turns empty lists into null, as in a cluster."""
    meta = service["metadata"]
    always = bool(service["spec"].get("publishNotReadyAddresses"))
    ports = [
        {"name": port.get("name", ""), "protocol": "TCP", "port": number} | _app_protocol(port)
        for port in service["spec"].get("ports") or []
        if (number := target_port(port, pods)) is not None
    ]
    endpoints = [
        {
            "addresses": [pod["status"]["podIP"]],
            "conditions": {
                "ready": always or (is_ready(pod) and not is_going(pod)),
                "serving": always or is_ready(pod),
                "terminating": is_going(pod),
            },
            "nodeName": pod["spec"]["nodeName"],
            "zone": zones.get(pod["spec"]["nodeName"], ""),
            "targetRef": {
                "kind": "Pod",
                "name": _name(pod),
                "namespace": meta["namespace"],
                "uid": pod["metadata"]["uid"],
            },
        }
        for pod in pods
        if (pod.get("status") or {}).get("podIP")
    ]
    labels = {
        **(meta.get("labels") or {}),
        "kubernetes.io/service-name": meta["name"],
        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
    }
    if service["spec"].get("clusterIP") == "None":
        labels["service.kubernetes.io/headless"] = ""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"{meta['name']}-slice", "namespace": meta["namespace"], "labels": labels},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": ports if endpoints else [],
    }


def target_port(port: Object, pods: Sequence[Object]) -> int | None:
    """The port number in the Service's pods; None while it is not known."""
    target = port.get("targetPort", port["port"])
    if isinstance(target, int):
        return target
    named = [
        entry["containerPort"]
        for pod in pods[:1]
        for container in pod["spec"]["containers"]
        for entry in container.get("ports") or []
        if entry.get("name") == target
    ]
    return named[0] if named else None


def selected(pods: Sequence[Object], labels: Mapping[str, str] | None) -> list[Object]:
    """Pods with all labels of the Service's selector; none without a selector."""
    return [pod for pod in pods if labels and labels.items() <= (pod["metadata"].get("labels") or {}).items()]


def _app_protocol(port: Object) -> dict[str, str]:
    return {"appProtocol": port["appProtocol"]} if "appProtocol" in port else {}


def _share(given: int | str, whole: int, *, up: bool) -> int:
    if isinstance(given, int):
        return given
    exact = whole * int(given.removesuffix("%")) / 100
    return math.ceil(exact) if up else math.floor(exact)


def _first_to_go(pods: Sequence[Object]) -> list[Object]:
    return sorted(pods, key=lambda pod: (is_ready(pod), pod["metadata"]["creationTimestamp"]))


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
